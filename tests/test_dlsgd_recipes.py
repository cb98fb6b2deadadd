"""The recipes of the DLSGD paper against its statements: Table 1's rates, Table 2's figures, the captions' n and K."""

import pytest

from offbeat.papers import RECIPES
from offbeat.papers.recipe import Run

TABLE_1 = {  # method, setting: data: (eta, eta-bar) for n = 5, 10, 20, 40, 80, from the paper
    ("local-sgd", "iid"): {"fashion-mnist": [None, (1, 0.1), (1, 0.01), (1, 0.01), (1, 0.01)],
                           "cifar10": [None, (1, 0.01), (1, 0.01), (1, 0.01), (1, 0.01)]},
    ("asysg", "iid"): {"fashion-mnist": [None, *[(0.1, None)] * 4], "cifar10": [None, *[(0.1, None)] * 4]},
    ("dlsgd-homo", "iid"): {"fashion-mnist": [(0.1, 0.05), (0.1, 0.05), (0.1, 0.05), (0.1, 0.05), (1, 0.1)],
                            "cifar10": [(0.1, 0.05), (1, 0.05), (0.1, 0.01), (0.1, 0.05), (1, 0.01)]},
    ("local-sgd", "non-iid"): {"fashion-mnist": [None, (0.1, 0.05), (0.1, 0.05), (1, 0.01), (0.1, 0.1)],
                               "cifar10": [None, (1, 0.01), (1, 0.01), (0.1, 0.05), (0.1, 0.05)]},
    ("fedbuff", "non-iid"): {"fashion-mnist": [None, (0.1, 0.005), (0.1, 0.01), (0.1, 0.01), (0.1, 0.05)],
                             "cifar10": [None, (0.1, 0.01), (0.1, 0.01), (0.1, 0.01), (0.1, 0.05)]},
    ("dlsgd-hetero", "non-iid"): {"fashion-mnist": [(0.1, 0.05)] * 5,
                                  "cifar10": [(0.1, 0.05), (0.1, 0.05), (0.1, 0.1), (0.1, 0.05), (0.1, 0.05)]},
}  # fmt: skip
SIZES = (5, 10, 20, 40, 80)


def rates(method):
    """(eta, eta-bar): FedBuff's beta is eta over the size of its buffer."""
    eta = method["beta"] * method["buffer_size"] if "beta" in method else method["server_lr"]
    return pytest.approx(eta), method.get("client_lr")


def cells():
    found = {cell.name: cell for name in ("dlsgd-table2", "dlsgd-fig2") for cell in RECIPES[name].cells}
    return {tuple(name.split()): cell.work for name, cell in found.items()}


def test_table_1_s_rates_n_of_5_among_them():
    found, seen = cells(), 0
    for (method, setting), by_data in TABLE_1.items():
        for data, pairs in by_data.items():
            for n, pair in zip(SIZES, pairs, strict=True):
                key = (data, setting, method, f"n={n}")
                assert (key in found) == (pair is not None)
                if pair is not None:
                    assert (pair[0], pair[1]) == rates(found[key].method)
                    seen += 1
    assert seen == len(found) == 52


def test_the_figures_have_the_captions_n_and_k():
    def numbers(figure, name):
        return {cell.work.method.get(name, cell.work.method.get("buffer_size")) for cell in RECIPES[figure].cells}

    assert numbers("dlsgd-fig2", "n") == set(SIZES)
    assert [numbers(f"dlsgd-fig{number}", "n") for number in (3, 4, 5, 6)] == [{20}, {40}, {80}, {10}]
    assert numbers("dlsgd-fig6", "local_steps") == {20, 50, 100}
    assert {cell.words[2] for cell in RECIPES["dlsgd-fig4"].cells} == {method for method, _ in TABLE_1}


def test_table_2_at_full_size_is_the_paper_s():
    cell = RECIPES["dlsgd-table2"].cell("cifar10 non-iid fedbuff n=40")
    made = cell.work.experiment(Run("full", 2, "cpu"))
    assert cell.paper == {"seconds": 2008.8}
    assert made.method == {"name": "fedbuff", "buffer_size": 40, "local_steps": 50, "client_lr": 0.01, "beta": 0.1 / 40}
    assert made.task == {"name": "cifar10", "model": "dlsgd-cnn", "split": {"name": "classes", "per_client": 2},
                         "scale": "standard", "clients": 100, "batch_size": 10}  # fmt: skip
    assert (made.fleet, made.seed, made.targets, made.until["accuracy_smoothed"]) == ("dlsgd-cifar10", 2, (0.6,), 0.6)


def test_a_figure_shows_the_runs_of_the_table():
    """A run serves Table 2 and the figures: cells of figures have their records there."""
    assert {cell.home for cell in RECIPES["dlsgd-fig4"].cells} == {"dlsgd-table2"}
    shared = RECIPES["dlsgd-fig6"].cell("cifar10 iid dlsgd-homo K=50")
    assert (shared.home, shared.record) == ("dlsgd-table2", "cifar10 iid dlsgd-homo n=10")


def test_the_questions_change_what_they_say():
    homo = RECIPES["questions-rates"]
    assert [homo.cell(f"{data} dlsgd-homo rate={rate}").work.method["client_lr"]
            for data in ("fashion-mnist", "cifar10") for rate in (0.1, 0.01)] == [0.1, 0.01, 0.1, 0.01]  # fmt: skip
    data = RECIPES["questions-data"]
    assert data.cell("shared n=10").work.task["split"] == "shared"  # section 2.1: one shared memory
    assert data.cell("stream n=10").work.task["sampling"] == "in-order-continued"  # and streams
    pixels = RECIPES["questions-pixels"].cell("unit dlsgd-hetero n=20")
    assert (pixels.work.task["scale"], pixels.work.method["n"], pixels.paper) == ("unit", 20, {"seconds": 497.51})
    assert RECIPES["questions-loaders"].cell("continued fedbuff n=80").paper == {"seconds": 422.88}
    loader = RECIPES["questions-loaders"].cell("continued fedbuff n=10").work.task
    assert (loader["sampling"], loader["split"]) == (
        "in-order-continued", {"name": "classes", "per_client": 2, "order": "classes"})  # fmt: skip
