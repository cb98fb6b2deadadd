"""Synchronous rounds: a cohort starts from one version, and the commit waits for it."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from offbeat.records import Arrived, Command, Commit, Drop, JobName, Joined, Left, Start, WakeAt, Woke


@dataclass(frozen=True)
class Rounds:
    """Every round `size` clients (None: all that are there) start from the newest version.

    With `replacement` a client may be drawn several times: it does one job, which counts as often as it was drawn.
    `over_selection` >= 1 starts that many times more clients and keeps the first `size` updates; a `deadline`
    (seconds after the round's start) closes the round with what has arrived, or with the first arrival after it.
    """

    steps: int = 1
    size: int | None = None
    replacement: bool = False
    over_selection: float = 1.0
    deadline: float | None = None

    kind = "rounds"
    holds = False
    overlaps = False

    def problems(self, clients: int) -> list[str]:
        found = []
        if self.steps < 1:
            found.append(f"rounds: local steps = {self.steps}; a job needs at least 1")
        if self.size is not None and self.size < 1:
            found.append(f"rounds: size = {self.size}; a round needs at least 1 client")
        if self.over_selection < 1:
            found.append(f"rounds: over_selection = {self.over_selection}; it multiplies the cohort and must be >= 1")
        if self.deadline is not None and self.deadline <= 0:
            found.append(f"rounds: deadline = {self.deadline}; it must be a positive number of seconds")
        if self.replacement and (self.size is None or self.over_selection != 1):
            found.append("rounds: replacement needs a size and no over_selection")
        if self.size is not None and not self.replacement and self.started > clients:
            found.append(
                f"rounds: {self.started} distinct clients asked for in a round (size {self.size} x over_selection "
                f"{self.over_selection}) of a fleet of {clients}; lower it or set replacement = true"
            )
        return found

    @property
    def started(self) -> int:
        """How many clients a round starts."""
        return math.ceil((self.size or 0) * self.over_selection)

    def conductor(self, clients: int, rng: random.Random) -> RoundsConductor:
        return RoundsConductor(self, rng)


@dataclass
class RoundsConductor:
    policy: Rounds
    rng: random.Random
    version: int = 0
    present: set[int] = field(default_factory=set)
    pool: list[int] | None = None  # the present in order; None when somebody has come or gone
    drawn: Counter[int] = field(default_factory=Counter)  # client -> how often it was drawn this round
    waiting: set[int] = field(default_factory=set)  # drawn and not yet arrived
    got: list[JobName] = field(default_factory=list)
    overdue: bool = False
    opened: int = 0  # rounds so far: names the deadline

    def begin(self, now: float, present: Collection[int]) -> list[Command]:
        self.present = set(present)
        return self.open_round(now)

    def arrived(self, now: float, event: Arrived) -> list[Command]:
        self.waiting.discard(event.client)
        self.got.append((event.client, event.job))
        return self.close_round(now) if self.complete() else []

    def left(self, now: float, event: Left) -> list[Command]:
        self.present.discard(event.client)
        self.pool = None
        self.waiting.discard(event.client)
        if not self.waiting and self.got:
            return self.close_round(now)
        return self.open_round(now) if not self.waiting else []

    def joined(self, now: float, event: Joined) -> list[Command]:
        self.present.add(event.client)
        self.pool = None
        return self.open_round(now) if not self.drawn else []

    def woke(self, now: float, event: Woke) -> list[Command]:
        if event.tag != self.opened:
            return []
        self.overdue = True
        return self.close_round(now) if self.got else []

    def complete(self) -> bool:
        enough = self.policy.size is not None and not self.policy.replacement and len(self.got) >= self.policy.size
        return enough or not self.waiting or self.overdue

    def open_round(self, now: float) -> list[Command]:
        self.drawn.clear()
        self.waiting.clear()
        self.got, self.overdue = [], False
        pool = self.pool = sorted(self.present) if self.pool is None else self.pool
        if not pool:
            return []
        if self.policy.size is None:
            cohort = pool
        elif self.policy.replacement:
            cohort = self.rng.choices(pool, k=self.policy.size)
        else:
            cohort = self.rng.sample(pool, min(self.policy.started, len(pool)))
        self.opened += 1
        self.drawn.update(cohort)
        self.waiting.update(cohort)
        orders: list[Command] = [Start(client, self.version, self.policy.steps) for client in dict.fromkeys(cohort)]
        if self.policy.deadline is not None:
            orders.append(WakeAt(now + self.policy.deadline, self.opened))
        return orders

    def close_round(self, now: float) -> list[Command]:
        jobs = tuple(job for job in self.got for _ in range(self.drawn[job[0]]))
        late: list[Command] = [Drop(client) for client in sorted(self.waiting)]
        self.version += 1
        return [*late, Commit(jobs), *self.open_round(now)]
