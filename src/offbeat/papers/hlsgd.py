"""The experiments of the HL-SGD paper (section 6, appendices F and G), and its clusters without a common pace.

CIFAR-10 by Dirichlet(0.1) over 32 devices in four rings with Metropolis-Hastings weights, batch 50, the FedAvg CNN, 100
rounds; times in hours by the paper's runtime model (2). FEMNIST runs where LEAF's files are there (`--only femnist`);
`stand-in` is Fashion-MNIST in its place. Rates are tuned for each algorithm from the paper's list (`hlsgd-rates`); the
paper does not say which it took, nor how pixels are scaled: we standardise them. Local SGD with p < 1 is HL-SGD without
gossip. Accuracies are the best so far, as in the paper.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from offbeat.fleets.graphs import gap, graphs_of, metropolis
from offbeat.papers import agreement
from offbeat.papers.recipe import Cell, Claim, Recipe, Record, Run, Stated, Training

ROUNDS, TAU, DEVICES = 100, 50, 32
RATES = {"cifar10": (0.01, 0.02, 0.05, 0.08, 0.1), "femnist": (0.005, 0.01, 0.02, 0.05, 0.08)}
TUNED = {"cifar10": 0.1, "femnist": 0.05, "stand-in": 0.05}  # 0.1 was best for both algorithms on CIFAR-10
TARGET = {"cifar10": 0.6, "femnist": 0.75, "stand-in": 0.75}
BEST = {("cifar10", "hl-sgd"): 0.6871, ("cifar10", "local-sgd"): 0.6368,
        ("femnist", "hl-sgd"): 0.8376, ("femnist", "local-sgd"): 0.7994}  # fmt: skip
TASKS: dict[str, dict[str, Any]] = {
    "cifar10": {"name": "cifar10", "model": "fedavg-cifar-cnn", "clients": DEVICES, "batch_size": 50,
                "split": {"name": "dirichlet", "alpha": 0.1}, "scale": "standard"},
    "femnist": {"name": "leaf", "folder": "femnist", "clients": DEVICES, "classes": 62, "batch_size": 30,
                "split": {"name": "natural", "fewer": "grouped"}},
    "stand-in": {"name": "fashion-mnist", "model": "leaf-femnist-cnn", "clients": DEVICES, "batch_size": 30,
                 "split": {"name": "dirichlet", "alpha": 0.1}, "scale": "standard"},
}  # fmt: skip
HL: dict[str, Any] = {"name": "hl-sgd"}
LOCAL: dict[str, Any] = {"name": "local-sgd", "n": None}
ALONE: dict[str, Any] = {"name": "hl-sgd", "gossip_rounds": 0}  # Local SGD of which a share p reports
BOTH = {"hl-sgd": HL, "local-sgd": LOCAL}
FEW = 0.08  # with one report of a cluster 0.1 diverges: in round 92 on rings, 22 on sparse random graphs
TAUS = (5, 10, 20, 50)


def training(
    data: str, method: dict[str, Any], rate: float | None = None, tau: int = TAU, rounds: int = ROUNDS,
    decay: bool = False, **fleet: Any,
) -> Training:  # fmt: skip
    lr: Any = TUNED[data] if rate is None else rate
    if decay:  # appendix F: by half after 50 % and 75 % of the rounds
        lr = {"schedule": "step", "value": lr, "at": [rounds // 2, 3 * rounds // 4], "factor": 0.5}
    return Training({"local_steps": tau, "client_lr": lr, **method}, TASKS[data], {"name": "hlsgd", **fleet},
                    {"commits": rounds}, targets=(TARGET[data],), client_steps=rounds * tau * DEVICES,
                    pace="fedavg-cnn")  # fmt: skip


SECTION_6 = (
    Stated("task.clients", (32,), "6.1: 32 devices"),
    Stated("task.batch_size", (50,), "6.1: batch 50 on CIFAR-10", "cifar10"),
    Stated("task.batch_size", (30,), "6.1: batch 30 on FEMNIST", "femnist"),
    Stated("task.split.alpha", (0.1,), "6.1: Dir(0.1)", "cifar10"),
    Stated("targets", ((0.6,),), "6.2: a target of 60 %", "cifar10"),
    Stated("targets", ((0.75,),), "6.2: a target of 75 %", "femnist"),
    Stated("method.client_lr", RATES["cifar10"], "6.1: the rates to tune from", "cifar10"),
    Stated("method.client_lr", RATES["femnist"], "6.1: the rates to tune from", "femnist"),
)
CIFAR = tuple(one._replace(only="") for one in SECTION_6 if one.only != "femnist")
TAU_50 = Stated("method.local_steps", (50,), "6.2 and captions: tau = 50")
HALVED = (*(one for one in CIFAR if one.path != "method.client_lr"), TAU_50,
          Stated("method.client_lr.value", RATES["cifar10"], "appendix F: the initial rates to tune from"),
          Stated("method.client_lr.at", ([50, 75],), "appendix F: after 50 % and 75 % of the rounds"),
          Stated("method.client_lr.factor", (0.5,), "appendix F: by half"))  # fmt: skip
DRAWN = agreement.curves
CONTRADICTION = ("At tau = 50 the paper says that HL-SGD needs 15.67 % less time to 60 % than Local SGD (Figure 1: "
                 "1.186 times as fast) and 45.88 % less (Figure 2), of the same setting; one of the two cannot "
                 "be.")  # fmt: skip
FIG_1 = Recipe(
    "hlsgd-fig1", "HL-SGD Figure 1: tau = 50, p = 1",
    "Figure 1: HL-SGD against Local SGD over rounds and over time, tau = 50, p = 1.",
    ("data", "method"),
    tuple(Cell(f"{data} {name}", training(data, method), {"best": BEST[data, name]} if (data, name) in BEST else {},
               2 if data == "cifar10" else 9) for data in TASKS for name, method in BOTH.items()),
    ("best", "hours", "total hours"), apart=("data",), few=("cifar10",), stated=(*SECTION_6, TAU_50),
    notes=(CONTRADICTION,),
    claims=(Claim("hours to 60 %: 1.186 times as fast", "hours", "cifar10 local-sgd", "cifar10 hl-sgd", 1.186),
            Claim("hours to 75 %: 5.67 times as fast", "hours", "femnist local-sgd", "femnist hl-sgd", 5.67)),
    picture=DRAWN(("method",), ("commits", "virtual_seconds"), best=True),
)  # fmt: skip


def same(name: str, cell: Cell, priority: int = 2) -> Cell:
    """A cell of Figure 1 under another name."""
    return replace(cell, name=name, alias=cell.name, paper={}, priority=priority)


def fig2_cells() -> list[Cell]:
    return [same(f"{name} tau={tau}", FIG_1.cell(f"cifar10 {name}")) if tau == TAU else
            Cell(f"{name} tau={tau}", training("cifar10", method, tau=tau), priority=2)
            for tau in TAUS for name, method in BOTH.items()]  # fmt: skip


def equal_cells() -> list[Cell]:
    return [Cell(f"{name} tau={tau}", training("cifar10", method, tau=tau, rounds=ROUNDS * TAU // tau), priority=4)
            for tau in TAUS[:-1] for name, method in BOTH.items()]  # fmt: skip


def fig3_cells() -> list[Cell]:
    cells = [Cell(f"{data} p={p:g}", training(data, {**HL, "p": p}, FEW if p == 0.125 and data != "femnist" else None),
                  priority=3 if data == "cifar10" else 9) for data in RATES for p in (0.125, 0.25, 0.5)]  # fmt: skip
    return cells + [same(f"{data} p=1", FIG_1.cell(f"{data} hl-sgd"), 3 if data == "cifar10" else 9) for data in RATES]


EDGES = (0.2, 0.5, 0.8, 1.0)


def fig4_cells() -> list[Cell]:
    """Every graph with every rate of the list: they are tuned for each."""
    cells = []
    for rate in RATES["cifar10"]:
        priority = {0.08: 3, 0.1: 5, 0.05: 6}.get(rate, 8)
        for edge in EDGES:
            spec = {"count": 4, "graph": {"name": "erdos-renyi", "p": edge}}
            made = training("cifar10", {**HL, "p": 0.125}, rate, decay=True, clusters=spec)
            cells.append(Cell(f"er={edge:g} rate={rate:g}", made, priority=priority))
        made = training("cifar10", {**ALONE, "p": 0.125}, rate, decay=True)
        cells.append(Cell(f"local-sgd rate={rate:g}", made, priority=priority))
    return cells


def fig5_cells() -> list[Cell]:
    ways = {f"l={every}": {**HL, "gossip_every": every} for every in (1, 5, 10)} | {"local-sgd": LOCAL}
    return [Cell(name, training("cifar10", method, decay=True), priority=3) for name, method in ways.items()]


def rate_cells() -> list[Cell]:
    cells = []
    for data, rates in RATES.items():
        for name, method in BOTH.items():
            for rate in rates:
                same_as = FIG_1.cell(f"{data} {name}")
                cells.append(same(f"{data} {name} {rate:g}", same_as, 6) if rate == TUNED[data] else
                             Cell(f"{data} {name} {rate:g}", training(data, method, rate),
                                  priority=6 if data == "cifar10" else 9))  # fmt: skip
    return cells


# ---- appendix G ---------------------------------------------------------------------------------
ORDERS: dict[str, Callable[[float], float]] = {  # the stated order of 1 - rho in n
    "ring": lambda n: n**-2.0,
    "path": lambda n: n**-2.0,
    "grid": lambda n: 1 / (n * math.log(n)),
    "torus": lambda n: 1 / n,
    "erdos-renyi": lambda n: 1.0,
    "exponential": lambda n: 1 / math.log(n),
}
NODES = (16, 36, 64, 144, 256, 400, 576)


def fitted(values: list[float], sizes: tuple[int, ...]) -> float:
    """The exponent a of values ~ n^-a, by least squares in logarithms."""
    return -float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def gaps(name: str) -> Callable[[Run], Record]:
    def job(run: Run) -> Record:
        sizes = NODES[:3] if run.size == "smoke" else NODES
        spec = {"name": name, "p": 0.5} if name == "erdos-renyi" else name
        spectral = [gap(metropolis(graphs_of(spec, n, seed=n)[0])) for n in sizes]
        values = {f"n = {n}": value for n, value in zip(sizes, spectral, strict=True)} | {
            "exponent": fitted(spectral, sizes)
        }
        return {"values": values, "failed": None}

    return job


# ---- beyond the paper: clusters that keep no common time ------------------------------------------
SLOW_FLEET = {"name": "hlsgd", "clusters": {"count": 4, "graph": "ring", "pace": [1.0, 1.0, 1.0, 5.0]}}
PACED = {"local_steps": 10, "client_lr": 0.1, "p": 0.25}


def slow(method: dict[str, Any]) -> Training:
    task = {"name": "fashion-mnist", "model": "mlp", "scale": "standard", "clients": DEVICES, "batch_size": 10,
            "split": {"name": "dirichlet", "alpha": 0.3}}  # fmt: skip
    return Training(PACED | method, task, SLOW_FLEET, {"virtual_seconds": 360000.0, "commits": 10000}, targets=(0.82,),
                    client_steps=1e5, pace="mlp")  # fmt: skip


RECIPES = (
    FIG_1,
    Recipe(
        "hlsgd-fig2", "HL-SGD Figure 2: effect of tau, 100 rounds", "Figure 2: both with tau = 5, 10, 20, 50.",
        ("method", "tau"), tuple(fig2_cells()), ("best", "hours"), few=("tau=5", "tau=50"), stated=CIFAR,
        notes=(CONTRADICTION, "hlsgd-tau compares at equal R x tau."),
        claims=(*(Claim(f"tau = {tau}: best accuracy {more} % higher", "best", f"hl-sgd tau={tau}", "local-sgd "
                                                                                                    f"tau={tau}",
                        1 + more / 100) for tau, more in zip(TAUS, (2.49, 3.99, 4.05, 7.0), strict=True)),
                *(Claim(f"tau = {tau}: hours to 60 % {less} % fewer", "hours", f"hl-sgd tau={tau}", "local-sgd "
                                                                                                    f"tau={tau}",
                        1 - less / 100) for tau, less in zip(TAUS, (9.66, 19.76, 33.46, 45.88), strict=True))),
        picture=DRAWN(("method", "tau"), ("commits", "virtual_seconds"), best=True),
    ),
    Recipe(
        "hlsgd-tau", "HL-SGD: effect of tau at equal R x tau = 5000",
        "Figure 2's tau = 5, 10, 20 over as many local steps as 100 rounds of 50: is tau = 5 behind for want of steps?",
        ("method", "tau"), (*equal_cells(), *(cell for cell in fig2_cells() if cell.words[1] == "tau=50")),
        ("best", "hours"), few=("tau=20",), picture=DRAWN(("method", "tau"), ("commits", "virtual_seconds"), best=True),
    ),
    Recipe(
        "hlsgd-fig3", "HL-SGD Figure 3: effect of p",
        "Figure 3: HL-SGD of which a share p = 1/8, 1/4, 1/2, 1 of each cluster reports.",
        ("data", "p"), tuple(fig3_cells()), ("best", "hours", "total hours"), apart=("data",), few=("cifar10",),
        stated=(*SECTION_6, TAU_50, Stated("method.p", (0.125, 0.25, 0.5, None), "6.2: p from {0.125, 0.25, 0.5, 1}")),
        notes=("p = 1/8 at rate .08: at .1 it diverged in round 92.",),
        claims=(Claim("p = 1/8: best accuracy 1.92 % lower", "best", "cifar10 p=0.125", "cifar10 p=1", 1 - 0.0192),
                Claim("fewer reports train faster", "hours", "cifar10 p=0.125", "cifar10 p=1", above=False)),
        picture=DRAWN(("p",), ("commits", "virtual_seconds"), best=True),
    ),
    Recipe(
        "hlsgd-fig4", "HL-SGD Figure 4: random graphs, p = 1/8, rates halved at 50 % and 75 %",
        "Figure 4: Erdos-Renyi graphs with edge probability 0.2, 0.5, 0.8, 1; p = 1/8; decaying rates, tuned per "
        "graph.",
        ("graph", "rate"), tuple(fig4_cells()), ("best", "hours", "total hours"), few=("rate=0.08",),
        stated=(*HALVED, Stated("method.p", (1 / 8,), "Figure 4: p = 1/8")),
        notes=("The paper's graphs have rho_max .9394, .844, .5357 and 0, ours of seed 0 .939, .912, .619 and 0.",),
        claims=(Claim("a more connected graph is more accurate", "best", "er=1 rate=0.08", "er=0.2 rate=0.08"),
                Claim("a sparse graph comes to a target sooner", "hours", "er=0.2 rate=0.08", "er=1 rate=0.08",
                above=False)),
        picture=DRAWN(("graph",), ("commits", "virtual_seconds"), best=True),
    ),
    Recipe(
        "hlsgd-fig5", "HL-SGD Figure 5: steps before gossip, p = 1, rates halved at 50 % and 75 %",
        "Figure 5: l = 1, 5, 10 local steps before each gossip; p = 1; decaying rates.",
        ("method",), tuple(fig5_cells()), ("best", "hours"), stated=HALVED,
        claims=(Claim("l = 5 needs 5.22 % less time to 60 % than l = 1", "hours", "l=5", "l=1", 1 - 0.0522),
                Claim("l = 1 comes to the highest accuracy", "best", "l=1", "l=10"),
                Claim("l = 1 is above Local SGD", "best", "l=1", "local-sgd")),
        picture=DRAWN(("method",), ("commits", "virtual_seconds"), best=True),
    ),
    Recipe(
        "hlsgd-rates", "HL-SGD section 6.1: rates, tau = 50, p = 1",
        "The tuning of section 6.1: both algorithms with every rate of the paper's list, tau = 50, p = 1.",
        ("data", "method", "rate"), tuple(rate_cells()), ("best",), "rate", ("data",), 1, ("cifar10", "hl-sgd"),
        (*SECTION_6, TAU_50),
    ),
    Recipe(
        "hlsgd-table2", "HL-SGD Table 2: spectral gaps 1 - rho, Metropolis-Hastings weights",
        "Table 2: the spectral gap 1 - rho of five graphs against n, its fitted order beside the stated one.",
        ("graph",), tuple(Cell(name, gaps(name), {"exponent": fitted([order(n) for n in NODES], NODES)}, 3,
                               client_steps=2e5, pace="quadratic") for name, order in ORDERS.items()),
        (*(f"n = {n}" for n in NODES), "exponent"), seeds=1,
        notes=("exponent: a of gap ~ n^-a by least squares in logarithms; the stated order over these n in brackets. "
               "The stated order of the grid, 1 / (n log n), is an upper bound: its gap falls like 1 / n. "
               "Erdos-Renyi has p = 1/2 here, one graph of each size, and gets better with n.",),
    ),
    Recipe(
        "hlsgd-slow-cluster", "HL-SGD with one cluster five times slower",
        "Beyond the paper: four clusters, one of them five times slower; all wait for it, or nobody does.",
        ("method",), (Cell("hl-sgd", slow(HL)), Cell("async-hl-sgd", slow({"name": "async-hl-sgd", "buffer_size": 2,
                                                                          "server_lr": 0.7}))),
        ("hours", "best"), picture=DRAWN(("method",), ("commits", "virtual_seconds"), best=True),
    ),
)  # fmt: skip
