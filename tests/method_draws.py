"""Random runs of every method, and their comparison with `method_oracle`: `both(drawn(number)).difference`."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from method_oracle import ORACLES, Version, World
from offbeat import Experiment, Method, Task
from offbeat.experiments.assemble import Built, build, build_method
from offbeat.records import Begun, Commit, Finished

NAMES = tuple(sorted(ORACLES))
CLUSTERED = ("async-hl-sgd", "gossip-pga", "gossip-sgd", "hierarchical-local-sgd", "hl-sgd")
BUFFERED = ("async-hl-sgd", "asysg", "dlsgd-homo", "fedasync", "fedbuff")
CORRECTED = ("fedagrac", "fedagrac-avg", "fedagrac-first", "fedagrac-reverse", "fedlin", "scaffold")
PLAIN_STEPS = (*CORRECTED, "fednova")
NO_LOCAL_STEPS = ("asysg", "minibatch-sgd")
OTHER_POLICY = ("fedagrac", "fedagrac-avg", "fedagrac-first", "fednova", "fedprox", "local-sgd", "scaffold")
STEP = 0.1  # seconds, about, of a local step
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


# ---- drawing --------------------------------------------------------------------------------------
class Chance(random.Random):
    """Draws for one case. `pick` deals the values of an option to the cases of a method like cards: as many cases in a
    row as there are values have each value once."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.index, self.method = divmod(number, len(NAMES))

    def pick(self, what: str, values: Sequence[Any]) -> Any:
        block, place = divmod(self.index, len(values))
        order = list(range(len(values)))
        random.Random(f"{self.method} {what} {block}").shuffle(order)
        return values[order[place]]

    def often(self, what: str, times: int, of: int) -> bool:
        return bool(self.pick(what, [True] * times + [False] * (of - times)))


def drawn(number: int) -> Case:
    """The run of this number; numbers that are equal modulo 20 are of one method."""
    chance, name = Chance(number), NAMES[number % len(NAMES)]
    clients = chance.randint(4, 7)
    fleet = drawn_fleet(chance, name)
    method: dict[str, Any] = {"name": name, **rates(chance, name), **optimisers(chance, name)}
    graphs: tuple[str, ...] = ()
    if name in CLUSTERED:
        units = 1 if name in ("gossip-sgd", "gossip-pga") else chance.randint(2, 3)
        cuts = sorted(chance.sample(range(1, clients), units - 1))
        sizes = [end - begin for begin, end in zip([0, *cuts], [*cuts, clients], strict=True)]
        kinds = ["ring", "complete", "star", "path", "one-peer-exponential"]
        graphs = (chance.pick("graph", kinds), *(chance.choice(kinds) for _ in sizes[1:]))
        fleet["clusters"] = {"sizes": sizes, "graphs": list(graphs), "pace": [chance.uniform(0.5, 3) for _ in sizes]}
        method |= gossip(chance, name)
    else:
        units = clients
        method |= local_steps(chance, name, fleet, clients)
    method |= policy(chance, name, units)
    elsewhere = name in OTHER_POLICY and chance.often("other policy", 1, 6)
    if elsewhere or (name == "fedasync" and chance.often("several arrivals", 2, 5)):
        for option in ("n", "replacement", "over_selection", "deadline", "concurrency"):
            method.pop(option, None)
        steps = {"steps": method.pop("local_steps")} if "local_steps" in method else {}
        method["when"] = {"policy": "buffer", "size": chance.randint(2, 3), **steps}
        if elsewhere:
            method["experimental"] = True
    method |= own_options(chance, name, clients, method, fleet)
    kinds = ["linear", "mlp", "frozen", "square", "norm averaged", "centred averaged", "norm local", "centred local",
             "centred batch"]  # fmt: skip
    model, _, rule = chance.pick("model", kinds).partition(" ")
    if rule:
        model, rule = ruled(name, method, model, rule)
    shards = tuple(chance.choice([6, 6, 8, 9, 11, 14]) for _ in range(clients))
    least = 2 if rule else 1
    batches: list[Any] = [chance.randint(2, 4), tuple(chance.randint(least, 4) for _ in shards), 3, None]
    samplings = ["replacement", "shuffle", "in-order", "in-order-continued", "in-order-continued"]
    return Case(
        number, method, fleet, shards, chance.pick("batch", batches), chance.pick("sampling", samplings), model,
        rule or None, chance.randrange(2**32), chance.randint(3, 5), chance.pick("mode", ["wave", "wave", "reference"]),
        graphs,
    )  # fmt: skip


def ruled(name: str, method: dict[str, Any], model: str, rule: str) -> tuple[str, str]:
    """The model and a rule for its statistics that the method takes."""
    if name.startswith("fedagrac") and method.get("start") != "zeros":
        return "mlp", ""  # a gradient over a shard has no batches
    if method.get("option") == "I" or method.get("start") == "gradients":
        return "mlp", ""
    return model, "local" if rule == "averaged" and name == "gossip-sgd" else rule  # it has no server


def rates(chance: Chance, name: str) -> dict[str, Any]:
    value, options = chance.uniform(0.05, 0.3), dict[str, Any]()
    schedules: list[Any] = [
        value,
        {"schedule": "step", "value": value, "at": [2, 4], "factor": 0.5},
        {"schedule": "stages", "values": [value, 0.5 * value, 0.7 * value], "at": [1, 3]},
        {"schedule": "inverse-sqrt", "value": value, "scale": 2.0},
        {"schedule": "cosine", "value": value, "versions": 6, "floor": 0.01, "warm_up": chance.choice([0, 2])},
        {"schedule": "warm-up", "value": value, "steps": 3},
        {"schedule": "local-cosine", "value": value, "floor": 0.02, "warm_up": chance.choice([0, 2])},
    ]
    if name not in NO_LOCAL_STEPS:
        options["client_lr"] = chance.pick("client_lr", schedules)
    server = chance.pick("server_lr", [
        None, chance.uniform(0.4, 0.9), chance.uniform(1.1, 1.4),
        {"schedule": "step", "value": 0.9, "at": [1], "factor": 0.6}, {"schedule": "inverse-sqrt", "value": 1.2},
    ])  # fmt: skip
    without = ("fedasync", "gossip-sgd", "fedlin", "fedagrac", "fedagrac-avg", "fedagrac-first", "fedagrac-reverse")
    if server is not None and name not in without:
        options["beta" if name == "fedbuff" else "server_lr"] = server
    return options


def optimisers(chance: Chance, name: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    servers = [
        None, {"name": "momentum", "momentum": 0.7}, {"name": "nesterov", "momentum": 0.6}, "momentum", None,
        {"name": "adagrad", "eps": 0.1}, {"name": "adam", "eps": 0.1, "beta2": 0.9}, None, None,
        {"name": "adam", "eps": 0.1, "bias_correction": True}, {"name": "yogi", "eps": 0.1, "beta1": 0.8}, None,
        {"name": "sgd", "momentum": 0.5, "nesterov": True},
    ]  # fmt: skip
    if name not in ("fedasync", "gossip-sgd", *CORRECTED) and (server := chance.pick("server", servers)) is not None:
        options["server_optimiser"] = server
    clients: list[Any] = [
        None, {"momentum": 0.8, "state": "kept"}, {"momentum": 0.6, "nesterov": True, "weight_decay": 0.05},
        {"clip": 0.4}, {"optimiser": "adamw", "eps": 0.01, "weight_decay": 0.1, "clip": 1.0, "state": "kept"}, None,
        {"optimiser": "rmsprop", "eps": 0.1, "momentum": 0.5}, {"weight_decay": 0.1, "clip": 0.6}, None,
        {"momentum": 0.7, "clip": 0.5}, {"optimiser": "rmsprop", "eps": 0.1, "alpha": 0.8, "state": "kept"},
    ]  # fmt: skip
    if name not in NO_LOCAL_STEPS and (client := chance.pick("client", clients)) is not None:
        shared = name in CLUSTERED and name != "gossip-sgd"  # a cluster's devices keep nothing from job to job
        options["client_options"] = {key: value for key, value in client.items() if key != "state" or not shared}
        if name in PLAIN_STEPS:
            options["experimental"] = True
    return options


def drawn_fleet(chance: Chance, name: str) -> dict[str, Any]:
    laws = [{"law": "uniform", "low": 0.3 * STEP, "high": 3 * STEP}, {"law": "lognormal", "median": STEP, "sigma": 0.8}]
    latencies = [0.0, 0.3 * STEP, {"law": "uniform", "low": 0.0, "high": 5 * STEP}]
    fleet: dict[str, Any] = {"name": "custom", "step_seconds": chance.choice(laws), "latency": chance.choice(latencies)}
    if chance.often("jitter", 1, 2):
        fleet["jitter"] = {"law": "uniform", "low": 0.5, "high": 2.0}
    if name not in CLUSTERED:
        if chance.often("drop-out", 1, 4):
            fleet["drop_out"] = chance.uniform(0.1, 0.3)
        if chance.often("presence", 1, 4):
            fleet |= {"mean_on": chance.uniform(20, 60) * STEP, "mean_off": chance.uniform(3, 10) * STEP}
    return fleet


def local_steps(chance: Chance, name: str, fleet: dict[str, Any], clients: int) -> dict[str, Any]:
    if name in NO_LOCAL_STEPS:
        return {}
    law = chance.pick("steps", [
        None, [chance.randint(1, 5) for _ in range(clients)], {"law": "linear", "low": 1, "high": 5},
        {"law": "uniform", "low": 1, "high": 5, "mode": "random"},
        {"law": "gaussian", "mean": 3, "variance": 3, "mode": "random"},
    ])  # fmt: skip
    if law is None:
        return {"local_steps": chance.randint(2, 4)}
    fleet["local_steps"] = law
    return {}


def gossip(chance: Chance, name: str) -> dict[str, Any]:
    every = chance.pick("every", [1, 1, 2])
    steps = every * chance.randint(1, 3) if name in ("gossip-sgd", "hierarchical-local-sgd") else chance.randint(2, 5)
    options = {"local_steps": steps, "gossip_every": every}
    if name != "hierarchical-local-sgd":
        options["gossip_rounds"] = chance.pick("rounds", [1, 1, 2, 0] if name == "hl-sgd" else [1, 1, 2])
    if name in ("hl-sgd", "async-hl-sgd"):
        options["p"] = chance.pick("p", [1.0, 0.5, 0.3])
    return options


def policy(chance: Chance, name: str, units: int) -> dict[str, Any]:
    """Options of the schedule."""
    some = chance.randint(1, max(1, units - 1))
    if name == "gossip-sgd":
        return {}
    if name == "dlsgd-hetero":
        return {"n": chance.randint(2, 4), "overlap": chance.often("overlap", 2, 3)}
    if name in BUFFERED:
        size = chance.pick("size", [1, 2, 3]) if units > 3 else chance.randint(1, 2)
        options: dict[str, Any] = {"buffer_size" if name in ("fedbuff", "async-hl-sgd") else "n": size}
        if name == "fedasync":
            options, size = {}, 1
        if name == "dlsgd-homo":
            options["overlap"] = chance.often("overlap", 2, 3)
        elif chance.often("concurrency", 1, 4):
            options["concurrency"] = chance.randint(size, units)
        return options
    if name == "fedlin":
        return {"probes": chance.randint(1, 3)} | ({"n": some} if chance.often("n", 1, 2) else {})
    kind = chance.pick("policy", ["all", "all", "n", "n", "replacement", "over", "deadline"])
    if kind == "replacement":
        return {"n": chance.randint(2, units + 2), "replacement": True}
    if kind == "over" and units > 1:
        return {"n": chance.randint(1, units // 2), "over_selection": chance.choice([1.5, 2.0])}
    if kind == "n":
        return {"n": some}
    everyone: dict[str, Any] = {"n": None} if name == "local-sgd" else {}
    return everyone | ({"deadline": chance.uniform(3, 9) * STEP} if kind == "deadline" else {})


def own_options(
    chance: Chance, name: str, clients: int, method: dict[str, Any], fleet: dict[str, Any]
) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if name in ("fedbuff", "fedasync", "async-hl-sgd"):
        laws = ["constant", "polynomial", {"law": "polynomial", "a": 1.0}, {"law": "hinge", "a": 2.0, "b": 1.0}]
        options["staleness"] = chance.pick("staleness", laws)
    if name == "fedasync":
        options["alpha"] = chance.pick("alpha", [0.4, 0.9])
    if name in ("fedasync", "fedprox", "fednova"):
        options["proximal"] = chance.pick("proximal", [0.0, 0.1, 0.5])
    if name == "fednova" and (momentum := chance.pick("momentum", [None, 0.5, 0.7])) is not None:
        options |= {"momentum": momentum, "nesterov": chance.often("nesterov", 1, 2)}
    if name in ("fedprox", "fednova", "local-sgd", "hl-sgd", *CORRECTED):
        listed = [chance.uniform(0.2, 1.0) for _ in range(clients)]
        parts = "size" if name in CLUSTERED else [weight / sum(listed) for weight in listed]
        if (weights := chance.pick("weights", [None, "size", "uniform", parts])) is not None:
            options["weights"] = weights
    kept = method.get("client_options", {}).get("state") == "kept"
    if name == "scaffold":
        options["option"] = chance.pick("option", ["I", "II", "II"])
    if name == "scaffold" or name.startswith("fedagrac"):
        start = chance.pick("start", ["zeros", "gradients"])
        options["start"] = "zeros" if kept else start  # an optimiser's state begins at zeros
    if name.startswith("fedagrac"):
        stages = {"schedule": "stages", "values": [0.2, 0.8], "at": [2]}
        options["calibration"] = chance.pick("calibration", [1.0, 0.5, stages])
        options["first"] = chance.pick("first", ["gradient", "gradient", "epoch"])
        steady = not fleet.get("drop_out") and not fleet.get("mean_on")
        whole = not any(method.get(key) for key in ("n", "deadline", "when"))
        lr = method["client_lr"]
        by_version = not isinstance(lr, dict) or lr["schedule"] not in ("warm-up", "local-cosine")
        if steady and whole and (variant := chance.pick("variant", ["saving", "equation-4", None])) is not None:
            options |= {"saving": True} if variant == "saving" and by_version else {"reference": "equation-4"}
    small = {"name": "int8", "block": 5}
    ways = [None, "int8", None, {"up": small}, None, {"down": "bfloat16"}, None, {"up": ["float16", "int8"]}, None,
            {"up": small, "down": "float16"}, None]  # fmt: skip
    way = chance.pick("stages", ways)
    if name != "gossip-sgd" and not options.get("saving") and way is not None:
        options["stages"] = way
    return options


# ---- the problem ----------------------------------------------------------------------------------
class Square(nn.Module):
    """A model of two parameters that meet in a product, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.randn(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x.tanh() @ self.a.tanh() @ self.b.sin() + x.cos() @ self.a.tanh() @ self.b.tanh()


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


def built_of(case: Case, method: Method) -> Built:
    module, loss, data, shards = problem_of(case)
    batch = list(case.batch) if isinstance(case.batch, tuple) else case.batch
    options: Any = {"batch_size": batch, "sampling": case.sampling, "batch_norm": case.batch_norm}
    task = Task(module, loss, data, shards, **options)
    run: Any = {"seed": case.seed, "device": "cpu", "precision": "float64", "mode": case.mode}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return build(Experiment(method, task, case.fleet, **run, until={"commits": case.commits}))


def trace_of(case: Case) -> list[tuple[float, Any]]:
    """The rows of a case up to its last commit."""
    rows, commits = [], 0
    for row in built_of(case, build_method(case.method)).clock():
        rows.append(row)
        commits += isinstance(row[1], Commit)
        if commits == case.commits:
            break
    return rows


def both(case: Case, change: Callable[[Method, Case], Method] | None = None) -> Both:
    """Run a case, its method changed, and replay its trace without the change."""
    method = build_method(case.method)
    built = built_of(case, method if change is None else change(method, case))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        clock, engine = Recorded(built.clock()), built.engine()
        beside = [name for name in engine.server.state if name in ("c", "nu", "g")]
        ours = [Version(engine.model(), {}, {name: engine.server.state[name] for name in beside}, [])]
        for done in engine.commits(built.horizon(clock)):  # type: ignore[arg-type]
            state = {name: engine.server.state[name] for name in beside}
            ours.append(Version(engine.model(), {}, state, list(done.staleness)))
        engine.close()
    task, rule = built.task, method.what
    world = World(task.model, task.loss, task.data, task.shards, task.batch_size, case.sampling, case.batch_norm,
                  case.seed, case.clusters, case.graphs)  # fmt: skip
    options = {key: value for key, value in case.method.items() if key not in OF_POLICIES}
    replay = ORACLES[case.name](world, options, rule.up, rule.down, rule.local.sends, rule.broadcasts)
    return Both(ours, replay.run(clock.rows, case.commits), clock.rows, replay.violations)


OF_POLICIES = ("name", "when", "stages", "experimental", "n", "buffer_size", "local_steps", "replacement",
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
