"""Sampled participation over busy clients: everyone trains all the time, the server draws whom it hears."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from offbeat.config.options import count_problems
from offbeat.records import Arrived, Command, Commit, Fetch, JobName, Joined, Left, Offer, Woke
from offbeat.schedule.of_clients import OfClients
from offbeat.schedule.pool import Pool


@dataclass(frozen=True)
class Sampled(OfClients):
    """Each round draws `size` clients uniformly with replacement, fetches their send buffers and waits for all.

    Versions are broadcast to receive buffers; finished updates wait in send buffers, where a newer one overwrites
    an older one, and a buffer is empty once it was sent. A drawn client that goes away is drawn anew.
    """

    size: int = 10
    steps: int | None = None  # None: as many as each client will
    overlap: bool = True

    kind = "sampled"
    holds = True
    drops = True
    options: ClassVar[Mapping[str, str]] = {"n": "size", "local_steps": "steps", "overlap": "overlap"}

    @property
    def overlaps(self) -> bool:
        return self.overlap

    def problems(self, clients: int) -> list[str]:
        problems = count_problems("sampled", "local steps", self.steps, "a job needs at least 1")
        return problems + count_problems("sampled", "size", self.size, "a round needs at least 1 draw")

    def conductor(self, clients: int, rng: random.Random) -> SampledConductor:
        return SampledConductor(self, rng, Pool(clients))


@dataclass
class SampledConductor:
    policy: Sampled
    rng: random.Random
    present: Pool
    version: int = 0
    drawn: Counter[int] = field(default_factory=Counter)  # client -> how often it was drawn this round
    got: dict[int, JobName] = field(default_factory=dict)

    def begin(self, now: float, present: Collection[int]) -> list[Command]:
        self.present = Pool(self.present.clients, sorted(present))
        return [Offer(0, self.policy.steps or 0), *self.draw(self.policy.size)]

    def arrived(self, now: float, event: Arrived) -> list[Command]:
        self.got[event.client] = (event.client, event.job)
        return self.settle()

    def left(self, now: float, event: Left) -> list[Command]:
        self.present.remove(event.client)
        if event.client not in self.drawn or event.client in self.got:
            return []
        return self.draw(self.drawn.pop(event.client)) or self.settle()

    def joined(self, now: float, event: Joined) -> list[Command]:
        self.present.append(event.client)
        return self.draw(self.policy.size - sum(self.drawn.values())) or self.settle()

    def woke(self, now: float, event: Woke) -> list[Command]:
        return []

    def settle(self) -> list[Command]:
        """Commit, broadcast and draw anew once everyone drawn has answered."""
        if not self.got or len(self.got) < len(self.drawn) or sum(self.drawn.values()) < self.policy.size:
            return []
        jobs = tuple(self.got[client] for client, times in self.drawn.items() for _ in range(times))
        self.version += 1
        self.drawn.clear()
        self.got.clear()
        return [Commit(jobs), Offer(self.version, self.policy.steps or 0), *self.draw(self.policy.size)]

    def draw(self, times: int) -> list[Command]:
        """Draw so many clients with replacement; fetch those that were not drawn this round before."""
        if not len(self.present):
            return []
        known = set(self.drawn)
        self.drawn.update(self.rng.choices(self.present, k=times))
        return [Fetch(client) for client in self.drawn if client not in known]
