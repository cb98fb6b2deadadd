"""Buffered asynchrony: every `size`-th arrival makes a commit, and nobody waits for anybody."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

from offbeat.records import Arrived, Command, Commit, JobName, Joined, Left, Offer, Start, Woke

Restart = Literal["newest", "fresh", "broadcast"]


@dataclass(frozen=True)
class Buffer:
    """Commit on every `size`-th arrival; `restart` says how clients get their next work.

    newest     the client pulls the newest version when its upload is in (FedBuff: download, train, upload in turn);
    fresh      the same, but never twice from one version: it waits for the next commit if need be;
    broadcast  every version goes to every client's receive buffer, beside computing; never twice from one (DLSGD).

    With a `concurrency` below the fleet's size at most so many clients work at once, and the place of one that
    has reported goes to a client drawn uniformly from the idle ones.
    """

    size: int = 10
    steps: int = 1
    concurrency: int | None = None
    restart: Restart = "newest"

    holds = False

    @property
    def kind(self) -> str:
        return "buffer" if self.restart == "newest" else f"buffer-{self.restart}"

    @property
    def overlaps(self) -> bool:
        return self.restart == "broadcast"

    def problems(self, clients: int) -> list[str]:
        found = []
        if self.steps < 1:
            found.append(f"buffer: local steps = {self.steps}; a job needs at least 1")
        if self.size < 1:
            found.append(f"buffer: size = {self.size}; a commit needs at least 1 update")
        if self.restart not in ("newest", "fresh", "broadcast"):
            found.append(f"buffer: restart = '{self.restart}'; it is one of newest, fresh, broadcast")
        if self.concurrency is not None and not 1 <= self.concurrency <= clients:
            found.append(f"buffer: concurrency = {self.concurrency}; it must be between 1 and the {clients} clients")
        working = self.concurrency or clients
        if self.size > working:
            found.append(
                f"buffer: size = {self.size} is larger than the {working} clients at work at once; "
                "lower the size or raise the concurrency"
            )
        if self.restart == "broadcast" and self.concurrency not in (None, clients):
            found.append("buffer: restart = 'broadcast' reaches every client; it takes no concurrency limit")
        return found

    def conductor(self, clients: int, rng: random.Random) -> BufferConductor:
        return BufferConductor(self, self.concurrency or clients, rng)


@dataclass
class BufferConductor:
    policy: Buffer
    places: int
    rng: random.Random
    version: int = 0
    idle: list[int] = field(default_factory=list)  # there, without work
    working: set[int] = field(default_factory=set)
    resting: list[int] = field(default_factory=list)  # "fresh" clients that wait for the next version
    buffered: list[JobName] = field(default_factory=list)
    heard: dict[int, int] = field(default_factory=dict)  # client -> version of its last update, where "fresh" matters

    def begin(self, now: float, present: Collection[int]) -> list[Command]:
        if self.policy.restart == "broadcast":
            return [Offer(0, self.policy.steps)]
        self.idle = sorted(present)
        return self.fill()

    def arrived(self, now: float, event: Arrived) -> list[Command]:
        orders: list[Command] = []
        self.buffered.append((event.client, event.job))
        if len(self.buffered) == self.policy.size:
            orders.append(Commit(tuple(self.buffered)))
            self.buffered = []
            self.version += 1
            if self.policy.restart == "broadcast":
                orders.append(Offer(self.version, self.policy.steps))
            self.idle += self.resting
            self.resting = []
        if self.policy.restart == "broadcast":
            return orders
        self.working.discard(event.client)
        if self.policy.restart == "fresh":
            self.heard[event.client] = event.version
        self.rest(event.client)
        return orders + self.fill()

    def left(self, now: float, event: Left) -> list[Command]:
        self.working.discard(event.client)
        for pool in (self.idle, self.resting):
            if event.client in pool:
                pool.remove(event.client)
        return self.fill()

    def joined(self, now: float, event: Joined) -> list[Command]:
        if self.policy.restart == "broadcast":
            return []
        self.rest(event.client)
        return self.fill()

    def woke(self, now: float, event: Woke) -> list[Command]:
        return []

    def rest(self, client: int) -> None:
        """Without work now; "fresh" clients that have the newest version behind them wait for the next."""
        (self.resting if self.heard.get(client) == self.version else self.idle).append(client)

    def fill(self) -> list[Command]:
        """Give work to idle clients while places are free: to all of them, or to some drawn uniformly."""
        orders: list[Command] = []
        free = self.places - len(self.working)
        if len(self.idle) <= free:
            chosen, self.idle = self.idle, []
        else:
            chosen = [self.take(self.rng.randrange(len(self.idle))) for _ in range(free)]
        for client in chosen:
            self.working.add(client)
            orders.append(Start(client, self.version, self.policy.steps))
        return orders

    def take(self, place: int) -> int:
        """Remove one idle client in constant time."""
        self.idle[place], self.idle[-1] = self.idle[-1], self.idle[place]
        return self.idle.pop()
