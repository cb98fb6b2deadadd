"""The FedBuff analysis (Toghani, Uribe, 2022): the schedule of Figure 1, and Theorem 1 beside runs at its own rates."""

from __future__ import annotations

import itertools
import json
from typing import Any, NamedTuple

import numpy as np

from offbeat import assemble
from offbeat.config import Experiment
from offbeat.errors import ConfigError
from offbeat.fleets.make import build
from offbeat.keys import generator
from offbeat.measure import schedule_of
from offbeat.meters import fedbuff
from offbeat.meters.constants import Constants, Plan
from offbeat.method import Policy
from offbeat.papers.recipe import Made, Settings, TableMade, begun, pick, write
from offbeat.records import Arrived, Commit, Row
from offbeat.runs import plots, report
from offbeat.schedule.buffer import Buffer
from offbeat.schedule.clock import VirtualClock
from offbeat.schedule.rounds import Rounds
from offbeat.tasks.quadratic import Family, alike, noise_of, optimum
from offbeat.tasks.task import Task

CLIENTS, LOCAL_STEPS, BUFFER, SHARE = 5, 3, 2, 0.6
UNTIL = 12.0


def fig1(settings: Settings) -> Made:
    """Figure 1: n = 5 clients, Q = 3 local steps, K = 2 in the buffer, beside synchronous rounds of 60 %."""
    if settings.only or settings.n:
        raise ConfigError(["fedbuff-fig1 draws one schedule; it takes neither --only nor --n"])
    fleet = build("custom", CLIENTS, seed=0, step_seconds={"law": "uniform", "low": 0.3, "high": 1.0}, latency=0.3)
    durations = fleet.durations(0, 0, 0)
    policies: dict[str, Policy] = {
        f"FedBuff, K = {BUFFER}, Q = {LOCAL_STEPS}": Buffer(BUFFER, LOCAL_STEPS),
        f"synchronous, {SHARE:.0%} of clients, Q = {LOCAL_STEPS}": Rounds(LOCAL_STEPS, round(SHARE * CLIENTS)),
    }
    panels: dict[str, list[Row]] = {}
    rows = []
    made = Made()
    for title, policy in policies.items():
        clock = VirtualClock(policy, durations, generator(0, "policy"))
        trace = panels[title] = list(itertools.takewhile(lambda row: row[0] <= UNTIL, clock))
        commits = sum(isinstance(record, Commit) for _, record in trace)
        updates = sum(isinstance(record, Arrived) for _, record in trace)
        rows.append([title, str(commits), str(updates)])
        made.figures.append({"schedule": title, "commits": commits, "updates": updates, "virtual_seconds": UNTIL})
    columns = ("schedule", f"commits in {UNTIL:.0f} s", "updates")
    made.tables.append(TableMade("FedBuff Figure 1: the same five clients, two schedules", columns, rows))
    made.files.append(plots.timeline(panels, settings.out / "fig1.png", UNTIL, CLIENTS))
    made.files.append(report.write_table(settings.out / "fig1.md", "FedBuff Figure 1", columns, rows))
    (settings.out / "fig1.json").write_text(json.dumps(made.figures, indent=1) + "\n")
    made.files.append(settings.out / "fig1.json")
    return made


# ---- Theorem 1 ------------------------------------------------------------------------------------
WORLD: dict[str, Any] = {"clients": 10, "dimension": 20, "spread": 0.3, "low": 0.002, "high": 0.0125}
NOISE, SAMPLES, START = (
    0.06,
    8,
    5.0,
)  # of b in every coordinate; samples of a client; how far w_0 is in every coordinate
CONCURRENCY = 2  # clients at work at once, in units of K: the staleness stays small and every idle client is drawn


class Bounded(NamedTuple):
    """A run at the theorem's rates, and what the theorem says of it."""

    measured: float  # the mean of |grad f(w_t)|^2 over t < T
    bound: float
    needed: float  # the T that the theorem asks for
    staleness: int
    client_lr: float
    failing: list[str]


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


def bounded(buffer: int, steps: int, commits: int, seed: int) -> Bounded:
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
    model = engine.server.state["model"]
    for _ in engine.commits(run.horizon(run.clock())):
        total += family.global_gradient(model.numpy())
        model = engine.server.state["model"]
    return Bounded(total / commits, fedbuff.bound(constants, plan), fedbuff.needed_commits(constants, plan),
                   plan.staleness, advice.client_lr, [condition.name for condition in advice.failing])  # fmt: skip


def theorem1(settings: Settings) -> Made:
    """Theorem 1: the mean squared gradient of runs at the theorem's own rates, beside its bound, by K, Q and T."""
    if settings.n:
        raise ConfigError([f"--n {settings.n[0]}; fedbuff-theorem1 has K in its cells: --only K=4"])
    lengths = {"smoke": (130,), "small": (130, 600), "full": (130, 600, 2500, 10000)}[settings.scale]
    cells = pick({f"K={buffer} Q={steps} T={commits}": (buffer, steps, commits)
                  for buffer, steps in ((1, 1), (4, 1), (4, 4)) for commits in lengths}, settings)  # fmt: skip
    columns = ("K", "Q", "T", "T asked for", "holds", "tau", "eta", "measured", "bound", "measured / bound")
    known = quadratics()[2]
    made = begun(settings, "FedBuff, Theorem 1: mean of |grad f|^2 over commits, and its bound", columns, [
        f"{WORLD['clients']} quadratic clients with equal Hessians: L = {known.smoothness:g}, f(w_0) - min f = "
        f"{known.gap:.4g}, sigma^2 = {known.noise:.4g}, gamma^2 = {known.mean_divergence:.4g}; all of one pace, "
        f"{CONCURRENCY} K of them at work at once, in float64.",
    ])  # fmt: skip
    curves: dict[str, list[tuple[float, float]]] = {}
    for buffer, steps, commits in cells.values():
        runs = [bounded(buffer, steps, commits, seed) for seed in range(settings.seeds)]
        found, first = float(np.mean([run.measured for run in runs])), runs[0]
        made.figures += [{"K": buffer, "Q": steps, "T": commits, "seed": seed, **run._asdict()}
                         for seed, run in enumerate(runs)]  # fmt: skip
        made.tables[0].rows.append([str(buffer), str(steps), str(commits), f"{first.needed:.0f}",
                                    "no: " + ", ".join(first.failing) if first.failing else "yes", str(first.staleness),
                                    f"{first.client_lr:.3g}", f"{found:.4g}", f"{first.bound:.4g}",
                                    f"{found / first.bound:.3f}"])  # fmt: skip
        label = f"K = {buffer}, Q = {steps}"
        curves.setdefault(f"{label}, bound", []).append((commits, first.bound))
        curves.setdefault(f"{label}, measured", []).append((commits, found))
        write(made, settings, "theorem1")
    picture = settings.out / "theorem1.png"
    made.files.append(plots.falling(curves, picture, "commits T", "mean of |grad f|^2", "FedBuff, Theorem 1"))
    return made
