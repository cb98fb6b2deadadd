"""What theorems make of measured constants: the rates they admit for a method as it is configured, and what fails."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from offbeat.assemble import Built, build
from offbeat.config import Experiment, split_name
from offbeat.errors import ConfigError, unknown
from offbeat.fleets.graphs import rho_of
from offbeat.fleets.steps import Fixed
from offbeat.fleets.timing import phases
from offbeat.measure import Measured, Schedule, schedule_of
from offbeat.meters.constants import Advice, Constants, Plan
from offbeat.meters.theorems import EVERYONE, SAMPLED, THEOREMS, Theorem
from offbeat.method import Method, Rule, StepRate
from offbeat.schedule.device import OWN_STEPS
from offbeat.schedule.hybrid import Hybrid


@dataclass(frozen=True)
class Counsel:
    """One theorem on one plan: the rates it would take, and what it says of those that are configured."""

    own: Advice | None  # with the theorem's rates; None where it cannot be asked
    yours: Advice | None  # with the plan's
    refused: tuple[str, ...] = ()  # why it could not be asked

    def json(self) -> dict[str, Any]:
        told: dict[str, Any] = {"refused": list(self.refused)}
        for whose, advice in (("own", self.own), ("yours", self.yours)):
            conditions = [c._asdict() | {"holds": c.holds} for c in advice.conditions] if advice else []
            told[whose] = asdict(advice) | {"conditions": conditions} if advice else None
        return told


def asked_about(experiment: Experiment, method: str) -> tuple[Built, bool]:
    """The experiment with the method asked about, and whether it is its own; a sentence where it cannot be asked."""
    if method not in THEOREMS:
        raise ConfigError([unknown("method with a theorem here", method, THEOREMS)])
    given = experiment.method
    name = given.name if isinstance(given, Method) else split_name("method", given)[0]
    return build(experiment if name == method else replace(experiment, method=method)), name == method


def advise(measured: Measured, experiment: Experiment, method: str) -> tuple[Plan, dict[str, Counsel]]:
    """The theorems of a method, asked about its plan on this problem. The experiment's own options count where its
    method is the one asked about, defaults where it is not."""
    built, same = asked_about(experiment, method)
    when, constants = built.method.when, measured.constants
    plan = plan_of(built, measured.schedule if same else schedule_of(built, measured.schedule.commits))
    theorems = THEOREMS[method]
    if method == "local-sgd":
        theorems = EVERYONE if plan.cohort == constants.clients else SAMPLED
    if isinstance(when, Hybrid) and built.fleet.clusters is not None:
        theorems = theorems[:1] if when.sample == 1 else theorems[1:]
        mixing = [rho_of(phases(cluster, when)) if when.rounds else 1.0 for cluster in built.fleet.clusters.each]
        constants = replace(constants, mixing=max(mixing))  # of a phase, with all its exchanges
    found = {}
    for theorem in theorems:
        own, refused = attempt(theorem, constants, replace(plan, client_lr=None, server_lr=None))
        yours, _ = attempt(theorem, constants, plan)
        name = next((made.theorem for made in (own, yours) if made is not None), theorem.__name__)
        found[name] = Counsel(own, yours, refused)
    return plan, found


def attempt(theorem: Theorem, constants: Constants, plan: Plan) -> tuple[Advice | None, tuple[str, ...]]:
    try:
        return theorem(constants, plan), ()
    except ConfigError as error:
        return None, error.problems


def plan_of(built: Built, schedule: Schedule) -> Plan:
    """How a built method is to be run, in the words of the theorems."""
    when, rule, clients = built.method.when, built.method.what, built.task.clients
    law = built.fleet.local_steps
    counts = tuple(law.steps) if isinstance(law, Fixed) else ()
    ordered = when.orders
    steps = ordered or (round(float(np.mean(counts))) if counts else OWN_STEPS)
    cohort = when.cohort or clients
    if isinstance(when, Hybrid) and built.fleet.clusters is not None:
        cohort = min(when.reports(cluster.size) for cluster in built.fleet.clusters.each)
    options: dict[str, Any] = built.experiment.table()["method"]  # of a method of your own: its name alone
    server = options.get("server_lr", options.get("beta"))
    commits = int(built.experiment.until.get("commits", schedule.commits))
    return Plan(
        local_steps=steps, cohort=cohort, commits=commits, client_lr=first_rate(rule, "lr", steps),
        server_lr=float(server) if isinstance(server, int | float) else None, staleness=schedule.staleness,
        steps=() if ordered else counts, calibration=first_rate(rule, "calibration", steps),
    )  # fmt: skip


def first_rate(rule: Rule, name: str, steps: int) -> float:
    """A rate of the clients at version 0, the mean over a job's steps; 1 where the rule has none of this name."""
    by = rule.local.rates.get(name)
    if by is None:
        return 1.0
    return by.mean(0, steps) if isinstance(by, StepRate) else by(0)
