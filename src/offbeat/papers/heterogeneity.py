"""The experiments of the FedAvg paper on heterogeneity (section 6, appendix C): Tables 1, 2, 3, C.1, C.2, the figures.

"A new theoretical perspective on data heterogeneity in federated optimization": L_h beside L-tilde and L_g, measured as
its appendix C says, and what more local steps give. Batches of 20; X % of each worker's samples have one label. What it
leaves open is chosen here and stands as a constant: standardised pixels (with [0, 1] Table C.2 ends at twice the
training loss), 200 hidden units, the path of the estimators and where it begins, and whether the estimators' gradients
are of whole shards or of batches: both are measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from offbeat.errors import ConfigError
from offbeat.experiments.assemble import build
from offbeat.papers import agreement
from offbeat.papers.recipe import Cell, Claim, Recipe, Record, Run, Stated, Training
from offbeat.papers.runner import train, watched
from offbeat.tasks.make import build_task
from offbeat.tasks.quadratic import Family, optimum, regressions
from offbeat.tasks.task import Task
from offbeat.theory import curvature
from offbeat.theory.drift import drift
from offbeat.theory.measure import flat_of, gauge_of

PERCENTS = (25, 50, 75, 100)
BATCH = 20
ETA = 2.0  # the paper's server rate in the figures and Table C.2
PIXELS = "standard"


class World(NamedTuple):
    """Which data, which model, how many workers; the paper's gamma, the rate of the path and of what leads to it."""

    data: str
    model: Any
    workers: int
    rate: float
    path_rate: float = 0.01
    start: tuple[int, int, float] = (300, 10, 0.1)  # rounds, steps, rate
    samples: int | None = None  # of each worker that the estimators look at
    pace: str = "mlp"


WORLDS = {
    "mlp": World("mnist", {"name": "mlp", "hidden": 200}, 10, 0.1),
    "linear": World("mnist", "linear", 10, 0.01, 0.001, (300, 10, 0.001), pace="lr"),
    "cnn": World("cifar10", {"name": "heterogeneity-cnn", "filters": 64}, 100, 0.05, 0.01, (40, 50, 0.05), 100,
                 "heterogeneity-cnn"),
    "vgg16": World("cinic10", "vgg16", 10, 0.01, pace="vgg16"),
    "vgg16-cifar10": World("cifar10", "vgg16", 10, 0.01, pace="vgg16"),
}  # fmt: skip
SMOKE = {"linear": "linear", "cnn": {"name": "heterogeneity-cnn", "filters": 4}}


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    """|outputs - one-hot label|^2, the mean over a batch."""
    labels = torch.arange(outputs.shape[-1], device=outputs.device)
    return (outputs - (targets[..., None] == labels).to(outputs.dtype)).square().sum(-1).mean()


def mean_squares(outputs: Tensor, targets: Tensor) -> Tensor:
    """PyTorch's MSE loss of one-hot labels: a mean over the outputs as well."""
    return squares(outputs, targets) / outputs.shape[-1]


def single(percent: float) -> dict[str, Any]:
    return {"name": "single-label", "percent": percent}


def table(world: str, split: Any) -> dict[str, Any]:
    at = WORLDS[world]
    return {"name": at.data, "model": at.model, "clients": at.workers, "batch_size": BATCH, "split": split,
            "scale": PIXELS}  # fmt: skip


def task(world: str, split: Any, run: Run, loss: Any = squares) -> Task:
    """The paper's task, or the embedded digits in its place."""
    options = table(world, split)
    name = options.pop("name")
    if run.size == "smoke":
        name = "digits"
        options |= {"model": SMOKE.get(world, {"name": "mlp", "hidden": 16}), "clients": 10}
    made = build_task(name, options, run.seed)
    return replace(made, loss=loss) if world == "linear" else made


def fedavg(world: str, split: Any, steps: int, rate: float, rounds: int, n: int | None = None, **more: Any) -> Training:
    method = {"name": "local-sgd", "n": n, "local_steps": steps, "client_lr": rate, "server_lr": more.pop("eta", ETA)}
    own: Any = table(world, split)
    if world == "linear":
        own = lambda run: task(world, split, run, mean_squares)  # noqa: E731
    many = n or WORLDS[world].workers
    return Training(method, own, "equal", {"commits": rounds}, client_steps=rounds * steps * many,
                    pace=WORLDS[world].pace, **more)  # fmt: skip


# ---- Tables 1, C.1 and 2: the constants ---------------------------------------------------------
PATH_ROUNDS, PATH_STEPS = 10, 10  # the paper's 10 rounds; neither I nor gamma is in it
CONSTANTS = ("L~", "L_h", "L_g")
PAPER: dict[str, dict[str, tuple[float, ...]]] = {
    "mlp": {"L~": (127.62, 130.97, 134.24, 141.92), "L_h": (0.35, 0.82, 1.66, 2.36), "L_g": (122.23,) * 4},
    "linear": {"L~": (2010.51, 3577.35, 20563.42, 25402.19), "L_h": (226.15, 916.20, 3172.41, 4610.54),
               "L_g": (869.07,) * 4},
    "cnn": {"L~": (447.59, 898.49, 1131.36, 1662.24), "L_h": (0.96, 1.21, 1.63, 2.15), "L_g": (323.35,) * 4},
}  # fmt: skip


@lru_cache(maxsize=1)
def beginning(world: str, run: Run) -> dict[str, Tensor]:
    """The model where every path begins: trained by all workers on the iid split of the same data."""
    rounds, steps, rate = (5, 5, WORLDS[world].start[2]) if run.size == "smoke" else WORLDS[world].start
    made = fedavg(world, "iid", steps, rate, rounds // (10 if run.size == "small" else 1), eta=1.0)
    work = replace(made, task=lambda _: task(world, "iid", run), evaluate={"every_commits": rounds})
    return watched(work.experiment(run._replace(size="full")), 0, f"{world} start, seed {run.seed}").model


def estimates(world: str, percent: int, batches: bool) -> Callable[[Run], Record]:
    """L~, L_h and L_g along the path, by gradients of whole shards or of batches; and rho of (A.1) at its beginning."""

    def job(run: Run) -> Record:
        at = WORLDS[world]
        if run.precision in ("tf32", "bf16"):  # differences of gradients need their digits
            run = run._replace(precision="float32")
        made = fedavg(world, single(percent), PATH_STEPS, at.path_rate, 1)
        held = replace(made, task=lambda _: task(world, single(percent), run))
        engine = build(held.experiment(run._replace(size="full"))).engine()
        x = flat_of(engine, dict(beginning(world, run)), "the common start")
        smoke = run.size == "smoke"
        gauge = gauge_of(engine, run.seed, 20 if smoke else at.samples)
        gauge.batch = BATCH if batches else None
        rounds, steps = (2, 3) if smoke else (PATH_ROUNDS, PATH_STEPS)
        try:
            path = curvature.path(gauge, x, rounds, steps, at.path_rate)
        except ConfigError as error:
            return {"values": dict.fromkeys(CONSTANTS), "failed": str(error)}
        by_round = {"L~": path.smoothness, "L_h^2": path.heterogeneity, "L_g": path.global_smoothness}
        values = {"L~": float(np.mean(path.smoothness)), "L_h": math.sqrt(np.mean(path.heterogeneity)),
                  "L_g": float(np.mean(path.global_smoothness)), "rho": drift(gauge, x, steps,
                  at.path_rate)}  # fmt: skip
        return {"values": values, "failed": None, "rounds": by_round}

    return job


def constants(name: str, title: str, world: str, priority: int) -> Recipe:
    at = WORLDS[world]
    looked = at.samples or 60000 // at.workers
    work = at.start[0] * at.start[1] * at.workers + PATH_ROUNDS * at.workers * (PATH_STEPS + 4 * looked / BATCH)
    cells = [Cell(f"{percent}% {gradients}", estimates(world, percent, gradients == "batches"),
                  {key: figures[place] for key, figures in PAPER[world].items()}, priority, client_steps=work,
                  pace=at.pace)
             for gradients in ("whole", "batches") for place, percent in enumerate(PERCENTS)]  # fmt: skip
    rounds, steps, rate = at.start
    return Recipe(
        f"heterogeneity-{name}", f"FedAvg, heterogeneity, {title}", f"{title}: L_h, L-tilde and L_g, 25 to 100 % of "
                                                                    f"one label.",
        ("percent", "gradients"), tuple(cells), (*CONSTANTS, "rho"), apart=("gradients",), seeds=5, few=("25%", "100%"),
        notes=(f"The path: {PATH_ROUNDS} rounds of {PATH_STEPS} steps of {at.path_rate:g}, from a model that {rounds} "
               f"rounds of {steps} steps of {rate:g} on the iid split made. Gradients over {at.samples or 'all'} "
               f"samples of each worker, or over fresh batches of {BATCH}: then the noise of batches is in the "
               "estimates. rho is (A.1). In Table 1 neither way gives all of the paper's figures: L~ and L_g are of "
               "its size with batches alone, where noise hides L_h, and L_h rises with the percentage with whole "
               "shards alone.",),
        picture=agreement.falling("percent", CONSTANTS),
    )  # fmt: skip


# ---- Table 3: L_h = 0 -----------------------------------------------------------------------------
DRAW, TARGET, DIMENSION, WORKERS = 24, 0.8, 100, 10  # which U and v_i: see `regressions`
NOISE, SAMPLES, MOST = 0.1, 20, 5000  # of b_i in every coordinate, over so many samples of each worker; rounds
SMOKE_DRAW, SMOKE_DIMENSION = 59, 10
QUADRATICS = (  # eta, gamma, I, s, the paper's rounds
    ("rates", 1, 0.005, 10, 1, 86), ("rates", 2, 0.0025, 10, 1, 86), ("rates", 5, 0.001, 10, 1, 86),
    ("rates", 10, 0.0005, 10, 1, 86), ("steps", 1, 0.005, 1, 1, 927), ("steps", 1, 0.005, 1, 5, 927),
    ("steps", 1, 0.005, 1, 10, 925), ("steps", 1, 0.005, 5, 1, 187), ("steps", 1, 0.005, 10, 1, 95),
)  # fmt: skip


def family(size: str) -> tuple[Family, float]:
    """The quadratics of Table 3 and the excess to reach; at the smoke scale in fewer dimensions, in proportion."""
    if size == "smoke":
        return regressions(WORKERS, SMOKE_DIMENSION, True, SMOKE_DRAW), TARGET * SMOKE_DIMENSION / DIMENSION
    return regressions(WORKERS, DIMENSION, True, DRAW), TARGET


def quadratic(eta: float, gamma: float, steps: int, batch: int) -> Callable[[Run], Record]:
    def job(run: Run) -> Record:
        quadratics, excess = family(run.size)
        least = quadratics.value(optimum(quadratics.matrices, quadratics.linear))
        method = {"name": "local-sgd", "n": None, "local_steps": steps, "client_lr": gamma, "server_lr": eta}
        work = Training(
            method, lambda run: replace(quadratics.task(None, NOISE, SAMPLES, run.seed), batch_size=batch), "equal",
            {"loss": least + excess, "commits": MOST}, precision="float64",
        )  # fmt: skip
        record = train(work, run._replace(size="full", device="cpu"), f"quadratics I = {steps}, seed {run.seed}")
        met = record["ended"].startswith("loss")
        values = {"rounds": record["commits"] if met else None, "excess": record["values"]["loss"] - least}
        return record | {"values": values, "curve": []}

    return job


# ---- Table C.2 and the figures --------------------------------------------------------------------
RI = tuple(range(120, 961, 120))
FIXED: dict[int, tuple[tuple[float, float], ...]] = {  # I: the paper's training loss and accuracy at each R I
    10: ((0.34, 88.84), (0.21, 93.76), (0.19, 94.01), (0.17, 94.46), (0.15, 95.05), (0.12, 96.04), (0.12, 95.90),
         (0.10, 96.49)),
    20: ((0.34, 89.38), (0.27, 91.61), (0.20, 93.72), (0.18, 94.27), (0.15, 95.47), (0.14, 95.14), (0.12, 95.71),
         (0.11, 95.95)),
    30: ((0.35, 89.70), (0.29, 90.96), (0.23, 92.57), (0.21, 93.4), (0.16, 94.63), (0.15, 94.68), (0.14, 95.06),
         (0.13, 95.50)),
    40: ((0.35, 89.45), (0.25, 90.91), (0.23, 92.80), (0.23, 92.84), (0.18, 94.22), (0.17, 94.13), (0.14, 95.17),
         (0.12, 96.06)),
}  # fmt: skip
AT_RI = tuple(f"{kind} RI={ri}" for ri in RI for kind in ("loss", "accuracy"))


def fixed_product(steps: int) -> Callable[[Run], Record]:
    def job(run: Run) -> Record:
        most = {"smoke": 120, "small": 240, "full": RI[-1]}[run.size]
        work = fedavg("mlp", single(50), steps, WORLDS["mlp"].rate, most // steps, training_looks=1)
        work = replace(work, task=lambda _: task("mlp", single(50), run), evaluate={"every_commits": RI[0] // steps})
        record = train(work, run._replace(size="full"), f"I = {steps}, seed {run.seed}")
        rows = {row[0] * steps: row for row in record["curve"] if row[0]}
        values = {f"{kind} RI={ri}": rows[ri][place] for ri in RI if ri in rows
                  for kind, place in (("loss", 4), ("accuracy", 2))}  # fmt: skip
        return record | {"values": values}

    return job


ROUNDS = 100
LOCAL = {"mlp": (10, 20, 30, 40), "linear": (5, 10, 15, 20), "cnn": (10, 20, 40, 80), "vgg16": (10, 20, 30, 40),
         "vgg16-cifar10": (10, 20, 30, 40)}  # fmt: skip


def figure_cells(world: str, priority: int, n: int | None = None, model: bool = True) -> list[Cell]:
    return [Cell(f"{world + ' ' if model else ''}{percent}% I={steps}",
                 fedavg(world, single(percent), steps, WORLDS[world].rate, ROUNDS, n, training_looks=5),
                 priority=priority) for percent in (50, 75) for steps in LOCAL[world]]  # fmt: skip


def fastest(world: str, figure: str, model: bool = True) -> list[Claim]:
    """The curve with the most local steps is the best, the paper says."""
    least, *_, most = LOCAL[world]
    named = f"{world} " if model else ""
    return [Claim(f"{figure}, {percent} %: I = {most} is the best curve", "best", f"{named}{percent}% I={most}",
                  f"{named}{percent}% I={least}") for percent in (50, 75)]  # fmt: skip


SGD = Stated("task.batch_size", (20,), "appendix C: the mini-batch size of SGD is 20")
TWO = Stated("method.server_lr", (2,), "captions of Figures 2 and C.1 to C.6: eta = 2")
RECIPES = (
    constants("table1", "Table 1: two-layer network, MNIST", "mlp", 3),
    constants("tableC1", "Table C.1: linear regression, MNIST", "linear", 3),
    constants("table2", "Table 2: CNN, CIFAR-10", "cnn", 2),
    Recipe(
        "heterogeneity-table3", "FedAvg, heterogeneity, Table 3: quadratics, L_h = 0, rounds to the target",
        "Table 3: quadratics with L_h = 0; rounds to the target by rates, local steps I and batch size s.",
        ("part", "eta", "gamma", "I", "s"),
        tuple(Cell(f"{part} eta={eta:g} gamma={gamma:g} I={steps} s={batch}", quadratic(eta, gamma, steps, batch),
                   {"rounds": paper}, 3, client_steps=paper * steps * WORKERS, pace="quadratic")
              for part, eta, gamma, steps, batch, paper in QUADRATICS),
        ("rounds", "excess"), apart=("part",), seeds=5,
        notes=(f"Rounds until f - min f <= {TARGET:g}, from 0, in float64: the mean of 1/2 |U x - v_i|^2 itself is "
               "never near 0.8 (it has a floor near 45), so the paper's target can only be the excess. Columns of U "
               f"have length 1; {WORKERS} workers (not said there) with {SAMPLES} samples each, whose v_i differ by "
               f"noise of {NOISE:g}. The number of rounds depends on the draw of U and v_i (500 to 3,800 among seeds "
               f"0 to 11); draw {DRAW} comes near 927. (1, .005) with I = 10 has 86 rounds in one half of the paper's "
               "table and 95 in the other.",),
        picture=agreement.points("I", "rounds"),
    ),
    Recipe(
        "heterogeneity-tableC2", "FedAvg, heterogeneity, Table C.2: training loss and test accuracy at equal R I",
        "Table C.2: training loss and test accuracy of the two-layer network on MNIST, 50 %, at equal R I.",
        ("I",), tuple(Cell(f"I={steps}", fixed_product(steps), {
            f"{kind} RI={ri}": value for ri, pair in zip(RI, figures, strict=True)
            for kind, value in (("loss", pair[0]), ("accuracy", pair[1] / 100))}, 3, client_steps=960 * 10, pace="mlp")
            for steps, figures in FIXED.items()),
        AT_RI, "I", seeds=5, few=("I=10", "I=40"), notes=("eta = 2, gamma = 0.1, 50 % of one label, 10 workers, all "
                                                          "take part.",),
    ),
    Recipe(
        "heterogeneity-fig2", "FedAvg, heterogeneity, Figure 2: CNN, CIFAR-10",
        "Figure 2: the CNN on CIFAR-10, 10 of 100 workers a round; 50 and 75 %, up to I = 80.",
        ("percent", "I"), tuple(figure_cells("cnn", 2, 10, False)), ("training loss", "best"), seeds=5,
        few=("50%", "I=10"), claims=tuple(fastest("cnn", "Figure 2", False)),
        stated=(SGD, TWO, Stated("method.client_lr", (0.05,), "Figure 2: gamma = 0.05"),
                Stated("task.clients", (100,), "section 6: 100 workers"),
                Stated("method.n", (10,), "section 6: 10 workers are sampled in each round")),
        notes=("Of the I the text names 80 alone; 10, 20 and 40 are ours, and so are 100 rounds.",),
        picture=agreement.curves(("I",), losses=True), small_table=False,
    ),
    Recipe(
        "heterogeneity-figC", "FedAvg, heterogeneity, Figures C.1 to C.6",
        "Figures C.1 to C.6: MNIST, two-layer network and linear regression; CINIC-10, VGG-16 (or CIFAR-10 for it).",
        ("model", "percent", "I"),
        (*figure_cells("mlp", 3), *figure_cells("linear", 3), *figure_cells("vgg16", 9),
        *figure_cells("vgg16-cifar10", 9)),
        ("training loss", "best"), apart=("model",), seeds=5, few=("mlp", "linear", "75%", "I=20"),
        claims=(*fastest("mlp", "C.1, C.2"), *fastest("linear", "C.3, C.4")),
        stated=(TWO, Stated("method.client_lr", (0.1,), "Figures C.1, C.2: gamma = 0.1", "mlp"),
                Stated("method.client_lr", (0.01,), "Figures C.3, C.4: gamma = 0.01", "linear"),
                Stated("method.client_lr", (0.01,), "Figures C.5, C.6: gamma = 0.01", "vgg16"),
                Stated("method.n", (None,), "appendix C: all workers perform the local updates")),
        notes=("Of the I the text names the largest alone, 40 and 20; the others and 100 rounds are ours. Figures "
               "C.5 and C.6 are of CINIC-10: vgg16 reads it where it is there; vgg16-cifar10 is a stand-in on "
               "CIFAR-10.",),
        picture=agreement.curves(("I",), losses=True), small_table=False,
    ),
)  # fmt: skip
