"""Clusters in the place of clients: devices step and gossip inside, and another policy conducts the clusters."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass

from offbeat.config.options import STEPS
from offbeat.keys import fold, key
from offbeat.method import Conductor, Policy


@dataclass(frozen=True)
class Hybrid:
    """`between` speaks of clients and means clusters: an order goes to all devices of one, and they answer as one.

    After every `every` local steps the devices of a cluster exchange models `rounds` times in a row along their links
    (0: never), or, with `edge`, through an edge server that takes the mean. Steps that are left over at the end of a
    job are followed by no exchange. When a cluster has finished, a share `sample` of its devices, drawn anew for each
    job without replacement, sends what it has. Without `server` nothing goes over the links to the server: devices
    carry on from their own models, and a commit only looks at them.
    """

    between: Policy
    every: int = 1
    rounds: int = 1
    sample: float = 1.0
    edge: bool = False
    server: bool = True

    @property
    def kind(self) -> str:
        return f"hybrid {self.between.kind}" + ("" if self.server else " without server")

    @property
    def holds(self) -> bool:
        return self.between.holds

    @property
    def overlaps(self) -> bool:
        return self.between.overlaps

    speaks_of = "clusters"

    @property
    def orders(self) -> int | None:
        return self.between.orders

    @property
    def cohort(self) -> int | None:
        return self.between.cohort

    @property
    def drops(self) -> bool:
        return self.between.drops or self.sample < 1

    @property
    def synchronous(self) -> bool:
        return self.between.synchronous

    @property
    def options(self) -> Mapping[str, str]:
        inner = {name: f"between.{path}" for name, path in self.between.options.items()}
        own = {"gossip_every": "every", "gossip_rounds": "rounds"}
        if not self.server:  # nobody is drawn, and nothing is reported
            return {"local_steps": inner["local_steps"]} | own
        return inner | {"p": "sample"} | own | {"edge": "edge"}

    @property
    def gossips(self) -> bool:
        """Whether devices need links to one another."""
        return self.rounds > 0 and not self.edge

    def problems(self, clients: int) -> list[str]:
        """With so many clusters."""
        problems = []
        if self.between.speaks_of == "clusters":
            problems.append("hybrid: between is hybrid itself; clusters of clusters are not known here")
        if self.every < 1:
            problems.append(f"hybrid: gossip_every = {self.every}; devices exchange models after 1 or more local steps")
        if self.rounds < 0:
            problems.append(f"hybrid: gossip_rounds = {self.rounds}; devices exchange models 0 or more times in a row")
        elif max(self.rounds, (self.orders or 0) // max(1, self.every) * self.rounds) > STEPS:
            problems.append(
                f"hybrid: gossip_rounds = {self.rounds} after every {self.every} of {self.orders} local steps; devices "
                f"exchange models {STEPS:,} times in a job at most"
            )
        if not 0 < self.sample <= 1:
            problems.append(
                f"hybrid: p = {self.sample}; it is the share of a cluster's devices that report, above 0 and at most 1"
            )
        if self.orders is None:
            problems.append("hybrid: the devices of a cluster step together; give the number of local steps")
        elif self.rounds and self.every > self.orders:
            problems.append(f"hybrid: models are exchanged after every {self.every} of {self.orders} steps: never")
        elif self.rounds and (self.edge or not self.server) and self.orders % max(1, self.every):
            problems.append(
                f"hybrid: models are exchanged after every {self.every} steps, and a commit looks after {self.orders}: "
                "the one must divide the other"
            )
        if self.edge and (self.rounds != 1 or self.sample != 1):
            problems.append(
                f"hybrid: an edge server takes one mean and reports for all, so gossip_rounds = {self.rounds} and "
                f"p = {self.sample:g} have no meaning; leave them at 1"
            )
        return problems + self.between.problems(clients)

    def conductor(self, clients: int, rng: random.Random) -> Conductor:
        return self.between.conductor(clients, rng)

    def exchanges(self, steps: int) -> int:
        """How often models go over a device's links in a job of so many steps."""
        return steps // self.every * self.rounds

    def reports(self, devices: int) -> int:
        """m = max(p n, 1) (HL-SGD, Algorithm 1, line 13): how many of a cluster's devices report; p n is rounded to the
        nearest whole number. An edge server reports for all of them, as one.

        >>> [Hybrid(None, sample=1 / 8).reports(n) for n in (3, 8, 12, 16)]
        [1, 1, 2, 2]
        """
        return 1 if self.edge else max(1, math.floor(self.sample * devices + 0.5))

    def reporters(self, seed: int, cluster: int, job: int, devices: int) -> list[int]:
        """Which of them, by their places in the cluster: keyed, so that everyone who asks gets the same answer."""
        many = self.reports(devices)
        if many == devices:
            return list(range(devices))
        root = key(seed, "report", cluster, job)
        return sorted(sorted(range(devices), key=lambda place: fold(root, place))[:many])
