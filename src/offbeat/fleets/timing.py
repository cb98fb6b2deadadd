"""The clock of clusters: how long a block's exchange with the server and its steps with gossip between them take.

A gossip step waits for its neighbours. Each device sends its model over its links one after the other, and goes on
when it has sent its own and heard all of its neighbours':

    S_j = T_j + sum over j's links of (latency + bytes / bandwidth),    T_i <- max of S_j over i and its neighbours.

So one slow device holds up its neighbours, then theirs. Where all devices and links are alike, a round takes
tau (c_cp + c_d2d) + c_d2s with c_d2d proportional to the largest degree: equation (2) of the HL-SGD paper.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from offbeat.fleets.clusters import Cluster
from offbeat.fleets.distributions import Array
from offbeat.fleets.fleet import Fleet
from offbeat.method import ClusterPolicy
from offbeat.schedule.device import Durations


class Timing:
    """One cluster's exchanges of models of so many bytes."""

    def __init__(self, cluster: Cluster, policy: ClusterPolicy, vector_bytes: float) -> None:
        self.policy = policy
        self.to_edge: Array = cluster.edge_latency + vector_bytes / cluster.edge_bandwidth
        one = cluster.latency + vector_bytes / cluster.bandwidth
        self.sending: list[Array] = []  # [n] for each graph: seconds in which a device has sent its model
        self.heard: list[tuple[NDArray[np.intp], NDArray[np.intp]]] = []  # senders by receiver, and where each begins
        for turn in range(len(cluster.graphs)):
            hears = cluster.hears(turn)
            self.sending.append(np.where(hears > 0, one, 0.0).sum(axis=0))
            receiver, sender = np.nonzero(hears + np.eye(cluster.size))
            self.heard.append((sender, np.searchsorted(receiver, np.arange(cluster.size))))

    def finish(self, step: Array, steps: int, turn: int = 0) -> Array:
        """When each device has done so many local steps, `step` seconds each, with all exchanges between them, of which
        the first is the `turn`-th."""
        now = np.zeros_like(step)
        every = self.policy.every
        for _ in range(steps // every if self.policy.rounds else 0):
            now = now + every * step
            for _ in range(self.policy.rounds):
                now = self.exchange(now, turn)
                turn += 1
            steps -= every
        return now + steps * step

    def exchange(self, now: Array, turn: int) -> Array:
        if self.policy.edge:
            all_in: Array = (now + self.to_edge).max() + self.to_edge
            return all_in
        place = turn % len(self.sending)
        sender, begins = self.heard[place]
        together: Array = np.maximum.reduceat((now + self.sending[place])[sender], begins)
        return together


def phases(cluster: Cluster, policy: ClusterPolicy) -> tuple[Array, ...]:
    """What a cluster's models are multiplied by at the end of each phase, in turn: as many of its matrices as there are
    exchanges in a row, one after the other; with an edge server the mean; nothing where models are not exchanged."""
    if not policy.rounds:
        return ()
    if policy.edge:
        return (np.full((cluster.size, cluster.size), 1 / cluster.size),)
    many, rounds = len(cluster.mixing), policy.rounds
    if rounds == 1:
        return cluster.mixing
    durations = []
    for first in range(0, math.lcm(many, rounds), rounds):
        product = np.eye(cluster.size)
        for turn in range(first, first + rounds):
            product = cluster.mixing[turn % many] @ product
        durations.append(product)
    return tuple(durations)


class BlockDurations(Durations):
    """A fleet's durations with clusters in the place of clients. A block begins when its last device has the model,
    and sends when its last device has finished."""

    def __init__(
        self, devices: Durations, fleet: Fleet, policy: ClusterPolicy, seed: int, vector_bytes: float
    ) -> None:  # fmt: skip
        assert fleet.clusters is not None
        self.devices, self.clusters, self.policy, self.seed = devices, fleet.clusters.each, policy, seed
        self.timings = [Timing(cluster, policy, vector_bytes) for cluster in self.clusters]
        # Seconds of a job by cluster, steps and first graph, where all jobs are alike but for those.
        self.known: dict[tuple[int, int, int], float] | None = {} if fleet.jitter is None else None

    @property
    def clients(self) -> int:
        return len(self.clusters)

    @cached_property
    def download_bound(self) -> float:
        return self.devices.download_bound if self.policy.server else 0.0

    def download(self, client: int, job: int) -> float:
        if not self.policy.server:
            return 0.0
        return max(self.devices.download(device, job) for device in self.clusters[client].members)

    def compute(self, client: int, job: int, steps: int) -> float:
        turn = job * self.policy.exchanges(steps) % len(self.clusters[client].graphs)
        if self.known is None:
            return self.finish(client, job, steps, turn)
        if (client, steps, turn) not in self.known:
            self.known[client, steps, turn] = self.finish(client, job, steps, turn)
        return self.known[client, steps, turn]

    def finish(self, client: int, job: int, steps: int, turn: int) -> float:
        return float(self.timings[client].finish(self.step_seconds(client, job), steps, turn).max())

    def step_seconds(self, client: int, job: int) -> Array:
        members = self.clusters[client].members
        return np.array([self.devices.compute(device, job, 1) for device in members])

    def upload(self, client: int, job: int) -> float:
        if not self.policy.server:
            return 0.0
        members = self.clusters[client].members
        chosen = self.policy.reporters(self.seed, client, job, len(members))
        return max(self.devices.upload(members[place], job) for place in chosen)

    def fails(self, client: int, job: int) -> float | None:
        return None

    def presence(self, client: int) -> Iterator[tuple[float, bool]] | None:
        return None
