"""The trace: the rows of a run as flat columns, their comparison, and replay.

Replay is the third driver beside the virtual clock and a live network: it tells a policy what was heard and holds
its commands against those recorded.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from offbeat.errors import OffbeatError
from offbeat.method import Policy
from offbeat.records import (
    COMMANDS,
    EVENTS,
    Begun,
    Commit,
    Finished,
    Record,
    Row,
)
from offbeat.schedule.guard import Guard, feed

if TYPE_CHECKING:
    from offbeat.schedule.horizon import Driver

KINDS: dict[str, Any] = {kind.__name__.lower(): kind for kind in (*COMMANDS, *EVENTS)}
NAMES = {kind: name for name, kind in KINDS.items()}
COLUMNS = ("time", "kind", "client", "job", "version", "steps", "steps_before", "tag", "until", "jobs")


# Where the fields of each record stand among the columns; the time of a `WakeAt` is in "until".
PLACES = {kind: tuple(COLUMNS.index("until" if name == "time" else name) for name in kind._fields) for kind in NAMES}
# For each column between kind and jobs the field that goes there; -1, the None behind the fields, if none does.
FIELDS = {
    kind: itemgetter(*(places.index(c) if c in places else -1 for c in range(2, len(COLUMNS) - 1)))
    for kind, places in PLACES.items()
}


def flat(row: Row) -> tuple[Any, ...]:
    """One row as the values of `COLUMNS`; what a record does not have is None.

    >>> flat((1.5, Commit(((3, 0), (4, 1)))))
    (1.5, 'commit', None, None, None, None, None, None, None, [3, 0, 4, 1])
    """
    time, record = row
    kind = type(record)
    jobs = [number for job in record.jobs for number in job] if isinstance(record, Commit) else None
    return (time, NAMES[kind], *FIELDS[kind]((*record, None)), jobs)


def unflat(values: Sequence[Any]) -> Row:
    """The inverse of `flat`."""
    kind = KINDS.get(values[1])
    if kind is None:
        raise OffbeatError(f"the trace has a row of unknown kind '{values[1]}'; known: {', '.join(sorted(KINDS))}")
    if kind is Commit:
        numbers = iter(values[-1])
        return values[0], Commit(tuple(zip(numbers, numbers, strict=True)))
    record: Record = tuple.__new__(kind, [values[place] for place in PLACES[kind]])
    return values[0], record


class StepsBefore:
    """Completes rows of a trace that was stored without the column `steps_before`: passed in order, each `Begun` gets
    the steps of its client's finished jobs."""

    def __init__(self) -> None:
        self.done: Counter[int] = Counter()
        self.working: dict[int, int] = {}

    def __call__(self, row: Row) -> Row:
        now, record = row
        if type(record) is Begun:
            self.working[record.client] = record.steps
            return now, record._replace(steps_before=self.done[record.client])
        if type(record) is Finished:
            self.done[record.client] += self.working.pop(record.client, 0)
        return row


def difference(one: Iterable[Row], other: Iterable[Row]) -> str | None:
    """A sentence on the first row in which two traces differ, or None."""
    for place, (left, right) in enumerate(zip_longest(one, other)):
        if left is None or right is None:
            return f"one trace ends after {place} rows, the other does not"
        if not same(left, right):
            return f"row {place}: {left[1]} at {left[0]} s against {right[1]} at {right[0]} s"
    return None


def same(one: Row | None, other: Row) -> bool:
    """Rows of two kinds may hold the same numbers."""
    return one == other and one is not None and type(one[1]) is type(other[1])


def last_begins(rows: Iterable[Row]) -> list[int]:
    """For each version the last row in which a job begins from it, or -1."""
    last = [-1]
    for place, (_, record) in enumerate(rows):
        if type(record) is Commit:
            last.append(-1)
        elif type(record) is Begun:
            last[record.version] = place
    return last


class Replay:
    """A driver that reads arrivals from a trace. A command that differs from the recorded one ends it.

    The rows are passed several times and never held. `last` is what `last_begins` says of them, where it is known.
    `beyond` is the driver that made the trace, where it can be run again: its rows must be those recorded, and it goes
    on behind their end, so that whoever looks ahead there sees what the run saw.
    """

    def __init__(
        self, rows: Iterable[Row], policy: Policy, clients: int, rng: random.Random, last: Sequence[int] | None = None,
        beyond: Driver | None = None,
    ) -> None:  # fmt: skip
        self.rows = rows
        self.guard = Guard(policy, clients, rng)
        self.last = last_begins(rows) if last is None else last
        self.beyond = beyond
        self.oldest = 0  # the oldest version that any later row begins from

    @property
    def floor(self) -> int:
        """What a version store must keep."""
        return self.oldest if self.beyond is None else self.beyond.floor

    def __iter__(self) -> Iterator[Row]:
        again = iter(() if self.beyond is None else self.beyond)
        newest = len(self.last) - 1
        for place, row in feed(self.guard, self.rows):
            while self.oldest < newest and self.last[self.oldest] <= place:
                self.oldest += 1
            if self.beyond is not None and not same(other := next(again, None), row):
                raise OffbeatError(f"replay: row {place} of the trace is {row}, the clock says {other}")
            yield row
        yield from again

    @property
    def refused(self) -> dict[str, int]:
        return self.guard.refused
