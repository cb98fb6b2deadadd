"""The experiments of the FedaGrac paper (sections 1, 4 and 6): Tables 1, 2 and 6, Figures 2 to 5.

What the paper does not say, and what we take: the batch on Fashion-MNIST (`BATCH`), the steps under step asynchronism
there (`ASYNC`; it says at least 100), its non-i.i.d. split (`NON_IID`), lambda where it is not an axis and
which of its three rates each method has in Table 6 (`WORLDS`; `fedagrac-rates` runs all), the speeds behind Table 2
(`DEVICES`) and the times behind Figure 5 (`STEP_SECONDS`, `MBIT`, `PROXIMAL_COST`). Pixels are standardised, all
clients take part in every round, means are weighted by size (equation 1), and a model is looked at after every round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from statistics import mean
from typing import Any, NamedTuple

from offbeat.papers import agreement
from offbeat.papers.recipe import Cell, Recipe, Record, Run, Stated, Training
from offbeat.papers.runner import train

BATCH = 25
CONSTANT = {"law": "constant", "value": 100}
ASYNC = {"law": "uniform", "low": 100, "high": 400}
STEPS = {"constant": CONSTANT, "various": ASYNC}
NON_IID = {"name": "classes", "per_client": 1}
SPLITS: dict[str, Any] = {"dp1": {"name": "dirichlet", "alpha": 0.3}, "dp2": {"name": "classes", "per_client": 5}}
METHODS = ("fedagrac", "local-sgd", "fednova", "scaffold", "fedprox")  # in the order of Table 6; local-sgd is FedAvg
TRANSITS = ("fedagrac", "fedagrac-avg", "fedagrac-first", "fedagrac-reverse")


class World(NamedTuple):
    """A data set and a model, how many clients have it, and the rates that go with it."""

    data: str
    model: str
    clients: int
    batch: int
    pace: str
    rate: float
    calibration: float
    proximal: float  # of 1, .1 and .01


WORLDS = {
    "lr": World("fashion-mnist", "logistic", 10, BATCH, "lr", 0.001, 1.0, 0.1),
    "cnn": World("fashion-mnist", "fedagrac-cnn", 10, BATCH, "cnn", 0.03, 0.05, 0.1),
    "a9a": World("a9a", "logistic", 20, 20, "lr", 0.005, 1.0, 0.1),
    "alexnet": World("cifar10", "alexnet", 20, 25, "alexnet", 0.01, 0.05, 0.01),
    "vgg19": World("cifar10", "vgg19", 20, 25, "vgg19", 0.01, 0.05, 0.01),
}
TABLE_1_RATES = tuple(Stated("method.client_lr", (rate,), "Table 1: rates of LR and CNN, also of Table 2, Figures 2 "
                                                          "and 3",
                             world) for world, rate in (("lr", 0.001), ("cnn", 0.03)))  # fmt: skip
BOX = Stated("method.first", ("gradient", None), "Algorithm 1, line 14: the first stochastic gradient")
BATCHES = tuple(Stated("task.batch_size", (size,), "6.1: batches of 25 (CIFAR-10) and 20 (a9a)", world)
                for world, size in (("alexnet", 25), ("a9a", 20)))  # fmt: skip


def method_table(world: str, name: str, rate: float | None = None, calibration: Any = None) -> dict[str, Any]:
    """A method with the rates of its world, or with those given."""
    own: dict[str, Any] = {"n": None} if name == "local-sgd" else {}
    if name == "fedprox":
        own["proximal"] = WORLDS[world].proximal
    elif name in TRANSITS:
        own["calibration"] = WORLDS[world].calibration if calibration is None else calibration
        own["first"] = "gradient"
    return {"name": name, "client_lr": WORLDS[world].rate if rate is None else rate, "weights": "size", **own}


def gaussian(average: int, variance: int, mode: str) -> dict[str, Any]:
    if variance == 0:
        return {"law": "constant", "value": average}
    return {"law": "gaussian", "mean": average, "variance": variance, "mode": mode}


def mean_steps(law: Mapping[str, Any]) -> float:
    return mean(float(law[name]) for name in ("value", "mean", "low", "high", "slow", "fast") if name in law)


def training(
    world: str, split: Any, steps: Mapping[str, Any], method: Mapping[str, Any], rounds: int,
    target: float | None = None, **fleet: Any,
) -> Training:  # fmt: skip
    at = WORLDS[world]
    task = {"name": at.data, "model": at.model, "clients": at.clients, "split": split, "batch_size": at.batch}
    task |= {} if at.data == "a9a" else {"scale": "standard"}
    until = {"commits": rounds} | ({} if target is None else {"accuracy": target})
    return Training(
        method, task, {"name": "equal", "local_steps": steps, **fleet}, until,
        targets=() if target is None else (target,),
        client_steps=rounds * at.clients * mean_steps(steps), pace=at.pace,
    )  # fmt: skip


# ---- Tables 1 and 6: rounds to a target ---------------------------------------------------------
LIMIT = 1000
CASES = {"neither": (CONSTANT, "iid"), "step-async": (ASYNC, "iid"), "non-iid": (CONSTANT, NON_IID),
         "both": (ASYNC, NON_IID)}  # fmt: skip
ROUNDS = {"lr": (2, 1, 91, math.inf), "cnn": (20, 8, 265, 339)}
TARGET = {("alexnet", "dp1"): 0.68, ("alexnet", "dp2"): 0.7, ("vgg19", "dp2"): 0.8}
WITHIN, MEAN, NEVER = 200, 500, math.inf
LEVELS = ((0, "fixed"), (100, "fixed"), (100, "random"), (10000, "fixed"), (10000, "random"))
TABLE_6: dict[tuple[str, str], tuple[tuple[float, ...], ...]] = {  # by LEVELS and METHODS
    ("alexnet", "dp1"): ((113, 123, 127, 113, 145), (106, 130, 147, 114, 144), (116, 140, 154, 133, 140),
                         (126, 156, 172, 141, 142), (121, 177, 170, 136, 152)),
    ("alexnet", "dp2"): ((152, 183, 186, 160, 147), (111, 179, 119, 124, 143), (112, NEVER, 195, 137, 141),
                         (111, NEVER, 113, 131, 145), (118, NEVER, NEVER, 123, 152)),
    ("vgg19", "dp2"): ((73, 83, 79, 72, 90), (73, 75, 72, 66, 72), (73, 85, 74, 78, 102),
                       (77, 73, 70, 72, 77), (71, 85, 76, 72, 99)),
}  # fmt: skip
RATES, CALIBRATIONS = (0.01, 0.008, 0.005), (0.01, 0.02, 0.03, 0.04, 0.05)


def table6(model: str, split: str, variance: int, mode: str, method: str, **rates: Any) -> Training:
    """One run of Table 6."""
    steps, table = gaussian(MEAN, variance, mode), method_table(model, method, **rates)
    return training(model, SPLITS[split], steps, table, WITHIN, TARGET[model, split])


def table6_cells() -> list[Cell]:
    """AlexNet with DP2 first, then DP1, VGG-19 last; the largest variance first."""
    cells = []
    for (model, split), by_level in TABLE_6.items():
        for (variance, mode), figures in zip(LEVELS, by_level, strict=True):
            priority = {"dp2": 6, "dp1": 7}[split] + 2 * (model == "vgg19") + (variance != 10000 or mode != "fixed")
            cells += [Cell(f"{model} {split} v{variance} {mode} {method}", table6(model, split, variance, mode, method),
                           {"rounds": value}, priority) for method, value in zip(METHODS, figures,
                           strict=True)]  # fmt: skip
    return cells


SECTION_6 = (
    BATCHES[0], BOX,
    Stated("task.clients", (20,), "6.1: 20 cores act as clients"),
    Stated("task.split.alpha", (0.3,), "6.1: DP1 is Dirichlet 0.3", "dp1"),
    Stated("task.split.per_client", (5,), "6.1: DP2 has 5 classes on each client", "dp2"),
)  # fmt: skip
RATES_6 = (
    Stated("method.client_lr", RATES, "6.1: {0.01, 0.008, 0.005} for AlexNet and VGG-19"),
    Stated("method.calibration", (*CALIBRATIONS, None), "6.2: lambda from {0.01, ..., 0.05}"),
    Stated("method.proximal", (1, 0.1, 0.01, None), "6.1: {1, 0.1, 0.01}"),
    Stated("task.model", ("alexnet", "vgg19"), "Tables 4 and 5; the paper has no augmentation"),
    Stated("until.commits", (200,), "Table 6: a maximum of 200 rounds"),
)


def tuned_cells() -> list[Cell]:
    """All rates that section 6.1 lets a method choose from, in the setting where methods differ most."""
    cells = [Cell(f"{method} rate={rate:g} lambda=.05", table6("alexnet", "dp2", 10000, "fixed", method, rate=rate),
                  priority=8) for method in METHODS for rate in RATES if rate != RATES[0]]  # fmt: skip
    return cells + [
        Cell(f"fedagrac rate=.01 lambda={value:g}", table6("alexnet", "dp2", 10000, "fixed", "fedagrac",
        calibration=value),
             priority=8) for value in CALIBRATIONS[:-1]
    ]  # fmt: skip


# ---- Table 2: one fast device among nine slow ones ----------------------------------------------
# Single-precision lanes and their clock in GHz, from the makers' data sheets: CUDA cores at boost clock (34.1, 13.4,
# 11.3 and 0.24 TFLOP/s); four Cortex-A72 with 4 lanes each (0.048 TFLOP/s). Only ratios matter.
FAST = (10240, 1.665)  # RTX 3080 Ti, "GTX 3080Ti" in the paper
DEVICES = {
    "raspberry-pi-4": (16, 1.5),
    "jetson-nano": (128, 0.9216),
    "gtx-1080-ti": (3584, 1.582),
    "rtx-2080-ti": (4352, 1.545),
}
SLOW = 10  # local steps of a slow device
FIRST, LATER, ENOUGH, LESS = 50, 100, 0.6, 5  # rounds to reach so much in, rounds in all; the deduction, in %
TABLE_2 = {  # utilisation in %, rounds to 60 %, accuracy after 100 rounds
    "raspberry-pi-4": {"fednova": (25, 49, 0.6618), "fedagrac": (100, 25, 0.7207)},
    "jetson-nano": {"fednova": (50, 50, 0.6439), "fedagrac": (100, 21, 0.7293)},
    "gtx-1080-ti": {"fednova": (100, 40, 0.6977), "fedagrac": (100, 30, 0.7200)},
    "rtx-2080-ti": {"fednova": (100, 29, 0.7211), "fedagrac": (100, 36, 0.7213)},
}


def speed_ratio(device: str) -> float:
    lanes, clock = DEVICES[device]
    return FAST[0] * FAST[1] / (lanes * clock)


def utilisation(device: str, method: str) -> Callable[[Run], Record]:
    """From 100 % downwards by 5 %: the largest share of the fast device with which 60 % is reached in 50 rounds."""

    def attempt(share: int, rounds: int, target: float | None) -> Training:
        steps = {"law": "extreme", "slow": SLOW, "fast": max(1, round(SLOW * speed_ratio(device) * share / 100))}
        return training("cnn", NON_IID, steps, method_table("cnn", method), rounds, target)

    def job(run: Run) -> Record:
        tried = range(100, 0, -LESS)[: 2 if run.size == "smoke" else None]
        for share in tried:
            record = train(attempt(share, FIRST, ENOUGH), run, f"{device} {method} {share} %")
            if (at := record["values"]["rounds"]) is not None:
                whole = train(attempt(share, LATER, None), run, f"{device} {method} {share} %, {LATER} rounds")
                values = {"utilisation": share, "rounds": at, "accuracy": whole["values"]["accuracy"]}
                return whole | {"values": values, "tried": [*range(100, share - 1, -LESS)]}
        return {"values": {"utilisation": 0, "rounds": None, "accuracy": None}, "failed": None, "tried": [*tried]}

    return job


def table2_cells() -> list[Cell]:
    steps = {"fednova": 5.0, "fedagrac": 2.0}  # attempts of 100 % that the search is about worth
    return [
        Cell(f"{device} {method}", utilisation(device, method),
             dict(zip(("utilisation", "rounds", "accuracy"), figures, strict=True)),
             5 if speed_ratio(device) < 200 else 9,
             client_steps=steps[method] * FIRST * SLOW * speed_ratio(device), pace="sequential")
        for device, by_method in TABLE_2.items() for method, figures in by_method.items()
    ]  # fmt: skip


# ---- Figures 2 to 5 -----------------------------------------------------------------------------
LAMBDAS = (0, 0.01, 0.05, 0.1, 0.2, 0.5, 1)
INCREASE = {"schedule": "stages", "values": [0.1, 0.5, 1.0], "at": [50, 150]}
FIG_2 = {"various": LAMBDAS, "constant": (0, 0.1, 0.5, 1, "increase")}
ETAS, GRID = (0.1, 0.05, 0.01, 0.005, 0.001, 0.0005), (0, 0.01, 0.05, 0.1, 0.5, 1)
MEANS, VARIANCE = (500, 1000), 10000
STEP_SECONDS = {"alexnet": 0.01, "a9a": 0.001}
PROXIMAL_COST = {"alexnet": 1.05, "a9a": 1.3}  # of a step of FedProx, in steps of FedAvg: a pass over the model more
MBIT = 100.0  # each way: 2.3 s for a vector of AlexNet's 28.9 MB, beside about 7 s for 700 steps


def fig2_cells() -> list[Cell]:
    return [
        Cell(f"{steps} lambda={value}", training("cnn", NON_IID, STEPS[steps], method_table(
            "cnn", "fedagrac", calibration=INCREASE if value == "increase" else value), 200), priority=4)
        for steps, values in FIG_2.items() for value in values
    ]  # fmt: skip


def fig3_cells() -> list[Cell]:
    return [Cell(f"{world} {steps} {name}", training(world, NON_IID, law, method_table(world, name), 200), priority=3)
            for steps, law in STEPS.items() for world in ("lr", "cnn") for name in TRANSITS]  # fmt: skip


def fig4_cells() -> list[Cell]:
    return [
        Cell(f"{world} {steps} eta={eta:g} lambda={value:g}", training(
            world, SPLITS["dp1"], gaussian(MEAN, variance, "fixed"), method_table(world, "fedagrac", eta, value), 100),
            priority=5 if world == "a9a" else 9)
        for steps, variance in (("constant", 0), ("various", VARIANCE)) for world in ("a9a", "alexnet")
        for eta in ETAS for value in GRID
    ]  # fmt: skip


def fig5_cells() -> list[Cell]:
    cells = []
    for world, split in (("a9a", "dp1"), ("alexnet", "dp2")):
        for average in MEANS:
            for name in METHODS:
                step = STEP_SECONDS[world] * (PROXIMAL_COST[world] if name == "fedprox" else 1.0)
                made = training(world, SPLITS[split], gaussian(average, VARIANCE, "fixed"), method_table(world, name),
                200,
                                step_seconds=step, mbit=MBIT)  # fmt: skip
                cells.append(Cell(f"{world} mean={average} {name}", made, priority=4 if world == "a9a" else 9))
    return cells


RECIPES = (
    Recipe(
        "fedagrac-table1", "FedaGrac Table 1: rounds of FedAvg to 80 %",
        "Table 1: rounds of FedAvg to 80 % on Fashion-MNIST, with and without step asynchronism and non-i.i.d. data.",
        ("model", "case"),
        tuple(Cell(f"{world} {case}", training(world, split, steps, method_table(world, "local-sgd"), LIMIT, 0.8),
                   {"rounds": figure}, 2) for world, figures in ROUNDS.items()
              for (case, (steps, split)), figure in zip(CASES.items(), figures, strict=True)),
        ("rounds",), "case", ("model",),
        stated=(*TABLE_1_RATES, Stated("task.clients", (10,), "Table 1: 10 devices"),
                Stated("targets", ((0.8,),), "Table 1: 80 %"),
                Stated("fleet.local_steps.value", (100, None), "Table 1: 100 updates without step asynchronism"),
                Stated("fleet.local_steps.low", (100, None), "Table 1: at least 100 under it")),
        notes=("Within 1,000 rounds. The paper says neither the batch (25 here), nor the split (one class for each "
               "client), nor the law of steps (uniform, 100 to 400). With its rate .001 LR needs 40 rounds here for "
               "the first column, where the paper has 2; .02 gives 3: see `questions`.",),
    ),
    Recipe(
        "fedagrac-table2", "FedaGrac Table 2: utilisation of one fast device",
        "Table 2: how much of one fast device FedNova and FedaGrac can use beside nine slow ones, CNN, Fashion-MNIST.",
        ("device", "method"), tuple(table2_cells()), ("utilisation", "rounds", "accuracy"), few=("jetson-nano",),
        notes=(f"Slow devices take {SLOW} steps a round, the fast one {SLOW} x ratio x utilisation; ratios of peak "
               "single-precision rates: " + ", ".join(f"{device} {speed_ratio(device):.3g}" for device in DEVICES),),
    ),
    Recipe(
        "fedagrac-table6", "FedaGrac Table 6: rounds to the target",
        "Table 6: rounds of five methods to a target on CIFAR-10; AlexNet and VGG-19, steps of three variances.",
        ("model", "split", "variance", "mode", "method"), tuple(table6_cells()), ("rounds",), "method", ("model",
        "split"),
        1, ("alexnet dp2", "v0", "v10000", "fedagrac", "fedprox"), (*SECTION_6, *RATES_6),
        ("Rate .01 for all, lambda = .05, mu = .01, of the sets that the paper chooses from; no augmentation.",),
    ),
    Recipe(
        "fedagrac-rates", "FedaGrac, section 6.1: rates of Table 6",
        "Section 6.1: the rates and lambdas that Table 6 chooses from, AlexNet, DP2, V = 10000.",
        ("method", "rate", "lambda"), tuple(tuned_cells()), ("rounds", "best"), "rate", seeds=1, few=("fedprox",),
        stated=(*RATES_6[:3], BOX),
    ),
    Recipe(
        "fedagrac-fig2", "FedaGrac Figure 2: accuracy after 200 rounds by lambda",
        "Figure 2: accuracy of the CNN on Fashion-MNIST after 200 rounds against the calibration rate lambda.",
        ("steps", "lambda"), tuple(fig2_cells()), ("accuracy", "best"), seeds=1,
        stated=(Stated("method.client_lr", (0.03,), "Table 1's caption"), BOX,
                Stated("until.commits", (200,), "Figure 2: after 200 rounds")),
        picture=agreement.points("lambda", "accuracy"), small_table=False,
    ),
    Recipe(
        "fedagrac-fig3", "FedaGrac Figure 3: which gradient is sent",
        "Figure 3: four rules on which gradient a client sends, LR and CNN on Fashion-MNIST, K constant and various.",
        ("model", "steps", "method"), tuple(fig3_cells()), ("accuracy", "best"), apart=("model",), few=("various",),
        stated=(*TABLE_1_RATES, BOX), picture=agreement.curves(("method",)), small_table=False,
    ),
    Recipe(
        "fedagrac-fig4", "FedaGrac Figure 4: mean accuracy of the last 10 of 100 rounds by eta and lambda",
        "Figure 4: accuracy by rate eta and calibration rate lambda, LR on a9a and AlexNet on CIFAR-10, DP1.",
        ("model", "steps", "eta", "lambda"), tuple(fig4_cells()), ("last 10",), "lambda", ("model",), 1,
        ("eta=0.1", "eta=0.0005", "lambda=0", "lambda=1"),
        (*BATCHES, BOX, Stated("task.split.alpha", (0.3,), "Figure 4: DP1"),
         Stated("until.commits", (100,), "Figure 4: 100 rounds"),
         Stated("fleet.local_steps.mean", (500, None), "Figure 4: mean 500"),
         Stated("fleet.local_steps.variance", (10000, None), "Figure 4: variance 10000")),
        picture=agreement.heat_maps("eta", "lambda", "last 10"), small_table=False,
    ),
    Recipe(
        "fedagrac-fig5", "FedaGrac Figure 5: accuracy over time and rounds",
        "Figure 5: accuracy over time and rounds, AlexNet with DP2 and LR on a9a with DP1, steps of two means.",
        ("model", "mean", "method"), tuple(fig5_cells()), ("accuracy", "best", "total hours"), apart=("model",),
        few=("mean=500", "fedagrac", "fedprox", "local-sgd"),
        stated=(*BATCHES, BOX, Stated("until.commits", (200,), "Figure 5: 200 rounds"),
                Stated("fleet.local_steps.variance", (10000,), "Figure 5: the fixed variance of 10000"),
                Stated("fleet.local_steps.mode", ("fixed",), "Figure 5: fixed and initialised at the beginning")),
        notes=(f"Steps take {STEP_SECONDS['alexnet']} s (AlexNet) and {STEP_SECONDS['a9a']} s (LR), those of FedProx "
               f"{PROXIMAL_COST['alexnet']} and {PROXIMAL_COST['a9a']} times as long, because its pull is a pass over "
               f"the model more; links carry {MBIT:g} Mbit/s each way; fedagrac and scaffold send two vectors each "
               "way, the others one. The paper gives no means and no times.",),
        picture=agreement.curves(("method",), ("virtual_seconds", "commits")), small_table=False,
    ),
)  # fmt: skip
