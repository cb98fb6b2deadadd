"""The guard before a conductor: what cannot be never reaches a policy, and is counted.

A driver that cannot answer for its clients (a live server, a trace from a file) speaks to the guard in place of the
conductor and gets the conductor's commands, unchanged. The guard keeps what follows from orders and arrivals: who is
there, what each client was ordered, the numbers of its jobs, which of them are open. An event that is refused changes
nothing but a count. The virtual clock asks its conductor directly: it makes no such events.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator
from itertools import takewhile

from offbeat.errors import OffbeatError
from offbeat.method import Policy
from offbeat.records import (
    COMMANDS,
    HEARD,
    Arrived,
    Begun,
    Command,
    Commit,
    Drop,
    Fetch,
    Finished,
    JobName,
    Joined,
    Left,
    Offer,
    Overwritten,
    Record,
    Row,
    Start,
    WakeAt,
    Woke,
)
from offbeat.schedule.commands import require_fit

RECENT = 16  # arrivals of each client that are remembered, to tell a repeated one from a late one


def nothing_refused() -> dict[str, int]:
    """late: of a job that was dropped, lost or overwritten, or of a client that is away; repeated: it was heard before;
    unknown: of a client, job, version or alarm that nobody ordered, or an update that nobody asked for."""
    return {"late": 0, "repeated": 0, "unknown": 0}


class Guard:
    """A conductor that refuses what cannot be. A server that hands a model out says so with `begun`."""

    def __init__(self, policy: Policy, clients: int, rng: random.Random) -> None:
        self.policy, self.clients = policy, clients
        self.conductor = policy.conductor(clients, rng)
        self.refused = nothing_refused()
        self.newest = 0  # version
        self.pending: list[Command] = []  # of a restored guard: said, and not in the record that it was restored from
        self.away: set[int] = set(range(clients))
        self.orders: defaultdict[int, list[Start]] = defaultdict(list)  # under way to a client
        self.offers: list[int] = []  # the steps of each version that was offered to all
        self.numbers: defaultdict[int, int] = defaultdict(int)  # jobs that a client has begun
        self.steps: defaultdict[int, int] = defaultdict(int)  # local steps of the jobs that a client has finished
        self.open: defaultdict[int, dict[int, Begun]] = defaultdict(dict)  # begun, and not settled
        self.heard: defaultdict[int, deque[int]] = defaultdict(lambda: deque(maxlen=RECENT))  # jobs that arrived
        self.asked: set[int] = set()  # whose send buffer was asked for
        self.alarms: set[int] = set()

    # ---- what a policy is told -------------------------------------------------------------------
    def begin(self, now: float, present: Collection[int]) -> list[Command]:
        self.away.difference_update(present)
        return self.note(now, self.conductor.begin(now, present))

    def arrived(self, now: float, event: Arrived) -> list[Command]:
        client, number = event.client, event.job
        reason = self.problem(event)
        if reason is not None:
            return self.refuse(reason)
        del self.open[client][number]
        self.heard[client].append(number)
        if self.policy.holds:  # a send buffer of one: what is older was overwritten
            self.asked.discard(client)
            self.open[client] = {job: begun for job, begun in self.open[client].items() if job > number}
        return self.note(now, self.conductor.arrived(now, event))

    def left(self, now: float, event: Left) -> list[Command]:
        if not self.known(event.client):
            return self.refuse("unknown")
        if event.client in self.away:
            return self.refuse("repeated")
        self.away.add(event.client)
        self.cancel(event.client)
        return self.note(now, self.conductor.left(now, event))

    def joined(self, now: float, event: Joined) -> list[Command]:
        if not self.known(event.client):
            return self.refuse("unknown")
        if event.client not in self.away:
            return self.refuse("repeated")
        self.away.discard(event.client)
        return self.note(now, self.conductor.joined(now, event))

    def woke(self, now: float, event: Woke) -> list[Command]:
        if event.tag not in self.alarms:
            return self.refuse("unknown")
        self.alarms.discard(event.tag)
        return self.note(now, self.conductor.woke(now, event))

    # ---- what happens on clients -----------------------------------------------------------------
    def begun(self, event: Begun) -> bool:
        """A client begins on what it was ordered or offered; whether that can be."""
        client, number, version, steps, before = event
        if not self.known(client) or number != self.numbers[client] or before != self.steps[client]:
            self.refuse("unknown")
            return False
        if client in self.away:
            self.refuse("late")
            return False
        orders = self.orders[client]
        fits = [place for place, (_, ordered, many) in enumerate(orders) if ordered == version and many in (0, steps)]
        offered = 0 <= version < len(self.offers) and self.offers[version] in (0, steps)
        if not fits and not offered:
            self.refuse("unknown")
            return False
        del orders[: fits[0] + 1 if fits else 0]  # a newer order has overwritten the older ones
        self.numbers[client] += 1
        self.open[client][number] = event
        return True

    def finished(self, event: Finished) -> None:
        """A client has computed a job to its end: its next job begins behind the steps of this one."""
        if self.known(event.client) and (begun := self.open[event.client].get(event.job)) is not None:
            self.steps[event.client] = begun.steps_before + begun.steps

    def overwritten(self, event: Overwritten) -> None:
        """A client has given a job up, or put a newer update in its place."""
        if self.known(event.client):
            self.open[event.client].pop(event.job, None)

    # ---- the books -------------------------------------------------------------------------------
    def problem(self, event: Arrived) -> str | None:
        client, number = event.client, event.job
        if not self.known(client) or not 0 <= number < self.numbers[client]:
            return "unknown"
        begun = self.open[client].get(number)
        if begun is None:
            return "repeated" if number in self.heard[client] else "late"
        if begun[:4] != event or (self.policy.holds and client not in self.asked):
            return "unknown"
        return None

    def known(self, client: int) -> bool:
        return 0 <= client < self.clients

    def refuse(self, reason: str) -> list[Command]:
        self.refused[reason] += 1
        return []

    def cancel(self, client: int) -> None:
        self.orders[client].clear()
        self.open[client].clear()
        self.asked.discard(client)

    def note(self, now: float, commands: list[Command]) -> list[Command]:
        for command in commands:
            require_fit(self.policy, now, command, self.clients, self.newest)
            if isinstance(command, Commit):
                self.newest += 1
            elif isinstance(command, Start):
                self.orders[command.client].append(command)
            elif isinstance(command, Offer):
                self.offers.append(command.steps)
            elif isinstance(command, Fetch):
                self.asked.add(command.client)
            elif isinstance(command, Drop):
                self.cancel(command.client)
            elif isinstance(command, WakeAt):
                self.alarms.add(command.tag)
        return commands

    def hear(self, now: float, record: Record) -> list[Command]:
        """Any event, by its kind."""
        if isinstance(record, Arrived):
            return self.arrived(now, record)
        if isinstance(record, Left):
            return self.left(now, record)
        if isinstance(record, Joined):
            return self.joined(now, record)
        if isinstance(record, Woke):
            return self.woke(now, record)
        if isinstance(record, Begun):
            self.begun(record)
        elif isinstance(record, Finished):
            self.finished(record)
        elif isinstance(record, Overwritten):
            self.overwritten(record)
        return []

    def jobs(self) -> set[JobName]:
        """The open ones."""
        return {(client, number) for client, jobs in self.open.items() for number in jobs}


def away_at_first(rows: Iterable[Row]) -> list[int]:
    """A trace opens with a row for each client that is not there."""
    return [record.client for _, record in takewhile(lambda row: isinstance(row[1], Left), rows)]  # type: ignore[union-attr]


def feed(guard: Guard, rows: Iterable[Row]) -> Iterator[tuple[int, Row]]:
    """Tell a fresh guard what was recorded, row by row; a command that differs from the recorded one is an error.

    The rows are passed twice.

    Restoring a conductor is no more than this. What it says after the last row is left in `guard.pending`.
    """
    away = away_at_first(rows)
    absent = set(away)
    expected = guard.begin(0.0, [client for client in range(guard.clients) if client not in absent])[::-1]
    for place, (now, record) in enumerate(rows):
        if isinstance(record, COMMANDS):
            want = expected.pop() if expected else None
            if want != record or type(want) is not type(record):
                raise OffbeatError(f"replay: at row {place} ({now} s) the trace has {record}, the policy says {want}")
        elif place >= len(away):
            if expected and isinstance(record, HEARD):
                raise OffbeatError(f"replay: before row {place} ({now} s) the policy also says {expected[-1]}")
            before = sum(guard.refused.values())
            commands = guard.hear(now, record)
            if sum(guard.refused.values()) != before:
                raise OffbeatError(f"replay: at row {place} ({now} s) the trace has {record}, which cannot be")
            expected = commands[::-1] or expected
        yield place, (now, record)
    guard.pending = expected[::-1]


def restore(policy: Policy, clients: int, rng: random.Random, rows: Iterable[Row]) -> Guard:
    """The guard, and behind it the conductor, that has heard these rows; `rng` is as it was at the start."""
    guard = Guard(policy, clients, rng)
    for _ in feed(guard, rows):
        pass
    return guard
