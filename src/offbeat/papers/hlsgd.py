"""The experiments of the HL-SGD paper (section 6, appendices F and G), and its clusters without a common pace.

CIFAR-10 by Dirichlet(0.1) over 32 devices in four rings with Metropolis-Hastings weights, batch 50, the FedAvg CNN, 100
rounds; times in hours by the paper's runtime model (2). FEMNIST runs where LEAF's files are there (`--only femnist`).
Rates are tuned for each algorithm from the paper's list (`hlsgd-rates`); the paper does not say which it took, nor how
pixels are scaled: we standardise them. Local SGD with p < 1 is HL-SGD without gossip.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from offbeat.comparison import Comparison
from offbeat.config import Experiment
from offbeat.errors import ConfigError
from offbeat.fleets.graphs import gap, graphs_of, metropolis
from offbeat.fleets.make import build
from offbeat.papers.recipe import Made, Settings, TableMade, begun, pick, run_cell, write
from offbeat.runs import plots, report
from offbeat.runs.loop import Outcome

HOUR, ROUNDS, TAU, DEVICES = 3600.0, 100, 50, 32
RATES = {"cifar10": (0.01, 0.02, 0.05, 0.08, 0.1), "femnist": (0.005, 0.01, 0.02, 0.05, 0.08)}
TUNED = {
    ("cifar10", "hl-sgd"): 0.1,
    ("cifar10", "local-sgd"): 0.1,
    ("femnist", "hl-sgd"): 0.05,
    ("femnist", "local-sgd"): 0.05,
}
TARGET = {"cifar10": 0.6, "femnist": 0.75}
BEST = {("cifar10", "hl-sgd"): 0.6871, ("cifar10", "local-sgd"): 0.6368,
        ("femnist", "hl-sgd"): 0.8376, ("femnist", "local-sgd"): 0.7994}  # fmt: skip
COLUMNS = ("data", "method", "rate", "best", "paper", "hours in all", "hours to target", "GB up", "GB d2d", "wall s")
Cell = tuple[dict[str, Any], dict[str, Any]]  # what is special about a cell's method and about its fleet


def task(data: str, settings: Settings) -> dict[str, Any]:
    split: dict[str, Any]
    if settings.scale == "smoke":
        return {"name": "digits", "clients": DEVICES, "batch_size": 10, "split": {"name": "dirichlet", "alpha": 0.5}}
    if data == "femnist":
        split = {"name": "natural", "fewer": "grouped"}
        return {
            "name": "leaf",
            "folder": "femnist",
            "clients": DEVICES,
            "classes": 62,
            "batch_size": 30,
            "split": split,
        }
    split = {"name": "dirichlet", "alpha": 0.1}
    return {"name": data, "model": "fedavg-cifar-cnn", "clients": DEVICES, "batch_size": 50, "split": split,
            "scale": "standard"}  # fmt: skip


def rounds(settings: Settings) -> int:
    return {"smoke": 4, "small": 10, "full": ROUNDS}[settings.scale]


def experiment(data: str, cell: Cell, settings: Settings, seed: int, decay: bool = False) -> Experiment:
    """One run. `smoke` trains on the embedded digits for a few rounds; `small` is the paper's task, cut short."""
    many = rounds(settings)
    method = {"local_steps": TAU, **cell[0]}
    method.setdefault("client_lr", TUNED[data, "local-sgd" if is_local(method) else "hl-sgd"])
    if decay:  # appendix F: by half after 50 % and 75 % of the rounds
        at = [many // 2, 3 * many // 4]
        method["client_lr"] = {"schedule": "step", "value": method["client_lr"], "at": at, "factor": 0.5}
    if settings.scale == "smoke":
        method["local_steps"] = max(2, method["local_steps"] // 5)
        method["gossip_every"] = min(method.get("gossip_every", 1), 2)
    if method["name"] == "local-sgd":
        method = {"n": None, **{key: value for key, value in method.items() if key != "gossip_every"}}
    return Experiment(
        method=method, task=task(data, settings), fleet={"name": "hlsgd", **cell[1]}, seed=seed,
        device=settings.device, precision=settings.precision, until={"commits": many}, evaluate={"every_commits": 1},
        targets=(TARGET[data],),
    )  # fmt: skip


def is_local(method: Mapping[str, Any]) -> bool:
    return method["name"] == "local-sgd" or method.get("gossip_rounds") == 0


def chosen(cells: Mapping[str, Cell], settings: Settings) -> dict[str, tuple[str, Cell]]:
    """Cells by name, on CIFAR-10, or on the data that --only names."""
    if settings.n:
        raise ConfigError(["the HL-SGD recipes take no --n; they have 32 devices in 4 clusters"])
    every = {f"{data} {name}": (data, cell) for data in RATES for name, cell in cells.items()}
    asked = {word for given in settings.only for word in given.split()} & set(RATES)
    return pick(every, settings if asked else replace(settings, only=(*settings.only, "cifar10")))


def curves(cells: Mapping[str, Cell], settings: Settings, title: str, name: str, decay: bool = False) -> Made:
    """Run the cells; a table, and a picture of accuracy over rounds and over time for each data set."""
    made = begun(settings, f"HL-SGD {title}", COLUMNS)
    groups: dict[str, dict[str, list[Outcome]]] = {}
    for label, (data, cell) in chosen(cells, settings).items():
        outcomes = [run_cell(experiment(data, cell, settings, seed, decay), f"{label} seed {seed}")
                    for seed in range(settings.seeds)]  # fmt: skip
        short = label.removeprefix(f"{data} ")
        groups.setdefault(data, {})[short] = outcomes
        results = [outcome.result for outcome in outcomes]
        made.figures += [{"label": label, "rate": rate_of(data, cell), **result} for result in results]
        made.tables[0].rows.append(row(data, short, cell, results))
        write(made, settings, name)  # after every cell: a run that is cut short keeps what it has
    for data, by_label in groups.items():
        drawn = Comparison(by_label, TARGET[data]).curves()
        picture = settings.out / f"{name}-{data}.png"
        against = ("commits", "virtual_seconds")
        made.files.append(plots.panels({data: drawn}, picture, title, against))
    return made


def rate_of(data: str, cell: Cell) -> float:
    rate: float = cell[0].get("client_lr", TUNED[data, "local-sgd" if is_local(cell[0]) else "hl-sgd"])
    return rate


def row(data: str, label: str, cell: Cell, results: list[dict[str, Any]]) -> list[str]:
    seconds = report.average(results, "virtual_seconds")
    reached = report.average(results, "reached", str(TARGET[data]), "virtual_seconds")
    hours = [None if value is None else value / HOUR for value in (seconds, reached)]
    gigabytes = [(report.average(results, name) or 0.0) / 1e9 for name in ("bytes_up", "bytes_d2d")]
    paper = BEST.get((data, label)) if cell in FIG1.values() else None
    return [data, label, f"{rate_of(data, cell):g}", report.amount(report.average(results, "accuracy_best"), 4),
            report.amount(paper, 4), *map(report.amount, hours), *map(report.amount, gigabytes),
            report.amount(sum(r["wall_seconds"] for r in results), 1)]  # fmt: skip


HL: dict[str, Any] = {"name": "hl-sgd"}
LOCAL: dict[str, Any] = {"name": "local-sgd"}
FEW = {"client_lr": 0.08}  # with one report of a cluster 0.1 diverges: in round 92 on rings, 22 on sparse random graphs
FIG1: dict[str, Cell] = {"hl-sgd": (HL, {}), "local-sgd": (LOCAL, {})}
ALONE: dict[str, Any] = {"name": "hl-sgd", "gossip_rounds": 0}  # Local SGD of which a share p reports


def rates(settings: Settings) -> Made:
    """The tuning of section 6.1: both algorithms with every rate of the paper's list, tau = 50, p = 1."""
    data = "femnist" if "femnist" in " ".join(settings.only).split() else "cifar10"
    cells: dict[str, Cell] = {
        f"{method['name']} {rate:g}": ({**method, "client_lr": rate}, {})
        for method in (HL, LOCAL)
        for rate in RATES[data]
    }
    return curves(cells, settings, "section 6.1: rates", "rates")


def fig1(settings: Settings) -> Made:
    """Figure 1: HL-SGD against Local SGD over rounds and over time, tau = 50, p = 1."""
    return curves(FIG1, settings, "Figure 1: tau = 50, p = 1", "fig1")


def fig2(settings: Settings) -> Made:
    """Figure 2: both with tau = 5, 10, 20, 50."""
    cells: dict[str, Cell] = {
        f"{method['name']} tau={tau}": ({**method, "local_steps": tau}, {})
        for tau in (5, 10, 20, 50)
        for method in (HL, LOCAL)
    }
    return curves(cells, settings, "Figure 2: effect of tau", "fig2")


def fig3(settings: Settings) -> Made:
    """Figure 3: HL-SGD of which a share p = 1/8, 1/4, 1/2, 1 of each cluster reports."""
    cells: dict[str, Cell] = {f"p={p:g}": ({**HL, "p": p}, {}) for p in (0.25, 0.5, 1.0)}
    cells = {"p=0.125": ({**HL, "p": 0.125, **FEW}, {}), **cells}
    return curves(cells, settings, "Figure 3: effect of p", "fig3")


def fig4(settings: Settings) -> Made:
    """Figure 4: Erdos-Renyi graphs with edge probability 0.2, 0.5, 0.8, 1; p = 1/8; decaying rates."""
    graphs = {edge: {"count": 4, "graph": {"name": "erdos-renyi", "p": edge}} for edge in (0.2, 0.5, 0.8, 1.0)}
    cells: dict[str, Cell] = {
        f"er={edge:g}": ({**HL, "p": 0.125, **FEW}, {"clusters": spec}) for edge, spec in graphs.items()
    }
    made = curves(
        {**cells, "local-sgd": ({**ALONE, "p": 0.125, **FEW}, {})}, settings, "Figure 4: random graphs", "fig4", True
    )
    found = []
    for edge, paper in zip(graphs, (0.9394, 0.844, 0.5357, 0.0), strict=True):
        clusters = build("hlsgd", DEVICES, 0, clusters=graphs[edge]).clusters
        assert clusters is not None
        found.append(f"{edge:g}: {clusters.rho_max:.4f} ({paper:g})")
    made.notes.append("rho_max by edge probability, seed 0 (the paper's, of graphs that it does not give): " +
                      ", ".join(found))  # fmt: skip
    write(made, settings, "fig4")
    return made


def fig5(settings: Settings) -> Made:
    """Figure 5: l = 1, 5, 10 local steps before each gossip; p = 1; decaying rates."""
    cells: dict[str, Cell] = {f"l={every}": ({**HL, "gossip_every": every}, {}) for every in (1, 5, 10)}
    return curves(
        {**cells, "local-sgd": ({**LOCAL, "local_steps": TAU}, {})},
        settings,
        "Figure 5: steps before gossip",
        "fig5",
        True,
    )


# ---- appendix G ---------------------------------------------------------------------------------
STATED: dict[str, tuple[str, Any]] = {  # the order of 1 - rho in n
    "ring": ("1 / n^2", lambda n: n**-2.0),
    "path": ("1 / n^2", lambda n: n**-2.0),
    "grid": ("1 / (n log n)", lambda n: 1 / (n * math.log(n))),
    "torus": ("1 / n", lambda n: 1 / n),
    "erdos-renyi": ("1", lambda n: 1.0),
    "exponential": ("1 / log n", lambda n: 1 / math.log(n)),
}


def table2(settings: Settings) -> Made:
    """Table 2: the spectral gap 1 - rho of five graphs against n, its fitted order beside the stated one."""
    if settings.n:
        raise ConfigError(["hlsgd-table2 has its own sizes of graphs; it takes no --n"])
    sizes = (16, 36, 64) if settings.scale == "smoke" else (16, 36, 64, 144, 256, 400, 576)
    cells = pick({name: name for name in STATED}, settings)
    columns = ("graph", *(f"n = {n}" for n in sizes), "fitted", "stated", "stated, over these n")
    made = Made([TableMade("HL-SGD Table 2: spectral gaps, Metropolis-Hastings weights", columns, [])])
    made.notes.append("fitted: the exponent a of gap ~ n^-a by least squares in logarithms; over these n the stated "
                      "order has the last exponent. Erdos-Renyi has p = 1/2 here, one graph of each size.")  # fmt: skip
    series: dict[str, dict[str, float]] = {}
    for name in cells:
        spec = {"name": name, "p": 0.5} if name == "erdos-renyi" else name
        gaps = [gap(metropolis(graphs_of(spec, n, seed=n)[0])) for n in sizes]
        order, stated = STATED[name]
        fits = [-np.polyfit(np.log(sizes), np.log(values), 1)[0] for values in (gaps, [stated(n) for n in sizes])]
        series[name] = {str(n): value for n, value in zip(sizes, gaps, strict=True)}
        made.tables[0].rows.append(
            [name, *(f"{value:.2g}" for value in gaps), f"{fits[0]:.2f}", order, f"{fits[1]:.2f}"]
        )
        made.figures.append({"graph": name, "n": sizes, "gap": gaps, "fitted": fits[0], "stated": order})
    by_size = {name: [(float(n), value) for n, value in found.items()] for name, found in series.items()}
    made.files.append(plots.falling(by_size, settings.out / "table2.png", "devices n", "1 - rho", "spectral gaps"))
    write(made, settings, "table2")
    return made


# ---- beyond the paper: clusters that keep no common time ------------------------------------------
def slow_cluster(settings: Settings) -> Made:
    """Beyond the paper: four clusters, one of them five times slower; all wait for it, or nobody does."""
    if settings.n:
        raise ConfigError(["hlsgd-slow-cluster takes no --n; it has 32 devices in 4 clusters"])
    small = settings.scale == "smoke"
    data = {"name": "digits", "model": {"name": "mlp", "hidden": 64}} if settings.scale != "full" else {
        "name": "fashion-mnist", "model": "mlp", "scale": "standard"}  # fmt: skip
    split = {"name": "dirichlet", "alpha": 0.3}
    target = 0.9 if settings.scale != "full" else 0.82
    fleet = {"name": "hlsgd", "clusters": {"count": 4, "graph": "ring", "pace": [1.0, 1.0, 1.0, 5.0]}}
    common = {"local_steps": 10, "client_lr": 0.1, "p": 0.25}
    cells: dict[str, dict[str, Any]] = {
        "hl-sgd": {"name": "hl-sgd", **common},
        "async-hl-sgd": {"name": "async-hl-sgd", "buffer_size": 2, "server_lr": 0.7, **common},
    }
    made = begun(settings, "HL-SGD with one slow cluster", ("method", "hours to target", *report.COLUMNS[1:-1]))
    by_label = {}
    for label, method in pick(cells, settings).items():
        config = Experiment(
            method=method, task={**data, "clients": DEVICES, "batch_size": 10, "split": split}, fleet=fleet,
            device=settings.device, precision=settings.precision, targets=(target,),
            until={"commits": 3} if small else {"virtual_seconds": 100 * HOUR}, evaluate={"every_commits": 1},
        )  # fmt: skip
        runs = [run_cell(replace(config, seed=seed), f"{label} seed {seed}") for seed in range(settings.seeds)]
        by_label[label] = runs
        made.figures += [{"label": label, "target": target, **run.result} for run in runs]
    comparison = Comparison(by_label, target)
    for line in comparison.rows():
        seconds = report.average([run.result for run in by_label[line[0]]], "reached", str(target), "virtual_seconds")
        made.tables[0].rows.append([line[0], report.amount(None if seconds is None else seconds / HOUR), *line[1:-1]])
    picture = settings.out / "slow-cluster.png"
    made.files.append(plots.comparison(comparison.curves(), picture, "One of four clusters is five times slower"))
    write(made, settings, "slow-cluster")
    return made
