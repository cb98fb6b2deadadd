"""What theorems make of measured constants: the rates they admit for a method as it is configured, and what fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from offbeat.assemble import Built, build
from offbeat.config import Experiment, split_name
from offbeat.errors import ConfigError, unknown
from offbeat.fleets.steps import Fixed
from offbeat.measure import Measured, Schedule, schedule_of
from offbeat.meters import dlsgd, fedagrac, fedavg, fedbuff, hlsgd
from offbeat.meters.constants import Advice, Constants, Plan
from offbeat.schedule.device import OWN_STEPS
from offbeat.schedule.hybrid import Hybrid

Theorem = Callable[[Constants, Plan], Advice]
EVERYONE: tuple[Theorem, ...] = (fedavg.theorem43, fedavg.corollary44)
SAMPLED: tuple[Theorem, ...] = (fedavg.theorem45, fedavg.corollary46)
THEOREMS: dict[str, tuple[Theorem, ...]] = {
    "dlsgd-hetero": (dlsgd.theorem2,),
    "dlsgd-homo": (dlsgd.theorem1,),
    "fedagrac": (fedagrac.theorem2,),
    "fedbuff": (fedbuff.theorem1,),
    "hl-sgd": (hlsgd.theorem1, hlsgd.theorem2, hlsgd.corollary1),  # all report; a part of them; and how few may
    "local-sgd": (*EVERYONE, *SAMPLED),
}


@dataclass(frozen=True)
class Counsel:
    """One theorem on one plan: the rates it would take, and what it says of those that are configured."""

    own: Advice | None  # with the theorem's rates; None where it cannot be asked
    yours: Advice | None  # with the plan's
    refused: tuple[str, ...] = ()  # why it could not be asked


def advise(measured: Measured, experiment: Experiment, method: str) -> tuple[Plan, dict[str, Counsel]]:
    """The theorems of a method, asked about its plan on this problem. The experiment's own options count where its
    method is the one asked about, defaults where it is not."""
    if method not in THEOREMS:
        raise ConfigError([unknown("method with a theorem here", method, THEOREMS)])
    given = experiment.method
    same = not isinstance(given, str | dict) or split_name("method", given)[0] == method
    built = build(experiment if same else replace(experiment, method=method))
    plan = plan_of(built, measured.schedule if same else schedule_of(built, measured.schedule.commits))
    asked = THEOREMS[method]
    if method == "local-sgd":
        asked = EVERYONE if plan.cohort == measured.constants.clients else SAMPLED
    elif isinstance(built.method.when, Hybrid):
        asked = asked[:1] if built.method.when.sample == 1 else asked[1:]
    found = {}
    for theorem in asked:
        own, refused = attempt(theorem, measured.constants, replace(plan, client_lr=None, server_lr=None))
        yours, _ = attempt(theorem, measured.constants, plan)
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
    ordered: int | None = getattr(when, "steps", None)
    steps = ordered or (round(float(np.mean(counts))) if counts else OWN_STEPS)
    cohort = getattr(when, "size", None) or clients
    if isinstance(when, Hybrid) and built.fleet.clusters is not None:
        cohort = min(when.reports(cluster.size) for cluster in built.fleet.clusters.each)
    options: dict[str, Any] = built.experiment.table()["method"]
    server = options.get("server_lr")
    return Plan(
        local_steps=steps, cohort=cohort, commits=schedule.commits, client_lr=rule.local.rate(0),
        server_lr=float(server) if isinstance(server, int | float) else None, staleness=schedule.staleness,
        steps=() if ordered else counts, calibration=rule.local.calibration(0),
    )  # fmt: skip
