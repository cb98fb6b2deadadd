"""The experiments of the DLSGD paper (section 4 and appendix B): Table 2, Figures 2, 3 and 6.

100 clients, K = 50 local steps of batch 10, the system model of appendix B.1, the rates of Table 1. The paper gives
FedBuff a global rate eta on the mean of the buffer, so beta = eta / n here. It does not say how pixels are scaled or
how often models were evaluated: we standardise pixels (`SCALE`; results/dlsgd-table2.md tells what [-1, 1] gives) and
evaluate every so many virtual seconds (`EVERY`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from offbeat.comparison import Comparison
from offbeat.config import Experiment
from offbeat.errors import ConfigError
from offbeat.papers.recipe import Made, Settings, begun, pick, run_cell, write
from offbeat.runs import plots, report
from offbeat.runs.loop import Outcome

SIZES = (10, 20, 40, 80)
DATA = ("fashion-mnist", "cifar10")
IID, NON_IID = "iid", "non-iid"
SCALE = "standard"
EVERY = {"fashion-mnist": 0.5, "cifar10": 1.0}  # virtual seconds between evaluations


class Line(NamedTuple):
    """One line of Tables 1 and 2: (global rate, local rate) and the paper's seconds, for n = 10, 20, 40, 80."""

    method: str
    setting: str
    rates: dict[str, tuple[tuple[float, float | None], ...]]
    seconds: dict[str, tuple[float, ...]]


LINES = (
    Line("local-sgd", IID,
         {"fashion-mnist": ((1, .1), (1, .01), (1, .01), (1, .01)), "cifar10": ((1, .01),) * 4},
         {"fashion-mnist": (51.89, 179.1, 184.9, 179.83), "cifar10": (302.12, 411.64, 282.51, 287.81)}),
    Line("asysg", IID,
         {"fashion-mnist": ((.1, None),) * 4, "cifar10": ((.1, None),) * 4},
         {"fashion-mnist": (335.16, 297.57, 231.22, 215.38), "cifar10": (501.60, 369.08, 400.92, 345.79)}),
    Line("dlsgd-homo", IID,
         {"fashion-mnist": ((.1, .05), (.1, .05), (.1, .05), (1, .1)),
          "cifar10": ((1, .05), (.1, .01), (.1, .05), (1, .01))},
         {"fashion-mnist": (26.39, 49.26, 94.49, 99.72), "cifar10": (54.41, 108.52, 207.45, 154.26)}),
    Line("local-sgd", NON_IID,
         {"fashion-mnist": ((.1, .05), (.1, .05), (1, .01), (.1, .1)),
          "cifar10": ((1, .01), (1, .01), (.1, .05), (.1, .05))},
         {"fashion-mnist": (437.57, 447.81, 211.67, 443.56), "cifar10": (934.11, 983.46, 1541.2, 1495.0)}),
    Line("fedbuff", NON_IID,
         {"fashion-mnist": ((.1, .005), (.1, .01), (.1, .01), (.1, .05)),
          "cifar10": ((.1, .01), (.1, .01), (.1, .01), (.1, .05))},
         {"fashion-mnist": (198.54, 218.26, 604.93, 422.88), "cifar10": (394.16, 789.63, 2008.8, 1463.5)}),
    Line("dlsgd-hetero", NON_IID,
         {"fashion-mnist": ((.1, .05),) * 4, "cifar10": ((.1, .05), (.1, .1), (.1, .05), (.1, .05))},
         {"fashion-mnist": (103.25, 144.49, 196.98, 236.30), "cifar10": (331.60, 497.51, 684.31, 786.85)}),
)  # fmt: skip
TARGET = {
    ("fashion-mnist", IID): 0.9,
    ("fashion-mnist", NON_IID): 0.8,
    ("cifar10", IID): 0.7,
    ("cifar10", NON_IID): 0.6,
}
PATIENCE = 3.0  # a full-scale run is given up after so many times the paper's seconds


def method_table(line: Line, data: str, n: int, local_steps: int = 50) -> dict[str, Any]:
    server_lr, client_lr = line.rates[data][SIZES.index(n)]
    if line.method == "asysg":
        return {"name": "asysg", "n": n, "server_lr": server_lr}
    if line.method == "fedbuff":
        beta = server_lr / n
        return {"name": "fedbuff", "buffer_size": n, "local_steps": local_steps, "client_lr": client_lr, "beta": beta}
    return {"name": line.method, "n": n, "local_steps": local_steps, "client_lr": client_lr, "server_lr": server_lr}


def experiment(line: Line, data: str, n: int, settings: Settings, seed: int, local_steps: int = 50) -> Experiment:
    """One cell. `smoke` trains on the embedded digits for a few commits; `small` is the paper's task, cut short."""
    target, paper = TARGET[data, line.setting], line.seconds[data][SIZES.index(n)]
    split: Any = "iid" if line.setting == IID else {"name": "classes", "per_client": 2}
    task: dict[str, Any] = {"name": data, "model": "dlsgd-cnn", "split": split, "scale": SCALE}
    task |= {"clients": 100, "batch_size": 10}
    until: dict[str, float] = {"accuracy_smoothed": target, "virtual_seconds": PATIENCE * paper}
    every = EVERY[data]
    if settings.scale == "small":
        until["virtual_seconds"] = min(10.0, paper)
    elif settings.scale == "smoke":
        task |= {"name": "digits", "model": "logistic"}
        until, every = {"commits": 6}, 0.05
    return Experiment(
        method=method_table(line, data, n, local_steps), task=task, fleet=f"dlsgd-{data}", seed=seed,
        device=settings.device, precision=settings.precision, until=until, evaluate={"every_seconds": every},
        targets=(target,),
    )  # fmt: skip


def cell(line: Line, data: str, n: int, settings: Settings, local_steps: int = 50) -> list[Outcome]:
    """One cell over the seeds."""
    named = f"{data} {line.setting} {line.method} n = {n} K = {local_steps}"
    return [run_cell(experiment(line, data, n, settings, seed, local_steps), f"{named} seed {seed}")
            for seed in range(settings.seeds)]  # fmt: skip


def sizes(settings: Settings, usual: Sequence[int]) -> list[int]:
    unknown = [n for n in settings.n if n not in SIZES]
    if unknown:
        raise ConfigError([f"--n {unknown[0]}; Table 1 has rates for n = 10, 20, 40 and 80"])
    return list(settings.n or (usual[:1] if settings.scale == "smoke" else usual))


def lines(settings: Settings, methods: Sequence[str] | None = None) -> list[tuple[Line, str]]:
    """The (line, data) pairs that --only lets through; it may name methods, settings or data sets, all must fit."""
    pairs = {f"{data} {line.setting} {line.method}": (line, data) for data in DATA for line in LINES
             if methods is None or line.method in methods}  # fmt: skip
    return list(pick(pairs, settings).values())


def table2(settings: Settings) -> Made:
    """Table 2: virtual seconds to the target accuracy, both data sets, n = 10, 20, 40, 80."""
    made = begun(settings, "DLSGD Table 2: virtual seconds to the target", COLUMNS)
    for line, data in lines(settings):
        for n in sizes(settings, SIZES):
            results = [o.result for o in cell(line, data, n, settings)]
            made.figures += [{"n": n, "setting": line.setting, **r} for r in results]
            made.tables[0].rows.append(table2_row(line, data, n, results))
            write(made, settings, "table2")  # after every cell: a run that is cut short keeps what it has
    return made


COLUMNS = ("data", "setting", "method", "n", "target", "ours, s", "smoothed, s", "paper, s", "ours / paper", "best",
           "dead, skipped", "wall s")  # fmt: skip


def table2_row(line: Line, data: str, n: int, results: list[dict[str, Any]]) -> list[str]:
    target, paper = TARGET[data, line.setting], line.seconds[data][SIZES.index(n)]
    ours = report.average(results, "reached", str(target), "virtual_seconds")
    smooth = report.average(results, "reached_smoothed", str(target), "virtual_seconds")
    figures = (ours, smooth, paper, None if ours is None else ours / paper)
    best = max(r["accuracy_best"] for r in results)
    dead, wall = report.average(results, "share_dead"), sum(r["wall_seconds"] for r in results)
    names = [data, line.setting, line.method, str(n), f"{target:.0%}"]
    return [*names, *map(report.amount, figures), f"{best:.4f}", report.amount(dead), report.amount(wall, 1)]


def curves(settings: Settings, cells: Sequence[tuple[str, Line, str, int, int]], title: str, name: str) -> Made:
    """Run cells (label, line, data, n, K) and draw them together, a picture for each data set and setting."""
    columns = ("data", *report.COLUMNS, "paper, s (K = 50)")
    made = begun(settings, f"DLSGD {title}", columns)
    groups: dict[str, dict[str, list[Outcome]]] = {}
    targets: dict[str, float] = {}
    paper: dict[tuple[str, str], str] = {}
    for label, line, data, n, local_steps in cells:
        outcomes = cell(line, data, n, settings, local_steps)
        groups.setdefault(f"{data}-{line.setting}", {})[label] = outcomes
        targets[f"{data}-{line.setting}"] = TARGET[data, line.setting]
        paper[data, label] = report.amount(line.seconds[data][SIZES.index(n)] if local_steps == 50 else None)
        made.figures += [{"label": label, "n": n, "local_steps": local_steps, **o.result} for o in outcomes]
    for group, by_label in groups.items():
        comparison = Comparison(by_label, targets[group])
        picture = settings.out / f"{name}-{group}.png"
        made.files.append(plots.comparison(comparison.curves(), picture, f"{title}: {group}"))
        data = group.removesuffix(f"-{NON_IID}").removesuffix(f"-{IID}")
        made.tables[0].rows.extend([group, *row, paper[data, row[0]]] for row in comparison.rows())
    write(made, settings, name)
    return made


def fig2(settings: Settings) -> Made:
    """Figure 2: convergence of both DLSGD methods with n = 10, 20, 40, 80."""
    pairs = lines(settings, ("dlsgd-homo", "dlsgd-hetero"))
    cells = [(f"{line.method} n = {n}", line, data, n, 50) for line, data in pairs for n in sizes(settings, SIZES)]
    return curves(settings, cells, "Figure 2, effect of n", "fig2")


def fig3(settings: Settings) -> Made:
    """Figure 3: convergence over time of all methods with n = 20."""
    cells = [(line.method, line, data, n, 50) for line, data in lines(settings) for n in sizes(settings, (20,))]
    return curves(settings, cells, "Figure 3, convergence over time", "fig3")


def fig6(settings: Settings) -> Made:
    """Figure 6: both DLSGD methods with K = 20, 50, 100 local steps (the paper does not name n; we take 20)."""
    cells = [(f"{line.method} K = {k}", line, data, n, k)
             for line, data in lines(settings, ("dlsgd-homo", "dlsgd-hetero"))
             for n in sizes(settings, (20,)) for k in (20, 50, 100)]  # fmt: skip
    return curves(settings, cells, "Figure 6, effect of K", "fig6")
