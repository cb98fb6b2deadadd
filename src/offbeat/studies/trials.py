"""Trials: runs that are judged by a held-out part of every shard, in heats that share one schedule where they can.

Trials learn from the clients' shards without that part; the test set is not looked at. Those that differ by their rates
alone go through one schedule together (`engines/company.py`). Whoever cannot win any more is cut off.
"""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from offbeat.engines.company import Company, common, share_steps, shareable
from offbeat.errors import BadNumbers, ConfigError
from offbeat.experiments.assemble import Built, build, build_method
from offbeat.experiments.experiment import Experiment
from offbeat.experiments.running import run
from offbeat.runs.logbook import Evaluate
from offbeat.runs.outcome import row_of
from offbeat.runs.target import SMOOTH, crossing, plain_name, stop_reason

RATES = ("client_lr", "server_lr", "beta")  # options that change no schedule
LAST = 3  # evaluations whose mean is a trial's value
NEVER = 1e15  # virtual seconds that count where the target was not reached

JUDGES = 10_000  # samples that judge a trial, where more are held out
CUTS = (0.25, 0.5)  # shares of the budget at which the worse half leaves
LEAST = 2  # trials that stay then
ROOM = 1 << 30  # bytes for what there is of each client, of all trials that go together
SLACK = 1.5  # times the best seconds to the target that a trial may take

Rows = list[dict[str, Any]]


# ---- how a trial is judged ----------------------------------------------------------------------
@dataclass
class Tried:
    """What a trial came to: its evaluations, why it failed, whether it was cut off, and how many went together."""

    rows: Rows = field(default_factory=list)
    failed: str | None = None
    cut: bool = False
    company: int = 1
    seconds: float = 0.0  # its part of the real time


def mean_of_last(rows: Sequence[Mapping[str, Any]], metric: str) -> float | None:
    """The mean of the last evaluations; that of the untrained model counts only where there is no other."""
    seen = [(row.get("commit"), row[metric]) for row in rows if row.get(metric) is not None]
    values = [value for commit, value in seen if commit != 0] or [value for _, value in seen]
    return sum(values[-LAST:]) / len(values[-LAST:]) if values else None


@dataclass(frozen=True)
class Aim:
    """What makes a trial good: a metric at the end of the budget, or the time to a target of it."""

    metric: str = "accuracy"
    more: bool = True
    target: float | None = None
    smooth: int = SMOOTH  # evaluations whose mean is to meet the target: SMOOTH or 1

    def value(self, rows: Rows) -> float | None:
        """The metric now; more is better here."""
        mean = mean_of_last(rows, self.metric)
        return None if mean is None else (1 if self.more else -1) * mean

    def seconds(self, rows: Rows) -> float | None:
        """The virtual time at which the mean of the last evaluations meets the target, in a straight line between two;
        None where it never does. A single one meets it by chance at times, most of all where rates are high."""
        at = None if self.target is None else crossing(rows, self.target, self.smooth, self.metric, self.more)
        return None if at is None else at.between

    def score(self, tried: Tried) -> float | None:
        """Larger is better, None is a failure. With a target, whoever has not reached it comes after all who have, the
        nearest first."""
        value = None if tried.failed else self.value(tried.rows)
        if self.target is None or value is None:
            return value
        at = self.seconds(tried.rows)
        if at is not None:
            return -at
        gap = abs(self.target - (1 if self.more else -1) * value) / max(abs(self.target), 1e-12)
        return -NEVER * (1 + gap)

    def reached(self, score: float) -> bool:
        """Whether the target was reached, by a score or the mean of some: with every seed."""
        return self.target is None or score > -NEVER / 1e3


def judging(experiment: Experiment, hold_out: float, aim: Aim) -> Experiment:
    """The experiment as trials run it: a part of every shard is held out, and all figures come from there."""
    looks = {"samples": JUDGES, **experiment.evaluate, "hold_out": hold_out, "on": "held-out", "clients": False}
    if not {"every_commits", "every_seconds"} & {k for k, v in looks.items() if v is not None}:
        looks["every_commits"] = 10
    limits = {name: value for name, value in experiment.until.items() if plain_name(name) != aim.metric}
    if not limits:
        raise ConfigError(["until has no limit but the metric that is tuned; give a budget, e.g. virtual_seconds=10"])
    if aim.target is not None:
        limits[f"{aim.metric}_smoothed" if aim.smooth > 1 else aim.metric] = aim.target
    return replace(experiment, evaluate=looks, until=limits, targets=(), callbacks=(), engine="local")


# ---- heats --------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Heat:
    """Trials of one seed that are computed together. `best` are the least seconds to the target that are known; with
    `halve` the worse half leaves at CUTS of the budget."""

    experiments: tuple[Experiment, ...]
    aim: Aim
    best: float = math.inf
    halve: bool = True

    @property
    def name(self) -> str:
        first = self.experiments[0]
        many = f" x {len(self.experiments)}" if len(self.experiments) > 1 else ""
        return f"{first.table()['method']['name']} seed {first.seed}{many}"


def run_heat(heat: Heat) -> list[Tried]:
    began = time.perf_counter()
    race = Race(heat.aim, heat.best, list(CUTS) if heat.halve else [])
    first, *others = heat.experiments
    alike = build(first)  # the task is read once for all
    builts = [alike, *(replace(alike, experiment=other, method=build_method(other.method)) for other in others)]
    if shareable(builts[0].method) is None and share_steps([built.method for built in builts]) and have_room(builts):
        tried = run_together(builts, race)
    else:
        tried = [run_alone(experiment, race) for experiment in heat.experiments]
    for one in tried:
        one.seconds = (time.perf_counter() - began) / len(tried)
    return tried


def have_room(builts: Sequence[Built]) -> bool:
    """Whether what there is of each client can be held for all trials at once."""
    first, many = builts[0], len(builts)
    vectors = len(first.method.what.personal) + (first.task.batch_norm == "local")
    return vectors * many * first.task.clients * first.task.numbers * 8 <= ROOM


def grouped(experiments: Sequence[Experiment], company: bool = True) -> list[list[int]]:
    """The places of experiments that can go together."""
    groups: dict[str, list[int]] = {}
    for place, experiment in enumerate(experiments):
        alone = not company or shareable(build_method(experiment.method)) is not None
        groups.setdefault(str(place) if alone else schedule_key(experiment), []).append(place)
    return list(groups.values())


def schedule_key(experiment: Experiment) -> str:
    """Equal for experiments that differ by their rates alone."""
    table = experiment.table()
    options = {key: value for key, value in table["method"].items() if key not in RATES}
    given = [isinstance(table["method"].get(key), str | None) for key in RATES]  # beta None is another formula
    return json.dumps([options, given, table["seed"]], sort_keys=True, default=str)


@dataclass
class Race:
    """Who is cut off: with a target, whoever takes SLACK times as long as the best; and of those that go together the
    worse half at each of these shares of the budget, though LEAST stay."""

    aim: Aim
    best: float = math.inf
    shares: list[float] = field(default_factory=list)

    def arrived(self, rows: Rows) -> None:
        at = self.aim.seconds(rows)
        self.best = self.best if at is None else min(self.best, at)

    def leaving(self, share: float, living: Mapping[int, Rows]) -> set[int]:
        """The trials that leave now, when this share of the budget is spent."""
        late = {trial for trial, rows in living.items() if rows[-1]["virtual_seconds"] > SLACK * self.best}
        if not self.shares or share < self.shares[0]:
            return late
        self.shares.pop(0)
        values = {trial: value for trial, rows in living.items() if (value := self.aim.value(rows)) is not None}
        order = sorted(living, key=lambda trial: values.get(trial, -math.inf), reverse=True)
        return late | set(order[max(LEAST, math.ceil(len(order) / 2)) :])


def run_together(builts: Sequence[Built], race: Race | None = None) -> list[Tried]:
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
                if race is not None:
                    race.arrived(one.rows)
        if race is not None and company.live:
            living = {trial: tried[trial].rows for trial in company.live}
            for trial in race.leaving(share_of(until, account), living):
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


def run_alone(experiment: Experiment, race: Race) -> Tried:
    """The same for a method whose trials cannot share waves: it ends where it cannot win any more."""
    until = dict(experiment.until)
    if race.best < math.inf:
        until["virtual_seconds"] = min(until.get("virtual_seconds", math.inf), SLACK * race.best)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a trial diverges is a result
            rows = run(replace(experiment, until=until)).metrics
    except BadNumbers as error:
        return Tried(error.outcome.metrics, str(error))
    late = until != experiment.until and race.aim.seconds(rows) is None
    race.arrived(rows)
    return Tried(rows, cut=late)
