"""Measure a problem: its constants at a model and along the path from it, what they say, and what theorems admit.

All that needs clients is batched over them, in groups that fit (`meters.gauge`). Squares are of gradients as losses are
given; nothing is scaled.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offbeat.engines.engine import Engine
from offbeat.engines.solver import LocalSolver
from offbeat.errors import ConfigError, OffbeatError
from offbeat.experiments.assemble import Built, build
from offbeat.experiments.experiment import Experiment
from offbeat.experiments.running import run
from offbeat.numerics.wave import bytes_per_job
from offbeat.runs.progress import Progress
from offbeat.runs.stored import read_model
from offbeat.schedule.horizon import Horizon
from offbeat.theory import curvature, dlsgd
from offbeat.theory.constants import Constants
from offbeat.theory.divergence import divergence, noise
from offbeat.theory.gauge import Gauge
from offbeat.theory.readings import Reading, readings_of, verdict

AFFINE = 1e-3  # gradients that bend less along a line are those of quadratics, to rounding in float32


@dataclass(frozen=True)
class Effort:
    """How much to look at. The defaults measure a small CNN over 100 clients in less than 20 rounds of training."""

    samples: int | None = 32  # of each client; None: all
    noise_samples: int | None = 8  # of each client, one by one; None: all
    rounds: int = 10  # of FedAvg, for the path estimators (the paper's 10)
    local_steps: int = 10  # in each of them
    client_lr: float = 0.05
    iterations: int = 0  # of power iteration, to check the path's estimates; 0: none
    commits: int = 1000  # of the schedule that are looked at, at most

    def passes(self, gauge: Gauge) -> float:
        """About how many passes over the data it takes; power iteration may settle sooner."""
        every, looked = sum(gauge.samples.sizes), sum(gauge.whole.sizes)
        walked = sum(gauge.samples.per_step(client) for client in range(gauge.clients)) * self.local_steps
        products = 10 if gauge.limit >= gauge.clients else 12
        return (self.rounds * (walked + 4 * looked) + (products * self.iterations + 7) * looked) / every

    def problems(self) -> list[str]:
        problems = []
        for name, least in (("samples", 2), ("noise_samples", 2), ("rounds", 1), ("local_steps", 1), ("iterations", 0),
                            ("commits", 1)):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < least:
                problems.append(f"{name} = {value}; give at least {least}")
        if not 0 < self.client_lr < math.inf:
            problems.append(f"client_lr = {self.client_lr}; it must be a positive number")
        return problems


@dataclass(frozen=True)
class Schedule:
    """A method's schedule on a fleet, from the virtual clock alone."""

    commits: int
    staleness: int  # lambda, tau: the largest
    staleness_mean: float
    likely: float | None  # with all but 1 % chance no client stays undrawn for longer (uniform sampling)
    never: int  # clients or clusters that no commit has heard of
    least: float  # updates of the client heard least, as a share of an equal part


@dataclass(frozen=True)
class Measured:
    """What was measured: one reading a line, the constants for the theorems, the schedule, and what it cost."""

    readings: tuple[Reading, ...]
    constants: Constants
    schedule: Schedule
    verdict: str
    loss: float
    accuracy: float | None
    passes: float
    seconds: float
    notes: tuple[str, ...] = ()

    def json(self) -> dict[str, Any]:
        return {**asdict(self), "readings": [reading._asdict() for reading in self.readings]}


def measure(
    experiment: Experiment,
    checkpoint: str | Path | None = None,
    train: int = 0,
    effort: Effort | None = None,
    progress: Progress | None = None,
) -> Measured:
    """Measure an experiment's problem at its first model, at that of a checkpoint (a run directory or its
    model.safetensors), or after `train` commits of its method."""
    effort = effort or Effort()
    if effort.problems():
        raise ConfigError(effort.problems())
    if checkpoint is not None and train:
        raise ConfigError(["give a checkpoint or a number of commits to train, not both"])
    built = build(replace(experiment, engine="local"))
    engine = built.engine()
    notes = []
    if checkpoint is not None:
        x = flat_of(engine, read_model(Path(checkpoint)), str(checkpoint))
    elif train:
        trained = run(
            replace(experiment, until={"commits": train}), None, progress and Progress("training", {"commits": train})
        )
        x = flat_of(engine, trained.model, "the trained model")
    else:
        x = engine.solver.problem.model.initial()
        notes.append("measured at the untrained model; the estimators want one near convergence (train, checkpoint)")
    began = time.perf_counter()
    engine.server.set_model(x)
    metrics = engine.evaluate()
    gauge = gauge_of(engine, experiment.seed, effort.samples)
    if progress is not None:
        expected = effort.passes(gauge)
        gauge.tell = lambda passes: progress.passed(passes, expected)
    path = curvature.path(gauge, x, effort.rounds, effort.local_steps, effort.client_lr)
    powers = {}
    if effort.iterations:
        for name in ("smoothness", "global_smoothness", "heterogeneity"):
            powers[name] = getattr(curvature, name)(gauge, x, effort.iterations, 1e-3)
        above = 1.01 * powers["smoothness"].value
        powers["convexity"] = curvature.convexity(gauge, x, above, effort.iterations, 1e-3)
    clusters = built.fleet.clusters
    apart = divergence(gauge, x, [cluster.members for cluster in clusters.each] if clusters else ())
    sigma = None
    batch = built.task.least_batch  # FedBuff: all batches are of b samples at least
    try:
        sigma = noise(gauge, x, effort.noise_samples, batch)
    except ConfigError as error:
        notes += error.problems
    if sigma is not None and sigma.batch is not None:
        notes.append(
            "the loss of a batch is not the mean of the losses of its samples (weights of classes, ignored labels, a "
            f"loss over the batch): the noise is that of batches of {sigma.batch}, and not of single samples"
        )
    readings = readings_of(path, powers, apart, sigma, batch, clusters.rho_max if clusters else None)
    plan = schedule_of(built, effort.commits)
    losses = gauge.values(x)
    start = sum(losses) / len(losses)
    constants = replace(
        constants_of(built, readings, apart, start),
        client_losses=tuple(losses) if min(losses) >= 0 else None,
        quadratic=curvature.bend(gauge, x) < AFFINE,
    )
    if start < 0:
        notes.append("the loss is negative here, so it says nothing of f(x) - min f: no gap for the theorems")
    return Measured(
        tuple(readings), constants, plan, verdict(readings), metrics["loss"], metrics["accuracy"], gauge.passes,
        time.perf_counter() - began, tuple(notes),
    )  # fmt: skip


def gauge_of(engine: Engine, seed: int, samples: int | None) -> Gauge:
    """A gauge whose groups fit into the memory that the engine may use."""
    solver = engine.solver
    assert isinstance(solver, LocalSolver)
    problem = solver.problem
    gauge = Gauge(
        problem.model, problem.samples, 1, seed, samples, advance=solver.advance, over_shards=solver.full_gradients
    )
    budget = bytes_per_job(problem) * solver.limit
    gauge.limit = max(1, min(gauge.clients, int(budget / bytes_per_job(gauge.problem))))
    return gauge


def flat_of(engine: Engine, tensors: dict[str, Tensor], where: str) -> Tensor:
    """A stored model as a flat vector; a sentence for what belongs to another model."""
    model = engine.solver.problem.model
    want = dict(zip(model.names, model.shapes, strict=True))
    lacking = [name for name in want if name not in tensors]
    wrong = [f"{name} {tuple(tensors[name].shape)} instead of {shape}" for name, shape in want.items()
             if name in tensors and tuple(tensors[name].shape) != shape]  # fmt: skip
    if lacking or wrong:
        said = "; ".join([*([f"no {', '.join(lacking[:3])}"] if lacking else []), *wrong[:3]])
        raise OffbeatError(f"{where} holds another model than this task's ({said}); give the task it was made with")
    flat = torch.cat([tensors[name].reshape(-1) for name in want]).to(model.dtype)
    if not flat.isfinite().all():
        raise OffbeatError(f"{where} holds numbers that are not finite; take an earlier checkpoint")
    return flat.to(engine.device)


def schedule_of(built: Built, commits: int) -> Schedule:
    """The staleness and participation of the experiment's method on its fleet, run on the clock without numerics."""
    commits = min(commits, int(built.experiment.until.get("commits", commits)))
    horizon = Horizon(built.clock(), last=commits)
    account = built.account()
    heard = np.zeros(built.units)
    for done, step in enumerate(horizon):
        versions = horizon.skipped(step.commit)
        account.take(step.rows, step.commit.jobs, [done - version for version in versions])
        np.add.at(heard, [client for client, _ in step.commit.jobs], 1)
    when = built.method.when
    size = when.cohort if when.kind in ("rounds", "sampled") else None
    likely = None if size is None else dlsgd.likely_staleness(built.units, size, commits, 0.01)
    stale = account.staleness
    updates = max(1, sum(stale.values()))
    mean = sum(k * many for k, many in stale.items()) / updates
    return Schedule(account.commits, max(stale, default=0), mean, likely, int((heard == 0).sum()),
                    float(heard.min() / max(heard.mean(), 1e-12)))  # fmt: skip


def constants_of(built: Built, readings: list[Reading], apart: Any, start: float) -> Constants:
    """The measured values under the names that theorems use; of two estimates the larger."""
    value = {reading.name: reading.value for reading in readings}
    largest = {}
    for name in ("L_tilde", "L_g", "L_h"):
        largest[name] = max(value[key] for key in value if key.startswith(name))
    clusters = built.fleet.clusters
    return Constants(
        clients=built.task.clients,
        gap=start if start >= 0 else None,
        smoothness=largest["L_tilde"],
        global_smoothness=largest["L_g"],
        heterogeneity=largest["L_h"],
        convexity=value.get("mu"),
        noise=0.0 if built.task.batch_size is None else value.get("sigma2_batch"),
        divergence=apart.zeta2,
        mean_divergence=apart.gamma2,
        gradient=float(apart.norms.max()),
        dissimilarity=value.get("B2"),
        inside=float(np.mean(apart.inside)) if clusters else None,
        between=apart.between if clusters else None,
        between_factor=1.0 if clusters else None,
        mixing=clusters.rho_max if clusters else None,
        clusters=len(clusters) if clusters else None,
    )
