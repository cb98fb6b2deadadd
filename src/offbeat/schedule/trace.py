"""The trace: the rows of a run as flat columns, their comparison, and replay.

Replay is the third driver beside the virtual clock and a live network: it tells a policy what was heard and holds
its commands against those recorded.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, get_type_hints

from offbeat.errors import OffbeatError
from offbeat.method import Policy
from offbeat.records import (
    COMMANDS,
    EVENTS,
    Begun,
    Commit,
    Record,
    Row,
)
from offbeat.schedule.guard import Guard, feed

if TYPE_CHECKING:
    from offbeat.schedule.horizon import Driver

KINDS: dict[str, Any] = {kind.__name__.lower(): kind for kind in (*COMMANDS, *EVENTS)}
NAMES = {kind: name for name, kind in KINDS.items()}
COLUMNS = ("time", "kind", "client", "job", "version", "steps", "tag", "until", "jobs")


def flat(row: Row) -> tuple[Any, ...]:
    """One row as the values of `COLUMNS`; what a record does not have is None.

    >>> flat((1.5, Commit(((3, 0), (4, 1)))))
    (1.5, 'commit', None, None, None, None, None, None, [3, 0, 4, 1])
    """
    time, record = row
    fields: dict[str, Any] = record._asdict()
    if "time" in fields:
        fields["until"] = fields.pop("time")
    if type(record) is Commit:
        fields["jobs"] = [number for job in record.jobs for number in job]
    return (time, NAMES[type(record)], *(fields.get(name) for name in COLUMNS[2:]))


def unflat(values: Sequence[Any]) -> Row:
    """The inverse of `flat`."""
    given = dict(zip(COLUMNS, values, strict=True))
    kind = KINDS.get(given["kind"])
    if kind is None:
        raise OffbeatError(f"the trace has a row of unknown kind '{given['kind']}'; known: {', '.join(sorted(KINDS))}")
    if given["until"] is not None:
        return given["time"], kind(given["until"], given["tag"])
    if kind is Commit:
        numbers = iter(given["jobs"])
        return given["time"], Commit(tuple(zip(numbers, numbers, strict=True)))
    record: Record = kind(*(given[name] for name in get_type_hints(kind)))
    return given["time"], record


def difference(one: Iterable[Row], other: Iterable[Row]) -> str | None:
    """A sentence on the first row in which two traces differ, or None."""
    a, b = list(one), list(other)
    for place, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return f"row {place}: {left[1]} at {left[0]} s against {right[1]} at {right[0]} s"
    if len(a) != len(b):
        return f"one trace has {len(a)} rows, the other {len(b)}"
    return None


class Replay:
    """A driver that reads arrivals from a trace. A command that differs from the recorded one ends it.

    `beyond` is the driver that made the trace, where it can be run again: its rows must be those recorded, and it goes
    on behind their end, so that whoever looks ahead there sees what the run saw.
    """

    def __init__(
        self, rows: Sequence[Row], policy: Policy, clients: int, rng: random.Random, beyond: Driver | None = None
    ) -> None:
        self.rows = rows
        self.guard = Guard(policy, clients, rng)
        self.beyond = beyond
        # The oldest version that any later row begins from: what a version store must keep.
        self.floors = [0] * (len(rows) + 1)
        self.place = 0
        oldest = sum(type(record) is Commit for _, record in rows)
        for place in range(len(rows), -1, -1):
            self.floors[place] = oldest
            if place and isinstance(begun := rows[place - 1][1], Begun):
                oldest = min(oldest, begun.version)

    @property
    def floor(self) -> int:
        return self.floors[self.place] if self.beyond is None else self.beyond.floor

    def __iter__(self) -> Iterator[Row]:
        again = iter(() if self.beyond is None else self.beyond)
        for place, row in feed(self.guard, self.rows):
            self.place = place + 1
            if self.beyond is not None and (other := next(again, None)) != row:
                raise OffbeatError(f"replay: row {place} of the trace is {row}, the clock says {other}")
            yield row
        yield from again

    @property
    def refused(self) -> dict[str, int]:
        return self.guard.refused
