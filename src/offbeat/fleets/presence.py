"""When clients are there: changes of presence as `(time, there)`, per client, the first at time 0.

Both kinds are lazy: a million clients cost no more than the records they share.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from offbeat.fleets.distributions import Exponential, number_problems, shortened
from offbeat.keys import fold, key, uniform

Change: TypeAlias = tuple[float, bool]
Opening: TypeAlias = tuple[list[bool], list[float]]


class Presence(Protocol):
    def problems(self, clients: int) -> list[str]: ...
    def __call__(self, client: int) -> Iterator[Change]: ...
    def opening(self, clients: int) -> Opening:
        """For each client whether it is there at time 0, and when that changes (infinity: never). Whoever derives from
        this class need not say it: each client is looked at."""
        firsts = [list(itertools.islice(self(client), 2)) for client in range(clients)]
        return [first[0][1] for first in firsts], [first[1][0] if len(first) > 1 else math.inf for first in firsts]


@dataclass(frozen=True, eq=False)
class PresenceOf:
    """The presence of some clients of a fleet, numbered anew."""

    presence: Presence
    fleet: int  # clients of the whole fleet
    clients: Sequence[int]

    def problems(self, clients: int) -> list[str]:
        return [] if clients == len(self.clients) else [f"presence: of {len(self.clients)} clients, not {clients}"]

    def __call__(self, client: int) -> Iterator[Change]:
        return self.presence(self.clients[client])

    def opening(self, clients: int) -> Opening:
        there, until = self.presence.opening(self.fleet)
        return [there[client] for client in self.clients], [until[client] for client in self.clients]


@dataclass(frozen=True, eq=False)
class Recorded:
    """Recorded users. Client i is there when user `users[i]` was (None: user i), again after the user's period."""

    changes: Sequence[Sequence[Change]]  # per user, ascending; before a first change later than 0 the opposite holds
    periods: Sequence[float | None]  # per user; None: nothing changes after the last change
    users: NDArray[np.int64] | None = None

    def problems(self, clients: int) -> list[str]:
        problems = []
        for user, (changes, period) in enumerate(zip(self.changes, self.periods, strict=False)):
            problems += [f"presence of user {user}: {sentence}" for sentence in change_problems(changes, period)]
        if len(self.changes) != len(self.periods):
            problems.append(f"presence: {len(self.changes)} users but {len(self.periods)} periods")
        given = len(self.changes) if self.users is None else len(self.users)
        if given != clients:
            problems.append(f"presence: given for {given} clients of {clients}")
        if self.users is not None and given and not 0 <= self.users.min() <= self.users.max() < len(self.changes):
            problems.append(f"presence: a client is assigned to a user outside 0 to {len(self.changes) - 1}")
        return shortened(problems)

    def __call__(self, client: int) -> Iterator[Change]:
        user = client if self.users is None else int(self.users[client])
        return unroll(self.changes[user], self.periods[user])

    def opening(self, clients: int) -> Opening:
        firsts = [list(itertools.islice(unroll(*user), 2)) for user in zip(self.changes, self.periods, strict=True)]
        there = [first[0][1] for first in firsts]
        until = [first[1][0] if len(first) > 1 else math.inf for first in firsts]
        users = range(clients) if self.users is None else self.users.tolist()
        return [there[user] for user in users], [until[user] for user in users]


def change_problems(changes: Sequence[Change], period: float | None) -> list[str]:
    """What is impossible about one user's record."""
    if not changes:
        return ["no changes; give at least (0, True) or (0, False)"]
    problems = []
    if not changes[0][0] >= 0:
        problems.append(f"the first change is at {changes[0][0]} s; times are >= 0")
    for (before, _), (after, _) in itertools.pairwise(changes):
        if not after > before:
            problems.append(f"a change at {after} s follows one at {before} s; times must ascend")
    if period is not None and not changes[-1][0] < period:
        problems.append(f"period = {period} s does not reach beyond the last change at {changes[-1][0]} s")
    return problems


def unroll(changes: Sequence[Change], period: float | None) -> Iterator[Change]:
    """The changes from time 0, with the start's state restored after every period.

    >>> list(itertools.islice(unroll([(2.0, True), (3.0, False)], 10.0), 5))
    [(0.0, False), (2.0, True), (3.0, False), (12.0, True), (13.0, False)]
    """
    time, there = changes[0]
    day = list(changes) if time == 0 else [(0.0, not there), *changes]
    repeats = period is not None and len({there for _, there in day}) > 1
    last = None
    for lap in itertools.count() if repeats else (0,):
        start = lap * (period or 0.0)
        for time, there in day:
            if there is not last:
                last = there
                yield start + time, there


@dataclass(frozen=True)
class OnOff:
    """There and away in turn, for exponential times with these means (seconds), each client in its own time.

    It begins in the steady state: there with probability mean_on / (mean_on + mean_off).
    """

    mean_on: float
    mean_off: float
    seed: int

    def problems(self, clients: int) -> list[str]:
        return number_problems("mean_on", self.mean_on, positive=True) + number_problems(
            "mean_off", self.mean_off, positive=True
        )

    def __call__(self, client: int) -> Iterator[Change]:
        root = key(self.seed, "presence", client)
        lasts = self.lasts()
        there = uniform(fold(root, 0)) < self.share
        time = 0.0
        for change in itertools.count(1):
            yield time, there
            time += lasts[there](uniform(fold(root, change)))
            there = not there

    def opening(self, clients: int) -> Opening:
        roots = key(self.seed, "presence", np.arange(clients, dtype=np.int64))
        lasts = self.lasts()
        there: list[bool] = (uniform(fold(roots, 0)) < self.share).tolist()
        chances: list[float] = uniform(fold(roots, 1)).tolist()
        return there, [lasts[now](chance) for now, chance in zip(there, chances, strict=True)]

    @property
    def share(self) -> float:
        return self.mean_on / (self.mean_on + self.mean_off)

    def lasts(self) -> dict[bool, Exponential]:
        return {True: Exponential(self.mean_on), False: Exponential(self.mean_off)}


@dataclass(frozen=True)
class EachOnOff(Presence):
    """Each client with means of its own."""

    each: tuple[OnOff, ...]

    def problems(self, clients: int) -> list[str]:
        problems = [f"client {client}: {text}" for client, one in enumerate(self.each) for text in one.problems(1)]
        if len(self.each) != clients:
            problems.append(f"presence: given for {len(self.each)} clients of {clients}")
        return shortened(problems)

    def __call__(self, client: int) -> Iterator[Change]:
        return self.each[client](client)
