"""Objective inconsistency on real data, in the setting of the FedaGrac paper's Figure 5: a9a, logistic regression.

20 clients, Dirichlet 0.3, batch 20, K_i normal with mean 500 and variance 10000, fixed per client. How far the training
loss of each method stays above the optimum that a centralised solver finds. The rate is the best that the paper saw
with lambda = 1.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from scipy.optimize import minimize

from offbeat.config import Experiment
from offbeat.papers.fedagrac import CUT, METHODS, chosen, divided, gaussian, method_table
from offbeat.papers.recipe import Made, Settings, begun, run_cell, write
from offbeat.runs import plots
from offbeat.tasks.make import build_task
from offbeat.tasks.task import Task

ROUNDS, RATE = 100, 0.005
COLUMNS = ("method", "rounds", "gap of the loss", "gap over FedaGrac's", "accuracy", "wall s")


def problem(settings: Settings, seed: int) -> Task:
    """The task, looked at on its training set: the objective itself."""
    options: dict[str, Any] = {"clients": 20, "split": {"name": "dirichlet", "alpha": 0.3}, "batch_size": 20}
    name = "digits" if settings.scale == "smoke" else "a9a"
    return replace(build_task(name, options | {"model": "logistic"}, seed), test=None)


def least(task: Task) -> float:
    """The least mean cross-entropy of a linear model with softmax on the whole training set, by L-BFGS in float64."""
    x, y = (np.asarray(t) for t in task.data)
    x = np.hstack([x.reshape(len(x), -1).astype(np.float64), np.ones((len(x), 1))])
    labels = np.eye(int(y.max()) + 1)[y]

    def value(flat: Any) -> tuple[float, Any]:
        scores = x @ flat.reshape(x.shape[1], -1)
        scores -= scores.max(axis=1, keepdims=True)
        logs = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
        return -float((labels * logs).sum() / len(x)), (x.T @ (np.exp(logs) - labels) / len(x)).ravel()

    start = np.zeros(x.shape[1] * labels.shape[1])
    options = {"maxiter": 200 if len(x) < 2000 else 5000, "maxfun": 10**5, "ftol": 1e-14, "gtol": 1e-9}
    return float(minimize(value, start, jac=True, method="L-BFGS-B", options=options).fun)


def gap(settings: Settings) -> Made:
    """a9a, logistic regression: how far each method's training loss stays above the optimum, after equal rounds."""
    made = begun(settings, "Objective inconsistency on a9a", COLUMNS)
    by, most = CUT[settings.scale]
    gaps: dict[str, list[tuple[float, float]]] = {}
    ends: dict[str, tuple[float, Any]] = {}
    for method in chosen(dict.fromkeys(METHODS), settings):
        for seed in range(settings.seeds):
            task = problem(settings, seed)
            best = least(task)
            steps = divided(gaussian(500, 10000, "fixed"), by)
            outcome = run_cell(Experiment(
                method=method_table("a9a", method, RATE), task=task, fleet={"name": "equal", "local_steps": steps},
                seed=seed, device=settings.device, precision=settings.precision,
                until={"commits": min(ROUNDS, most)}, evaluate={"every_commits": 5},
            ), f"{method} seed {seed}")  # fmt: skip
            above = [(row["commit"], row["loss"] - best) for row in outcome.metrics]
            made.figures.append({"method": method, "optimum": best, "gaps": above, **outcome.result})
            if seed == 0:
                gaps[method], ends[method] = above, (above[-1][1], outcome)
        ours = ends["fedagrac"][0] if "fedagrac" in ends else None
        made.tables[0].rows[:] = [
            [name, str(outcome.commits), f"{end:.3g}", "" if ours is None else f"{end / ours:.3g}",
             f"{outcome.accuracy_final:.4f}", f"{outcome.wall_seconds:.0f}"]
            for name, (end, outcome) in ends.items()
        ]  # fmt: skip
        write(made, settings, "a9a")
    made.files.append(plots.falling(gaps, settings.out / "a9a.png", "rounds", "training loss above the optimum"))
    return made
