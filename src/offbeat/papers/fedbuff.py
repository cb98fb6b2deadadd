"""The FedBuff analysis (Toghani, Uribe, 2022): the schedule of Figure 1, and Theorem 1 beside runs at its own rates."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from offbeat.experiments import assemble
from offbeat.experiments.experiment import Experiment
from offbeat.fleets.make import build
from offbeat.keys import generator
from offbeat.method import Policy
from offbeat.papers import agreement
from offbeat.papers.recipe import Cell, Claim, Recipe, Record, Records, Run
from offbeat.records import Arrived, Commit, Row
from offbeat.runs import fleet_plots
from offbeat.schedule.buffer import Buffer
from offbeat.schedule.clock import VirtualClock
from offbeat.schedule.rounds import Rounds
from offbeat.tasks.quadratic import Family, alike, noise_of, optimum
from offbeat.tasks.task import Task
from offbeat.theory import fedbuff
from offbeat.theory.constants import Constants, Plan
from offbeat.theory.measure import schedule_of

CLIENTS, LOCAL_STEPS, BUFFER, SHARE = 5, 3, 2, 0.6  # the caption of Figure 1: n = 5, Q = 3, K = 2, sampling rate 0.6
UNTIL = 12.0
SCHEDULES: dict[str, Policy] = {
    "fedbuff": Buffer(BUFFER, LOCAL_STEPS),
    "synchronous": Rounds(LOCAL_STEPS, round(SHARE * CLIENTS)),
}


def trace(name: str) -> list[Row]:
    fleet = build("custom", CLIENTS, seed=0, step_seconds={"law": "uniform", "low": 0.3, "high": 1.0}, latency=0.3)
    clock = VirtualClock(SCHEDULES[name], fleet.durations(0, 0, 0), generator(0, "policy"))
    return list(itertools.takewhile(lambda row: row[0] <= UNTIL, clock))


def counts(name: str) -> Callable[[Run], Record]:
    def job(run: Run) -> Record:
        records = [record for _, record in trace(name)]
        figures = {"commits": sum(isinstance(record, Commit) for record in records),
                 "updates": sum(isinstance(record, Arrived) for record in records)}  # fmt: skip
        return {"values": figures, "failed": None, "virtual_seconds": UNTIL}

    return job


def timeline(recipe: Recipe, records: Records, picture: Path) -> list[Path]:
    return [fleet_plots.timeline({name: trace(name) for name in records}, picture, UNTIL, CLIENTS)]


# ---- Theorem 1 ------------------------------------------------------------------------------------
WORLD: dict[str, Any] = {"clients": 10, "dimension": 20, "spread": 0.3, "low": 0.002, "high": 0.0125}
NOISE, SAMPLES, START = 0.06, 8, 5.0  # of b in every coordinate; samples of a client; how far w_0 is in each coordinate
CONCURRENCY = 2  # clients at work at once, in units of K: the staleness stays small and every idle client is drawn
LENGTHS = (130, 600, 2500, 10000)


def quadratics() -> tuple[Family, Task, Constants]:
    """Equal Hessians, so that L, zeta^2, gamma^2 and sigma^2 hold at every point: the assumptions are met."""
    family = alike(**WORLD)
    start = optimum(family.matrices, family.linear) + START
    task = family.task(start, NOISE, SAMPLES)
    constants = Constants(
        family.clients, family.gap(start), family.smoothness, noise=float(noise_of(task).max()),
        divergence=family.divergence(start), mean_divergence=family.mean_divergence(start),
    )  # fmt: skip
    return family, task, constants


def bounded(buffer: int, steps: int, commits: int, seed: int) -> Record:
    """FedBuff with K, Q and T at eta = 1 / (Q sqrt(L T)), beta = 1 / K, in float64 on the CPU; all clients alike."""
    family, task, constants = quadratics()
    method = {"name": "fedbuff", "buffer_size": buffer, "local_steps": steps, "concurrency": CONCURRENCY * buffer}

    def built(rates: dict[str, float]) -> assemble.Built:
        return assemble.build(Experiment(method=method | rates, task=task, fleet="equal", seed=seed, device="cpu",
                                         precision="float64", until={"commits": commits}))  # fmt: skip

    plan = Plan(steps, buffer, commits, staleness=schedule_of(built({}), commits).staleness)
    advice = fedbuff.theorem1(constants, plan)
    run = built({"client_lr": advice.client_lr, "beta": advice.server_lr})
    engine, total = run.engine(), 0.0
    model = engine.server.model
    for _ in engine.commits(run.horizon(run.clock())):
        total += family.global_gradient(model.numpy())
        model = engine.server.model
    measured, bound = total / commits, fedbuff.bound(constants, plan)
    values = {"measured": measured, "bound": bound, "measured / bound": measured / bound,
              "T asked for": fedbuff.needed_commits(constants, plan), "tau": plan.staleness,
              "eta": advice.client_lr}  # fmt: skip
    return {"values": values, "failed": None, "failing": [condition.name for condition in advice.failing]}


def theorem(buffer: int, steps: int, commits: int) -> Callable[[Run], Record]:
    return lambda run: bounded(buffer, steps, commits, run.seed)


RECIPES = (
    Recipe(
        "fedbuff-fig1", f"FedBuff Figure 1: the same five clients, two schedules of {UNTIL:g} virtual seconds",
        "Figure 1: n = 5 clients, Q = 3 local steps, K = 2 in the buffer, beside synchronous rounds of 60 %.",
        ("schedule",), tuple(Cell(name, counts(name), priority=3) for name in SCHEDULES), ("commits", "updates"),
        seeds=1,
        claims=(Claim("the server of FedBuff commits more often", "commits", "fedbuff", "synchronous"),),
        picture=timeline,
    ),
    Recipe(
        "fedbuff-theorem1", "FedBuff, Theorem 1: the mean squared gradient over commits, and its bound",
        "Theorem 1: the mean squared gradient of runs at the theorem's own rates, beside its bound, by K, Q and T.",
        ("K", "Q", "T"), tuple(Cell(f"K={k} Q={q} T={t}", theorem(k, q, t), priority=3, client_steps=t * k * q,
                                    pace="quadratic") for k, q in ((1, 1), (4, 1), (4, 4)) for t in LENGTHS),
        ("T asked for", "tau", "eta", "measured", "bound", "measured / bound"), seeds=1, few=("T=130",),
        notes=("10 quadratic clients in 20 dimensions with equal Hessians, so that the assumptions hold at every "
               f"point; all of one pace, {CONCURRENCY} K of them at work at once, in float64.",),
        picture=agreement.falling("T", ("measured", "bound")),
    ),
)  # fmt: skip
