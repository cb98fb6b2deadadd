"""Honest tuning: rates and sizes of several methods, each with the same budget, by what a held-out part says.

Trials learn from the clients' shards without a part of each, and are judged on that part; the test set is not looked
at. Trials that differ by their rates alone go through one schedule together (`engines/company.py`), and the worse half
is cut off at a quarter and at a half of the budget. Optuna proposes; every trial is written down, so that tuning can be
broken off and taken up.
"""

from __future__ import annotations

import inspect
import json
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from offbeat import registry, toml
from offbeat.assemble import Built, build
from offbeat.config import Experiment, split_name
from offbeat.engines.company import Company, common, shareable
from offbeat.errors import BadNumbers, ConfigError, OffbeatError, shown, unknown
from offbeat.experiment import run
from offbeat.numerics.evaluation import Figure
from offbeat.options import fits
from offbeat.runs.disk import storing, text_digest
from offbeat.runs.folder import Folder, reopened
from offbeat.runs.loop import Evaluate
from offbeat.runs.outcome import row_of
from offbeat.runs.target import plain_name, stop_reason

RATES = ("client_lr", "server_lr", "beta")  # options that change no schedule
WIDE = {"client_lr": (0.001, 3.0), "server_lr": (0.01, 3.0)}  # where rates are looked for, unless somebody says
CUTS = (0.25, 0.5)  # shares of the budget at which the worse half leaves
LEAST = 2  # trials that stay
LAST = 3  # evaluations whose mean is a trial's value
LEDGER = "trials.jsonl"

Rows = list[dict[str, Any]]
Cut = Callable[[float, Mapping[int, Rows]], set[int]]  # share of the budget, rows of those that live -> who leaves


# ---- trials in company --------------------------------------------------------------------------
@dataclass
class Tried:
    """What a trial came to: its evaluations, why it failed, whether it was cut off, and how many went together."""

    rows: Rows = field(default_factory=list)
    failed: str | None = None
    cut: bool = False
    company: int = 1


def run_together(builts: Sequence[Built], cut: Cut | None = None) -> list[Tried]:
    """Experiments that differ by their rates alone, through one schedule; no run directories."""
    first = builts[0]
    until, evaluate = first.experiment.until, Evaluate(**first.experiment.evaluate)
    methods = [built.method for built in builts]
    engine = replace(first, method=common(methods)).engine()
    company, account = Company(engine, methods), first.account()
    horizon = first.horizon(first.clock())
    tried = [Tried(company=len(builts)) for _ in builts]

    def look() -> None:
        for trial in list(company.live):
            one = tried[trial]
            one.rows.append(row_of(account, company.evaluate(trial)))
            if not math.isfinite(one.rows[-1]["loss"]):
                company.drop(trial, f"its loss is {one.rows[-1]['loss']} at commit {account.commits}")
            elif stop_reason(until, one.rows, engine.figures):
                company.drop(trial)
        if cut is not None and company.live:
            living = {trial: tried[trial].rows for trial in company.live}
            for trial in cut(share_of(until, account), living) & set(living):
                tried[trial].cut = True
                company.drop(trial)

    with engine.settings:
        look()
        for step, staleness in company.commits(horizon):
            before = account.time
            account.take(step.rows, step.commit.jobs, staleness)
            if evaluate.due(account.commits, before, step.time):
                look()
            if not company.live or share_of(until, account, counted=False) >= 1:
                break
        if any(tried[trial].rows[-1]["commit"] != account.commits for trial in company.live):
            look()
    for trial, reason in company.failed.items():
        tried[trial].failed = reason
    return tried


def share_of(until: Mapping[str, float], account: Any, counted: bool = True) -> float:
    """How much of the budget is spent; with `counted` false, of those limits that the schedule does not know."""
    spent = {name: getattr(account, name) for name in ("samples", "bytes_up", "bytes_down", "bytes_d2d")}
    if counted:
        spent |= {"commits": account.commits, "virtual_seconds": account.time}
    return max((spent[name] / until[name] for name in spent if name in until), default=0.0)


def run_alone(built: Built) -> Tried:
    """The same for a method whose trials cannot share waves."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a trial diverges is a result
            return Tried(run(built.experiment).metrics)
    except BadNumbers as error:
        return Tried(error.outcome.metrics, str(error))


# ---- what is looked for -------------------------------------------------------------------------
@dataclass(frozen=True)
class Aim:
    """What makes a trial good: a metric at the end of the budget, or the time to a target of it."""

    metric: str = "accuracy"
    more: bool = True
    target: float | None = None

    def value(self, rows: Rows) -> float | None:
        """The metric now: the mean of the last evaluations; more is better here."""
        seen = [row[self.metric] for row in rows if row.get(self.metric) is not None][-LAST:]
        return None if not seen else (1 if self.more else -1) * sum(seen) / len(seen)

    def score(self, tried: Tried) -> float | None:
        """Larger is better. With a target the time to it, between evaluations in a straight line; who has not reached
        it comes after all who have."""
        if tried.failed or not tried.rows:
            return None
        value = self.value(tried.rows)
        if self.target is None or value is None:
            return value
        sign, before = (1 if self.more else -1), None
        for row in tried.rows:
            now = row.get(self.metric)
            if now is None:
                continue
            if sign * now >= sign * self.target:
                if before is None or before[1] == now:
                    return -float(row["virtual_seconds"])
                part = (self.target - before[1]) / (now - before[1])
                return -float(before[0] + part * (row["virtual_seconds"] - before[0]))
            before = (row["virtual_seconds"], now)
        gap = abs(self.target - sign * value) / max(abs(self.target), 1e-12)
        return -float(tried.rows[-1]["virtual_seconds"]) * (2 + gap)


@dataclass(frozen=True)
class Between:
    """A number from a range, by powers."""

    low: float
    high: float


Space = Mapping[str, Between | Sequence[Any]]


def parse_search(texts: Sequence[str]) -> dict[str, Between | list[Any]]:
    """From `name=low..high` and `name=a,b,c`.

    >>> parse_search(["client_lr=0.01..1", "local_steps=5,10"])
    {'client_lr': Between(low=0.01, high=1.0), 'local_steps': [5, 10]}
    """
    found: dict[str, Between | list[Any]] = {}
    for text in texts:
        name, _, given = text.partition("=")
        low, dots, high = given.partition("..")
        try:
            found[name.strip()] = (
                Between(float(low), float(high))
                if dots
                else [toml.parse_value(each.strip()) for each in given.split(",")]
            )
        except ValueError:
            given = ""
        if not name.strip() or not given:
            raise ConfigError(
                [f"--search {text}; write client_lr=0.01..1 for a range or local_steps=5,10,20 for a choice"]
            )
    return found


def space_of(method: Any, search: Space) -> dict[str, Between | Sequence[Any]]:
    """What is tuned of a method: what was asked for and it has, else its rate."""
    name, fixed = split_name("method", method)
    parameters = inspect.signature(registry.find("method", name)).parameters
    asked = {key: value for key, value in search.items() if key in parameters}
    if not asked:
        rate = "client_lr" if "client_lr" in parameters else "server_lr"
        if rate not in parameters:
            raise ConfigError([f"{name} has no rate to tune; name options of it (--search)"])
        asked = {rate: Between(*WIDE[rate])}
    both = [key for key in asked if key in fixed]
    problems = [f"{name}: {key} = {shown(fixed[key])} is set and cannot be searched as well" for key in both]
    for key, values in asked.items():
        if isinstance(values, Between) and not 0 < values.low < values.high < math.inf:
            problems.append(
                f"--search {key}: {values.low}..{values.high}; give two positive numbers, the smaller first"
            )
    if problems:
        raise ConfigError(problems)
    return asked


# ---- the search ---------------------------------------------------------------------------------
@dataclass(frozen=True)
class Entry:
    """A trial in the ledger."""

    label: str
    number: int
    options: dict[str, Any]
    score: float | None  # None: it failed
    cut: bool
    company: int
    seconds: float  # of its part of the real time
    said: str | None = None


@dataclass(frozen=True)
class Tuned:
    """The best options of each label, and all trials."""

    best: dict[str, dict[str, Any]]
    entries: list[Entry]
    aim: Aim
    seconds: float

    def trials(self, label: str) -> list[Entry]:
        return [entry for entry in self.entries if entry.label == label]


def tune(
    experiments: Mapping[str, Experiment], search: Space | None = None, by: str | None = None,
    target: float | None = None, trials: int = 16, seeds: Sequence[int] = (0,), hold_out: float = 0.2,
    out: str | Path | None = None, resume: bool = False, company: bool = True,
    tell: Callable[[str, int, int], None] | None = None,
) -> Tuned:  # fmt: skip
    """Look for the best options of every experiment's method, with the same budget (`until`, `trials`, `seeds`) each.

    `by` is any metric of the runs (None: the accuracy, or the loss), judged at the end of the budget or, with a
    `target`, by the virtual time to it, on `hold_out` of every client's shard. `out` keeps a ledger, from which
    `resume` goes on, and `tuned.toml`, which `offbeat compare --tuned` takes.
    """
    if trials < 1 or not seeds:
        raise ConfigError([f"trials = {trials}, seeds = {list(seeds)}; give at least one of each"])
    began = time.perf_counter()
    spaces = {label: space_of(e.method, search or {}) for label, e in experiments.items()}
    if unused := [key for key in search or {} if not any(key in space for space in spaces.values())]:
        known = {key for e in experiments.values() for key in method_options(e.method)}
        raise ConfigError([f"--search: {unknown('option of these methods', unused[0], known)}"])
    aim = aim_of(next(iter(experiments.values())), by, target, hold_out)
    judged = {label: judging(experiment, hold_out, aim) for label, experiment in experiments.items()}
    for experiment in judged.values():
        build(experiment)
    facts = [{label: e.table() for label, e in judged.items()}, asdict(aim), trials, list(seeds), spaces]
    key = text_digest(json.dumps(facts, default=str))
    ledger = Ledger(None if out is None else Path(out), key, resume)
    with ledger:
        for label, experiment in judged.items():
            search_one(label, experiment, spaces[label], aim, trials, list(seeds), ledger, company, tell)
        best = {label: best_options(label, ledger.entries) for label in judged}
        found = Tuned(best, ledger.entries, aim, time.perf_counter() - began)
        ledger.close(experiments, found, {"trials": trials, "seeds": list(seeds), "hold_out": hold_out})
    return found


def method_options(method: Any) -> list[str]:
    return list(inspect.signature(registry.find("method", split_name("method", method)[0])).parameters)


def aim_of(experiment: Experiment, by: str | None, target: float | None, hold_out: float) -> Aim:
    """The aim, if the runs have such a metric and it has a better side."""
    if not fits(hold_out, float) or not 0 < hold_out < 1:
        raise ConfigError([f"hold_out = {shown(hold_out)}; it is the share of every shard that judges, such as 0.2"])
    built = build(judging(experiment, hold_out, Aim()))
    figures: Mapping[str, Figure] = built.engine().figures
    name = by or ("accuracy" if built.task.has_accuracy else "loss")
    if name not in figures:
        raise ConfigError([f"--by: {unknown('metric', name, figures)}"])
    if figures[name].more_is_better is None:
        raise ConfigError([f"--by {name}: nobody said whether more of it is better; say it (more_is_better)"])
    return Aim(name, bool(figures[name].more_is_better), target)


def judging(experiment: Experiment, hold_out: float, aim: Aim) -> Experiment:
    """The experiment as trials run it: a part of every shard is held out, and all figures come from there."""
    looks = {**experiment.evaluate, "hold_out": hold_out, "on": "held-out", "clients": False}
    if not {"every_commits", "every_seconds"} & {k for k, v in looks.items() if v is not None}:
        looks["every_commits"] = 10
    limits = {name: value for name, value in experiment.until.items() if plain_name(name) != aim.metric}
    if not limits:
        raise ConfigError(["until has no limit but the metric that is tuned; give a budget, e.g. virtual_seconds=10"])
    if aim.target is not None:
        limits[aim.metric] = aim.target
    return replace(experiment, evaluate=looks, until=limits, targets=(), callbacks=(), engine="local")


def search_one(
    label: str, experiment: Experiment, space: Mapping[str, Between | Sequence[Any]], aim: Aim, trials: int,
    seeds: list[int], ledger: Ledger, company: bool, tell: Callable[[str, int, int], None] | None,
) -> None:  # fmt: skip
    """Trials of one method: first spread over the space, then where Optuna expects more."""
    name, fixed = split_name("method", experiment.method)
    while len(done := [entry for entry in ledger.entries if entry.label == label]) < trials:
        if tell is not None:
            tell(label, len(done), trials)
        asked = proposed(space, done, trials, experiment.seed)
        methods = [{"name": name, **fixed, **options} for options in asked]
        began = time.perf_counter()
        results = raced([replace(experiment, method=method) for method in methods], aim, seeds, company)
        each = (time.perf_counter() - began) / len(asked)
        entries = []
        for number, (options, found) in enumerate(zip(asked, results, strict=True), len(done)):
            scores = [aim.score(one) for one in found]
            score = None if None in scores else sum(s for s in scores if s is not None) / len(scores)
            said = next((one.failed for one in found if one.failed), None)
            cut = any(one.cut for one in found)
            entries.append(Entry(label, number, options, score, cut, found[0].company, each, said))
        ledger.add(entries)


def proposed(space: Mapping[str, Any], done: Sequence[Entry], trials: int, seed: int) -> list[dict[str, Any]]:
    """The next trials: half of all spread evenly over the ranges, the rest by Optuna's TPE from what is known."""
    optuna = needed_optuna()
    first = max(1, math.ceil(trials / 2))
    if not done:
        return [spread(space, number, first) for number in range(first)]
    spaces = {key: distribution(optuna, values) for key, values in space.items()}
    worst = min((e.score for e in done if e.score is not None and not e.cut), default=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that some of its options are experimental
        sampler = optuna.samplers.TPESampler(seed=seed % 2**32 + len(done), n_startup_trials=1, constant_liar=True)
        study = optuna.create_study(direction="maximize", sampler=sampler)
        for entry in done:  # whoever was cut off or failed is no better than the worst of the others
            value = worst - abs(worst) - 1.0 if entry.score is None else entry.score
            value = min(value, worst) if entry.cut else value
            study.add_trial(optuna.trial.create_trial(params=entry.options, distributions=spaces, value=value))
        return [dict(study.ask(spaces).params) for _ in range(trials - len(done))]


def spread(space: Mapping[str, Any], number: int, many: int) -> dict[str, Any]:
    """Trial `number` of `many`: ranges in the middle of equal parts, by powers; of choices each in turn."""
    found: dict[str, Any] = {}
    for place, (key, values) in enumerate(space.items()):
        if isinstance(values, Between):
            part = ((number * (1 if place == 0 else 5 + 2 * place)) % many + 0.5) / many
            found[key] = values.low * (values.high / values.low) ** part
        else:
            found[key] = values[number % len(values)]
    return found


def distribution(optuna: Any, values: Any) -> Any:
    if isinstance(values, Between):
        return optuna.distributions.FloatDistribution(values.low, values.high, log=True)
    return optuna.distributions.CategoricalDistribution(list(values))


def needed_optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise ConfigError(["tuning needs Optuna; install it: pip install 'offbeat[tune]'"]) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def raced(experiments: Sequence[Experiment], aim: Aim, seeds: Sequence[int], company: bool) -> list[list[Tried]]:
    """The trials with the first seed, of which the worse half is cut off twice; those that are left with the others."""
    found: list[list[Tried]] = [[] for _ in experiments]
    for seed in seeds:
        alive = [n for n, tried in enumerate(found) if not any(one.cut or one.failed for one in tried)]
        builts = {number: build(replace(experiments[number], seed=seed)) for number in alive}
        groups: dict[str, list[int]] = {}
        for number, built in builts.items():
            groups.setdefault(schedule_key(built) if company else str(number), []).append(number)
        for group in groups.values():
            shared = company and shareable(builts[group[0]].method) is None
            if shared:
                cut = halving(aim) if seed == seeds[0] else None
                tried = run_together([builts[number] for number in group], cut)
            else:
                tried = [run_alone(builts[number]) for number in group]
            for number, one in zip(group, tried, strict=True):
                found[number].append(one)
    return found


def schedule_key(built: Built) -> str:
    """Equal for experiments that differ by their rates alone."""
    table = built.experiment.table()
    options = {key: value for key, value in table["method"].items() if key not in RATES}
    given = [isinstance(table["method"].get(key), str | None) for key in RATES]  # beta None is another formula
    return json.dumps([options, given, table["seed"]], sort_keys=True, default=str)


def halving(aim: Aim) -> Cut:
    """At each of CUTS the worse half of those that live leaves; two stay."""
    left = list(CUTS)

    def cut(share: float, rows: Mapping[int, Rows]) -> set[int]:
        if not left or share < left[0]:
            return set()
        left.pop(0)
        values = {trial: value for trial, seen in rows.items() if (value := aim.value(seen)) is not None}
        order = sorted(rows, key=lambda trial: values.get(trial, -math.inf), reverse=True)
        return set(order[max(LEAST, math.ceil(len(order) / 2)) :])

    return cut


def best_options(label: str, entries: Sequence[Entry]) -> dict[str, Any]:
    """Those of the best trial that was not cut off."""
    there = [entry for entry in entries if entry.label == label and entry.score is not None and not entry.cut]
    if not there:
        raise OffbeatError(f"every trial of {label} failed; search lower rates (--search client_lr=0.0001..0.01)")
    return dict(max(there, key=lambda entry: entry.score or 0.0).options)


# ---- what is written down -----------------------------------------------------------------------
class Ledger:
    """All trials so far, on the disk where there is a directory: a line for each, in whole batches."""

    def __init__(self, out: Path | None, key: str, resume: bool) -> None:
        self.entries: list[Entry] = []
        self.folder: Folder | None = None
        self.key = key
        if out is None:
            return
        lines: list[str] = []
        if resume and (out / LEDGER).is_file():
            first, *lines = (out / LEDGER).read_text().splitlines() or [""]
            if json.loads(first or "{}").get("key") != key:
                raise OffbeatError(
                    f"{out} holds a tuning of something else (other methods, budget or search); choose another --out"
                )
            self.entries = [Entry(**json.loads(line)) for line in lines]
        elif resume and not out.exists():
            raise OffbeatError(f"there is no tuning in {out} to go on with")
        self.folder = reopened(out, "tuning") if resume else Folder(out, "tuning")
        self.write()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        if self.folder is not None:
            self.folder.lock.release()

    def add(self, entries: Sequence[Entry]) -> None:
        self.entries += entries
        self.write()

    def write(self) -> None:
        if self.folder is None:
            return
        lines = [json.dumps({"key": self.key}), *(json.dumps(asdict(entry)) for entry in self.entries)]
        file = self.folder.path / LEDGER
        with storing(self.folder.path):
            new = file.with_suffix(".new")
            new.write_text("\n".join(lines) + "\n")
            new.replace(file)
            self.folder.add([file])

    def close(self, experiments: Mapping[str, Experiment], found: Tuned, budget: Mapping[str, Any]) -> None:
        """`tuned.toml`: a comparison of the methods with their best options, at the same budget."""
        if self.folder is None:
            return
        common = next(iter(experiments.values())).table()
        table = {key: value for key, value in common.items() if key != "method"}
        table["methods"] = {}
        for label, experiment in experiments.items():
            name, fixed = split_name("method", experiment.method)
            table["methods"][label] = {"name": name, **fixed, **found.best[label]}
        judged = f"{found.aim.metric} on the held-out part of every shard ({budget['hold_out']:.0%})"
        aim = judged if found.aim.target is None else f"time to {found.aim.target} of {judged}"
        head = f"# Tuned by {aim}; {budget['trials']} trials of each method, seeds {budget['seeds']}.\n"
        file = self.folder.path / "tuned.toml"
        with storing(self.folder.path):
            file.write_text(head + toml.write(table))
            self.folder.add([file])
