"""The experiments of the FedaGrac paper (sections 1, 4 and 6): Tables 1, 2 and 6, Figures 1 to 5.

What the paper does not say, and what we take: the batch on Fashion-MNIST (`BATCH`), the steps under step asynchronism
there (`ASYNC`; it says at least 100), its non-i.i.d. split (`NON_IID`), lambda where it is not an axis (`CALIBRATION`),
the rates of Table 6 (`RATE`; it picks the best of .01, .008 and .005 for each method), the lines of Figure 1, the
speeds behind Table 2 (`DEVICES`) and the times behind Figure 5 (`STEP_SECONDS`, `MBIT`). Pixels are standardised, all
clients take part in every round, means are weighted by size (equation 1), and a model is looked at after every round.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

from offbeat.assemble import build
from offbeat.config import Experiment
from offbeat.errors import ConfigError
from offbeat.papers.recipe import Made, Settings, TableMade, begun, pick, run_cell, write
from offbeat.runs import plots, report
from offbeat.runs.loop import Outcome
from offbeat.tasks.task import Task

BATCH = 25
CONSTANT = {"law": "constant", "value": 100}
ASYNC = {"law": "uniform", "low": 100, "high": 400}
STEPS = {"constant": CONSTANT, "various": ASYNC}
NON_IID = {"name": "classes", "per_client": 1}
SPLITS: dict[str, Any] = {"dp1": {"name": "dirichlet", "alpha": 0.3}, "dp2": {"name": "classes", "per_client": 5}}
METHODS = ("fedagrac", "local-sgd", "fednova", "scaffold", "fedprox")  # in the order of Table 6; local-sgd is FedAvg
TRANSITS = ("fedagrac", "fedagrac-avg", "fedagrac-first", "fedagrac-reverse")
AUGMENT = True  # CIFAR-10 with random crops and mirror images: not in the paper, but in the authors' published code
CUT = {"full": (1, 10**6), "small": (10, 10), "smoke": (100, 3)}  # what steps are divided by, and the most rounds


class World(NamedTuple):
    """A data set and a model, and how many clients have it."""

    data: str
    model: str
    clients: int
    batch: int


WORLDS = {
    "lr": World("fashion-mnist", "logistic", 10, BATCH),
    "cnn": World("fashion-mnist", "fedagrac-cnn", 10, BATCH),
    "a9a": World("a9a", "logistic", 20, 20),
    "alexnet": World("cifar10", "alexnet", 20, 25),
    "vgg19": World("cifar10", "vgg19", 20, 25),
}
RATE: dict[str, dict[str, float]] = {  # Table 1 for Fashion-MNIST; else section 6.1 gives three to choose from
    "lr": dict.fromkeys(
        (*METHODS, *TRANSITS), 0.02
    ),  # with the .001 of Table 1's caption "neither" takes 40 rounds, not 2
    "cnn": dict.fromkeys((*METHODS, *TRANSITS), 0.03),
    "a9a": {"fedagrac": 0.005, "local-sgd": 0.005, "fednova": 0.005, "scaffold": 0.005, "fedprox": 0.005},
    "alexnet": dict.fromkeys(METHODS, 0.05),  # the best in Figure 4; with .01 FedAvg is at 46 % after 40 rounds
    "vgg19": {"fedagrac": 0.01, "local-sgd": 0.01, "fednova": 0.01, "scaffold": 0.01, "fedprox": 0.01},
}
CALIBRATION = {"lr": 1.0, "cnn": 0.05, "a9a": 1.0, "alexnet": 0.2, "vgg19": 0.05}  # section 6.2 has 1, and .01 to .05
EARLY = {"alexnet": "epoch", "vgg19": "epoch"}  # as in the authors' code where a pass over the data ends within a round
PROXIMAL = {"lr": 0.1, "cnn": 0.1, "a9a": 0.1, "alexnet": 0.01, "vgg19": 0.01}  # of 1, .1 and .01


@dataclass(frozen=True)
class Trial:
    """One run: where, of what, with how many local steps, how long."""

    world: str
    split: Any
    steps: Mapping[str, Any]
    method: Mapping[str, Any]
    rounds: int
    target: float | None = None  # where it stops
    fleet: Mapping[str, Any] = field(default_factory=dict)  # options of fleet "equal"


def method_table(world: str, name: str, rate: float | None = None, calibration: Any = None) -> dict[str, Any]:
    """A method with the rates of its world, or with those given."""
    own: dict[str, Any] = {"n": None} if name == "local-sgd" else {}
    if name == "fedprox":
        own["proximal"] = PROXIMAL[world]
    elif name in TRANSITS:
        own["calibration"] = CALIBRATION[world] if calibration is None else calibration
        own["first"] = EARLY.get(world, "gradient")
    return {"name": name, "client_lr": RATE[world][name] if rate is None else rate, "weights": "size", **own}


def gaussian(average: int, variance: int, mode: str) -> dict[str, Any]:
    if variance == 0:
        return {"law": "constant", "value": average}
    return {"law": "gaussian", "mean": average, "variance": variance, "mode": mode}


def experiment(trial: Trial, settings: Settings, seed: int) -> Experiment:
    """`smoke` trains on the embedded digits for a few short rounds; `small` is the paper's task with short rounds."""
    world, (by, most) = WORLDS[trial.world], CUT[settings.scale]
    task: dict[str, Any] = {"name": world.data, "model": world.model, "clients": world.clients, "split": trial.split}
    task |= {"batch_size": world.batch, **({} if world.data == "a9a" else {"scale": "standard"})}
    if world.data == "cifar10" and AUGMENT:
        task["model"] = {"name": world.model, "augment": True}
    if settings.scale == "smoke":
        task |= {"name": "digits", "model": "logistic" if world.model == "logistic" else {"name": "mlp", "hidden": 16}}
    until: dict[str, float] = {"commits": min(trial.rounds, most)}
    if trial.target is not None:
        until["accuracy"] = trial.target
    return Experiment(
        method=trial.method, task=task, fleet={"name": "equal", "local_steps": divided(trial.steps, by), **trial.fleet},
        seed=seed, device=settings.device, precision=settings.precision, until=until, evaluate={"every_commits": 1},
    )  # fmt: skip


def divided(law: Mapping[str, Any], by: int) -> dict[str, Any]:
    """A step law whose numbers are so many times smaller."""
    return {name: value if isinstance(value, str) or by == 1 else value / by**2 if name == "variance"
            else max(1, round(value / by)) for name, value in law.items()}  # fmt: skip


def ran(label: str, trial: Trial, settings: Settings, made: Made) -> list[Outcome]:
    """The trial with every seed; its figures and curves ([virtual seconds, accuracy] by round) are kept."""
    outcomes = []
    for seed in range(settings.seeds):
        outcome = run_cell(experiment(trial, settings, seed), f"{label} seed {seed}")
        curve = [[round(row["virtual_seconds"], 3), round(row["accuracy"], 5)] for row in outcome.metrics]
        made.figures.append({"cell": label, **outcome.result, "options": dict(trial.method), "curve": curve})
        outcomes.append(outcome)
    return outcomes


def played(
    trials: Mapping[str, Trial], settings: Settings, made: Made, name: str
) -> Iterator[tuple[str, Trial, list[Outcome]]]:
    """Run what --only lets through; the files are written after every cell, so that a cut run keeps what it has."""
    for label, trial in chosen(trials, settings).items():
        yield label, trial, ran(label, trial, settings, made)
        write(made, settings, name)


def chosen(trials: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    if settings.n:
        raise ConfigError([f"--n {settings.n[0]}; in the FedaGrac paper all clients take part, so there is no n here"])
    return pick(trials, settings)


def diverged(outcomes: Sequence[Outcome]) -> bool:
    return any(o.result["ended"].startswith("stopped") for o in outcomes)


def rounds_to(target: float, outcomes: Sequence[Outcome]) -> float | None:
    return report.average([o.result for o in outcomes], "reached", str(target), "commit")


def counted(rounds: float | None, limit: int) -> str:
    return f"{limit}+" if rounds is None else f"{rounds:g}"


def score(outcomes: Sequence[Outcome], last: int = 1) -> float:
    """The mean accuracy of the last looks, over seeds; NaN where one diverged."""
    return math.nan if diverged(outcomes) else mean(r["accuracy"] for o in outcomes for r in o.metrics[1:][-last:])


def spoken(value: float) -> str:
    return "diverged" if math.isnan(value) else f"{value:.4f}"


def closing(outcomes: Sequence[Outcome]) -> list[str]:
    """The last columns of every table: best accuracy and seconds of work."""
    best = max(o.result["accuracy_best"] for o in outcomes)
    return [f"{best:.4f}", f"{sum(o.result['wall_seconds'] for o in outcomes):,.1f}"]


# ---- Tables 1 and 6: rounds to a target ---------------------------------------------------------
ROUNDS = {"lr": 1000, "cnn": 400}
CASES = {"neither": (CONSTANT, "iid"), "step-async": (ASYNC, "iid"), "non-iid": (CONSTANT, NON_IID),
         "both": (ASYNC, NON_IID)}  # fmt: skip
TABLE_1 = {"lr": (2, 1, 91, None), "cnn": (20, 8, 265, 339)}  # rounds; None: not within 1000

TARGET = {("alexnet", "dp1"): 0.68, ("alexnet", "dp2"): 0.7, ("vgg19", "dp2"): 0.8}
WITHIN, MEAN = 200, 500
LEVELS = ((0, "fixed"), (100, "fixed"), (100, "random"), (10000, "fixed"), (10000, "random"))
TABLE_6: dict[tuple[str, str], tuple[tuple[int | None, ...], ...]] = {  # by LEVELS and METHODS; None: not within 200
    ("alexnet", "dp1"): ((113, 123, 127, 113, 145), (106, 130, 147, 114, 144), (116, 140, 154, 133, 140),
                         (126, 156, 172, 141, 142), (121, 177, 170, 136, 152)),
    ("alexnet", "dp2"): ((152, 183, 186, 160, 147), (111, 179, 119, 124, 143), (112, None, 195, 137, 141),
                         (111, None, 113, 131, 145), (118, None, None, 123, 152)),
    ("vgg19", "dp2"): ((73, 83, 79, 72, 90), (73, 75, 72, 66, 72), (73, 85, 74, 78, 102),
                       (77, 73, 70, 72, 77), (71, 85, 76, 72, 99)),
}  # fmt: skip


def table1(settings: Settings) -> Made:
    """Table 1: rounds of FedAvg to 80 % on Fashion-MNIST, with and without step asynchronism and non-i.i.d. data."""
    trials = {f"{world} {case}": Trial(world, split, steps, method_table(world, "local-sgd"), ROUNDS[world], 0.8)
              for world in ROUNDS for case, (steps, split) in CASES.items()}  # fmt: skip
    paper = {f"{world} {case}": counted(value, 1000)
             for world in ROUNDS for case, value in zip(CASES, TABLE_1[world], strict=True)}  # fmt: skip
    return rounds_table(settings, "table1", "FedaGrac Table 1: rounds to 80 %", ("model", "case"), trials, paper)


def table6(settings: Settings) -> Made:
    """Table 6: rounds of five methods to a target on CIFAR-10; AlexNet and VGG-19, steps of three variances."""
    trials, paper = {}, {}
    for (model, split), by_level in TABLE_6.items():
        for (variance, mode), figures in zip(LEVELS, by_level, strict=True):
            for method, value in zip(METHODS, figures, strict=True):
                label = f"{model} {split} v{variance} {mode} {method}"
                trials[label] = table6_trial(model, split, variance, mode, method)
                paper[label] = counted(value, WITHIN)
    kinds = ("model", "split", "variance", "mode", "method")
    return rounds_table(settings, "table6", "FedaGrac Table 6: rounds to the target", kinds, trials, paper)


def table6_trial(
    model: str, split: str, variance: int, mode: str, method: str, rate: float | None = None, calibration: Any = None,
    rounds: int | None = None,
) -> Trial:  # fmt: skip
    steps, table = gaussian(MEAN, variance, mode), method_table(model, method, rate, calibration)
    return Trial(model, SPLITS[split], steps, table, rounds or WITHIN, TARGET[model, split])


def cell(
    model: str, split: str, variance: int, mode: str, method: str, settings: Settings, seed: int = 0,
    rate: float | None = None, calibration: Any = None, rounds: int | None = None,
) -> Outcome:  # fmt: skip
    """One run of Table 6, for tuning: rate, calibration and rounds may differ from the constants above."""
    trial = table6_trial(model, split, variance, mode, method, rate, calibration, rounds)
    return run_cell(experiment(trial, settings, seed), f"{model} {split} v{variance} {mode} {method} seed {seed}")


def rounds_table(
    settings: Settings, name: str, title: str, kinds: Sequence[str], trials: Mapping[str, Trial],
    paper: Mapping[str, str],
) -> Made:  # fmt: skip
    made = begun(settings, title, (*kinds, "target", "ours, rounds", "paper, rounds", "best", "wall s"))
    for label, trial, outcomes in played(trials, settings, made, name):
        assert trial.target is not None
        limit = min(trial.rounds, CUT[settings.scale][1])
        ours = "diverged" if diverged(outcomes) else counted(rounds_to(trial.target, outcomes), limit)
        made.tables[0].rows.append([*label.split(), f"{trial.target:.0%}", ours, paper[label], *closing(outcomes)])
    return made


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
CAP = 200.0  # the fast device counts as at most so many times as fast, so that a round stays affordable
FIRST, LATER, ENOUGH = 50, 100, 0.6
TABLE_2 = {  # utilisation in %, rounds to 60 %, accuracy in % after 100 rounds
    "raspberry-pi-4": {"fednova": (25, 49, 66.18), "fedagrac": (100, 25, 72.07)},
    "jetson-nano": {"fednova": (50, 50, 64.39), "fedagrac": (100, 21, 72.93)},
    "gtx-1080-ti": {"fednova": (100, 40, 69.77), "fedagrac": (100, 30, 72.00)},
    "rtx-2080-ti": {"fednova": (100, 29, 72.11), "fedagrac": (100, 36, 72.13)},
}


def speed_ratio(device: str) -> float:
    lanes, clock = DEVICES[device]
    return FAST[0] * FAST[1] / (lanes * clock)


def table2(settings: Settings) -> Made:
    """Table 2: how much of one fast device FedNova and FedaGrac can use beside nine slow ones, CNN, Fashion-MNIST."""
    note = f"Slow devices take {SLOW} steps a round, the fast one {SLOW} x ratio x utilisation; ratios are of peak "
    note += f"single-precision rates, at most {CAP:g} (without that limit: "
    note += ", ".join(f"{device} {speed_ratio(device):.4g}" for device in DEVICES) + ")."
    columns = ("device", "method", "ratio", "utilisation", "rounds", f"accuracy after {LATER}", "paper", "wall s")
    made = begun(settings, "FedaGrac Table 2: utilisation of one fast device", columns, [note])
    pairs = {f"{device} {method}": (device, method) for device, found in TABLE_2.items() for method in found}
    shares = range(100, 0, -5)[: 2 if settings.scale == "smoke" else None]
    for label, (device, method) in chosen(pairs, settings).items():
        ratio, before = min(CAP, speed_ratio(device)), len(made.figures)
        row = ["none", counted(None, min(FIRST, CUT[settings.scale][1])), "-"]
        for share in shares:
            steps = {"law": "extreme", "slow": SLOW, "fast": max(1, round(SLOW * ratio * share / 100))}
            table = method_table("cnn", method)
            attempt = Trial("cnn", NON_IID, steps, table, FIRST, ENOUGH)
            at = rounds_to(ENOUGH, ran(f"{label} {share}%", attempt, settings, made))
            write(made, settings, "table2")
            if at is not None:
                whole = ran(f"{label} {share}% whole", Trial("cnn", NON_IID, steps, table, LATER), settings, made)
                row = [f"{share}%", f"{at:g}", spoken(score(whole))]
                break
        use, rounds, accuracy = TABLE_2[device][method]
        wall = sum(figure["wall_seconds"] for figure in made.figures[before:])
        paper = f"{use}% ({rounds}) {accuracy / 100:.4f}"
        made.tables[0].rows.append([device, method, f"{ratio:.3g}", *row, paper, f"{wall:,.1f}"])
        write(made, settings, "table2")
    return made


# ---- Figure 1: paths of two parameters ----------------------------------------------------------
LINES = ((2.5, 1.0), (-1.0, 2.0), (0.5, -2.5))  # a_i, b_i of y = a x + b
CENTRES = (0.0, 0.6, -0.6)  # of the clients' x
FIG_1_STEPS = (2, 6, 20)
POINTS, NOISE, START, FIG_1_RATE, FIG_1_ROUNDS = 50, 0.3, (-2.5, -2.5), 0.04, 25
FIG_1: dict[str, dict[str, Any]] = {
    "local-sgd": {"n": None},
    "fedprox": {"proximal": 0.5},
    "fednova": {},
    "fedlin": {"client_lr": FIG_1_RATE * mean(FIG_1_STEPS)},  # its rate is for all steps of a round together
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
    method = {"name": name, "client_lr": FIG_1_RATE, "weights": "size", **FIG_1[name]}
    made = build(Experiment(
        method=method, task=task, fleet={"name": "equal", "local_steps": list(FIG_1_STEPS)}, device="cpu",
        precision="float64", until={"commits": each * FIG_1_ROUNDS}, evaluate={"every_commits": 1},
    ))  # fmt: skip
    engine = made.engine()
    places = [engine.server.state["model"].clone()]
    places += [engine.server.state["model"].clone() for _ in engine.commits(made.horizon(made.clock()))]
    found: Points = torch.stack(places)[::each].numpy()
    return found


def fig1(settings: Settings) -> Made:
    """Figure 1: the path of a line's two parameters, three clients with unequal lines and steps, six methods."""
    task = regression()
    x, y = (column[:, 0].numpy() for column in task.data)
    optimum = least_squares(x, y)
    columns = ("method", f"distance after {FIG_1_ROUNDS} rounds", "a", "b", "optimum a", "optimum b")
    made = Made([TableMade("FedaGrac Figure 1: distance to the global optimum", columns, [])])
    found = {}
    for name in chosen({name: name for name in FIG_1}, settings):
        found[name] = path(name, task)
        end = found[name][-1]
        distance = float(np.linalg.norm(end - optimum))
        made.figures.append({"method": name, "distance": distance, "path": found[name].tolist()})
        made.tables[0].rows.append([name, f"{distance:.3g}", *(f"{v:.4f}" for v in (*end, *optimum))])
        write(made, settings, "fig1")

    def loss(a: Points, b: Points) -> Any:
        return ((a[..., None] * x + b[..., None] - y) ** 2).mean(axis=-1)

    own = np.array([least_squares(x[shard], y[shard]) for shard in task.shards])
    marks = {"global optimum": optimum, "clients' optima": own}
    made.files.append(plots.paths(found, settings.out / "fig1.png", loss, marks, ("a", "b")))
    return made


# ---- Figures 2 to 5 -----------------------------------------------------------------------------
LAMBDAS = (0, 0.01, 0.05, 0.1, 0.2, 0.5, 1)
INCREASE = {"schedule": "stages", "values": [0.1, 0.5, 1.0], "at": [50, 150]}
FIG_2 = {"various": LAMBDAS, "constant": (0, 0.1, 0.5, 1, "increase")}
FIG_2_ROUNDS, FIG_3_ROUNDS, FIG_4_ROUNDS, FIG_5_ROUNDS = 200, 200, 100, 200
ETAS, GRID = (0.1, 0.05, 0.01, 0.005, 0.001, 0.0005), (0, 0.01, 0.05, 0.1, 0.5, 1)
MEANS, VARIANCE = (500, 1000), 10000
STEP_SECONDS = {"alexnet": 0.01, "a9a": 0.001}
MBIT = 100.0  # each way: 2.3 s for a vector of AlexNet's 28.9 MB, beside about 7 s for 700 steps


def fig2(settings: Settings) -> Made:
    """Figure 2: accuracy of the CNN on Fashion-MNIST after 200 rounds against the calibration rate lambda."""
    made = begun(settings, "FedaGrac Figure 2: accuracy by lambda", ("steps", "lambda", "accuracy", "best", "wall s"))
    trials = {}
    for steps, values in FIG_2.items():
        for value in values:
            table = method_table("cnn", "fedagrac", calibration=INCREASE if value == "increase" else value)
            trials[f"{steps} lambda={value}"] = Trial("cnn", NON_IID, STEPS[steps], table, FIG_2_ROUNDS)
    series: dict[str, dict[str, float]] = {}
    for label, _, outcomes in played(trials, settings, made, "fig2"):
        steps, value = label.replace("lambda=", "").split()
        series.setdefault(f"{steps} K", {})[value] = score(outcomes)
        made.tables[0].rows.append([steps, value, spoken(score(outcomes)), *closing(outcomes)])
    made.files.append(plots.points(series, settings.out / "fig2.png", "lambda", "accuracy", "FedaGrac, Figure 2"))
    return made


def fig3(settings: Settings) -> Made:
    """Figure 3: four rules on which gradient a client sends, LR and CNN on Fashion-MNIST, K constant and various."""
    trials = {f"{world} {steps} {name}": Trial(world, NON_IID, law, method_table(world, name), FIG_3_ROUNDS)
              for steps, law in STEPS.items() for world in ROUNDS for name in TRANSITS}  # fmt: skip
    return curves(settings, "fig3", "FedaGrac Figure 3: what is sent", ("model", "steps", "method"), trials)


def fig4(settings: Settings) -> Made:
    """Figure 4: accuracy by rate eta and calibration rate lambda, LR on a9a and AlexNet on CIFAR-10, DP1."""
    columns = ("model", "steps", "eta", "lambda", "mean of the last 10", "best", "wall s")
    made = begun(settings, "FedaGrac Figure 4: accuracy by eta and lambda", columns)
    etas, grid = (ETAS[::5], GRID[::5]) if settings.scale == "smoke" else (ETAS, GRID)
    trials = {}
    for steps, variance in (("constant", 0), ("various", VARIANCE)):
        for world in ("alexnet", "a9a"):
            for eta, value in ((eta, value) for eta in etas for value in grid):
                table = method_table(world, "fedagrac", eta, value)
                trial = Trial(world, SPLITS["dp1"], gaussian(MEAN, variance, "fixed"), table, FIG_4_ROUNDS)
                trials[f"{world} {steps} eta={eta} lambda={value}"] = trial
    maps: dict[str, dict[tuple[str, str], float]] = {}
    for label, _, outcomes in played(trials, settings, made, "fig4"):
        world, steps, row, column = label.replace("eta=", "").replace("lambda=", "").split()
        found = maps.setdefault(f"{world}, K {steps}", {})[row, column] = score(outcomes, 10)
        made.tables[0].rows.append([world, steps, row, column, spoken(found), *closing(outcomes)])
    made.files.append(plots.heat_maps(maps, settings.out / "fig4.png", ("eta", "lambda"), "FedaGrac, Figure 4"))
    return made


def fig5(settings: Settings) -> Made:
    """Figure 5: accuracy over time and rounds, AlexNet with DP2 and LR on a9a with DP1, steps of two means."""
    note = f"Steps take {STEP_SECONDS['alexnet']} s (AlexNet) and {STEP_SECONDS['a9a']} s (LR), links carry {MBIT:g} "
    note += "Mbit/s each way; fedagrac and scaffold send two vectors each way, the others one. The paper gives no "
    note += "means and no times; that FedProx's steps cost more is left out."
    trials = {}
    for world, split in (("alexnet", "dp2"), ("a9a", "dp1")):
        links = {"step_seconds": STEP_SECONDS[world], "mbit": MBIT}
        for average in MEANS:
            law = gaussian(average, VARIANCE, "fixed")
            for name in METHODS:
                trial = Trial(world, SPLITS[split], law, method_table(world, name), FIG_5_ROUNDS, fleet=links)
                trials[f"{world} mean={average} {name}"] = trial
    title, kinds = "FedaGrac Figure 5: accuracy over time and rounds", ("model", "mean", "method")
    return curves(settings, "fig5", title, kinds, trials, ("virtual_seconds", "commits"), [note])


def curves(
    settings: Settings, name: str, title: str, kinds: Sequence[str], trials: Mapping[str, Trial],
    against: Sequence[str] = ("commits",), notes: Sequence[str] = (),
) -> Made:  # fmt: skip
    """Run trials and draw those of one kind together, by the last word of their names."""
    made = begun(settings, title, (*kinds, "accuracy", "rounds", "virtual s", "best", "wall s"), notes)
    groups: dict[str, dict[str, list[list[dict[str, Any]]]]] = {}
    for label, _, outcomes in played(trials, settings, made, name):
        group, method = label.rsplit(maxsplit=1)
        groups.setdefault(group, {})[method] = [o.metrics for o in outcomes]
        results = [o.result for o in outcomes]
        spent = (report.average(results, "commits"), report.average(results, "virtual_seconds"))
        found = [spoken(score(outcomes)), report.amount(spent[0], 0), report.amount(spent[1], 1)]
        words = [word.rpartition("=")[2] for word in label.split()]
        made.tables[0].rows.append([*words, *found, *closing(outcomes)])
    made.files.append(plots.panels(groups, settings.out / f"{name}.png", title, against))
    return made
