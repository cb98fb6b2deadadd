"""Random runs of every method, and their comparison with `method_oracle`: `both(drawn(number)).difference`."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from method_oracle import ORACLES, Version, World
from offbeat import Experiment, Method, Task
from offbeat.experiments.assemble import build, build_method
from offbeat.records import Begun, Commit, Finished

NAMES = tuple(sorted(ORACLES))
CLUSTERED = ("async-hl-sgd", "gossip-pga", "gossip-sgd", "hierarchical-local-sgd", "hl-sgd")
BUFFERED = ("async-hl-sgd", "asysg", "dlsgd-homo", "fedasync", "fedbuff")
CORRECTED = ("fedagrac", "fedagrac-avg", "fedagrac-first", "fedagrac-reverse", "fedlin", "scaffold")
PLAIN_STEPS = (*CORRECTED, "fednova")
NO_LOCAL_STEPS = ("asysg", "minibatch-sgd")
STEP = 0.1  # seconds, about, of a local step
OWN_BUFFERS = False  # whether layers of one's own may move their buffers in training
TOLERANCE = 1e-9  # of the distance that the model has moved


@dataclass(frozen=True)
class Case:
    """One run, as plain options."""

    number: int
    method: dict[str, Any]
    fleet: dict[str, Any]
    sizes: tuple[int, ...]
    batch: int | tuple[int, ...] | None
    sampling: str
    model: str
    batch_norm: str | None
    seed: int
    commits: int
    mode: str = "wave"
    graphs: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return str(self.method["name"])

    @property
    def clusters(self) -> list[list[int]] | None:
        if not self.graphs:
            return None
        ends = [sum(self.fleet["clusters"]["sizes"][: k + 1]) for k in range(len(self.graphs))]
        return [list(range(begin, end)) for begin, end in zip([0, *ends], ends, strict=False)]

    @property
    def leaves(self) -> bool:
        """Whether clients come and go, or lose jobs."""
        return bool(self.fleet.get("drop_out") or self.fleet.get("mean_on"))

    @property
    def drops(self) -> bool:
        """Whether a round may leave out a client that has begun."""
        return "deadline" in self.method or "over_selection" in self.method

    @property
    def random_steps(self) -> bool:
        law = self.fleet.get("local_steps")
        return isinstance(law, dict) and law.get("mode") == "random"


# ---- drawing --------------------------------------------------------------------------------------
def drawn(number: int) -> Case:
    """The run of this number; numbers that are equal modulo 20 are of one method."""
    rng, name = random.Random(number), NAMES[number % len(NAMES)]
    clients = rng.randint(4, 7)
    method: dict[str, Any] = {"name": name, **rates(rng, name)}
    fleet = drawn_fleet(rng, name)
    graphs: tuple[str, ...] = ()
    if name in CLUSTERED:
        many = 1 if name in ("gossip-sgd", "gossip-pga") else rng.randint(2, 3)
        cuts = sorted(rng.sample(range(1, clients), many - 1))
        sizes = [end - begin for begin, end in zip([0, *cuts], [*cuts, clients], strict=True)]
        graphs = tuple(rng.choice(["ring", "complete", "star", "path", "one-peer-exponential"]) for _ in sizes)
        fleet["clusters"] = {"sizes": sizes, "graphs": list(graphs), "pace": [rng.uniform(0.5, 3) for _ in sizes]}
        method |= gossip(rng, name)
        units = many
    else:
        units = clients
        method |= local_steps(rng, name, fleet, clients)
    method |= policy(rng, name, units, fleet)
    if name == "fedasync" and rng.random() < 0.4:  # several arrivals in one commit
        size, steps = rng.randint(2, 3), method.pop("local_steps", None)
        method["when"] = {"policy": "buffer", "size": size, **({"steps": steps} if steps else {})}
        method.pop("concurrency", None)
    method |= own_options(rng, name, clients, method, fleet)
    model = rng.choice(["linear", "linear", "mlp", "mlp", "frozen", "norm", "norm", "square"])
    rule = None
    if model == "norm":
        rule = rng.choice(["averaged", "averaged", "local", "batch"])
        primed = method.get("option") == "I" or (name.startswith("fedagrac") and method.get("start") != "zeros")
        if primed or method.get("start") == "gradients" or name == "fedlin" or name in NO_LOCAL_STEPS:
            rule = "batch"
        if rule == "local" and (name in CLUSTERED or name == "fedasync"):
            rule = "averaged"
        if rule == "averaged" and (name == "gossip-sgd" or "kept" in commit_form(method)):
            rule = "batch"
        if primed or method.get("start") == "gradients":  # a gradient over a shard has no batches
            model, rule = "mlp", None
    if model == "norm" and OWN_BUFFERS and rng.random() < 0.6:
        model = "centred"
    shards = tuple(rng.choice([6, 6, 8, 9, 11, 14]) for _ in range(clients))
    least = 2 if rule else 1
    batches: list[Any] = [rng.randint(2, 4), rng.randint(2, 5), tuple(rng.randint(least, 4) for _ in shards), None]
    return Case(
        number, method, fleet, shards, rng.choice(batches),
        rng.choice(["replacement", "shuffle", "in-order", "in-order-continued", "in-order-continued"]),
        model, rule, rng.randrange(2**32), rng.randint(3, 5), rng.choice(["wave", "wave", "wave", "twin"]), graphs,
    )  # fmt: skip


def commit_form(method: dict[str, Any]) -> str:
    """Whether the server keeps a vector of each client (FedaGrac with sampled clients, or saving)."""
    sampled = any(name in method for name in ("n", "deadline", "over_selection", "saving"))
    return "kept" if str(method["name"]).startswith("fedagrac") and sampled else "sums"


def rates(rng: random.Random, name: str) -> dict[str, Any]:
    value = rng.uniform(0.05, 0.3)
    schedules: list[Any] = [
        value,
        value,
        {"schedule": "step", "value": value, "at": [2, 4], "factor": 0.5},
        {"schedule": "stages", "values": [value, 0.5 * value, 0.7 * value], "at": [1, 3]},
        {"schedule": "inverse-sqrt", "value": value, "scale": 2.0},
        {"schedule": "cosine", "value": value, "versions": 6, "floor": 0.01, "warm_up": rng.choice([0, 2])},
    ]
    by_step: list[Any] = [
        {"schedule": "warm-up", "value": value, "steps": 3},
        {"schedule": "local-cosine", "value": value, "floor": 0.02, "warm_up": rng.choice([0, 2])},
    ]
    options: dict[str, Any] = {}
    server = rng.choice([0.5, 0.7, 1.0, 1.3, {"schedule": "step", "value": 0.9, "at": [2], "factor": 0.6}])
    if name not in NO_LOCAL_STEPS:
        options["client_lr"] = rng.choice(schedules + by_step)
    if name == "fedbuff" and rng.random() < 0.5:
        options["beta"] = server if isinstance(server, dict) else 0.4 * server
    elif name not in ("fedasync", "gossip-sgd", "fedbuff", "fedlin") and not name.startswith("fedagrac"):
        options["server_lr"] = server
    adaptive = [
        {"name": "momentum", "momentum": 0.7}, {"name": "nesterov", "momentum": 0.6}, {"name": "adagrad", "eps": 0.1},
        {"name": "adam", "eps": 0.1, "beta2": 0.9}, {"name": "adam", "eps": 0.1, "bias_correction": True},
        {"name": "yogi", "eps": 0.1, "beta1": 0.8}, {"name": "sgd", "momentum": 0.5, "nesterov": True},
    ]  # fmt: skip
    if name not in ("fedasync", "gossip-sgd", *CORRECTED) and rng.random() < 0.4:
        options["server_optimiser"] = rng.choice(adaptive)
    if name not in NO_LOCAL_STEPS and rng.random() < 0.45:
        kept: dict[str, Any] = {"state": "kept"} if rng.random() < 0.5 else {}
        options["client_options"] = rng.choice([
            {"momentum": 0.8, **kept}, {"momentum": 0.6, "nesterov": True, "weight_decay": 0.05, **kept},
            {"clip": 0.5}, {"optimiser": "adamw", "eps": 0.01, "weight_decay": 0.1, "clip": 1.0, **kept},
            {"optimiser": "rmsprop", "eps": 0.1, "momentum": 0.5, **kept}, {"weight_decay": 0.1, "clip": 0.7},
            {"optimiser": "rmsprop", "eps": 0.1, "alpha": 0.8, "weight_decay": 0.02, **kept},
        ])  # fmt: skip
        if name in CLUSTERED and name != "gossip-sgd":
            options["client_options"].pop("state", None)
        if name in PLAIN_STEPS:
            options["experimental"] = True
    return options


def drawn_fleet(rng: random.Random, name: str) -> dict[str, Any]:
    laws = [{"law": "uniform", "low": 0.3 * STEP, "high": 3 * STEP}, {"law": "lognormal", "median": STEP, "sigma": 0.8}]
    latencies = [0.0, 0.3 * STEP, {"law": "uniform", "low": 0.0, "high": 5 * STEP}]
    fleet: dict[str, Any] = {"name": "custom", "step_seconds": rng.choice(laws), "latency": rng.choice(latencies)}
    if rng.random() < 0.5:
        fleet["jitter"] = {"law": "uniform", "low": 0.5, "high": 2.0}
    if name not in CLUSTERED:
        if rng.random() < 0.25:
            fleet["drop_out"] = rng.uniform(0.1, 0.3)
        if rng.random() < 0.25:
            fleet |= {"mean_on": rng.uniform(20, 60) * STEP, "mean_off": rng.uniform(3, 10) * STEP}
    return fleet


def local_steps(rng: random.Random, name: str, fleet: dict[str, Any], clients: int) -> dict[str, Any]:
    if name in NO_LOCAL_STEPS:
        return {}
    if rng.random() < 0.3:
        return {"local_steps": rng.randint(1, 5)}
    fleet["local_steps"] = rng.choice([
        [rng.randint(1, 5) for _ in range(clients)], {"law": "uniform", "low": 1, "high": 5, "mode": "random"},
        {"law": "gaussian", "mean": 3, "variance": 3, "mode": "random"}, {"law": "linear", "low": 1, "high": 5},
    ])  # fmt: skip
    return {}


def gossip(rng: random.Random, name: str) -> dict[str, Any]:
    every = rng.choice([1, 1, 2])
    steps = rng.choice([2, 3, 4, 5])
    if name in ("gossip-sgd", "hierarchical-local-sgd"):
        steps = every * rng.choice([1, 2])
    elif every > steps:
        every = steps
    options = {"local_steps": steps, "gossip_every": every}
    if name != "hierarchical-local-sgd":
        options["gossip_rounds"] = rng.choice([1, 1, 2])
    if name in ("hl-sgd", "async-hl-sgd"):
        options["p"] = rng.choice([1.0, 0.5, 0.3])
    return options


def policy(rng: random.Random, name: str, units: int, fleet: dict[str, Any]) -> dict[str, Any]:
    """Options of the schedule."""
    some = rng.randint(1, max(1, units - 1))
    if name == "gossip-sgd":
        return {}
    if name == "dlsgd-hetero":
        return {"n": rng.randint(2, 4), "overlap": rng.random() < 0.7}
    if name in BUFFERED:
        size = rng.randint(1, max(1, units // 2))
        options: dict[str, Any] = {} if name == "fedasync" else {"n": size}
        if name in ("fedbuff", "async-hl-sgd"):
            options = {"buffer_size": size}
        if name == "dlsgd-homo":
            options["overlap"] = rng.random() < 0.7
        elif rng.random() < 0.3:
            options["concurrency"] = rng.randint(size, units)
        return options
    if name == "fedlin":
        return {"probes": rng.randint(1, 3)} | ({"n": some} if rng.random() < 0.5 else {})
    kind = rng.choice(["all", "all", "n", "replacement", "over", "deadline"])
    if kind == "n":
        return {"n": some}
    if kind == "replacement":
        return {"n": rng.randint(2, units + 2), "replacement": True}
    if kind == "over" and some * 2 <= units:
        return {"n": some, "over_selection": rng.choice([1.5, 2.0])}
    everyone: dict[str, Any] = {"n": None} if name == "local-sgd" else {}
    return everyone | ({"deadline": rng.uniform(3, 9) * STEP} if kind == "deadline" else {})


def own_options(
    rng: random.Random, name: str, clients: int, method: dict[str, Any], fleet: dict[str, Any]
) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if name in ("fedbuff", "fedasync", "async-hl-sgd"):
        options["staleness"] = rng.choice(["constant", "polynomial", {"law": "polynomial", "a": 1.0},
                                           {"law": "hinge", "a": 2.0, "b": 1.0}])  # fmt: skip
    if name == "fedasync":
        options["alpha"] = rng.choice([0.4, 0.9])
    if name in ("fedasync", "fedprox", "fednova"):
        options["proximal"] = rng.choice([0.0, 0.1, 0.5])
    if name == "fednova" and rng.random() < 0.5:
        options["momentum"] = 0.5
        options["nesterov"] = rng.random() < 0.5
    if name in ("fedprox", "fednova", "local-sgd", "hl-sgd", *CORRECTED) and rng.random() < 0.7:
        listed = [rng.uniform(0.2, 1.0) for _ in range(clients)]
        choices: list[Any] = ["size", "uniform"]
        if name not in CLUSTERED:
            choices.append([weight / sum(listed) for weight in listed])
        options["weights"] = rng.choice(choices)
    kept = method.get("client_options", {}).get("state") == "kept"
    if name == "scaffold":
        options["option"] = rng.choice(["I", "II", "II"])
        options["start"] = "zeros" if kept else rng.choice(["zeros", "gradients"])
    if name.startswith("fedagrac"):
        options["start"] = "zeros" if kept else rng.choice(["zeros", "gradients"])
        options["calibration"] = rng.choice([1.0, 0.5, {"schedule": "stages", "values": [0.2, 0.8], "at": [2]}])
        options["first"] = rng.choice(["gradient", "gradient", "epoch"])
        steady = not fleet.get("drop_out") and not fleet.get("mean_on")
        whole = not any(method.get(key) for key in ("n", "deadline", "over_selection"))
        by_version = not (isinstance(method["client_lr"], dict)
                          and method["client_lr"]["schedule"] in ("warm-up", "local-cosine"))  # fmt: skip
        if steady and whole and rng.random() < 0.5:
            options |= {"saving": True} if by_version and rng.random() < 0.4 else {"reference": "equation-4"}
    if name != "gossip-sgd" and not options.get("saving") and rng.random() < 0.2:
        one = rng.choice(["int8", {"name": "int8", "block": 5}, "float16", "bfloat16", ["float16", "int8"]])
        options["stages"] = rng.choice([one, {"up": one}, {"down": one}, {"up": "int8", "down": one}])
    return options


# ---- the problem ----------------------------------------------------------------------------------
class Square(nn.Module):
    """A model of two parameters that meet in a product, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.randn(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x.tanh() @ self.a @ self.b + x.cos() @ self.a.tanh() @ self.b


class Centred(nn.Module):
    """A layer whose output in training depends on its buffers: a moving mean, and the number of calls."""

    mean: Tensor
    calls: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.7).add_(0.3 * x.mean(0))
                self.calls.add_(1)
        return (x - self.mean) * (1 + 1 / (1 + self.calls))


def module_of(kind: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    made: dict[str, Callable[[], nn.Module]] = {
        "linear": lambda: nn.Linear(4, 3),
        "mlp": lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)),
        "frozen": lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3)),
        "norm": lambda: nn.Sequential(nn.Linear(4, 5, bias=False), nn.BatchNorm1d(5, momentum=0.3), nn.Tanh(),
                                      nn.Linear(5, 3)),
        "centred": lambda: nn.Sequential(nn.Linear(4, 5), Centred(5), nn.Tanh(), nn.Linear(5, 3)),
        "square": Square,
    }  # fmt: skip
    module = made[kind]()
    if kind == "frozen":
        module[2].requires_grad_(False)  # type: ignore[index]
    return module


def problem_of(case: Case) -> tuple[nn.Module, Callable[..., Tensor], tuple[Tensor, Tensor], list[list[int]]]:
    """Clients whose samples differ, in an order that is not that of the clients; half of them by class."""
    generator = torch.Generator().manual_seed(case.seed)
    rows = sum(case.sizes)
    owner = torch.repeat_interleave(torch.arange(len(case.sizes)), torch.tensor(case.sizes))
    moved = torch.randn(len(case.sizes), 4, generator=generator)
    x = (torch.randn(rows, 4, generator=generator) + moved[owner]).double()
    scores = x.float() @ torch.randn(4, 3, generator=generator) + moved[owner][:, :3]
    places = torch.randperm(rows, generator=generator)
    x, scores, owner = x[places], scores[places], owner[places]
    shards = [torch.nonzero(owner == client).flatten().tolist() for client in range(len(case.sizes))]
    module = module_of(case.model, case.seed % 1000)
    if case.seed % 3 == 0:
        return module, functional.mse_loss, (x, (0.3 * scores).double()), shards
    return module, functional.cross_entropy, (x, scores.argmax(1)), shards


# ---- what is known to be wrong ---------------------------------------------------------------------
def faults(case: Case, rows: list[tuple[float, Any]]) -> set[str]:
    """Which defects of issue 27 can show in this run."""
    name, found = case.name, set()
    commits = [record.jobs for _, record in rows if isinstance(record, Commit)]
    if name.startswith("fedagrac") and case.leaves and not case.method.get("n") and not case.drops:
        found.add("8: FedaGrac with missing clients")
    if name.startswith(("fedagrac", "scaffold")) and any(len(set(jobs)) < len(jobs) for jobs in commits):
        found.add("9: a client drawn twice")
    if name == "fedlin" and case.leaves:
        found.add("10: FedLin with clients that leave")
    if case.sampling == "in-order-continued" and (case.random_steps or name == "fedlin" or lost(rows)):
        found.add("11: positions in a stream")
    if case.batch_norm == "averaged" and (name == "fednova" or "stages" in case.method):
        found.add("12: weights and stages of statistics")
    if case.batch_norm in ("averaged", "local") and name in (*CORRECTED, "scaffold"):
        found.add("4: statistics inside of vectors")
    return found


def lost(rows: list[tuple[float, Any]]) -> bool:
    """Whether a client began on a job that it did not finish, and went on."""
    began: dict[int, int] = {}
    done: dict[int, int] = {}
    for _, record in rows:
        if isinstance(record, Begun):
            if began.get(record.client, 0) > done.get(record.client, 0):
                return True
            began[record.client] = began.get(record.client, 0) + 1
        elif isinstance(record, Finished):
            done[record.client] = done.get(record.client, 0) + 1
    return False


# ---- the two sides --------------------------------------------------------------------------------
class Recorded:
    """A clock that keeps the rows it has given."""

    def __init__(self, clock: Any) -> None:
        self.clock, self.rows = clock, []

    def __iter__(self) -> Iterator[Any]:
        for row in self.clock:
            self.rows.append(row)
            yield row

    def __getattr__(self, name: str) -> Any:
        return getattr(self.clock, name)


@dataclass
class Both:
    """What the package computed, what the oracle computed, and the trace."""

    ours: list[Version]
    oracle: list[Version]
    rows: list[tuple[float, Any]]
    violations: list[str]  # of invariants

    @property
    def difference(self) -> str | None:
        """The first thing in which they differ, or the first invariant that is violated; None where all is well."""
        return first_difference(self.ours, self.oracle) or next(iter(self.violations), None)


def both(case: Case, change: Callable[[Method], Method] | None = None) -> Both:
    """Run a case, its method changed, and replay its trace without the change."""
    module, loss, data, shards = problem_of(case)
    batch = list(case.batch) if isinstance(case.batch, tuple) else case.batch
    options: Any = {"batch_size": batch, "sampling": case.sampling, "batch_norm": case.batch_norm}
    method = build_method(case.method)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        task = Task(module, loss, data, shards, **options)
        run: Any = {"seed": case.seed, "device": "cpu", "precision": "float64", "mode": case.mode}
        given = method if change is None else change(method)
        built = build(Experiment(given, task, case.fleet, **run, until={"commits": case.commits}))
        clock, engine = Recorded(built.clock()), built.engine()
        beside = [name for name in engine.server.state if name in ("c", "nu", "g")]
        ours = [Version(engine.model(), {}, {name: engine.server.state[name] for name in beside}, [])]
        for done in engine.commits(built.horizon(clock)):  # type: ignore[arg-type]
            state = {name: engine.server.state[name] for name in beside}
            ours.append(Version(engine.model(), {}, state, list(done.staleness)))
        engine.close()
    world = World(module, loss, data, shards, batch, case.sampling, case.batch_norm, case.seed, case.clusters,
                  case.graphs)  # fmt: skip
    rule = method.what
    options = {key: value for key, value in case.method.items() if key not in NOT_OF_RULES}
    replay = ORACLES[case.name](world, options, rule.up, rule.down, rule.local.sends, rule.broadcasts)
    return Both(ours, replay.run(clock.rows, case.commits), clock.rows, replay.violations)


NOT_OF_RULES = ("name", "when", "stages", "experimental", "n", "buffer_size", "local_steps", "replacement",
                "over_selection", "deadline", "overlap", "concurrency", "probes")  # fmt: skip


def first_difference(ours: list[Version], oracle: list[Version]) -> str | None:
    if len(ours) != len(oracle):
        return f"{len(ours) - 1} commits, {len(oracle) - 1} in the oracle"
    start = flat(oracle[0].model)
    for number, (mine, other) in enumerate(zip(ours, oracle, strict=True)):
        if mine.staleness != other.staleness:
            return f"commit {number}: staleness {mine.staleness}, {other.staleness} in the oracle"
        model = flat({name: mine.model[name] for name in other.model})
        moved = max(float((flat(other.model) - start).norm()), 1e-3)
        apart = float((model - flat(other.model)).norm()) / moved
        if not apart <= TOLERANCE:
            return f"version {number}: the model differs by {apart:.2g} of the distance it moved"
        for name, vector in other.beside.items():
            if mine.beside[name].shape != vector.shape:
                return f"version {number}: {name} has {len(mine.beside[name])} numbers, {len(vector)} in the oracle"
            apart = float((mine.beside[name] - vector).norm() / (1e-3 + vector.norm()))
            if not apart <= TOLERANCE:
                return f"version {number}: {name} differs by {apart:.2g} of its norm"
        for name, buffer in other.buffers.items():
            if name in mine.model and buffer.is_floating_point() and other.buffers is not oracle[0].buffers:
                apart = float((mine.model[name] - buffer).norm() / buffer.norm())
                if not apart <= TOLERANCE:
                    return f"version {number}: buffer {name} differs by {apart:.2g} of its norm"
    return None


def flat(model: dict[str, Tensor]) -> Tensor:
    return torch.cat([part.flatten() for part in model.values()])
