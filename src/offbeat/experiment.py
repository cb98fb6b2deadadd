"""An experiment: a frozen config, built in Python or read from TOML, checked whole, and run.

result = run(Experiment(method={"name": "fedbuff"}, until={"accuracy": 0.9}))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from offbeat import toml
from offbeat.engines.local import LocalEngine, Mode, Precision, pick_device
from offbeat.errors import ConfigError, unknown
from offbeat.fleets.fleet import Fleet
from offbeat.fleets.make import FLEETS
from offbeat.fleets.make import build as build_fleet
from offbeat.keys import generator
from offbeat.method import Method, Policy
from offbeat.methods import METHODS
from offbeat.options import defaults, fits, option_problems, spoken
from offbeat.runs.account import Account
from offbeat.runs.loop import Evaluate, Outcome, go
from offbeat.runs.progress import Progress
from offbeat.runs.store import Store, read_checkpoint, read_metrics, read_trace
from offbeat.runs.target import limit_problems
from offbeat.schedule.buffer import Buffer
from offbeat.schedule.clock import VirtualClock
from offbeat.schedule.horizon import Driver, Horizon
from offbeat.schedule.rounds import Rounds
from offbeat.schedule.sampled import Sampled
from offbeat.schedule.trace import Replay
from offbeat.tasks.make import DEFAULTS, TASKS, build_task
from offbeat.tasks.task import Task

POLICIES: dict[str, Any] = {"buffer": Buffer, "rounds": Rounds, "sampled": Sampled}
AHEAD = 4  # the schedule runs ahead by the updates of so many clients' jobs each


@dataclass(frozen=True)
class Experiment:
    """All that decides a run. `method`, `task` and `fleet` are names, tables with a `name`, or your own objects."""

    method: Any = "fedbuff"
    task: Any = "digits"
    fleet: Any = "straggling"
    seed: int = 0
    device: str = "auto"
    precision: Precision = "float32"
    mode: Mode = "wave"
    memory_gib: float | None = None
    checkpoint_seconds: float = 60.0
    until: Mapping[str, float] = field(default_factory=lambda: {"commits": 200})
    evaluate: Mapping[str, float] = field(default_factory=lambda: {"every_commits": 10})
    targets: tuple[float, ...] = ()

    @staticmethod
    def of(table: Mapping[str, Any]) -> Experiment:
        """From a table (a TOML file); unknown keys are named."""
        known = [f.name for f in fields(Experiment)]
        problems = [unknown("key", name, known) for name in table if name not in known]
        if problems:
            raise ConfigError(problems)
        return Experiment(**{**table, "targets": tuple(table.get("targets", ()))})

    def table(self) -> dict[str, Any]:
        """The resolved config, every default spelt out; objects of your own appear by name only."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        makers: dict[str, Mapping[str, Any]] = {"method": METHODS, "task": TASKS, "fleet": FLEETS}
        fixed = {"method": ("when",), "task": ("data", "seed"), "fleet": ("clients", "seed")}
        for kind, table in makers.items():
            given = plain[kind]
            if not isinstance(given, str | Mapping):
                plain[kind] = {"name": given.name, "custom": True}
                continue
            name, options = split_name(kind, given)
            own = DEFAULTS.get(name, {}) if kind == "task" else {}
            plain[kind] = {"name": name, **defaults(table[name], fixed[kind]), **own, **options}
        return plain

    def toml(self) -> str:
        return toml.write(self.table())


@dataclass(frozen=True)
class Built:
    """The objects of an experiment, ready to run."""

    experiment: Experiment
    method: Method
    task: Task
    fleet: Fleet

    @property
    def vector_bytes(self) -> float:
        own = sum(p.numel() for p in self.task.model.parameters()) * (
            8 if self.experiment.precision == "float64" else 4
        )
        return self.fleet.payload_bytes or float(own)

    def account(self, engine: LocalEngine) -> Account:
        rule = self.method.what
        each = [engine.problem.samples.per_step(client) for client in range(self.task.clients)]
        down, up = len(rule.broadcasts) * self.vector_bytes, len(rule.local.sends) * self.vector_bytes
        return Account(self.task.clients, each, down, up)

    def clock(self) -> VirtualClock:
        rule = self.method.what
        sizes = len(rule.broadcasts) * self.vector_bytes, len(rule.local.sends) * self.vector_bytes
        durations = self.fleet.durations(self.experiment.seed, *sizes)
        return VirtualClock(self.method.when, durations, generator(self.experiment.seed, "policy"))

    def engine(self) -> LocalEngine:
        e = self.experiment
        return LocalEngine(self.method, self.task, e.seed, pick_device(e.device), e.precision, e.mode, e.memory_gib)

    def horizon(self, driver: Driver) -> Horizon:
        until = self.experiment.until
        last = int(until["commits"]) if "commits" in until else None
        ahead = max(256, AHEAD * self.task.clients)
        return Horizon(driver, min(ahead, 8192), last, until.get("virtual_seconds"))


# ---- building -----------------------------------------------------------------------------------
def split_name(kind: str, given: Any) -> tuple[str, dict[str, Any]]:
    options = {"name": given} if isinstance(given, str) else dict(given)
    if "name" not in options:
        raise ConfigError([f'{kind} has no name; write {kind} = "..." or [{kind}] with name = "..."'])
    if options.pop("custom", False):
        raise ConfigError(
            [f"{kind} '{options['name']}' was given as an object; pass the object again to run this config"]
        )
    return str(options.pop("name")), options


def build_method(given: Any) -> Method:
    if isinstance(given, Method):
        return given
    name, options = split_name("method", given)
    if name not in METHODS:
        raise ConfigError([unknown("method", name, METHODS)])
    when = options.pop("when", None)
    problems = option_problems(name, METHODS[name], options, ("when",))
    policy: Policy | None = None
    if isinstance(when, Mapping):
        kind = when.get("policy")
        rest = {k: v for k, v in when.items() if k != "policy"}
        if kind in POLICIES:
            problems += option_problems(f"policy '{kind}'", POLICIES[kind], rest)
            policy = None if problems else POLICIES[kind](**rest)
        else:
            problems.append(unknown("policy", str(kind), POLICIES))
    else:
        policy = when
    if problems:
        raise ConfigError(problems)
    return METHODS[name](**options, when=policy)


def build(experiment: Experiment) -> Built:
    """All objects of an experiment, or one error that names everything that is wrong with it."""
    problems = limit_problems(experiment.until) + evaluate_problems(experiment.evaluate)
    problems += [f"targets: {t} is not an accuracy between 0 and 1" for t in experiment.targets if not 0 < t <= 1]
    for name, hint in (("seed", int), ("precision", Precision), ("mode", Mode), ("memory_gib", float | None)):
        if not fits(getattr(experiment, name), hint):
            problems.append(f"{name} = {getattr(experiment, name)!r}; it must be {spoken(hint)}")
    made: dict[str, Any] = {}

    def attempt(kind: str, make: Any) -> None:
        try:
            made[kind] = make()
        except ConfigError as error:
            problems.extend(error.problems)

    attempt("device", lambda: pick_device(experiment.device))
    attempt("method", lambda: build_method(experiment.method))
    attempt("task", lambda: make_task(experiment))
    task: Task | None = made.get("task")
    if task is not None:
        problems += task.problems()
        attempt("fleet", lambda: make_fleet(experiment, task.clients))
        if "method" in made:
            problems += made["method"].when.problems(task.clients)
    elif not isinstance(experiment.fleet, Fleet):
        attempt("fleet", lambda: make_fleet(experiment, 100))
    if problems:
        raise ConfigError(problems)
    return Built(experiment, made["method"], made["task"], made["fleet"])


def make_task(experiment: Experiment) -> Task:
    if isinstance(experiment.task, Task):
        return experiment.task
    name, options = split_name("task", experiment.task)
    if name not in TASKS:
        raise ConfigError([unknown("task", name, TASKS)])
    return build_task(name, options, experiment.seed)


def make_fleet(experiment: Experiment, clients: int) -> Fleet:
    if isinstance(experiment.fleet, Fleet):
        fleet = experiment.fleet
        if fleet.clients != clients:
            raise ConfigError([f"the fleet has {fleet.clients} clients, the task {clients}; they must be the same"])
        if fleet.problems():
            raise ConfigError(fleet.problems())
        return fleet
    name, options = split_name("fleet", experiment.fleet)
    if name not in FLEETS:
        raise ConfigError([unknown("fleet", name, FLEETS)])
    return build_fleet(name, clients, experiment.seed, **options)


def evaluate_problems(table: Mapping[str, Any]) -> list[str]:
    found = option_problems("evaluate", Evaluate, table)
    found += [f"evaluate.{k} = {v}; it must be positive" for k, v in table.items() if fits(v, float) and v <= 0]
    if not table:
        found.append("evaluate is empty; give every_commits or every_seconds")
    return found


# ---- running ------------------------------------------------------------------------------------
def run(experiment: Experiment, out: str | Path | None = None, progress: Progress | None = None) -> Outcome:
    """Run an experiment from its start; with `out`, into a run directory."""
    built = build(experiment)
    store = None
    if out is not None:
        store = Store(Path(out))
        store.config(experiment.toml())
    engine = built.engine()
    return go(experiment, built, engine, built.horizon(built.clock()), built.account(engine), store, progress)


def resume(
    out: str | Path,
    until: Mapping[str, float] | None = None,
    progress: Progress | None = None,
    **objects: Any,
) -> Outcome:
    """Go on with a run that stopped, for whatever reason, as if it had not. `until` may set a further limit.

    Time never depends on values, so the schedule is run again from the seed and checked against the stored trace;
    the numerics go on from the checkpoint. Objects of your own (task=..., method=..., fleet=...) are passed again.
    """
    path = Path(out)
    held, facts = read_checkpoint(path)
    experiment = Experiment.of(toml.read(path / "config.toml") | objects)
    if until:
        experiment = replace(experiment, until=dict(until))
    built = build(experiment)
    metrics = [row for row in read_metrics(path) if row["commit"] <= facts["version"]]
    recorded = read_trace(path)
    engine, horizon = built.engine(), built.horizon(built.clock())
    account = built.account(engine)
    engine.restore(held, facts)
    store = Store(path)
    store.config(experiment.toml())
    return go(experiment, built, engine, horizon, account, store, progress, (metrics, recorded))


def replay(out: str | Path, **objects: Any) -> Outcome:
    """Run again from a stored trace instead of the clock: the policy must say the same, the model must be the same."""
    path = Path(out)
    experiment = Experiment.of(toml.read(path / "config.toml") | objects)
    built = build(experiment)
    rows = read_trace(path)
    driver = Replay(rows, built.method.when, built.task.clients, generator(experiment.seed, "policy"))
    engine = built.engine()
    return go(experiment, built, engine, built.horizon(driver), built.account(engine), None, None)
