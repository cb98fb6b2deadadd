"""Every method a second time, written from the papers: plain PyTorch in float64, one client after another.

`Replay` reads the trace of a run (who started from which version, who finished, who was committed) and computes every
version of the model. It imports nothing from `offbeat.numerics` or `offbeat.methods`, except the keyed permutation
behind `sampling = "shuffle"`. Other keyed draws follow from `offbeat.keys`: the rows of a batch, the devices of a
cluster that report, and the noise of a stage, which encodes and decodes with its own functions.

A plain client is a cluster of one device that never exchanges models, so all methods share one job: `Replay.job`.
Rules that hold for all methods:

* A job that finished has read its rows and has moved what its client remembers, whether a commit consumes it or not.
* A client that is drawn twice in a round does one job. The job counts twice in the mean of the models, and once where
  the server keeps a vector of each client (c of SCAFFOLD, nu of FedaGrac).
* Buffers of the model under "averaged" start from those of the start version. Floating-point buffers of a new version
  are the mean over the cohort by the method's client weights, whole numbers the largest of the cohort.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import hybrid_oracle
from offbeat import keys
from offbeat.numerics.samples import permuted
from offbeat.records import Begun, Commit, Finished, JobName

Buffers = dict[str, Tensor]
Vectors = dict[str, Tensor]


@dataclass
class World:
    """What the methods run on, as the user gave it."""

    module: nn.Module
    loss: Callable[..., Tensor]
    data: tuple[Tensor, Tensor]
    shards: Sequence[Sequence[int]]
    batch: int | Sequence[int] | None
    sampling: str
    batch_norm: str | None
    seed: int
    clusters: Sequence[Sequence[int]] | None = None  # the devices of each
    graphs: Sequence[str] = ()  # the name of each cluster's graph

    def size(self, client: int) -> int:
        return len(self.shards[client])

    def width(self, client: int) -> int:
        """Samples in one step of a client."""
        if self.batch is None:
            return self.size(client)
        return self.batch if isinstance(self.batch, int) else self.batch[client]

    def epoch(self, client: int) -> int:
        """Steps in one pass over a client's shard."""
        return -(-self.size(client) // self.width(client))

    def rows(self, client: int, job: int, step: int, position: int) -> list[int]:
        """Rows of the batch of one step; `position` counts the steps that the client took in earlier jobs."""
        size, width = self.size(client), self.width(client)
        if self.batch is None:
            return list(self.shards[client])
        slots = range(step * width, (step + 1) * width)
        key = keys.key(self.seed, "batch", client, job)
        if self.sampling == "replacement":
            places = [(keys.word(key, slot) * size) >> 32 for slot in slots]
        elif self.sampling == "shuffle":
            whole = torch.arange(size)
            order = {epoch: permuted(keys.fold(torch.tensor(key), epoch), whole, torch.tensor(size)).tolist()
                     for epoch in {slot // size for slot in slots}}  # fmt: skip
            assert all(sorted(places) == list(range(size)) for places in order.values())
            places = [order[slot // size][slot % size] for slot in slots]
        else:
            start = position * width if self.sampling == "in-order-continued" else 0
            places = [(start + slot) % size for slot in slots]
        return [self.shards[client][place] for place in places]


class Network:
    """The user's module in float64, its trained parameters as one vector."""

    def __init__(self, world: World) -> None:
        self.module = copy.deepcopy(world.module).double().train()
        self.named = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        self.loss, (self.x, self.y) = world.loss, world.data

    def vector(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.named.values()])

    def buffers(self) -> Buffers:
        return {name: b.detach().clone() for name, b in self.module.named_buffers()}

    def by_name(self, vector: Tensor) -> Vectors:
        parts = vector.split([p.numel() for p in self.named.values()])
        return {name: part.view_as(p) for (name, p), part in zip(self.named.items(), parts, strict=True)}

    def gradient(self, y: Tensor, buffers: Buffers, rows: Sequence[int]) -> Tensor:
        """The gradient at y over these rows; `buffers` are changed as the module changes its own."""
        with torch.no_grad():
            for name, part in self.by_name(y).items():
                self.named[name].copy_(part)
            for name, buffer in self.module.named_buffers():
                buffer.copy_(buffers[name])
        loss = self.loss(self.module(self.x[rows]), self.y[rows])
        gradients = torch.autograd.grad(loss, list(self.named.values()))
        for name, buffer in self.module.named_buffers():
            buffers[name] = buffer.detach().clone()
        return torch.cat([g.flatten() for g in gradients])


# ---- rates, staleness, optimisers -----------------------------------------------------------------
def rate(spec: Any, version: int, step: int = 0, steps: int = 1) -> float:
    """The value of a schedule at a version and a local step."""
    if not isinstance(spec, Mapping):
        return float(spec)
    o = {"warm_up": 0, "floor": 0.0, "factor": 0.1, "scale": 1.0, **spec}
    match o.get("schedule", "constant"):
        case "constant":
            return float(o["value"])
        case "step":
            return float(o["value"] * o["factor"] ** sum(version >= v for v in o["at"]))
        case "stages":
            return float(o["values"][sum(version >= v for v in o["at"])])
        case "inverse-sqrt":
            return float(o["value"] * (1 + version / o["scale"]) ** -0.5)
        case "warm-up":
            return float(o["value"] * min(1.0, (step + 1) / o["steps"]))
        case "cosine" | "local-cosine" as name:
            now, end = (version, o["versions"]) if name == "cosine" else (step, steps)
            if now < o["warm_up"]:
                return float(o["value"] * (now + 1) / o["warm_up"])
            share = min(1.0, (now - o["warm_up"]) / max(1, end - o["warm_up"]))
            return float(o["floor"] + (o["value"] - o["floor"]) * (1 + math.cos(math.pi * share)) / 2)
    raise ValueError(f"schedule: {spec}")


def discount(spec: Any, k: int) -> float:
    """s(k) of Xie et al. (2019, section 5.2)."""
    o = {"law": spec} if isinstance(spec, str) else dict(spec)
    match o["law"]:
        case "constant":
            return 1.0
        case "polynomial":
            return float((k + 1) ** -o.get("a", 0.5))
        case "hinge":
            a, b = o.get("a", 10.0), o.get("b", 4.0)
            return 1.0 if k <= b else float(1 / (a * (k - b) + 1))
    raise ValueError(f"staleness: {spec}")


class ClientOptimiser:
    """The direction d of a step y <- y - lr d, from `torch.optim` with a rate of one."""

    def __init__(self, options: Mapping[str, Any] | None, size: int) -> None:
        o = dict(options or {})
        self.clip, self.kept = o.pop("clip", None), o.pop("state", "reset") == "kept"
        name = o.pop("optimiser", "sgd")
        self.y = torch.zeros(size, dtype=torch.float64, requires_grad=True)
        self.plain = name == "sgd" and not o
        if name == "adamw":
            o["betas"] = (o.pop("beta1", 0.9), o.pop("beta2", 0.999))
        kinds: Any = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW, "rmsprop": torch.optim.RMSprop}
        self.steps = None if self.plain else kinds[name]([self.y], lr=1.0, **o)

    def clipped(self, g: Tensor) -> Tensor:
        return g if self.clip is None or g.norm() <= self.clip else g * (self.clip / g.norm())

    def __call__(self, g: Tensor, y: Tensor) -> Tensor:
        if self.steps is None:
            return g
        self.y.data.copy_(y)
        self.y.grad = g.clone()
        self.steps.step()
        return y - self.y.detach()


class ServerOptimiser:
    """Reddi et al. (2021, Algorithm 2), and momentum; the commit's direction is the gradient."""

    def __init__(self, spec: Any, size: int) -> None:
        o = {"name": spec} if isinstance(spec, str) else dict(spec)
        self.name = o.pop("name", "sgd")
        default = {"momentum": 0.9} if self.name in ("momentum", "nesterov") else {}
        self.o = {"momentum": 0.0, "nesterov": self.name == "nesterov", "beta2": 0.99, "eps": 1e-3,
                  "beta1": 0.0 if self.name == "adagrad" else 0.9, "bias_correction": False} | default | o  # fmt: skip
        start = 0.0 if self.o["bias_correction"] else self.o["eps"] ** 2
        self.m, self.v = torch.zeros(size).double(), torch.full((size,), start, dtype=torch.float64)
        self.t = 0

    def step(self, w: Tensor, d: Tensor, lr: float) -> Tensor:
        o, self.t = self.o, self.t + 1
        if self.name in ("sgd", "momentum", "nesterov"):
            self.m = o["momentum"] * self.m + d
            return w - lr * (d + o["momentum"] * self.m if o["nesterov"] else self.m)
        self.m = o["beta1"] * self.m + (1 - o["beta1"]) * d
        if self.name == "adagrad":
            self.v = self.v + d**2
        elif self.name == "adam":
            self.v = o["beta2"] * self.v + (1 - o["beta2"]) * d**2
        else:
            self.v = self.v - (1 - o["beta2"]) * d**2 * torch.sign(self.v - d**2)
        m, v = self.m, self.v
        if o["bias_correction"]:
            m, v = m / (1 - o["beta1"] ** self.t), v / (1 - o["beta2"] ** self.t)
        return w - lr * m / (v.sqrt() + o["eps"])


# ---- one job --------------------------------------------------------------------------------------
@dataclass
class Path:
    """One device on its way through one job."""

    device: int
    begun: Begun
    position: int
    x: Tensor  # where it started
    y: Tensor
    buffers: Buffers
    correction: Tensor | float
    outer: ClientOptimiser  # an optimiser around a method that is defined for plain steps
    inner: ClientOptimiser
    directions: list[Tensor] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)

    def mean(self, first: int | None = None) -> Tensor:
        """The mean of the (first) directions, by the rates of their steps."""
        lrs = self.rates[:first]
        return sum((lr * d for lr, d in zip(lrs, self.directions, strict=False)), 0 * self.x) / sum(lrs)


@dataclass
class Arrival:
    """What the server has of one finished job."""

    unit: int  # the client, or the cluster
    job: int
    steps: int
    staleness: int
    sent: Vectors
    buffers: Buffers
    reach: float  # FedNova: lr |a|_1


def mean_of(weights: Sequence[float], each: Sequence[Buffers]) -> Buffers:
    """Floating-point buffers by weights that sum to one; of whole numbers the largest."""
    return {
        name: sum((p * b[name] for p, b in zip(weights, each, strict=True)), 0 * first)
        if first.is_floating_point()
        else torch.stack([b[name] for b in each]).amax(0)
        for name, first in each[0].items()
    }


@dataclass
class Version:
    model: Vectors
    buffers: Buffers
    beside: Vectors  # other vectors of the server
    staleness: list[int]


class Replay:
    """A method over a trace. Subclasses say what is particular to a method."""

    defaults: Mapping[str, Any] = {}
    memory = False

    def __init__(self, world: World, options: Mapping[str, Any], up: Any = None, down: Any = None,
                 sends: Sequence[str] = ("delta",), broadcasts: Sequence[str] = ("model",)) -> None:  # fmt: skip
        """`up` and `down` are stages; `sends` and `broadcasts` name vectors in the order in which they are keyed."""
        self.world, self.o, self.up, self.down = world, {**COMMON, **self.defaults, **options}, up, down
        self.sends, self.names, self.network = sends, broadcasts, Network(world)
        self.state: Vectors = {"model": self.network.vector()}
        self.zero = torch.zeros_like(self.state["model"])
        self.buffers = self.initial = self.network.buffers()
        self.server = ServerOptimiser(self.o["server_optimiser"], len(self.zero))
        units = range(len(world.shards)) if world.clusters is None else range(len(world.clusters))
        self.members = [[unit] for unit in units] if world.clusters is None else world.clusters
        self.read = dict.fromkeys(units, 0)  # steps of finished jobs
        self.violations: list[str] = []  # of invariants
        self.kept: dict[tuple[int, str], ClientOptimiser] = {}
        self.own_buffers: dict[int, Buffers] = {}
        self.mixing = [self.matrices(k) for k in units] if world.clusters else []
        self.version = 0
        self.lossless = up is None and down is None
        self.begin()
        self.sent = [self.broadcast()]
        self.stored = [self.buffers]
        kept = (self.o["client_options"] or {}).get("state") == "kept" or world.batch_norm == "local"
        self.in_order = self.memory or kept

    # ---- the trace ----
    def run(self, rows: Iterable[tuple[float, Any]], commits: int) -> list[Version]:
        begun: dict[JobName, tuple[Begun, int]] = {}
        done: dict[JobName, Arrival] = {}
        versions = [self.seen([])]
        finished: list[JobName] = []
        waiting: set[JobName] = set()  # finished, and not committed
        for _, record in rows:
            if isinstance(record, Begun):
                begun[record[:2]] = record, self.read[record.client]
                right = record.steps_before == self.read[record.client]
                self.require(right, f"{record} begins elsewhere in its client's stream")
            elif isinstance(record, Finished):
                job, position = begun[record[:2]]
                self.read[job.client] += job.steps
                waiting.add(record[:2])
                finished.append(record[:2])
                if self.in_order:
                    done[record[:2]] = self.job(job, position)
            elif isinstance(record, Commit):
                cohort = []
                for name in record.jobs:
                    if name not in done:
                        done[name] = self.job(*begun[name])
                    done[name].staleness = self.version - begun[name][0].version
                    cohort.append(done[name])
                self.commit_all(cohort)
                versions.append(self.seen([arrival.staleness for arrival in cohort]))
                waiting.difference_update(record.jobs)
                if not waiting:
                    self.check()
                if len(versions) > commits:
                    break
        if self.world.sampling == "in-order-continued" and self.world.batch is not None:
            self.check_streams(begun, finished)
        return versions

    def check_streams(self, begun: Mapping[JobName, tuple[Begun, int]], jobs: Iterable[JobName]) -> None:
        """Check that the finished jobs of a client read each row of its shard once before any row twice."""
        seen: dict[int, list[int]] = {}
        for name in jobs:
            job, position = begun[name]
            for device in self.members[job.client]:
                for step in range(job.steps):
                    seen.setdefault(device, []).extend(self.world.rows(device, job.job, step, position))
        for device, rows in seen.items():
            shard = list(self.world.shards[device])
            laps = -(-len(rows) // len(shard))
            self.require(rows == (laps * shard)[: len(rows)], f"client {device} skips or repeats rows")

    def seen(self, staleness: list[int]) -> Version:
        beside = {name: vector for name, vector in self.state.items() if name != "model"}
        return Version(self.network.by_name(self.state["model"]), self.buffers, beside, staleness)

    def broadcast(self) -> Vectors:
        key = keys.key(self.world.seed, "broadcast", self.version)
        return {name: through(self.down, self.state[name], keys.fold(key, i))
                for i, name in enumerate(self.names) if name in self.state}  # fmt: skip

    def commit_all(self, cohort: list[Arrival]) -> None:
        buffers = self.new_buffers(cohort)
        self.commit(cohort)
        if self.world.batch_norm == "averaged":
            self.buffers = buffers
        self.version += 1
        self.sent.append(self.broadcast())
        self.stored.append(self.buffers)

    # ---- a job ----
    def job(self, begun: Begun, position: int) -> Arrival:
        unit, number, version, steps = begun[:4]
        given = self.sent[version]
        paths = [self.open(device, begun, position, given) for device in self.members[unit]]
        for step in range(steps):
            for path in paths:
                self.step(path, step)
            if self.world.clusters and not (step + 1) % self.o["gossip_every"]:
                self.exchange(unit, paths, number, step, steps)
        sent = [self.arrived(path, self.finish(path, given)) for path in paths]
        for path in paths:
            self.own_buffers[path.device] = path.buffers
        chosen = self.reporters(unit, number)
        means = {name: sum((sent[i][name] for i in chosen), 0 * self.zero) / len(chosen) for name in sent[0]}
        buffers = mean_of([1 / len(chosen)] * len(chosen), [paths[i].buffers for i in chosen])
        return Arrival(unit, number, steps, 0, means, buffers, self.reach(paths[0]))

    def open(self, device: int, begun: Begun, position: int, given: Vectors) -> Path:
        own, rule = self.own_buffers.get(device, self.initial), self.world.batch_norm
        shared = own if self.personal_models else self.stored[begun.version]
        buffers = {"averaged": shared, "local": own}.get(rule or "", self.initial)
        x, options = self.start(device, given), self.o["client_options"]
        outer, inner = (options, self.solver()) if self.for_plain_steps else (None, options)
        return Path(device, begun, position, x, x, dict(buffers), self.correction(device, begun, given),
                    self.optimiser(device, "outer", outer), self.optimiser(device, "inner", inner))  # fmt: skip

    personal_models = False  # a device goes on from its own model
    for_plain_steps = False  # `client_options` stand around the method, not inside

    def solver(self) -> Mapping[str, Any] | None:
        """The local solver of a method that is defined for plain steps."""
        return None

    def optimiser(self, device: int, which: str, options: Mapping[str, Any] | None) -> ClientOptimiser:
        made = ClientOptimiser(options, len(self.zero))
        return self.kept.setdefault((device, which), made) if made.kept else made

    def step(self, path: Path, step: int) -> None:
        begun, mu = path.begun, self.o["proximal"]
        rows = self.world.rows(path.device, begun.job, step, path.position)
        g = self.network.gradient(path.y, path.buffers, rows)
        g = path.outer(path.outer.clipped(g), path.y)
        g = path.inner.clipped(g)
        if mu:
            g = g + mu * (path.y - path.x)
        d = path.inner(g, path.y)
        lr = self.lr(begun, step)
        path.directions.append(d)
        path.rates.append(lr)
        path.y = path.y - lr * (d + path.correction)

    def exchange(self, unit: int, paths: list[Path], number: int, step: int, steps: int) -> None:
        """X <- W X, `gossip_rounds` times; the matrices are used in turn, from job to job."""
        rounds, n = self.o["gossip_rounds"], len(paths)
        first = (number * (steps // self.o["gossip_every"]) + step // self.o["gossip_every"]) * rounds
        for turn in range(first, first + rounds):
            w = np.full((n, n), 1 / n) if self.o["edge"] else self.mixing[unit][turn % len(self.mixing[unit])]
            models, buffers = [path.y for path in paths], [path.buffers for path in paths]
            for i, path in enumerate(paths):
                path.y = sum((w[i, j] * models[j] for j in range(n)), 0 * self.zero)
                whole = {name: b for name, b in path.buffers.items() if not b.is_floating_point()}
                path.buffers = {**mean_of(w[i].tolist(), buffers), **whole}

    def matrices(self, cluster: int) -> list[hybrid_oracle.Array]:
        devices = self.members[cluster]
        heard = hybrid_oracle.neighbours(self.world.graphs[cluster], len(devices))
        return [hybrid_oracle.metropolis_hastings(one) for one in heard]

    def reporters(self, cluster: int, job: int) -> list[int]:
        """The places of the m = max(p n, 1) devices that report; an edge server sends one vector for all."""
        n = len(self.members[cluster])
        m = 1 if self.o["edge"] else max(1, math.floor(self.o["p"] * n + 0.5))
        key = keys.key(self.world.seed, "report", cluster, job)
        return list(range(n)) if m == n else sorted(sorted(range(n), key=lambda place: keys.fold(key, place))[:m])

    def arrived(self, path: Path, sent: Vectors) -> Vectors:
        key = keys.fold(keys.key(self.world.seed, "rule", path.device, path.begun.job), -1)
        return {name: through(self.up, sent[name], keys.fold(key, i)) for i, name in enumerate(self.sends)}

    def full_gradients(self) -> list[Tensor]:
        """Of every client over its shard, at the model of version 0 as clients receive it."""
        key = keys.key(self.world.seed, "broadcast", 0)
        w = through(self.down, self.state["model"], keys.fold(key, list(self.names).index("model")))
        return [self.network.gradient(w, dict(self.initial), shard) for shard in self.world.shards]

    def primed(self, client: int, gradient: Tensor) -> Tensor:
        return through(self.up, gradient, keys.key(self.world.seed, "prime", client))

    # ---- weights ----
    def part(self, unit: int) -> float:
        """p_i: the part of a client, or of a cluster, in the objective."""
        weights, devices = self.o["weights"], self.members[unit]
        if weights == "uniform":
            return len(devices) / len(self.world.shards)
        if weights == "size":
            return sum(map(self.world.size, devices)) / sum(map(len, self.world.shards))
        return float(weights[unit])

    def new_buffers(self, cohort: list[Arrival]) -> Buffers:
        weights = self.weights(cohort)
        return mean_of([p / sum(weights) for p in weights], [a.buffers for a in cohort])

    def weights(self, cohort: list[Arrival]) -> list[float]:
        """Each update's weight in the mean of the cohort."""
        parts = [self.part(arrival.unit) for arrival in cohort]
        return [p / sum(parts) for p in parts]

    def sum_of(self, name: str, weights: Sequence[float], cohort: list[Arrival]) -> Tensor:
        return sum((p * a.sent[name] for p, a in zip(weights, cohort, strict=True)), 0 * self.zero)

    # ---- what methods say ----
    def begin(self) -> None: ...

    def check(self) -> None:
        """Check the invariants of a moment at which every finished job has been committed."""

    def require(self, holds: bool, what: str) -> None:
        if not holds:
            self.violations.append(f"version {self.version}: {what}")

    def start(self, device: int, given: Vectors) -> Tensor:
        return given["model"]

    def correction(self, device: int, begun: Begun, given: Vectors) -> Tensor | float:
        return 0.0

    def lr(self, begun: Begun, step: int) -> float:
        return rate(self.o["client_lr"], begun.version, step, begun.steps)

    def finish(self, path: Path, given: Vectors) -> Vectors:
        return {"delta": given["model"] - path.y}

    def reach(self, path: Path) -> float:
        return 1.0

    def commit(self, cohort: list[Arrival]) -> None:
        """w <- w - server_lr * (weighted mean of the deltas)."""
        self.descend(self.sum_of("delta", self.weights(cohort), cohort))

    def descend(self, direction: Tensor) -> None:
        lr = rate(self.o["server_lr"], self.version)
        self.state["model"] = self.server.step(self.state["model"], direction, lr)


COMMON = {
    "client_lr": 0.05, "server_lr": 1.0, "weights": "uniform", "client_options": None, "server_optimiser": "sgd",
    "proximal": 0.0, "p": 1.0, "gossip_every": 1, "gossip_rounds": 1, "edge": False,
}  # fmt: skip


def through(stage: Any, vector: Tensor, key: int) -> Tensor:
    """What the receiver has of a vector that went through a stage."""
    return vector if stage is None else stage.decode(stage.encode(vector, key)).double()


# ---- the methods ----------------------------------------------------------------------------------
class LocalSGD(Replay):
    """McMahan et al. 2017, Algorithm 1, with a server rate (DLSGD paper, equations (2) and (3))."""


class Gradients(Replay):
    """Dekel et al. 2012; Lian et al. 2015, Algorithm 1, divided by M: w <- w - server_lr * mean of gradients at w."""

    defaults = {"server_lr": 0.1}

    def lr(self, begun: Begun, step: int) -> float:
        return 0.0

    def finish(self, path: Path, given: Vectors) -> Vectors:
        return {"gradient": sum(path.directions, 0 * self.zero) / len(path.directions)}

    def weights(self, cohort: list[Arrival]) -> list[float]:
        return [1 / len(cohort)] * len(cohort)

    def commit(self, cohort: list[Arrival]) -> None:
        self.descend(self.sum_of("gradient", self.weights(cohort), cohort))


class Delayed(LocalSGD):
    """DLSGD, Algorithms 1 (homo) and 2 (hetero): the mean over n updates, or over a multiset of n draws."""

    def weights(self, cohort: list[Arrival]) -> list[float]:
        return [1 / len(cohort)] * len(cohort)


class DelayedHomo(Delayed):
    defaults = {"server_lr": 0.3}


class FedProx(LocalSGD):
    """Li et al. 2020, Algorithm 2: client i descends f_i(y) + mu/2 |y - w|^2."""

    defaults = {"weights": "size", "proximal": 0.1}


class FedBuff(LocalSGD):
    """Toghani, Uribe 2022, Algorithm 2: w <- w - beta * sum of s(staleness) delta; beta = 1/K by default."""

    defaults = {"beta": None, "staleness": "constant", "client_lr": 0.02}

    def weights(self, cohort: list[Arrival]) -> list[float]:
        return [discount(self.o["staleness"], a.staleness) for a in cohort]

    def commit(self, cohort: list[Arrival]) -> None:
        total, beta = self.sum_of("delta", self.weights(cohort), cohort), self.o["beta"]
        direction, lr = (total / len(cohort), 1.0) if beta is None else (total, rate(beta, self.version))
        self.state["model"] = self.server.step(self.state["model"], direction, lr)


class FedAsync(Replay):
    """Xie et al. 2019, Algorithm 1: x <- (1 - a) x + a y, with a = alpha s(t - tau)."""

    defaults = {"alpha": 0.6, "staleness": "polynomial"}

    def finish(self, path: Path, given: Vectors) -> Vectors:
        return {"model": path.y}

    def commit(self, cohort: list[Arrival]) -> None:
        for arrival in cohort:
            a = self.o["alpha"] * discount(self.o["staleness"], arrival.staleness)
            self.state["model"] = (1 - a) * self.state["model"] + a * arrival.sent["model"]

    def weights(self, cohort: list[Arrival]) -> list[float]:
        """Of buffers: they are not mixed into those of the server, a commit takes the plain mean of those that came."""
        return [1 / len(cohort)] * len(cohort)


class FedNova(Replay):
    """Wang et al. 2020, equation (4): w <- w - server_lr tau_eff sum p_i delta_i / |a_i|, tau_eff = sum p_i |a_i|."""

    defaults = {"weights": "size", "momentum": 0.0, "nesterov": False}
    for_plain_steps = True

    def solver(self) -> Mapping[str, Any]:
        return {name: self.o[name] for name in ("momentum", "nesterov") if self.o[name]}

    def reach(self, path: Path) -> float:
        """lr |a|: how far the solver moves where every gradient is one."""
        z, solver = torch.zeros(1).double(), ClientOptimiser(self.solver(), 1)
        for lr in path.rates:
            z = z - lr * solver(1 + self.o["proximal"] * z, z)
        return -float(z)

    def commit(self, cohort: list[Arrival]) -> None:
        p = self.weights(cohort)
        tau = sum(part * a.reach for part, a in zip(p, cohort, strict=True))
        normalised = [part / a.reach for part, a in zip(p, cohort, strict=True)]
        self.descend(tau * self.sum_of("delta", normalised, cohort))


class Scaffold(Replay):
    """Karimireddy et al. 2020, Algorithm 1: c is the mean of the c_i, by the weights of clients.

    The paper moves c by the mean of the changes. That is the same where the server receives every c_i exactly, so the
    oracle takes the mean of the c_i that the server received last.
    """

    defaults = {"option": "II", "start": "zeros"}
    memory = for_plain_steps = True

    def begin(self) -> None:
        self.c_i = [self.zero for _ in self.world.shards]
        self.last = list(self.c_i)  # what the server has of them
        if self.o["start"] == "gradients":
            self.c_i = self.full_gradients()
            self.last = [self.primed(i, g) for i, g in enumerate(self.c_i)]
        self.look()

    def look(self) -> None:
        self.state["c"] = sum((self.part(i) * c_i for i, c_i in enumerate(self.last)), 0 * self.zero)

    def correction(self, device: int, begun: Begun, given: Vectors) -> Tensor:
        return given["c"] - self.c_i[device]  # line 10

    def finish(self, path: Path, given: Vectors) -> Vectors:
        x, c, c_i = given["model"], given["c"], self.c_i[path.device]
        if self.o["option"] == "I":
            renewed = self.network.gradient(x, dict(self.initial), self.world.shards[path.device])  # line 12, (i)
        else:
            renewed = c_i - c + (x - path.y) / sum(path.rates)  # (ii): K lr is the sum of the rates
        self.c_i[path.device] = renewed
        return {"delta": x - path.y, "control": renewed}  # 13

    def commit(self, cohort: list[Arrival]) -> None:
        self.descend(self.sum_of("delta", self.weights(cohort), cohort))  # 16-17
        for arrival in cohort:
            self.last[arrival.unit] = arrival.sent["control"]
        self.look()

    def check(self) -> None:
        mean = sum((self.part(i) * c_i for i, c_i in enumerate(self.c_i)), 0 * self.zero)
        near = torch.allclose(mean, self.state["c"], 1e-12, 1e-12)
        self.require(near or not self.lossless, "c is not the mean of c_i")


class FedLin(Replay):
    """Mitra et al. 2021, Algorithm 1, without compression. Even versions ask for gradients, odd ones for models."""

    memory = for_plain_steps = True

    def begin(self) -> None:
        self.g_i: dict[int, tuple[int, Tensor]] = {}  # the version of the gradient, and the gradient
        self.state["g"] = self.zero

    def correction(self, device: int, begun: Begun, given: Vectors) -> Tensor | float:
        if not begun.version % 2:
            return 0.0
        version, g_i = self.g_i.get(device, (-1, self.zero))
        self.require(version == begun.version - 1, f"client {device} takes steps of a round without its gradient")
        return given["g"] - g_i

    def lr(self, begun: Begun, step: int) -> float:
        return rate(self.o["client_lr"], begun.version // 2, step, begun.steps) / begun.steps * (begun.version % 2)

    def finish(self, path: Path, given: Vectors) -> Vectors:
        if path.begun.version % 2:
            return {"update": given["model"] - path.y}
        mean = sum(path.directions, 0 * self.zero) / len(path.directions)
        self.g_i[path.device] = path.begun.version, mean
        return {"update": mean}

    def commit(self, cohort: list[Arrival]) -> None:
        mean = self.sum_of("update", self.weights(cohort), cohort)
        if self.version % 2:
            self.state["model"] = self.state["model"] - mean
        else:
            self.state["g"] = mean


class FedaGrac(Replay):
    """Wu et al., Algorithm 1 and the schemes of section 4.2; nu is the mean over all clients of what each sent last."""

    defaults = {"weights": "size", "calibration": 1.0, "transit": "by-steps", "first": "gradient", "reference": "mean",
                "start": "gradients", "saving": False}  # fmt: skip
    memory = for_plain_steps = True

    def begin(self) -> None:
        clients = range(len(self.world.shards))
        self.nu_i, self.last = ([self.zero for _ in clients] for _ in range(2))
        self.means: dict[int, tuple[Tensor, Tensor]] = {}  # of the last job: first and mean gradient, as the client has
        if self.o["start"] == "gradients":
            self.nu_i = self.full_gradients()
            self.last = [self.primed(i, g) for i, g in enumerate(self.nu_i)]
        self.look()

    def look(self) -> None:
        self.state["nu"] = sum((self.part(i) * v for i, v in enumerate(self.last)), 0 * self.zero)  # line 23

    def correction(self, device: int, begun: Begun, given: Vectors) -> Tensor:
        return rate(self.o["calibration"], begun.version) * (given["nu"] - self.nu_i[device])  # 5

    def finish(self, path: Path, given: Vectors) -> Vectors:
        many = self.world.epoch(path.device) if self.o["first"] == "epoch" else 1
        first, mean = path.mean(many), path.mean()
        self.nu_i[path.device], self.means[path.device] = mean, (first, mean)  # 11
        return {"delta": given["model"] - path.y, "first": first, "mean": mean}

    def arrived(self, path: Path, sent: Vectors) -> Vectors:
        names = {name: sent[name] for name in ("delta", "first", "mean")}
        return names | super().arrived(path, names)

    def commit(self, cohort: list[Arrival]) -> None:
        p = self.weights(cohort)
        average = sum(part * a.steps for part, a in zip(p, cohort, strict=True))  # 21
        self.state["model"] = self.state["model"] - self.sum_of("delta", p, cohort)  # 20
        for a in cohort:
            fast = a.steps > average * (1 + 1e-9)
            firsts = {"by-steps": fast, "mean": False, "first": True, "reverse": not fast}
            self.last[a.unit] = a.sent["first" if firsts[self.o["transit"]] else "mean"]  # 14
            if self.o["reference"] == "equation-4":
                first, mean = self.means[a.unit]
                self.nu_i[a.unit] = first if fast else mean
        self.look()

    def check(self) -> None:
        if self.lossless and self.o["transit"] == self.o["reference"] == "mean":
            mean = sum((self.part(i) * nu_i for i, nu_i in enumerate(self.nu_i)), 0 * self.zero)
            self.require(torch.allclose(mean, self.state["nu"], 1e-12, 1e-12), "nu is not the mean of nu_i")


class HLSGD(LocalSGD):
    """Guo et al. 2022, Algorithm 1; gossip PGA and hierarchical local SGD are special cases."""


class Hierarchical(HLSGD):
    defaults = {"edge": True, "gossip_rounds": 1}


class AsyncHLSGD(HLSGD):
    """FedBuff over clusters: w <- w - server_lr * mean of s(staleness) (n_k K / N) delta_k."""

    defaults = {"staleness": "polynomial"}

    def weights(self, cohort: list[Arrival]) -> list[float]:
        scale = len(self.members) / len(self.world.shards) / len(cohort)
        return [discount(self.o["staleness"], a.staleness) * len(self.members[a.unit]) * scale for a in cohort]


class GossipSGD(Replay):
    """Lian et al. 2017; Koloskova et al. 2020: X <- W (X - lr G), each device from its own model."""

    memory = personal_models = True

    def begin(self) -> None:
        self.own = [self.state["model"] for _ in self.world.shards]

    def start(self, device: int, given: Vectors) -> Tensor:
        return self.own[device]

    def finish(self, path: Path, given: Vectors) -> Vectors:
        self.own[path.device] = path.y
        return {"place": path.y}

    def commit(self, cohort: list[Arrival]) -> None:
        self.state["model"] = self.sum_of("place", self.weights(cohort), cohort)


def transit(name: str) -> type[FedaGrac]:
    return type(f"FedaGrac {name}", (FedaGrac,), {"defaults": {**FedaGrac.defaults, "transit": name}})


ORACLES: dict[str, type[Replay]] = {
    "async-hl-sgd": AsyncHLSGD,
    "asysg": Gradients,
    "dlsgd-hetero": Delayed,
    "dlsgd-homo": DelayedHomo,
    "fedagrac": FedaGrac,
    "fedagrac-avg": transit("mean"),
    "fedagrac-first": transit("first"),
    "fedagrac-reverse": transit("reverse"),
    "fedasync": FedAsync,
    "fedbuff": FedBuff,
    "fedlin": FedLin,
    "fednova": FedNova,
    "fedprox": FedProx,
    "gossip-pga": HLSGD,
    "gossip-sgd": GossipSGD,
    "hierarchical-local-sgd": Hierarchical,
    "hl-sgd": HLSGD,
    "local-sgd": LocalSGD,
    "minibatch-sgd": Gradients,
    "scaffold": Scaffold,
}
