"""From a config to the objects of a run, or to one error that names everything that is wrong with it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from inspect import signature
from typing import Any

import numpy as np
import torch

from offbeat.config import registry
from offbeat.config.choices import Choice, Engines, Mode, Precision
from offbeat.config.options import WHOLE, fits, option_problems, spoken, value_problems
from offbeat.engines.crew import in_process
from offbeat.engines.engine import Engine, pick_device
from offbeat.engines.memory import chosen_place
from offbeat.engines.ray_crew import ray_crew, ray_problems
from offbeat.errors import ConfigError, in_words
from offbeat.experiments import cluster_views
from offbeat.experiments.experiment import Experiment, split_name
from offbeat.experiments.sizes import size_problems
from offbeat.experiments.traffic import Traffic
from offbeat.fleets.fleet import Fleet, without
from offbeat.fleets.make import build as build_fleet
from offbeat.fleets.timing import BlockDurations
from offbeat.keys import generator
from offbeat.method import ClusterPolicy, Method, Policy, Rule, conducts_clusters, inner_policies, policy_options
from offbeat.numerics.buffers import method_problems
from offbeat.numerics.evaluation import PERCENTILES, SPEEDS, Figure
from offbeat.numerics.threads import threads
from offbeat.runs.account import Account
from offbeat.runs.logbook import Evaluate
from offbeat.runs.target import limit_problems, target_problems
from offbeat.schedule.clock import VirtualClock
from offbeat.schedule.horizon import Driver, Horizon
from offbeat.schedule.policies import POLICIES
from offbeat.tasks.looks import Watch, holding_out, leaving_out, speed_thirds, with_metrics
from offbeat.tasks.make import build_task
from offbeat.tasks.task import Task

LEAST = 1e-9  # seconds between two looks at the model
AHEAD = 4  # the schedule runs ahead by the updates of so many clients' jobs each


@dataclass(frozen=True)
class Built:
    """The objects of an experiment, ready to run."""

    experiment: Experiment
    method: Method
    task: Task
    fleet: Fleet
    sources: Mapping[str, str] = field(default_factory=dict)  # digests of code that is not Offbeat's own, by its name

    @property
    def numbers(self) -> int:
        """In a vector."""
        return self.task.numbers

    @property
    def vector_bytes(self) -> float:
        stated = self.fleet.payload_bytes
        return float(self.numbers * (8 if self.experiment.precision == "float64" else 4)) if stated is None else stated

    @property
    def traffic(self) -> Traffic:
        sizes = [len(shard) for shard in self.task.shards]
        return Traffic(self.method.what, sizes, self.numbers, self.vector_bytes, self.experiment.precision == "float64")

    @property
    def hybrid(self) -> ClusterPolicy | None:
        """The policy, where clusters stand in the place of clients."""
        return self.method.when if conducts_clusters(self.method.when) else None

    @property
    def units(self) -> int:
        """Whom the schedule speaks of: clients, or clusters."""
        return units(self.task, self.method.when, self.fleet)

    def account(self) -> Account:
        rule, traffic, policy = self.method.what, self.traffic, self.hybrid
        size = traffic.samples
        each = [self.task.per_step(client) for client in range(self.task.clients)]
        crowd = cluster_views.crowd(self.fleet, policy, self.experiment.seed, self.vector_bytes) if policy else None
        if crowd is not None:
            each = [sum(each[device] for device in devices) for devices in crowd.members]
        up = traffic.up_most if traffic.up is None else traffic.up
        account = Account(
            self.task.clients, each, traffic.down, up, pulls=not self.method.when.overlaps, crowd=crowd,
            looked=size if rule.local.full_gradient else None, each_up=traffic.each_up if traffic.up is None else None,
            client_ids=self.task.client_ids,
        )  # fmt: skip
        if rule.prime is not None:
            account.note_prime(size, traffic.down_vector, traffic.up_vector)
        return account

    def clock(self) -> VirtualClock:
        looks = None
        if self.method.what.local.full_gradient:
            steps = [-(-len(shard) // self.task.per_step(client)) for client, shard in enumerate(self.task.shards)]
            looks = np.array(steps)
        seed, policy, traffic = self.experiment.seed, self.method.when, self.traffic
        fleet = cluster_views.sharing(self.fleet, policy)
        up = traffic.uploads(self.fleet.local_steps)
        durations = fleet.durations(seed, traffic.down, np.array(up) if isinstance(up, list) else up, looks)
        if conducts_clusters(policy):
            durations = BlockDurations(durations, fleet, policy, seed, self.vector_bytes)
        return VirtualClock(policy, durations, generator(seed, "policy"))

    def engine(self, facts: dict[str, Any] | None = None, again: bool = False) -> Engine:
        """The engine of a new run, of one that goes on from these facts, or of one that is made `again` by them."""
        e = self.experiment
        device = pick_device(e.device)
        tiling: Mapping[str, int] | None = None if facts is None else facts.get("tiling")
        if tiling is None and e.engine != "local" and not again:
            tiling = {"since": 0 if facts is None else facts["waves"]}
        return Engine(
            self.method, self.task, e.seed, device, e.precision, e.mode, e.memory_gib, client_memory=e.client_memory,
            blocks=cluster_views.blocks(self.fleet, self.hybrid, e.seed) if self.hybrid else None, watch=self.watch,
            crew=ray_crew(e.workers, e.address) if e.engine == "ray" else in_process, tiling=tiling, facts=facts,
        )  # fmt: skip

    @property
    def watch(self) -> Watch:
        """Which figures the run is to give."""
        given = Evaluate(**self.experiment.evaluate)
        speed = speed_thirds(self.fleet.step_seconds)
        return Watch(given.on, given.clients, bool(given.training_loss), given.samples, speed)

    def horizon(self, driver: Driver, last: int | None = None) -> Horizon:
        until = self.experiment.until
        if last is None and "commits" in until:
            last = int(until["commits"])
        ahead = max(256, AHEAD * self.task.clients)
        memory = bool(self.method.what.local.remembers) or self.task.batch_norm == "local"  # clients keep buffers
        return Horizon(driver, min(ahead, 8192), last, until.get("virtual_seconds"), memory)


def build_method(given: Any) -> Method:
    if isinstance(given, Method):
        return checked_method(given)
    name, options = split_name("method", given)
    make = registry.find("method", name)
    when = options.pop("when", None)
    problems = option_problems(name, make, options, ("when",))
    if when is not None and "when" not in signature(make).parameters:
        problems.append(f"{name} has a policy of its own and takes no other; leave out when")
    if when is not None:
        idle = [key for key in policy_options(make) if key in options]
        problems += [f"{name}: {key} has no effect with when; say it in when (size, steps, ...)" for key in idle]
    policy = build_policy(when, problems)
    if problems:
        raise ConfigError(problems)
    return checked_method(registry.make("method", name, **options, **({} if policy is None else {"when": policy})))


def checked_method(method: Method) -> Method:
    problems = [] if isinstance(method.what, Rule) else [f"`what` = {in_words(method.what)}; it must be a Rule"]
    if sentence := registry.misfit("policy", method.when):
        problems.append(f"`when` = {in_words(method.when)}; it must be a Policy, and {sentence}")
    if problems:
        raise ConfigError([f"method {in_words(method.name)}: {problem}" for problem in problems])
    return method


def build_policy(when: Any, problems: list[str]) -> Policy | None:
    """The policy that a config names; what is wrong with it goes into `problems`."""
    if when is None:
        return None
    if not isinstance(when, str | Mapping) and registry.misfit("policy", when) is None:
        policy: Policy = when
        return policy
    given = {"policy": when} if isinstance(when, str) else when
    if not isinstance(given, Mapping):
        problems.append(
            f"{in_words(when)} is no policy ({registry.misfit('policy', when)}); give a name or a table with one. "
            f"Known: {', '.join(POLICIES)}"
        )
        return None
    if "policy" not in given:
        problems.append(
            f'when = {in_words(given)} names no policy; write when = {{policy = "..."}}: {", ".join(POLICIES)}'
        )
        return None
    kind, rest = given["policy"], {k: v for k, v in given.items() if k != "policy"}
    if rest.get("custom"):
        problems.append(f"policy {kind} was given as an object; pass the object again to run this config")
        return None
    try:
        make = registry.find("policy", str(kind))
    except ConfigError as error:
        problems += error.problems
        return None
    before = len(problems)
    problems += option_problems(f"policy '{kind}'", make, rest)
    for name, may_lack in inner_policies(make).items():
        if name in rest:
            rest[name] = build_policy(rest[name], problems)
            if rest[name] is None and len(problems) == before and not may_lack:
                problems.append(f"policy '{kind}': {name} = none; it is a policy, such as rounds")
    return registry.make("policy", str(kind), **rest) if len(problems) == before else None


def read_experiment(table: Mapping[str, Any]) -> Experiment:
    """The experiment of a table (a TOML file). Where some of its keys are refused, the problems of the others are named
    with them."""
    try:
        return Experiment.of(table)
    except ConfigError as error:
        known = {f.name for f in fields(Experiment)}
        try:
            build(Experiment.of({name: value for name, value in table.items() if name in known}))
        except ConfigError as more:
            raise ConfigError(dict.fromkeys((*error.problems, *more.problems))) from None
        raise


def build(experiment: Experiment) -> Built:
    """All objects of an experiment, or one error that names everything that is wrong with it."""
    with registry.recording() as sources, threads(1):  # calls that are tried are small; several threads would wait
        built = objects(experiment)
    return replace(built, sources=sources)


def objects(experiment: Experiment) -> Built:
    if problems := endless_problems(experiment):
        raise ConfigError(problems)
    problems = plain_problems(experiment)
    ends = not problems and not all(str(name).startswith("accuracy") for name in experiment.until)
    if seeds := seed_problems(experiment.seed):
        problems += seeds
        experiment = replace(experiment, seed=0)  # one bad seed should not be named three times
    parts: dict[str, Any] = {}

    def attempt(kind: str, make: Any) -> None:
        try:
            parts[kind] = make()
        except ConfigError as error:
            problems.extend(error.problems)

    device: Any = experiment.device
    if isinstance(device, str | torch.device):
        attempt("device", lambda: pick_device(experiment.device))
    else:
        problems.append(f"device = {in_words(device)}; it is 'auto', 'cpu', 'cuda' or 'cuda:N'")
    attempt("method", lambda: build_method(experiment.method))
    attempt("task", lambda: make_task(experiment))
    task: Task | None = parts.get("task")
    figures = known_figures(experiment, task)
    if isinstance(experiment.until, Mapping):
        problems += limit_problems(experiment.until, figures)
    problems += target_problems(experiment.targets, figures)
    if task is not None:
        problems += task.problems(torch.float64 if experiment.precision == "float64" else torch.float32)
        if not problems and not ends and not task.has_accuracy:
            problems.append(f"task '{task.name}' has no accuracy to stop at; add another limit to until")
        attempt("fleet", lambda: make_fleet(experiment, task.clients, task.left_out))
        if "method" in parts:
            when, fleet = parts["method"].when, parts.get("fleet")
            problems += kinds if (kinds := policy_problems(when)) else when.problems(units(task, when, fleet))
            if kinds:
                raise ConfigError(problems)
            problems += step_problems(experiment, parts["method"], fleet)
            if conducts_clusters(when) and fleet is not None:
                problems += cluster_views.problems(parts["method"], fleet)
            if "device" in parts and not problems:
                item = 8 if experiment.precision == "float64" else 4
                problems += size_problems(parts["method"], task, units(task, when, fleet), item, parts["device"])
                problems += rule_problems(experiment, parts["method"], task, parts["fleet"], parts["device"])
            if not problems:
                problems += idle_problems(experiment, parts["fleet"])
    elif not isinstance(experiment.fleet, Fleet):
        attempt("fleet", lambda: make_fleet(experiment, 100))
    if problems:
        raise ConfigError(problems)
    parts["task"].warn()
    return Built(experiment, parts["method"], parts["task"], parts["fleet"])


def endless_problems(experiment: Any) -> list[str]:
    """What is no experiment at all, or has no end; nothing else is looked at before."""
    if not isinstance(experiment, Experiment):
        return [f"{in_words(experiment)} is no Experiment; give Experiment(method=..., task=..., fleet=...)"]
    return value_problems("", {f.name: getattr(experiment, f.name) for f in fields(experiment)})


def seed_problems(seed: Any) -> list[str]:
    good = fits(seed, int) and 0 <= seed < WHOLE
    return [] if good else [f"seed = {in_words(seed)}; it must be a whole number, 0 or more, and below 2^64"]


def policy_problems(when: Any) -> list[str]:
    """Values of the wrong kind in a policy that was made in Python; those of a config were looked at before."""
    make = type(when)
    options = {f.name: getattr(when, f.name) for f in fields(when) if f.init} if is_dataclass(when) else {}
    if options.keys() != signature(make).parameters.keys():
        return []  # it is made in a way of its own
    where = f"policy '{registry.name_of('policy', make)}'"
    problems = option_problems(where, make, options)
    inner = {name: options[name] for name, may_lack in inner_policies(make).items() if not may_lack or options[name]}
    for name, policy in inner.items():
        if sentence := registry.misfit("policy", policy):
            problems.append(
                f"{where}: {name} = {in_words(policy)}; it is a policy, such as Rounds(steps=10): {sentence}"
            )
    return problems or [problem for policy in inner.values() for problem in policy_problems(policy)]


def idle_problems(experiment: Experiment, fleet: Fleet) -> list[str]:
    """A limit on time alone, where nothing takes any."""
    times = [fleet.step_seconds, fleet.down_latency, fleet.up_latency]
    times += [] if fleet.payload_bytes == 0 else [1 / fleet.down_bandwidth, 1 / fleet.up_bandwidth]
    if set(experiment.until) != {"virtual_seconds"} or any(array.any() for array in times):
        return []
    return [
        "until.virtual_seconds is never reached: on this fleet neither steps nor transfers take any time; give another "
        "limit, or a fleet that takes time"
    ]


def step_problems(experiment: Experiment, method: Method, fleet: Fleet | None) -> list[str]:
    """A step law that nobody would follow, because the method's config orders the steps itself."""
    given, ordered = experiment.method, method.when.orders
    silent = isinstance(given, str) or (isinstance(given, Mapping) and not {"when", "local_steps"} & given.keys())
    if fleet is None or fleet.local_steps is None or ordered is None or (silent and method.when.speaks_of == "clients"):
        return []
    return [
        f"{method.name} orders local_steps = {ordered} of everyone, but the fleet has a step law of its own; "
        "leave out the one or the other"
    ]


def units(task: Task, when: Policy, fleet: Fleet | None) -> int:
    """Whom a policy speaks of: clients, or, if it is hybrid, clusters."""
    return len(fleet.clusters) if when.speaks_of == "clusters" and fleet and fleet.clusters else task.clients


def rule_problems(experiment: Experiment, method: Method, task: Task, fleet: Fleet, device: torch.device) -> list[str]:
    """What a rule asks of the others: room for what there is of each client, as many weights as clients, no losses."""
    rule, clients = method.what, task.clients
    problems = method_problems(method, task.batch_norm) if task.changing.state else []
    if rule.clients not in (None, many := units(task, method.when, fleet)):
        problems.append(f"{method.name}: weights of {rule.clients} clients for a task of {many}; give one for each")
    if rule.reliable and (fleet.presence is not None or fleet.drop_out):
        problems.append(
            f"{method.name}: {rule.reliable} needs every finished update of clients that are always there, but clients "
            f"of this fleet come and go or lose jobs; leave out {rule.reliable}, or take a fleet without presence "
            "(mean_on, mean_off) and drop_out"
        )
    if rule.personal:
        numbers = task.numbers
        size = len(rule.personal) * clients * numbers * (8 if experiment.precision == "float64" else 4)
        problems += chosen_place(
            size, f"{', '.join(rule.personal)} of {clients} clients", device, experiment.client_memory
        )[1]
    return problems


def plain_problems(experiment: Experiment) -> list[str]:
    """What is wrong with the values that stand for themselves."""
    problems = []
    for name in ("until", "evaluate"):
        table = getattr(experiment, name)
        if not isinstance(table, Mapping):
            problems.append(f"{name} = {in_words(table)}; it must be a table")
        elif name == "evaluate":
            problems += evaluate_problems(table)
    kinds: dict[str, Any] = {
        "precision": Precision, "mode": Mode, "engine": Engines, "workers": int | None, "address": str | None,
        "memory_gib": float | None, "checkpoint_seconds": float, "client_memory": Choice,
    }  # fmt: skip
    for name, hint in kinds.items():
        value = getattr(experiment, name)
        number = isinstance(value, int | float) and not 0 < value < math.inf
        if not fits(value, hint) or number:
            bound = "" if "number" not in spoken(hint) else ", positive and finite"
            problems.append(f"{name} = {in_words(value)}; it must be {spoken(hint)}{bound}")
    return problems + (ray_problems() if experiment.engine == "ray" else [])


def make_task(experiment: Experiment) -> Task:
    if isinstance(experiment.task, Task):
        task = experiment.task
    else:
        name, options = split_name("task", experiment.task)
        task = build_task(name, options, experiment.seed)
    given = experiment.evaluate
    if not isinstance(given, Mapping) or evaluate_problems(given) or task.kind_problems():
        return task  # these problems are named elsewhere
    if given.get("metrics"):
        task = with_metrics(task, given["metrics"])
    if given.get("unseen"):
        task = leaving_out(task, int(given["unseen"]), experiment.seed)
    if given.get("hold_out"):
        task = holding_out(task, float(given["hold_out"]), experiment.seed)
    if given.get("on") == "held-out" and task.held_out is None:
        raise ConfigError(["evaluate.on = 'held-out', but nothing is held out; give evaluate.hold_out = 0.1 or so"])
    if given.get("on") == "test" and task.test is None:
        raise ConfigError([f"evaluate.on = 'test', but task '{task.name}' has no test set"])
    return task


def known_figures(experiment: Experiment, task: Task | None) -> dict[str, Figure]:
    """The metrics that a run will have; where there is no task, those that every run has."""
    figures = {"loss": Figure("", False), "accuracy": Figure("", True, True), "training_loss": Figure("", False)}
    table = experiment.evaluate if isinstance(experiment.evaluate, Mapping) else {}
    if task is None or not isinstance(task.metrics, Mapping) or task.kind_problems():
        return figures
    if not table.get("training_loss"):
        del figures["training_loss"]
    figures |= {name: Figure("", m.more_is_better, m.share) for name, m in task.all_metrics.items()}
    heads = [head for head, sets in (("own", task.client_tests), ("held_out", task.held_out)) if sets is not None]
    heads += ["unseen"] if task.unseen is not None else []
    heads = ([] if table.get("clients") is False else heads) or (["shard"] if table.get("clients") else [])
    for head in heads:
        for name in ("loss", *task.all_metrics):
            for end in ("mean", "worst", *(f"p{each}" for each in PERCENTILES), *SPEEDS):
                figures[f"{head}_{name}_{end}"] = figures[name]
    return figures


def make_fleet(experiment: Experiment, clients: int, left_out: Sequence[int] = ()) -> Fleet:
    """The fleet of so many clients. Where others were left out of the data, it is the fleet of all, without them: each
    client has the device that it has in a run of all."""
    everyone = clients + len(left_out)
    if isinstance(experiment.fleet, Fleet):
        fleet = experiment.fleet
        if problems := fleet.kind_problems():
            raise ConfigError(problems)
        if fleet.clients not in (clients, everyone):
            raise ConfigError([f"the fleet has {fleet.clients} clients, the task {everyone}; they must be the same"])
        if problems := fleet.problems():
            raise ConfigError(problems)
        return fleet if fleet.clients == clients else thinned(fleet, left_out)
    name, options = split_name("fleet", experiment.fleet)
    if {"clients", "seed"} & set(options):
        raise ConfigError(
            ["a fleet is as large as its task and drawn by the run's seed; set task.clients or seed instead"]
        )
    fleet = build_fleet(name, everyone, experiment.seed, **options)
    return thinned(fleet, left_out) if left_out else fleet


def thinned(fleet: Fleet, left_out: Sequence[int]) -> Fleet:
    """The fleet without the clients that `evaluate.unseen` took away."""
    if fleet.clusters is not None:
        raise ConfigError(
            [f"evaluate.unseen takes {len(left_out)} of {fleet.clients} clients away, but fleet '{fleet.name}' has "
             "clusters, whose graphs need all their devices; leave out evaluate.unseen, hold out a part of each shard "
             "(evaluate.hold_out), or make a task of the clients that train and give the others as Task(unseen=...)"]
        )  # fmt: skip
    return without(fleet, left_out)


def evaluate_problems(table: Mapping[str, Any]) -> list[str]:
    problems = option_problems("evaluate", Evaluate, table)
    for name, value in table.items():
        if fits(value, float) and not 0 < value < math.inf:
            problems.append(f"evaluate.{name} = {value}; it must be positive and finite")
        elif name == "hold_out" and fits(value, float) and value >= 1:
            problems.append(f"evaluate.hold_out = {value}; it is a share of every shard, such as 0.1")
        elif name == "every_seconds" and fits(value, float) and value < LEAST:
            problems.append(f"evaluate.{name} = {value}; it must be at least {LEAST:g}, a nanosecond")
    if not problems and all(table.get(name) is None for name in ("every_commits", "every_seconds")):
        problems.append("evaluate is empty; give every_commits or every_seconds")
    return problems
