"""The recipes of the FedaGrac paper against its statements, and what Figure 1 shows."""

import math

import numpy as np
import pytest

from offbeat.papers import RECIPES, fedagrac, fedagrac_convex, runner
from offbeat.papers.recipe import Run
from offbeat.runs import plots

SMOKE = Run("smoke", 0, "cpu")


def methods(name, *words):
    cells = RECIPES[name].cells
    return [cell.work.method for cell in cells if set(words) <= set(cell.words)]


def test_rates_are_those_of_the_captions():
    """Table 1's caption: .001 for LR and .03 for the CNN, also in Table 2 and Figures 2 and 3."""
    assert {method["client_lr"] for method in methods("fedagrac-table1", "lr")} == {0.001}
    assert {method["client_lr"] for method in methods("fedagrac-table1", "cnn")} == {0.03}
    assert {method["client_lr"] for method in methods("fedagrac-fig3", "lr")} == {0.001}
    assert {method["client_lr"] for method in [*methods("fedagrac-fig3", "cnn"), *methods("fedagrac-fig2")]} == {0.03}


def test_table_6_has_rates_lambda_and_mu_of_the_paper_and_no_augmentation():
    table = RECIPES["fedagrac-table6"]
    assert len(table.cells) == 75
    assert {method["client_lr"] for method in methods("fedagrac-table6")} <= {0.01, 0.008, 0.005}
    assert {method["calibration"] for method in methods("fedagrac-table6", "fedagrac")} <= {
        0.01,
        0.02,
        0.03,
        0.04,
        0.05,
    }
    assert {method["proximal"] for method in methods("fedagrac-table6", "fedprox")} <= {1, 0.1, 0.01}
    assert {str(cell.work.task["model"]) for cell in table.cells} == {"alexnet", "vgg19"}
    assert {method["first"] for method in methods("fedagrac-table6", "fedagrac")} == {"gradient"}
    tuned = {
        (method["name"], method["client_lr"]) for method in [*methods("fedagrac-rates"), *methods("fedagrac-table6")]
    }
    assert tuned >= {(name, rate) for name in fedagrac.METHODS for rate in (0.01, 0.008, 0.005)}


def test_table_6_at_full_size_is_the_paper_s():
    cell = RECIPES["fedagrac-table6"].cell("vgg19 dp2 v100 random fedprox")
    made = cell.work.experiment(Run("full", 3, "cpu"))
    assert cell.paper == {"rounds": 102}
    assert made.task == {
        "name": "cifar10", "model": "vgg19", "clients": 20, "batch_size": 25, "scale": "standard",
        "split": {"name": "classes", "per_client": 5},
    }  # fmt: skip
    assert made.fleet["local_steps"] == {"law": "gaussian", "mean": 500, "variance": 100, "mode": "random"}
    assert (made.seed, made.until, made.evaluate) == (3, {"commits": 200, "accuracy": 0.8}, {"every_commits": 1})
    never = RECIPES["fedagrac-table6"].cell("alexnet dp2 v10000 fixed local-sgd").paper
    assert never == {"rounds": math.inf}


def test_table_2_has_no_cap_and_lowers_the_utilisation_until_the_target_is_reached(monkeypatch):
    assert fedagrac.speed_ratio("jetson-nano") == pytest.approx(34.1 / 0.236, rel=0.01)
    assert fedagrac.speed_ratio("raspberry-pi-4") > 700
    tried = []

    def train(work, run, label):
        steps = work.fleet["local_steps"]["fast"]
        tried.append(steps)
        met = steps <= 0.85 * 10 * fedagrac.speed_ratio("raspberry-pi-4")
        return {"values": {"rounds": 30 if met else None, "accuracy": 0.7}, "failed": None, "curve": []}

    monkeypatch.setattr(fedagrac, "train", train)
    record = fedagrac.utilisation("raspberry-pi-4", "fednova")(Run("full"))
    assert record["values"] == {"utilisation": 85, "rounds": 30, "accuracy": 0.7}
    assert record["tried"] == [100, 95, 90, 85]
    assert tried == [
        round(10 * fedagrac.speed_ratio("raspberry-pi-4") * share / 100) for share in (100, 95, 90, 85, 85)
    ]


def test_steps_of_fedprox_take_longer_in_figure_5():
    """Section 6.2: FedProx takes more time for its rounds, by less in the larger model."""
    cells = RECIPES["fedagrac-fig5"]

    def step(name):
        return cells.cell(name).work.fleet["step_seconds"]

    small = step("a9a mean=500 fedprox") / step("a9a mean=500 local-sgd")
    large = step("alexnet mean=500 fedprox") / step("alexnet mean=500 local-sgd")
    assert small > large > 1
    ours, plain, prox = (runner.play(cells.cell(f"alexnet mean=500 {name}"), SMOKE)
                         for name in ("fedagrac", "local-sgd", "fedprox"))  # fmt: skip
    assert ours["virtual_seconds"] > plain["virtual_seconds"] < prox["virtual_seconds"]
    assert plain["bytes_down"] == prox["bytes_down"] < ours["bytes_down"]


def test_methods_that_correct_their_drift_end_at_the_optimum():
    """Figure 1: the exact gradients of SCAFFOLD, FedLin and FedaGrac agree there; the others stop elsewhere."""
    task = fedagrac_convex.regression()
    x, y = (column[:, 0].numpy() for column in task.data)
    optimum = fedagrac_convex.least_squares(x, y)
    left = optimum[0] * x + optimum[1] - y
    assert max(abs(left.mean()), abs((left * x).mean())) < 1e-12
    paths = {name: fedagrac_convex.path(name, task) for name in ("fedlin", "fedagrac", "local-sgd", "fedprox")}
    distance = {name: np.linalg.norm(path[-1] - optimum) for name, path in paths.items()}
    assert max(distance["fedlin"], distance["fedagrac"]) < 1e-3
    assert 0.3 < distance["fedprox"] < distance["local-sgd"]
    assert paths["fedlin"][0] == pytest.approx(fedagrac_convex.START)
    assert len(paths["fedlin"]) == 1 + fedagrac_convex.ROUNDS


def test_a_run_that_diverges_is_a_result():
    cell = RECIPES["fedagrac-table1"].cell("cnn both")
    wild = type(cell)(
        "cnn both", type(cell.work)(**{**vars(cell.work), "method": {**cell.work.method, "client_lr": 1e30}})
    )
    record = runner.play(wild, SMOKE)
    assert record["failed"].startswith("stopped: ")
    assert (record["values"]["rounds"], record["values"]["accuracy"]) == (None, None)


def test_pictures_take_what_a_cut_run_leaves(tmp_path):
    maps = {"one": {("0.1", "0"): 0.5, ("0.1", "1"): np.nan, ("0.01", "0"): 0.7}}
    assert plots.heat_maps(maps, tmp_path / "h.png", ("eta", "lambda")).exists()
    assert plots.points({"a": {"0": 0.1}}, tmp_path / "p.png", "x", "y").exists()
