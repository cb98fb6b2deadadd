"""HL-SGD, its relatives and its clock written a second time from the paper, slowly and plainly, as an oracle.

Guo, Sun, Hu, Gong: Hybrid local SGD for federated learning with heterogeneous communications. ICLR 2022: Algorithm 1,
the runtime model (2), section 6.1, appendices E (several exchanges in a row) and F (l steps before an exchange).

Client i has the quadratic f_i(w) = 1/2 w'A_i w - b_i'w, whose gradient A_i w - b_i is exact. A cluster is a list of
clients; `mixing[k]` holds the matrices W_k that cluster k uses in turn, the first of them at its first exchange. They
go on from round to round, as on devices that do not know what a round is. `heard[i]` are the places in a cluster whose
models come to place i, without i itself.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Arrays = Sequence[Array]
Heard = Sequence[Sequence[int]]
Rate = float | Callable[[int], float]


def at(rate: Rate, version: int) -> float:
    return rate(version) if callable(rate) else rate


# ---- graphs and weights --------------------------------------------------------------------------
def neighbours(name: str, n: int) -> list[list[list[int]]]:
    """Who hears whom in the graphs of that name, one after the other; those that are not drawn at random."""
    pairs: set[tuple[int, int]] = set()
    if name == "one-peer-exponential":
        turns, offset = [], 1
        while offset < n:
            turns.append([[(i - offset) % n] for i in range(n)])
            offset *= 2
        return turns or [[[]]]
    if name == "exponential":
        offset = 1
        while offset < n:
            pairs |= {(i, (i + offset) % n) for i in range(n)}
            offset *= 2
    elif name in ("grid", "torus"):
        rows = max(r for r in range(1, n + 1) if n % r == 0 and r * r <= n)
        columns = n // rows
        for r in range(rows):
            for c in range(columns):
                if c + 1 < columns or name == "torus":
                    pairs.add((r * columns + c, r * columns + (c + 1) % columns))
                if r + 1 < rows or name == "torus":
                    pairs.add((r * columns + c, (r + 1) % rows * columns + c))
    else:
        pairs = {
            "complete": {(i, j) for i in range(n) for j in range(i)},
            "none": set(),
            "path": {(i, i + 1) for i in range(n - 1)},
            "ring": {(i, (i + 1) % n) for i in range(n)},
            "star": {(0, i) for i in range(1, n)},
        }[name]
    both = {(i, j) for i, j in pairs if i != j} | {(j, i) for i, j in pairs if i != j}
    return [[sorted(j for j in range(n) if (i, j) in both) for i in range(n)]]


def metropolis_hastings(heard: Heard) -> Array:
    """W_ij = 1 / (1 + max(deg i, deg j)) for neighbours, W_ii = 1 - the others."""
    n = len(heard)
    w = np.zeros((n, n))
    for i in range(n):
        for j in heard[i]:
            w[i, j] = 1 / (1 + max(len(heard[i]), len(heard[j])))
        w[i, i] = 1 - w[i].sum()
    return w


def max_degree(heard: Heard) -> Array:
    """W_ij = 1 / (1 + Delta) for neighbours, W_ii = 1 - the others."""
    n, largest = len(heard), max(map(len, heard))
    w = np.zeros((n, n))
    for i in range(n):
        for j in heard[i]:
            w[i, j] = 1 / (1 + largest)
        w[i, i] = 1 - w[i].sum()
    return w


def rho(w: Array) -> float:
    """Assumption 3: the spectral norm of W - J."""
    n = len(w)
    return float(np.sqrt(np.linalg.eigvalsh((w - 1 / n).T @ (w - 1 / n)).max()))


# ---- methods -------------------------------------------------------------------------------------
@dataclass
class Gossip:
    """The devices of one cluster, and how many exchanges they have had."""

    matrices: Arrays  # A_i of its devices
    linear: Arrays
    mixing: Arrays
    x: list[Array]
    turn: int = 0  # never set back

    def begin(self, x: Array) -> None:
        """Line 4: everyone has the server's model."""
        self.x = [x.copy() for _ in self.matrices]

    def run(self, steps: int, lr: float, every: int = 1, rounds: int = 1, edge: bool = False) -> None:
        """Lines 5 to 9: steps, and `rounds` exchanges after every `every` of them."""
        for s in range(1, steps + 1):
            self.x = [x - lr * (a @ x - b) for x, a, b in zip(self.x, self.matrices, self.linear, strict=True)]  # 6, 7
            if s % every == 0:
                for _ in range(rounds):
                    self.exchange(edge)

    def exchange(self, edge: bool) -> None:
        if edge:
            mean = sum(self.x[1:], self.x[0]) / len(self.x)
            self.x = [mean.copy() for _ in self.x]
            return
        w = self.mixing[self.turn % len(self.mixing)]
        new = []
        for i in range(len(self.x)):
            mine = np.zeros_like(self.x[0])
            for j in range(len(self.x)):
                mine = mine + w[i, j] * self.x[j]
            new.append(mine)  # 8
        self.x = new
        self.turn += 1


def cluster_of(
    matrices: Arrays, linear: Arrays, members: Sequence[int], mixing: Arrays, start: Sequence[Array]
) -> Gossip:
    return Gossip([matrices[i] for i in members], [linear[i] for i in members], mixing, [x.copy() for x in start])


def hl_sgd(
    matrices: Arrays,
    linear: Arrays,
    clusters: Sequence[Sequence[int]],
    mixing: Sequence[Arrays],
    start: Array,
    rounds: int,
    tau: int,
    lr: Rate,
    every: int = 1,
    gossip: int = 1,
    sampled: Callable[[int, int], Sequence[int]] | None = None,  # cluster, round -> places; None: all
    server_lr: float = 1.0,
    parts: Sequence[float] | None = None,  # of the clusters; None: n_k / N, 1 / K where they are of one size
    edge: bool = False,
) -> list[Array]:
    """Algorithm 1; the models x^1, x^2, ... after each round."""
    total = sum(len(members) for members in clusters)
    share = [len(members) / total for members in clusters] if parts is None else parts
    x, models = np.array(start, dtype=np.float64), []
    networks = [cluster_of(matrices, linear, members, mixing[k], []) for k, members in enumerate(clusters)]
    for r in range(rounds):
        new = np.zeros_like(x)
        for k, (members, inside) in enumerate(zip(clusters, networks, strict=True)):
            inside.begin(x)
            inside.run(tau, at(lr, r), every, gossip, edge)
            chosen = range(len(members)) if sampled is None else sampled(k, r)  # 13, 14
            new = new + share[k] * sum(inside.x[place] for place in chosen) / len(chosen)  # 16
        x = x - server_lr * (x - new)
        models.append(x.copy())
    return models


def gossip_pga(
    matrices: Arrays, linear: Arrays, mixing: Arrays, start: Array, steps: int, period: int, lr: float
) -> list[Array]:
    """Chen et al. 2021: one network; at every `period`-th step the exchange is followed by a full average."""
    n = len(matrices)
    inside = cluster_of(matrices, linear, range(n), mixing, [start] * n)
    models = []
    for s in range(1, steps + 1):
        inside.run(1, lr)
        if s % period == 0:
            mean = sum(inside.x[1:], inside.x[0]) / n
            inside.begin(mean)
            models.append(mean)
    return models


def gossip_sgd(
    matrices: Arrays, linear: Arrays, mixing: Arrays, start: Array, steps: int, lr: float, every: int = 1,
    gossip: int = 1,
) -> list[Array]:  # fmt: skip
    """tau -> infinity: no server, one network; every device's model after all steps."""
    n = len(matrices)
    inside = cluster_of(matrices, linear, range(n), mixing, [start] * n)
    inside.run(steps, lr, every, gossip)
    return inside.x


def hierarchical(
    matrices: Arrays, linear: Arrays, clusters: Sequence[Sequence[int]], start: Array, rounds: int, inner: int,
    outer: int, lr: float,
) -> Array:  # fmt: skip
    """Liu et al. 2020: edge servers average after `inner` steps, the cloud after `outer` of their averages."""
    total, x = len(matrices), np.array(start, dtype=np.float64)
    for _ in range(rounds):
        new = np.zeros_like(x)
        for members in clusters:
            edge = x.copy()
            for _ in range(outer):
                arrived = np.zeros_like(x)
                for i in members:
                    y = edge.copy()
                    for _ in range(inner):
                        y = y - lr * (matrices[i] @ y - linear[i])
                    arrived = arrived + y
                edge = arrived / len(members)
            new = new + len(members) / total * edge
        x = new
    return x


def async_hl_sgd(
    matrices: Arrays,
    linear: Arrays,
    clusters: Sequence[Sequence[int]],
    mixing: Sequence[Arrays],
    start: Array,
    commits: int,
    tau: int,
    lr: float,
    seconds: Sequence[float],  # of a cluster's job, transfers and all
    buffer: int,
    sampled: Callable[[int, int], Sequence[int]],
    every: int = 1,
    gossip: int = 1,
    server_lr: float = 1.0,
    stale: Callable[[int], float] = lambda k: (k + 1) ** -0.5,
) -> tuple[Array, list[list[tuple[int, int]]], list[list[int]]]:
    """FedBuff over clusters: the model, and of each commit its (cluster, job)s and their staleness.

    w <- w - server_lr / B * sum over the buffer of s(staleness) (n_k K / N) (mean of what the cluster has moved).
    """
    total, w, version = len(matrices), np.array(start, dtype=np.float64), 0
    number = [0] * len(clusters)
    networks = [cluster_of(matrices, linear, members, mixing[k], []) for k, members in enumerate(clusters)]
    agenda = [(seconds[k], k, 0, w.copy()) for k in range(len(clusters))]
    heapq.heapify(agenda)
    held: list[Array] = []
    jobs: list[list[tuple[int, int]]] = [[]]
    ages: list[list[int]] = [[]]
    while version < commits:
        now, k, begun, model = heapq.heappop(agenda)
        members, inside = clusters[k], networks[k]
        inside.begin(model)
        inside.run(tau, lr, every, gossip)
        chosen = sampled(k, number[k])
        moved = model - sum(inside.x[place] for place in chosen) / len(chosen)
        held.append(stale(version - begun) * len(members) * len(clusters) / total * moved)
        jobs[-1].append((k, number[k]))
        ages[-1].append(version - begun)
        number[k] += 1
        if len(held) == buffer:
            w = w - server_lr * sum(held) / buffer
            version, held = version + 1, []
            jobs.append([])
            ages.append([])
        heapq.heappush(agenda, (now + seconds[k], k, version, w.copy()))
    return w, jobs[:-1], ages[:-1]


# ---- where they end ------------------------------------------------------------------------------
def fixed_point(round_: Callable[[Array], Array], dimension: int) -> Array:
    """The model that an affine round leaves as it is."""
    offset = round_(np.zeros(dimension))
    linear = np.stack([round_(e) - offset for e in np.eye(dimension)], axis=1)
    found: Array = np.linalg.solve(np.eye(dimension) - linear, offset)
    return found


def gossip_limit(matrices: Arrays, linear: Arrays, w: Array, lr: float) -> Array:
    """Every device's model where X = W (X - lr (A X - b)); a row each."""
    n, d = len(matrices), len(linear[0])
    kron = np.kron(w, np.eye(d))
    blocks = np.zeros((n * d, n * d))
    for i, a in enumerate(matrices):
        blocks[i * d : (i + 1) * d, i * d : (i + 1) * d] = a
    found = np.linalg.solve(np.eye(n * d) - kron @ (np.eye(n * d) - lr * blocks), lr * kron @ np.concatenate(linear))
    return found.reshape(n, d)


# ---- the clock -----------------------------------------------------------------------------------
def runtime(
    rounds: int, tau: int, c_cp: float, c_d2d: float, c_d2s: float, every: int = 1, gossip: int = 1
) -> float:  # fmt: skip
    """Equation (2), R [tau (c_cp + c_d2d) + c_d2s]; with l steps and g exchanges, tau // l * g of them (E, F)."""
    return rounds * (tau * c_cp + tau // every * gossip * c_d2d + c_d2s)


@dataclass
class Simulated:
    """Messages between the devices of one cluster, one event after the other."""

    step: Sequence[float]  # seconds per local step
    heard: Sequence[Heard]  # for each graph in turn
    link: Callable[[int, int], float]  # seconds from one place to another
    steps: int
    every: int = 1
    gossip: int = 1
    first: int = 0  # exchanges that the cluster has had before
    messages: int = 0
    history: list[list[float]] = field(default_factory=list)  # of each device: after each phase of steps and exchange

    def run(self) -> list[float]:
        """When each device has finished: S_j = T_j + its link times; i goes on at the last S of itself and those it
        hears. Messages that come early wait."""
        n, phases = len(self.step), self.steps // self.every if self.gossip else 0
        total = phases * self.gossip
        left = self.steps - phases * self.every
        self.history = [[] for _ in range(n)]
        inbox: list[dict[int, set[int]]] = [{} for _ in range(n)]
        exchange, end = [0] * n, [0.0] * n
        agenda: list[tuple[float, int, str, int]] = []  # time, serial, what, who

        def put(time: float, what: str, who: int) -> None:
            nonlocal serial
            serial += 1
            heapq.heappush(agenda, (time, serial, what, who))

        serial = 0
        for i in range(n):
            put(self.every * self.step[i] if total else self.steps * self.step[i], "stepped", i)
        while agenda:
            now, _, what, i = heapq.heappop(agenda)
            if what == "stepped":
                self.history[i].append(now)
                if exchange[i] == total:
                    end[i] = now
                else:
                    put(now + self.sending(i, exchange[i]), "sent", i)
                continue
            turn = exchange[i]  # its own, until it has sent
            for j in [i, *self.hearers(i, turn)]:
                inbox[j].setdefault(turn, set()).add(i)
            for j in [i, *self.hearers(i, turn)]:
                wanted = {j, *self.graph(exchange[j])[j]}
                if exchange[j] < total and inbox[j].get(exchange[j], set()) >= wanted:
                    exchange[j] += 1
                    self.history[j].append(now)
                    if exchange[j] % self.gossip:  # the next exchange in a row
                        put(now + self.sending(j, exchange[j]), "sent", j)
                    else:
                        steps = left if exchange[j] == total else self.every
                        put(now + steps * self.step[j], "stepped", j)
        return end

    def graph(self, turn: int) -> Heard:
        return self.heard[(self.first + turn) % len(self.heard)]

    def hearers(self, i: int, turn: int) -> list[int]:
        return [j for j, others in enumerate(self.graph(turn)) if i in others]

    def sending(self, i: int, turn: int) -> float:
        """One link after the other."""
        seconds = 0.0
        for j in self.hearers(i, turn):
            seconds += self.link(i, j)
            self.messages += 1
        return seconds


def through_an_edge_server(
    step: Sequence[float], to_edge: Sequence[float], steps: int, every: int, gossip: int = 1
) -> list[float]:
    """When each device has finished; the edge server waits for the last model, then sends the mean to everyone."""
    now = [0.0] * len(step)
    for s in range(1, steps + 1):
        now = [t + c for t, c in zip(now, step, strict=True)]
        if s % every == 0:
            for _ in range(gossip):
                last = 0.0
                for t, link in zip(now, to_edge, strict=True):
                    last = max(last, t + link)
                now = [last + link for link in to_edge]
    return now
