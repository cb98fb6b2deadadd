"""The recipes of the FedaGrac paper, at the smoke scale: what they make, what they refuse, and what Figure 1 shows."""

import json

import numpy as np
import pytest

from offbeat.errors import ConfigError
from offbeat.papers import PAPERS, dlsgd, fedagrac
from offbeat.papers.recipe import Settings
from offbeat.runs import plots

PNG = b"\x89PNG\r\n\x1a\n"
NAMES = [name for name in PAPERS if name.startswith("fedagrac-")]
CHOSEN = {  # enough to see every branch
    "fedagrac-table6": ("alexnet dp2", "v0", "v10000", "fedagrac", "fedprox"),
    "fedagrac-fig5": ("mean=500", "fedagrac", "local-sgd"),
    "fedagrac-fig3": ("various",),
    "fedagrac-table2": ("raspberry-pi-4",),
}
COLUMNS = {
    "fedagrac-a9a": ("method", "rounds", "gap of the loss", "gap over FedaGrac's", "accuracy", "wall s"),
    "fedagrac-fig1": ("method", "distance after 25 rounds", "a", "b", "optimum a", "optimum b"),
    "fedagrac-fig2": ("steps", "lambda", "accuracy", "best", "wall s"),
    "fedagrac-fig3": ("model", "steps", "method", "accuracy", "rounds", "virtual s", "best", "wall s"),
    "fedagrac-fig4": ("model", "steps", "eta", "lambda", "mean of the last 10", "best", "wall s"),
    "fedagrac-fig5": ("model", "mean", "method", "accuracy", "rounds", "virtual s", "best", "wall s"),
    "fedagrac-table1": ("model", "case", "target", "ours, rounds", "paper, rounds", "best", "wall s"),
    "fedagrac-table2": ("device", "method", "ratio", "utilisation", "rounds", "accuracy after 100", "paper", "wall s"),
    "fedagrac-table6": ("model", "split", "variance", "mode", "method", "target", "ours, rounds", "paper, rounds",
                        "best", "wall s"),
}  # fmt: skip
ROWS = {"fedagrac-a9a": 5, "fedagrac-fig1": 6, "fedagrac-fig2": 12, "fedagrac-fig3": 8, "fedagrac-fig4": 16,
        "fedagrac-fig5": 4, "fedagrac-table1": 8, "fedagrac-table2": 2, "fedagrac-table6": 6}  # fmt: skip


def smoke(tmp_path, *only, **more):
    return Settings(only=only, device="cpu", scale="smoke", out=tmp_path, **more)


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Figure 1, made once."""
    return fedagrac.fig1(smoke(tmp_path_factory.mktemp("fig1")))


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_makes_its_table_and_picture(name, tmp_path, request):
    if name == "fedagrac-fig1":
        made = request.getfixturevalue("paths")
        tmp_path = made.files[0].parent
    else:
        made = PAPERS[name](smoke(tmp_path, *CHOSEN.get(name, ())))
    short, table = name.removeprefix("fedagrac-"), made.tables[0]
    assert tuple(table.columns) == COLUMNS[name]
    assert len(table.rows) == ROWS[name]
    assert all(len(row) == len(table.columns) for row in table.rows)
    kinds = ["md", "json", *(["png"] if short.startswith(("fig", "a9a")) else [])]
    assert made.files == [tmp_path / f"{short}.{kind}" for kind in kinds]
    assert (tmp_path / f"{short}.md").read_text().startswith("# Objective" if short == "a9a" else "# FedaGrac ")
    assert json.loads((tmp_path / f"{short}.json").read_text()) == json.loads(json.dumps(made.figures))
    if "png" in kinds:
        assert (tmp_path / f"{short}.png").read_bytes().startswith(PNG)
    if name != "fedagrac-fig1":
        assert "figures mean nothing" in made.notes[0]
        assert short == "a9a" or all(len(figure["curve"]) == 1 + figure["commits"] for figure in made.figures)
        assert {figure["task"] for figure in made.figures} == {"digits"}


@pytest.mark.parametrize("name", NAMES)
def test_words_that_fit_nothing_and_n_are_refused(name, tmp_path):
    with pytest.raises(ConfigError, match="--only zzz fits nothing here; the words are: "):
        PAPERS[name](smoke(tmp_path, "zzz"))
    with pytest.raises(ConfigError, match="--n 7; in the FedaGrac paper all clients take part"):
        PAPERS[name](smoke(tmp_path, n=(7,)))
    assert not list(tmp_path.iterdir())


def test_methods_that_correct_their_drift_end_at_the_optimum(paths):
    """Figure 1: the exact gradients of SCAFFOLD, FedLin and FedaGrac agree there; the others stop elsewhere."""
    distance = {figure["method"]: figure["distance"] for figure in paths.figures}
    assert all(distance[name] < 1e-3 for name in ("scaffold", "fedlin", "fedagrac"))
    assert all(distance[name] > 0.3 for name in ("local-sgd", "fedprox", "fednova"))
    assert distance["fedprox"] < distance["local-sgd"]


def test_the_closed_form_of_figure_1_is_where_the_gradient_vanishes():
    task = fedagrac.regression()
    x, y = (column[:, 0].numpy() for column in task.data)
    a, b = fedagrac.least_squares(x, y)
    left = a * x + b - y
    assert abs(left.mean()) < 1e-12
    assert abs((left * x).mean()) < 1e-12
    begun = fedagrac.path("fedlin", task)
    assert begun[0] == pytest.approx(fedagrac.START)
    assert len(begun) == 1 + fedagrac.FIG_1_ROUNDS


def test_one_cell_of_table_6_alone(tmp_path):
    made = fedagrac.table6(smoke(tmp_path, "alexnet dp2 v10000 fixed fedagrac"))
    assert [row[:6] for row in made.tables[0].rows] == [["alexnet", "dp2", "v10000", "fixed", "fedagrac", "70%"]]
    assert made.tables[0].rows[0][7] == "111"
    outcome = fedagrac.cell(
        "alexnet", "dp2", 10000, "fixed", "fedagrac", smoke(tmp_path), 0, rate=0.008, calibration=0.02, rounds=2
    )
    assert outcome.commits == 2
    same = fedagrac.cell("alexnet", "dp2", 10000, "fixed", "fedagrac", smoke(tmp_path))
    assert same.accuracy_final == made.figures[0]["accuracy_final"]


def test_table_6_at_full_size_is_the_paper_s():
    settings = Settings(scale="full", device="cpu")
    e = fedagrac.experiment(fedagrac.table6_trial("vgg19", "dp2", 100, "random", "fedprox"), settings, 3)
    assert e.task == {
        "name": "cifar10", "model": {"name": "vgg19", "augment": True}, "clients": 20, "batch_size": 25,
        "scale": "standard", "split": {"name": "classes", "per_client": 5},
    }  # fmt: skip
    assert e.fleet["local_steps"] == {"law": "gaussian", "mean": 500, "variance": 100, "mode": "random"}
    assert (e.seed, e.until, e.evaluate) == (3, {"commits": 200, "accuracy": 0.8}, {"every_commits": 1})
    own = fedagrac.method_table("alexnet", "fedagrac", 0.008, 0.02)
    assert own == {"name": "fedagrac", "client_lr": 0.008, "weights": "size", "calibration": 0.02, "first": "epoch"}
    assert fedagrac.method_table("lr", "local-sgd") == {
        "name": "local-sgd", "client_lr": 0.02, "weights": "size", "n": None,
    }  # fmt: skip


def test_table_2_lowers_the_utilisation_until_the_target_is_reached(tmp_path, monkeypatch):
    assert fedagrac.speed_ratio("jetson-nano") == pytest.approx(34.1 / 0.236, rel=0.01)
    made = fedagrac.table2(smoke(tmp_path, "jetson-nano", "fednova"))
    tried = [(figure["cell"], figure["commits"]) for figure in made.figures]
    assert tried == [("jetson-nano fednova 100%", 3), ("jetson-nano fednova 95%", 3)]
    assert made.tables[0].rows[0][2:7] == ["145", "none", "3+", "-", "50% (50) 0.6439"]
    monkeypatch.setattr(fedagrac, "ENOUGH", 0.01)
    row = fedagrac.table2(smoke(tmp_path, "jetson-nano", "fednova")).tables[0].rows[0]
    assert row[3:5] == ["100%", "0"]
    assert 0 < float(row[5]) < 1


def test_a_run_that_diverges_is_a_result(tmp_path, monkeypatch):
    monkeypatch.setitem(fedagrac.RATE["cnn"], "local-sgd", 1e30)
    made = fedagrac.table1(smoke(tmp_path, "cnn", "both"))
    assert made.tables[0].rows[0][3:5] == ["diverged", "339"]
    monkeypatch.setattr(fedagrac, "ETAS", (1e30,))
    monkeypatch.setattr(fedagrac, "GRID", (0,))
    made = fedagrac.fig4(smoke(tmp_path, "alexnet", "various"))
    assert made.tables[0].rows[0][4] == "diverged"


def test_seeds_are_averaged_and_a_round_s_time_shows_the_traffic(tmp_path):
    made = fedagrac.fig5(smoke(tmp_path, "alexnet", "mean=500", "fedagrac", "local-sgd", seeds=2))
    assert [figure["seed"] for figure in made.figures] == [0, 1, 0, 1]
    ours, plain = made.figures[0], made.figures[2]
    assert ours["virtual_seconds"] > plain["virtual_seconds"]
    assert plain["bytes_down"] < ours["bytes_down"]


def test_words_of_one_kind_are_alternatives_in_other_papers_too():
    settings = Settings(only=("fedbuff", "asysg", "cifar10"))
    assert [(line.method, data) for line, data in dlsgd.lines(settings)] == [
        ("asysg", "cifar10"),
        ("fedbuff", "cifar10"),
    ]


def test_pictures_take_what_a_cut_run_leaves(tmp_path):
    maps = {"one": {("0.1", "0"): 0.5, ("0.1", "1"): np.nan, ("0.01", "0"): 0.7}}
    assert plots.heat_maps(maps, tmp_path / "h.png", ("eta", "lambda")).exists()
    assert plots.points({"a": {"0": 0.1}}, tmp_path / "p.png", "x", "y").exists()
