"""What theorems make of measured constants: the rates they admit for a method as it is configured, and what fails."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np

from offbeat.config import registry
from offbeat.config.options import fits
from offbeat.errors import ConfigError, in_words, unknown
from offbeat.experiments import cluster_views
from offbeat.experiments.assemble import Built, build
from offbeat.experiments.experiment import Experiment, split_name
from offbeat.fleets.graphs import rho_of
from offbeat.fleets.steps import Fixed
from offbeat.fleets.timing import phases
from offbeat.method import Method, Rule, StepRate
from offbeat.schedule.device import OWN_STEPS
from offbeat.theory.constants import Advice, Condition, Constants, Plan
from offbeat.theory.measure import Measured, Schedule, schedule_of
from offbeat.theory.theorems import ADVISED, THEOREMS, Bound


@dataclass(frozen=True)
class Counsel:
    """One theorem on one plan: the rates it would take, and what it says of those that are configured."""

    own: Advice | None  # with the theorem's rates; None where it cannot be asked
    yours: Advice | None  # with the plan's
    refused: tuple[str, ...] = ()  # why it could not be asked

    def json(self) -> dict[str, Any]:
        table: dict[str, Any] = {"refused": list(self.refused)}
        for whose, advice in (("own", self.own), ("yours", self.yours)):
            conditions = [c._asdict() | {"holds": c.holds} for c in advice.conditions] if advice else []
            table[whose] = asdict(advice) | {"conditions": conditions} if advice else None
        return table


def asked_about(experiment: Experiment, method: str, theorems: Sequence[str] = ()) -> tuple[Built, bool]:
    """The experiment with the method asked about, and whether it is its own; a sentence where it cannot be asked."""
    if method not in ADVISED and not theorems:
        known = unknown("method with a theorem here", method, ADVISED)
        raise ConfigError([f"{known}; a theorem of your own is --theorem module:function"])
    given = experiment.method
    name = given.name if isinstance(given, Method) else split_name("method", given)[0]
    return build(experiment if name == method else replace(experiment, method=method)), name == method


def advise(
    measured: Measured, experiment: Experiment, method: str, theorems: Sequence[str] = ()
) -> tuple[Plan, dict[str, Counsel]]:
    """The theorems of a method, asked about its plan on this problem, or those that are named (one of your own as
    module:function). The experiment's own options count where its method is the one asked about, else the defaults."""
    built, same = asked_about(experiment, method, theorems)
    constants = measured.constants
    plan = plan_of(built, measured.schedule if same else schedule_of(built, measured.schedule.commits))
    if (hybrid := built.hybrid) is not None:
        mixing = [
            rho_of(phases(cluster, hybrid)) if hybrid.rounds else 1.0 for cluster in cluster_views.each(built.fleet)
        ]
        constants = replace(constants, mixing=max(mixing))  # of a phase, with all its exchanges
    bounds: dict[str, Bound] = {name: registry.find("theorem", name) for name in theorems} or {
        name: theorem.bound
        for name, theorem in THEOREMS.items()
        if method in theorem.methods and theorem.about(constants, plan)
    }
    counsels: dict[str, Counsel] = {}
    for name, bound in bounds.items():
        own, refused = attempt(name, bound, constants, replace(plan, client_lr=None, server_lr=None))
        yours, _ = attempt(name, bound, constants, plan)
        counsels[name] = Counsel(own, yours, refused)
    return plan, counsels


def schedule_for(measured: Measured, experiment: Experiment, method: str, theorems: Sequence[str] = ()) -> Schedule:
    """The schedule of the method asked about, on the experiment's fleet."""
    built, _ = asked_about(experiment, method, theorems)
    return schedule_of(built, measured.schedule.commits)


def opening(experiment: Experiment, method: str, plan: Plan, counsels: Mapping[str, Counsel]) -> str:
    """What to do, in a sentence: whether the rates that are configured are covered, which ones would be, and what
    stands in the way where none are."""
    built, _ = asked_about(experiment, method, tuple(counsels))
    given = built.experiment.table()["method"]
    server = next((name for name in ("server_lr", "beta") if name in given), None)
    run = f"{method} with {written(server, plan.client_lr or 0.0, plan.server_lr)} and {plan.local_steps} local steps"
    askable = {name: counsel for name, counsel in counsels.items() if counsel.own and counsel.own.conditions}
    if not askable:
        why = "; ".join(dict.fromkeys(text for counsel in counsels.values() for text in counsel.refused))
        return f"{run}: no theorem can be asked here{f' ({why})' if why else ''}"
    for name, counsel in askable.items():
        if counsel.yours is not None and not counsel.yours.failing:
            return f"{run}: go ahead, {name} covers these rates over {plan.commits} commits"
    for name, counsel in askable.items():
        own = counsel.own
        if own is None or own.failing:
            continue
        rates = f"--set method.client_lr={own.client_lr:.3g}"
        rates += f" --set method.{server}={own.server_lr:.3g}" if server else ""
        return f"{run} {beyond(name, counsel.yours)}. Covered is {rates}; beyond that it is experience, not theory"
    name, counsel = min(askable.items(), key=lambda pair: len(pair[1].own.failing) if pair[1].own else 99)
    assert counsel.own is not None
    rest = "; ".join(remedy(condition) for condition in counsel.own.failing)
    return f"{run}: no rates satisfy {name} here; to get there, {rest}"


def beyond(theorem: str, yours: Advice | None) -> str:
    """How far the configured rates are from what a theorem allows."""
    if yours is None or not yours.failing:
        return "cannot be judged"
    worst = yours.failing[0]
    if worst.least:
        return f"has {worst.given:.3g} where {theorem} asks at least {worst.allowed:.3g} ({worst.text})"
    times = worst.given / worst.allowed if worst.allowed else math.inf
    limit = f"{worst.text}: {worst.given:.3g}, at most {worst.allowed:.3g}"
    return f"goes {times:.3g} times as far as {theorem} allows ({limit})"


def written(server: str | None, client_lr: float, server_lr: float | None) -> str:
    more = f", {server} {server_lr:.3g}" if server and server_lr is not None else ""
    return f"client_lr {client_lr:.3g}{more}"


def remedy(condition: Condition) -> str:
    """What would make a condition hold that no rate does."""
    if condition.allowed == math.inf or condition.allowed != condition.allowed:
        return f"nothing helps {condition.name}: {condition.text}"
    count = math.ceil(condition.allowed) if condition.least else math.floor(condition.allowed)
    if condition.text.startswith("T >="):
        return f"run at least {count:,} commits (now {condition.given:,.0f}), or lower the staleness"
    if condition.text.startswith("I "):
        return f"take at most {max(1, count)} local steps (now {condition.given:.0f})" if count >= 1 else (
            f"run more commits: not even one local step meets {condition.text}")  # fmt: skip
    if condition.text in ("M >= N", "m >= n"):
        return f"let all {condition.allowed:.0f} take part (now {condition.given:.0f})"
    if condition.text.startswith("rho"):
        return f"gossip more or take more local steps ({condition.text}: now {condition.given:.3g})"
    side = "at least" if condition.least else "at most"
    return f"{condition.text} must be {side} {condition.allowed:.3g} (now {condition.given:.3g})"


def attempt(name: str, bound: Bound, constants: Constants, plan: Plan) -> tuple[Advice | None, tuple[str, ...]]:
    try:
        advice = bound(constants, plan)
    except ConfigError as error:
        return None, error.problems
    except Exception as error:
        if name in THEOREMS:
            raise
        raise ConfigError([f"theorem '{name}' stopped with {registry.fault(error)}"]) from error
    if not isinstance(advice, Advice):
        raise ConfigError([f"theorem '{name}' gives {in_words(advice)}; it must give an Advice"])
    return advice, ()


def plan_of(built: Built, schedule: Schedule) -> Plan:
    """How a built method is to be run, in the words of the theorems."""
    when, rule, clients = built.method.when, built.method.what, built.task.clients
    law = built.fleet.local_steps
    counts = tuple(law.steps) if isinstance(law, Fixed) else ()
    ordered = when.orders
    steps = ordered or (round(float(np.mean(counts))) if counts else OWN_STEPS)
    cohort = when.cohort or clients
    if (hybrid := built.hybrid) is not None:
        cohort = min(hybrid.reports(cluster.size) for cluster in cluster_views.each(built.fleet))
    options: dict[str, Any] = built.experiment.table()["method"]  # of a method of your own: its name alone
    server = options.get("server_lr", options.get("beta"))
    commits = int(built.experiment.until.get("commits", schedule.commits))
    return Plan(
        local_steps=steps, cohort=cohort, commits=commits, client_lr=first_rate(rule, "lr", steps),
        server_lr=float(server) if isinstance(server, int | float) else None, staleness=schedule.staleness,
        steps=() if ordered else counts, calibration=first_rate(rule, "calibration", steps),
        reports=1.0 if hybrid is None else hybrid.sample,
    )  # fmt: skip


def first_rate(rule: Rule, name: str, steps: int) -> float:
    """A rate of the clients at version 0, the mean over a job's steps; 1 where the rule has none of this name."""
    by = rule.local.rates.get(name)
    if by is None:
        return 1.0
    return by.mean(0, steps) if isinstance(by, StepRate) else by(0)


def check_known(given: Mapping[str, Any]) -> None:
    """Refuse constants that no theorem knows, or that cannot be."""
    names = [field.name for field in fields(Constants) if field.name not in ("clients", "client_losses")]
    problems = [unknown("constant", name, names) for name in given if name not in names]
    for name in set(given) & set(names):
        value = given[name]
        good = isinstance(value, bool) if name == "quadratic" else fits(value, float) and 0 <= value < math.inf
        if not good:
            what = "true or false" if name == "quadratic" else "a finite number from 0"
            problems.append(f"--known {name}={in_words(value)}; it must be {what}")
    if problems:
        raise ConfigError(problems)


def with_known(measured: Measured, given: Mapping[str, Any]) -> Measured:
    """What was measured, with constants that somebody knows in their place."""
    check_known(given)
    return replace(measured, constants=replace(measured.constants, **given))
