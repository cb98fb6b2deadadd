"""Questions that the papers leave, each a few cells that settle it: what was not said, varied.

Cells stand beside those of their table and have its figures; nothing here is tuned to fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from offbeat.papers import dlsgd, fedagrac
from offbeat.papers.dlsgd import IID, NON_IID, line_of, seconds, training
from offbeat.papers.recipe import Cell, Recipe, Training

BY_CLASS = {"name": "classes", "per_client": 2, "order": "classes"}
LOADERS: dict[str, dict[str, Any]] = {  # what a client reads, and in which order
    "restarted": {"split": BY_CLASS, "sampling": "in-order"},
    "continued": {"split": BY_CLASS, "sampling": "in-order-continued"},
    "epochs": {"sampling": "shuffle"},
    "shards": {"split": {"name": "shards", "per_client": 2}},
    "random-deal": {"split": {"name": "classes", "per_client": 2, "deal": "random"}},
    "shards-continued": {
        "split": {"name": "shards", "per_client": 2, "order": "classes"},
        "sampling": "in-order-continued",
    },
}


def with_task(work: Training, changes: Mapping[str, Any]) -> Training:
    assert isinstance(work.task, Mapping)
    return replace(work, task={**work.task, **changes})


def loader_cells() -> list[Cell]:
    """1: DLSGD non-iid is 2 to 4 times faster with random batches than in the paper: does the loader explain it?"""
    return [
        Cell(f"{name} {line.method} n={n}", with_task(training(line, "fashion-mnist", n), changes),
             {"seconds": seconds(line, "fashion-mnist", n)}, 2 if name == "continued" else 4)
        for name, changes in LOADERS.items() for n in ((10, 20, 80) if name == "continued" else (10, 20))
        for line in dlsgd.LINES if line.setting == NON_IID
    ]  # fmt: skip


def rate_cells() -> list[Cell]:
    """2: DLSGD-homo, n = 80, with local rates .10 and .01 on both data sets: a misprint?"""
    line, cells = line_of("dlsgd-homo", IID), []
    for data in dlsgd.DATA:
        printed = dlsgd.TABLE_2.cell(f"{data} iid dlsgd-homo n=80")
        assert isinstance(printed.work, Training)
        for rate in (0.1, 0.01):
            name, method = f"{data} dlsgd-homo rate={rate:g}", {**printed.work.method, "client_lr": rate}
            cells.append(replace(printed, name=name, alias=printed.name) if method == printed.work.method else
                         Cell(name, replace(printed.work, method=method), {"seconds": seconds(line, data, 80)},
                         2))  # fmt: skip
    asysg = line_of("asysg", IID)
    symmetric = with_task(training(asysg, "fashion-mnist", 10), {"scale": "symmetric"})
    return [
        *cells,
        Cell("fashion-mnist asysg rate=0.1", symmetric, {"seconds": seconds(asysg, "fashion-mnist", 10)}, 4),
    ]


def pixel_cells() -> list[Cell]:
    """6: cells of Table 2 on CIFAR-10 that fail with the printed rates, with pixels that are not standardised."""
    failing = (("asysg", IID, 20), ("dlsgd-homo", IID, 10), ("dlsgd-homo", IID, 40), ("dlsgd-hetero", NON_IID, 20))
    return [
        Cell(f"{scale} {method} n={n}", with_task(training(line_of(method, setting), "cifar10", n), {"scale": scale}),
             {"seconds": seconds(line_of(method, setting), "cifar10", n)}, 2)
        for scale in ("symmetric", "unit") for method, setting, n in failing
    ]  # fmt: skip


def data_cells() -> list[Cell]:
    """5: section 2.1 of DLSGD: clients read from one shared set, or from a stream that each passes once."""
    line, ways = (
        line_of("dlsgd-homo", IID),
        {"shared": {"split": "shared"}, "stream": {"sampling": "in-order-continued"}},
    )
    return [Cell(f"{name} n={n}", with_task(training(line, "fashion-mnist", n), changes),
                 {"seconds": seconds(line, "fashion-mnist", n)}, 4)
            for name, changes in ways.items() for n in (10, 20)]  # fmt: skip


def lr_cells() -> list[Cell]:
    """3: FedaGrac's Table 1: LR with other rates and splits; the CNN with Dirichlet 0.1 and with loaders in order."""
    cells = []
    for case, (steps, split) in fedagrac.CASES.items():
        paper = {"rounds": fedagrac.ROUNDS["lr"][list(fedagrac.CASES).index(case)]}
        cells.append(Cell(f"lr rate=.02 {case}", fedagrac.training(
            "lr", split, steps, fedagrac.method_table("lr", "local-sgd", 0.02), 1000, 0.8), paper, 3))  # fmt: skip
    dirichlet = {"name": "dirichlet", "alpha": 0.1}
    sorted_in_order = {"split": {**fedagrac.SPLITS["dp2"], "order": "classes"}, "sampling": "in-order"}
    for case, place in (("non-iid", 2), ("both", 3)):
        steps = fedagrac.CASES[case][0]
        for model in ("lr", "cnn"):
            work = fedagrac.training(model, dirichlet, steps, fedagrac.method_table(model, "local-sgd"), 1000, 0.8)
            paper = {"rounds": fedagrac.ROUNDS[model][place]}
            cells.append(Cell(f"{model} dirichlet-.1 {case}", work, paper, 3))
            cells.append(Cell(f"{model} in-order {case}", with_task(work, sorted_in_order), paper, 4))
    return cells


def reference_cells() -> list[Cell]:
    """4: Algorithm 1 keeps the mean gradient (line 11), equation (4) a fast client's first; and first epochs for first
    gradients, as in the authors' published code."""
    ways: dict[str, dict[str, Any]] = {
        "line-11": {},
        "equation-4": {"reference": "equation-4"},
        "epoch": {"first": "epoch"},
    }
    cells = []
    for model in ("lr", "cnn"):
        for name, more in ways.items():
            table = fedagrac.method_table(model, "fedagrac") | more
            cells.append(Cell(f"{model} {name}", fedagrac.training(model, fedagrac.NON_IID, fedagrac.ASYNC, table, 200),
                              priority=4))  # fmt: skip
    return cells


RECIPES = (
    Recipe(
        "questions-loaders", "Question 1: DLSGD Table 2, non-iid Fashion-MNIST, with other loaders and deals, "
                             "seconds to 80 %",
        "Question 1: does the order in which clients read their samples explain DLSGD's non-iid times?",
        ("loader", "method", "n"), tuple(loader_cells()), ("seconds",), "n", ("loader",), 1, ("n=10", "continued"),
        notes=("restarted, continued: shards sorted by class and read in order, from their start in every job, or on "
               "from where the last job ended; epochs: shuffled passes; shards: 200 shards of sorted data, two for "
               "each client; random-deal: two classes drawn without balance.",
               "Answer: for two of three methods. Shards sorted by class and read on from job to job give FedAvg 482 "
               "and 488 s with n = 10 and 20 (the paper: 438 and 448) and FedBuff 154 and 180 s (199 and 218), where "
               "random batches give 178 and 182, 68 and 63; but DLSGD-hetero takes 146 and 194 s (103 and 144), with "
               "random batches 51 and 67. From their start in every job all three are slower than in the paper. "
               "Shuffled passes and other deals of two classes change no time by more than a quarter. None of them "
               "makes DLSGD-hetero as much faster than FedBuff as it is in the paper: read on, with n = 80, FedBuff "
               "takes 257 s and DLSGD-hetero 316 (the paper: 423 and 236).",),
    ),
    Recipe(
        "questions-rates", "Question 2: DLSGD-homo with n = 80 and local rates .1 and .01, seconds to the target",
        "Question 2: is the local rate of DLSGD-homo for n = 80 in Table 1 a misprint? And AsySG with pixels in [-1, "
        "1].",
        ("data", "method", "rate"), tuple(rate_cells()), ("seconds", "best"), apart=("data", "method"), seeds=1,
        notes=("asysg: n = 10 with pixels in [-1, 1]; standardised, it stays below 55 %.",
               "Answer: probably. On Fashion-MNIST .1 (printed) gives 22 s and .01 68 s, the paper 99.7 s; on CIFAR-10 "
               ".1 does not reach 70 % and .01 (printed there) gives 107 s, the paper 154 s.",),
    ),
    Recipe(
        "questions-pixels", "Question 6: DLSGD Table 2 on CIFAR-10 with other pixels, seconds to the target",
        "Question 6: do the printed rates fail on CIFAR-10 because the paper's pixels were not standardised?",
        ("pixels", "method", "n"), tuple(pixel_cells()), ("seconds", "best"), apart=("pixels",), seeds=1,
        few=("n=10",),
        notes=("Answer, of the first 30 commits with two seeds on a processor: very likely. DLSGD-homo with n = 10 and "
               "DLSGD-hetero with n = 20 diverge with standardised pixels; with pixels in [0, 1] neither does, in "
               "[-1, 1] only the first.",),
    ),
    Recipe(
        "questions-data", "Question 5: DLSGD-homo on one shared set and on streams, Fashion-MNIST, seconds to 90 %",
        "Question 5: does it matter that DLSGD-homo's clients read from one shared set, or each from a stream?",
        ("data", "n"), tuple(data_cells()), ("seconds",), "n", ("data",), 1, ("n=10",),
    ),
    Recipe(
        "questions-table1", "Question 3: FedaGrac Table 1 with rate .02 for LR, Dirichlet .1, and shards read in order",
        "Question 3: which rate, split and loader give the rounds of FedaGrac's Table 1?",
        ("model", "change", "case"), tuple(lr_cells()), ("rounds", "best"), apart=("model", "change"), seeds=1,
        few=("dirichlet-.1",),
        notes=("Answer: LR had .02: it gives 3, 1, 93 and 131 rounds where the paper has 2, 1, 91 and none within its "
               "limit; the stated .001 gives 39, 15, 161 and 139. For the CNN nothing here gives both of the paper's "
               "265 and 339 rounds: Dirichlet .1 takes 105 and 42, sorted shards read in order none within 1,000 and "
               "303, random batches of one class for each client none within 1,000.",),
    ),
    Recipe(
        "questions-reference", "Question 4: FedaGrac by line 11, by equation (4), and with first epochs, 200 rounds",
        "Question 4: does it matter which gradient a fast client of FedaGrac keeps?",
        ("model", "reference"), tuple(reference_cells()), ("accuracy", "best"), seeds=1,
        notes=("Answer for LR: the mean gradient (line 11) ends at 82.6 %, the first one (equation 4) at 73.3 % after "
               "82.1 at its best, the first epoch's at 83.9 %.",),
    ),
)  # fmt: skip
