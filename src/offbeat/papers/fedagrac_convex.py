"""What the FedaGrac paper says of convex problems: Figure 1's paths, and objective inconsistency on a9a (Figure 5c, d).

On a9a: 20 clients, Dirichlet 0.3, batch 20, K_i normal with mean 500 and variance 10000, fixed per client; how far the
training loss of each method stays above the optimum that a centralised solver finds. The rate is the best that the
paper saw with lambda = 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.optimize import minimize
from torch import nn
from torch.nn import functional

from offbeat.experiments.assemble import build
from offbeat.experiments.experiment import Experiment
from offbeat.papers.fedagrac import METHODS, SPLITS, gaussian, method_table
from offbeat.papers.recipe import Cell, Recipe, Record, Records, Run, Training
from offbeat.papers.runner import train
from offbeat.runs import plots
from offbeat.tasks.make import build_task
from offbeat.tasks.task import Task

# ---- Figure 1: paths of two parameters ----------------------------------------------------------
LINES = ((2.5, 1.0), (-1.0, 2.0), (0.5, -2.5))  # a_i, b_i of y = a x + b
CENTRES = (0.0, 0.6, -0.6)  # of the clients' x
STEPS = (2, 6, 20)
POINTS, NOISE, START, RATE, ROUNDS = 50, 0.3, (-2.5, -2.5), 0.04, 25
PATHS: dict[str, dict[str, Any]] = {
    "local-sgd": {"n": None},
    "fedprox": {"proximal": 0.5},
    "fednova": {},
    "fedlin": {"client_lr": RATE * mean(STEPS)},  # its rate is for all steps of a round together
    "scaffold": {},
    "fedagrac": {"calibration": 1.0},
}
Points = npt.NDArray[np.float64]


def regression(seed: int = 0) -> Task:
    """Three clients, each with points about a line of its own; gradients are exact."""
    rng = np.random.default_rng([seed, 1])
    x = np.concatenate([centre + rng.uniform(-1, 1, POINTS) for centre in CENTRES])
    y = np.concatenate([np.full(POINTS, a) for a, _ in LINES]) * x + np.repeat([b for _, b in LINES], POINTS)
    y += NOISE * rng.standard_normal(len(y))
    model = nn.Linear(1, 1, dtype=torch.float64)
    with torch.no_grad():
        model.weight.fill_(START[0])
        model.bias.fill_(START[1])
    shards = np.arange(len(x)).reshape(len(LINES), POINTS)
    data = (torch.from_numpy(x)[:, None], torch.from_numpy(y)[:, None])
    return Task(model, functional.mse_loss, data, list(shards), batch_size=None, name="regression")


def least_squares(x: Points, y: Points) -> Points:
    """(a, b) of the line with the least squared error."""
    return np.asarray(np.linalg.lstsq(np.stack([x, np.ones_like(x)], axis=1), y, rcond=None)[0], np.float64)


def path(name: str, task: Task) -> Points:
    """The server's (a, b) after every round, [1 + rounds, 2]. A round of FedLin is two commits."""
    each = 2 if name == "fedlin" else 1
    method = {"name": name, "client_lr": RATE, "weights": "size", **PATHS[name]}
    made = build(Experiment(
        method=method, task=task, fleet={"name": "equal", "local_steps": list(STEPS)}, device="cpu",
        precision="float64", until={"commits": each * ROUNDS}, evaluate={"every_commits": 1},
    ))  # fmt: skip
    engine = made.engine()
    places = [engine.server.model.clone()]
    places += [engine.server.model.clone() for _ in engine.commits(made.horizon(made.clock()))]
    points: Points = torch.stack(places)[::each].numpy()
    return points


def walk(name: str) -> Callable[[Run], Record]:
    def job(run: Run) -> Record:
        task = regression()
        optimum = least_squares(*(column[:, 0].numpy() for column in task.data))
        line = path(name, task)
        distance = float(np.linalg.norm(line[-1] - optimum))
        return {"values": {"distance": distance}, "failed": None, "path": line.tolist(), "optimum": optimum.tolist()}

    return job


def paths(recipe: Recipe, records: Records, picture: Path) -> list[Path]:
    task = regression()
    x, y = (column[:, 0].numpy() for column in task.data)

    def loss(a: Points, b: Points) -> Any:
        return ((a[..., None] * x + b[..., None] - y) ** 2).mean(axis=-1)

    own = np.array([least_squares(x[shard], y[shard]) for shard in task.shards])
    marks = {"global optimum": least_squares(x, y), "clients' optima": own}
    lines = {name: np.array(runs[0]["path"]) for name, runs in records.items()}
    return [plots.paths(lines, picture, loss, marks, ("a", "b"))]


# ---- a9a ----------------------------------------------------------------------------------------
def problem(run: Run) -> Task:
    """The task, looked at on its training set: the objective itself."""
    options: dict[str, Any] = {"clients": 20, "split": SPLITS["dp1"], "batch_size": 20, "model": "logistic"}
    return replace(build_task("digits" if run.size == "smoke" else "a9a", options, run.seed), test=None)


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


def inconsistency(method: str) -> Training:
    return Training(method_table("a9a", method), problem, {"name": "equal", "local_steps": gaussian(500, 10000,
    "fixed")},
                    {"commits": 100}, {"every_commits": 5}, client_steps=100 * 20 * 500, pace="lr")  # fmt: skip


def gap(method: str) -> Callable[[Run], Record]:
    def job(run: Run) -> Record:
        best = least(problem(run))
        record = train(inconsistency(method), run, f"a9a {method} seed {run.seed}")
        above = [[row[0], row[3] - best] for row in record["curve"] if row[3] is not None]
        end = record["values"]["loss"]
        return record | {"optimum": best, "gaps": above,
                         "values": record["values"] | {"gap": None if end is None else end - best}}  # fmt: skip

    return job


def gaps(recipe: Recipe, records: Records, picture: Path) -> list[Path]:
    lines = {name: [tuple(point) for point in runs[0]["gaps"]] for name, runs in records.items()}
    return [plots.falling(lines, picture, "rounds", "training loss above the optimum")]


RECIPES = (
    Recipe(
        "fedagrac-a9a", "Objective inconsistency on a9a: training loss above the optimum after 100 rounds",
        "a9a, logistic regression: how far each method's training loss stays above the optimum, after equal rounds.",
        ("method",), tuple(Cell(name, gap(name), priority=3, client_steps=100 * 20 * 500,
        pace="lr") for name in METHODS),
        ("gap", "accuracy"), picture=gaps,
    ),
    Recipe(
        "fedagrac-fig1", f"FedaGrac Figure 1: distance to the global optimum after {ROUNDS} rounds",
        "Figure 1: the path of a line's two parameters, three clients with unequal lines and steps, six methods.",
        ("method",), tuple(Cell(name, walk(name), priority=3, client_steps=ROUNDS * 28,
        pace="quadratic") for name in PATHS),
        ("distance",), seeds=1, picture=paths, small_table=False,
    ),
)  # fmt: skip
