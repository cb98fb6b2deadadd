"""Synchronous rounds: a cohort starts from one version, and the commit waits for it."""

from __future__ import annotations

import math
import random
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from offbeat.config.options import STEPS, count_problems
from offbeat.records import Arrived, Command, Commit, Drop, JobName, Joined, Left, Start, WakeAt, Woke
from offbeat.schedule.of_clients import OfClients
from offbeat.schedule.ticks import after

record = tuple.__new__  # record(Start, (...)) is Start(...) at half the cost


@dataclass(frozen=True)
class Rounds(OfClients):
    """Every round `size` clients (None: all that are there) start from the newest version, for `steps` local steps
    (None: as many as each client will).

    With `replacement` a client may be drawn several times: it does one job, which counts as often as it was drawn.
    `over_selection` >= 1 starts that many times more clients and keeps the first `size` updates; a `deadline`
    (seconds after the round's start) closes the round with what has arrived, or with the first arrival after it.
    With `probes` a round has two legs, each with a commit: the cohort takes so many steps, then the same clients take
    `steps` (as where gradients are asked for first). Those of them that have gone away take no part in the second leg;
    if all have, it waits until one is back.
    """

    steps: int | None = None
    size: int | None = None
    replacement: bool = False
    over_selection: float = 1.0
    deadline: float | None = None
    probes: int | None = None

    kind = "rounds"
    holds = False
    overlaps = False
    synchronous = True

    @property
    def options(self) -> Mapping[str, str]:
        plain = {name: name for name in ("replacement", "over_selection", "deadline")}
        return {"n": "size", "local_steps": "steps"} | (plain if self.probes is None else {"probes": "probes"})

    @property
    def drops(self) -> bool:
        return self.over_selection != 1 or self.deadline is not None

    def problems(self, clients: int) -> list[str]:
        problems = []
        for name, steps in (("local steps", self.steps), ("probes", self.probes)):
            problems += count_problems("rounds", name, steps, "a job needs at least 1")
        problems += count_problems("rounds", "size", self.size, "a round needs at least 1 client")
        if not 1 <= self.over_selection <= STEPS:
            problems.append(
                f"rounds: over_selection = {self.over_selection}; it multiplies the cohort and must be >= 1, and "
                f"{STEPS:,} at most"
            )
            return problems
        if self.deadline is not None and self.deadline <= 0:
            problems.append(f"rounds: deadline = {self.deadline}; it must be a positive number of seconds")
        if self.probes is not None and self.replacement:
            problems.append("rounds: probes ask each client of a round once; they take no replacement")
        if self.replacement and (self.size is None or self.over_selection != 1):
            problems.append("rounds: replacement needs a size and no over_selection")
        if self.size is not None and not self.replacement and self.started > clients:
            problems.append(
                f"rounds: {self.started} distinct clients asked for in a round (size {self.size} x over_selection "
                f"{self.over_selection}) of a fleet of {clients}; lower it or set replacement = true"
            )
        return problems

    @property
    def legs(self) -> tuple[int, ...]:
        """The steps of each exchange of a round, which has a commit for each; 0: as many as a client will."""
        return (self.steps or 0,) if self.probes is None else (self.probes, self.steps or 0)

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
    present: Sequence[int] = ()  # in order: all clients as a range, or an array once somebody has come or gone
    drawn: dict[int, int] = field(default_factory=dict)  # client -> how often it was drawn this round
    waiting: set[int] = field(default_factory=set)  # drawn and not yet arrived
    got: list[JobName] = field(default_factory=list)
    overdue: bool = False
    opened: int = 0  # rounds so far: names the deadline
    reported: list[int] = field(default_factory=list)  # in the leg before: the next leg of the round is theirs

    def __post_init__(self) -> None:
        size = self.policy.size
        self.legs = self.policy.legs
        self.enough = math.inf if size is None or self.policy.replacement else size  # updates that close a round

    def begin(self, now: float, present: Collection[int]) -> list[Command]:
        self.present = present if isinstance(present, range) else array("i", sorted(present))
        return self.open_round(now)

    def arrived(self, now: float, event: Arrived) -> list[Command]:
        client, waiting, got = event[0], self.waiting, self.got
        waiting.discard(client)
        got.append((client, event[1]))
        return self.close_round(now) if not waiting or self.overdue or len(got) >= self.enough else []

    def left(self, now: float, event: Left) -> list[Command]:
        present, place = self.find(event.client)
        if place < len(present) and present[place] == event.client:
            del present[place]
        self.waiting.discard(event.client)
        if not self.waiting and self.got:
            return self.close_round(now)
        return self.open_round(now) if not self.waiting else []

    def joined(self, now: float, event: Joined) -> list[Command]:
        present, place = self.find(event.client)
        if place == len(present) or present[place] != event.client:
            present.insert(place, event.client)
        return self.open_round(now) if not self.drawn else []

    def woke(self, now: float, event: Woke) -> list[Command]:
        if event.tag != self.opened:
            return []
        self.overdue = True
        return self.close_round(now) if self.got else []

    def find(self, client: int) -> tuple[array[int], int]:
        """Those present, as an array to change, and the place of one client in it."""
        if not isinstance(self.present, array):
            self.present = array("i", self.present)
        return self.present, bisect_left(self.present, client)

    def open_round(self, now: float) -> list[Command]:
        self.drawn, self.waiting, self.got, self.overdue = {}, set(), [], False
        pool, size = self.present, self.policy.size
        if not pool:
            return []
        leg = self.version % len(self.legs)
        if leg > 0:
            there = set(pool)
            self.drawn = dict.fromkeys([client for client in self.reported if client in there], 1)
            if not self.drawn:
                return []  # until one of them is back
        elif size is None:
            self.drawn = dict.fromkeys(pool, 1)
        elif self.policy.replacement:
            self.drawn = Counter(self.rng.choices(pool, k=size))
        else:
            self.drawn = dict.fromkeys(self.rng.sample(pool, min(self.policy.started, len(pool))), 1)
        self.opened += 1
        self.waiting = set(self.drawn)
        version, steps = self.version, self.legs[leg]
        orders: list[Command] = [record(Start, (client, version, steps)) for client in self.drawn]
        if self.policy.deadline is not None:
            orders.append(WakeAt(after(now, self.policy.deadline), self.opened))
        return orders

    def close_round(self, now: float) -> list[Command]:
        drawn = self.drawn
        jobs = [job for job in self.got if job[0] in drawn]
        if self.policy.replacement:
            jobs = [job for job in jobs for _ in range(drawn[job[0]])]
        late: list[Command] = [Drop(client) for client in sorted(self.waiting)]
        self.version += 1
        self.reported = [client for client, _ in jobs] if len(self.legs) > 1 else []
        return [*late, Commit(tuple(jobs)), *self.open_round(now)]
