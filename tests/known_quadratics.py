"""Quadratics whose constants are known, what runs on them do, and what a bound must keep: for tests of theorems."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from offbeat.engines.engine import Engine
from offbeat.experiments.assemble import build_method
from offbeat.keys import generator
from offbeat.records import Begun
from offbeat.schedule.clock import VirtualClock
from offbeat.schedule.horizon import Horizon
from offbeat.tasks.quadratic import optimum, quadratic
from offbeat.tasks.task import Task
from offbeat.theory.constants import Advice, Constants, Plan, Rates


class World(NamedTuple):
    task: Task
    constants: Constants
    hessian: np.ndarray
    target: np.ndarray  # the mean of the b_i
    radius: float  # what is bounded only near the optimum is bounded in this ball about it

    def gradients(self, models: np.ndarray) -> np.ndarray:
        """|grad f|^2 at each row."""
        return np.asarray(np.square(models @ self.hessian - self.target).sum(axis=1))

    def stays(self, models: np.ndarray) -> bool:
        """Whether versions keep well inside the ball, so that local models, which move little, keep to it."""
        far = np.linalg.norm(models - np.linalg.solve(self.hessian, self.target), axis=1)
        return bool(far.max() <= self.radius / 1.2)


def world(
    eigenvalues: Any, linear: np.ndarray, start: float, noise: float, unlike: float = 0.0, samples: int = 4
) -> World:
    """A_i = diag(eigenvalues) +- unlike in turn; b_i = linear[i]; sigma^2 as the samples have it."""
    clients, d = linear.shape
    base = np.diag(np.broadcast_to(np.asarray(eigenvalues, dtype=float), (d,)))
    matrices = [base + (-1) ** i * unlike * np.eye(d) for i in range(clients)]
    task = quadratic(matrices, list(linear), np.full(d, start), noise, samples, seed=1)
    rows = task.data[0].numpy()[:, d * d :].reshape(clients, samples, d)
    sigma2 = np.square(rows - linear[:, None]).sum(axis=2).mean(axis=1).max()
    best, mean, target = optimum(matrices, list(linear)), np.mean(matrices, axis=0), linear.mean(axis=0)
    away = np.full(d, start) - best
    radius = 1.25 * float(np.linalg.norm(away))
    most = float(base.max()) + unlike
    apart = [np.linalg.norm((a - mean) @ best - (b - target)) for a, b in zip(matrices, linear, strict=True)]
    pulls = [np.linalg.norm(a @ best - b) for a, b in zip(matrices, linear, strict=True)]
    divergences = np.square(np.array(apart) + unlike * radius)
    constants = Constants(
        clients,
        gap=float(away @ mean @ away) / 2,
        smoothness=most,
        global_smoothness=float(np.linalg.eigvalsh(mean).max()),
        heterogeneity=2 * unlike,
        noise=float(sigma2),
        divergence=float(divergences.max()),
        mean_divergence=float(divergences.mean()),
        gradient=float(np.square(np.array(pulls) + most * radius).max()),
    )
    return World(task, constants, mean, target, radius)


class Walk(NamedTuple):
    models: np.ndarray  # w_0 .. w_(T-1), and with `inside` the means of the clients' models between them
    staleness: int


def walk(spec: dict[str, Any], task: Task, durations: Any, commits: int, seed: int = 0, inside: int = 1) -> Walk:
    """The versions that commits begin from; with `inside` = I also the clients' mean after 1 .. I - 1 local steps."""
    method = build_method(spec)
    engine = Engine(method, task, seed, torch.device("cpu"), "float64")
    horizon = Horizon(VirtualClock(method.when, durations, generator(seed, "policy")), 256, commits)
    models, late, model = [], 0, engine.server.state["model"]
    for done in engine.commits(horizon):
        models.append(model.numpy())
        late = max(late, *done.staleness)
        for steps in range(1, inside):
            engine.server.versions[-1] = {"model": model}
            jobs = [Begun(client, job, -1, steps) for client, job in done.step.commit.jobs]
            models.append((model - engine.solve(jobs).updates["delta"].mean(dim=0)).numpy())
        model = engine.server.state["model"]
    return Walk(np.array(models), late)


def measured(found: World, walks: list[Walk]) -> float:
    """The mean of |grad f|^2 over versions and seeds."""
    return float(np.mean([found.gradients(w.models).mean() for w in walks]))


def failing(advice: Advice) -> list[str]:
    return [condition.name for condition in advice.failing]


Bound = Callable[[Constants, Plan, Rates], float]


def keeps_its_units(bound: Bound, constants: Constants, plan: Plan, rates: Rates) -> bool:
    """c f in place of f, or x / s in place of x: a bound of |grad f|^2 is c^2 / s^2 times what it was."""
    plain, near = bound(constants, plan, rates), []
    for c, s in ((3.0, 1.0), (1.0, 2.0), (0.1, 0.3)):
        first = dict.fromkeys(("smoothness", "global_smoothness", "heterogeneity"), c / s**2)
        second = dict.fromkeys(("noise", "divergence", "mean_divergence", "gradient"), c**2 / s**2)
        factors = {"gap": c} | first | second
        other = {
            name: getattr(constants, name) * k for name, k in factors.items() if getattr(constants, name) is not None
        }
        now = bound(replace(constants, **other), plan, Rates(rates.client * s**2 / c, rates.server))
        near.append(now == pytest.approx(plain * c**2 / s**2, rel=1e-12))
    return all(near)
