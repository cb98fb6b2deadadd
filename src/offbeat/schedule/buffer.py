"""Buffered asynchrony: every `size`-th arrival makes a commit, and nobody waits for anybody."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from offbeat.config.options import count_problems
from offbeat.records import Arrived, Command, Commit, JobName, Joined, Left, Offer, Start, Woke
from offbeat.schedule.of_clients import OfClients
from offbeat.schedule.pool import Pool

record = tuple.__new__  # record(Start, (...)) is Start(...) at half the cost
Restart = Literal["newest", "fresh"]


@dataclass(frozen=True)
class Buffer(OfClients):
    """Commit on every `size`-th arrival; `restart` says how clients get their next work.

    newest  the client pulls the newest version when its upload is in (FedBuff: download, train, upload in turn);
    fresh   the same, but never twice from one version: it waits for the next commit if need be.

    With `overlap` (and "fresh") every version goes to every client's receive buffer, beside computing (DLSGD).

    With a `concurrency` below the fleet's size at most so many clients work at once, and the place of one that
    has reported goes to a client drawn uniformly from the idle ones.
    """

    size: int = 10
    steps: int | None = None  # None: as many as each client will
    concurrency: int | None = None
    restart: Restart = "newest"
    overlap: bool = False

    holds = False
    drops = False

    @property
    def kind(self) -> str:
        return "buffer" if self.restart == "newest" else f"buffer-{self.restart}"

    @property
    def overlaps(self) -> bool:
        return self.overlap

    @property
    def options(self) -> Mapping[str, str]:
        more = "concurrency" if self.restart == "newest" else "overlap"
        return {"n": "size", "local_steps": "steps", more: more}

    def problems(self, clients: int) -> list[str]:
        problems = count_problems("buffer", "local steps", self.steps, "a job needs at least 1")
        if self.size < 1:
            problems.append(f"buffer: size = {self.size}; a commit needs at least 1 update")
        if self.restart not in ("newest", "fresh"):
            problems.append(f"buffer: restart = '{self.restart}'; it is one of newest, fresh (with overlap: broadcast)")
        elif self.overlap and self.restart != "fresh":
            problems.append(
                "buffer: overlap brings every version to every client, which trains once from each; it needs "
                "restart = 'fresh'"
            )
        if self.concurrency is not None and not 1 <= self.concurrency <= clients:
            problems.append(f"buffer: concurrency = {self.concurrency}; it must be between 1 and the {clients} clients")
        working = self.concurrency or clients
        if self.size > working:
            problems.append(
                f"buffer: size = {self.size} is larger than the {working} clients at work at once; "
                "lower the size or raise the concurrency"
            )
        if self.overlap and self.concurrency not in (None, clients):
            problems.append("buffer: overlap brings versions to every client; it takes no concurrency limit")
        return problems

    def conductor(self, clients: int, rng: random.Random) -> BufferConductor:
        return BufferConductor(self, self.concurrency or clients, rng, Pool(clients))


@dataclass
class BufferConductor:
    policy: Buffer
    places: int
    rng: random.Random
    idle: Pool  # there, without work
    version: int = 0
    working: int = 0  # how many have work
    resting: dict[int, None] = field(default_factory=dict)  # "fresh" clients that wait for the next version, in order
    buffered: list[JobName] = field(default_factory=list)
    heard: dict[int, int] = field(default_factory=dict)  # client -> version of its last update, where "fresh" matters

    def __post_init__(self) -> None:
        self.bits = self.rng.getrandbits
        self.size, self.steps, self.newest = self.policy.size, self.policy.steps or 0, self.policy.restart == "newest"

    def begin(self, now: float, present: Collection[int]) -> list[Command]:
        if self.policy.overlap:
            return [Offer(0, self.steps)]
        self.idle = Pool(self.idle.clients, sorted(present))
        return self.fill([])

    def arrived(self, now: float, event: Arrived) -> list[Command]:
        client, number, _, _ = event
        buffered = self.buffered
        buffered.append((client, number))
        orders = self.commit() if len(buffered) == self.size else []
        if self.newest:  # it rests and leaves its place: to itself, or to one drawn from the idle
            drawn = self.idle.exchange(client, self.bits)
            orders.append(record(Start, (drawn, self.version, self.steps)))
        elif not self.policy.overlap:
            self.working -= 1
            self.heard[client] = event.version
            self.rest(client)
            self.fill(orders)
        return orders

    def left(self, now: float, event: Left) -> list[Command]:
        if self.policy.overlap:
            return []
        if event.client in self.resting:
            del self.resting[event.client]
        elif not self.idle.remove(event.client):
            self.working -= 1
        return self.fill([])

    def joined(self, now: float, event: Joined) -> list[Command]:
        if self.policy.overlap:
            return []
        self.rest(event.client)
        return self.fill([])

    def woke(self, now: float, event: Woke) -> list[Command]:
        return []

    def commit(self) -> list[Command]:
        orders: list[Command] = [Commit(tuple(self.buffered))]
        self.buffered = []
        self.version += 1
        if self.policy.overlap:
            orders.append(Offer(self.version, self.steps))
        for client in self.resting:
            self.idle.append(client)
        self.resting.clear()
        return orders

    def rest(self, client: int) -> None:
        """Without work now; "fresh" clients that have the newest version behind them wait for the next."""
        if self.heard.get(client) == self.version:
            self.resting[client] = None
        else:
            self.idle.append(client)

    def fill(self, orders: list[Command]) -> list[Command]:
        """Give work to idle clients while places are free: to all of them, or to some drawn uniformly."""
        free = self.places - self.working
        idle, version, steps = self.idle, self.version, self.steps
        chosen = idle.empty() if len(idle) <= free else [idle.draw(self.bits) for _ in range(free)]
        self.working += len(chosen)
        orders += [record(Start, (client, version, steps)) for client in chosen]
        return orders
