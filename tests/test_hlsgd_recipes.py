"""The recipes of the HL-SGD paper, at the smoke scale: what they make, what they refuse, and the paper's clock."""

import json
import math

import pytest

from offbeat.errors import ConfigError
from offbeat.papers import PAPERS, hlsgd
from offbeat.papers.recipe import Settings
from offbeat.runs import report

PNG = b"\x89PNG\r\n\x1a\n"
NAMES = [name for name in PAPERS if name.startswith("hlsgd-")]
CHOSEN = {"hlsgd-fig2": ("tau=5", "tau=50"), "hlsgd-rates": ("hl-sgd",)}  # enough to see every branch
ROUNDS, TAU = 4, 10  # of the smoke scale
LABELS = {
    "hlsgd-fig1": ["hl-sgd", "local-sgd"],
    "hlsgd-fig2": ["hl-sgd tau=5", "local-sgd tau=5", "hl-sgd tau=50", "local-sgd tau=50"],
    "hlsgd-fig3": ["p=0.125", "p=0.25", "p=0.5", "p=1"],
    "hlsgd-fig4": ["er=0.2", "er=0.5", "er=0.8", "er=1", "local-sgd"],
    "hlsgd-fig5": ["l=1", "l=5", "l=10", "local-sgd"],
    "hlsgd-rates": ["hl-sgd 0.01", "hl-sgd 0.02", "hl-sgd 0.05", "hl-sgd 0.08", "hl-sgd 0.1"],
    "hlsgd-slow-cluster": ["hl-sgd", "async-hl-sgd"],
    "hlsgd-table2": ["ring", "path", "grid", "torus", "erdos-renyi", "exponential"],
}
COLUMNS = ("data", "method", "rate", "best", "paper", "hours in all", "hours to target", "GB up", "GB d2d", "wall s")
OTHER_COLUMNS = {
    "hlsgd-slow-cluster": ("method", "hours to target", *report.COLUMNS[1:-1]),
    "hlsgd-table2": ("graph", "n = 16", "n = 36", "n = 64", "fitted", "stated", "stated, over these n"),
}


def smoke(tmp_path, *only, **more):
    return Settings(only=only, device="cpu", scale="smoke", out=tmp_path, **more)


@pytest.fixture(scope="module")
def makes(tmp_path_factory):
    """What a recipe made, each made once."""
    made = {}

    def make(name):
        if name not in made:
            made[name] = PAPERS[name](smoke(tmp_path_factory.mktemp(name), *CHOSEN.get(name, ())))
        return made[name]

    return make


def hours(steps=TAU, exchanges=TAU, degree=2, reports=8, rounds=ROUNDS):
    """Equation (2): c_cp = 0.01 h, c_d2d = degree / 2 x 0.005 h, and 0.05 h for each report of a cluster's eight."""
    return rounds * (steps * 0.01 + exchanges * degree / 2 * 0.005 + reports * 0.05)


def told(made):
    """Virtual hours of each run, by its label without the data."""
    return {figure["label"].removeprefix("cifar10 "): figure["virtual_seconds"] / 3600 for figure in made.figures}


# ---- every recipe -------------------------------------------------------------------------------
@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_makes_its_table_and_picture(name, makes):
    made = makes(name)
    short, table, place = name.removeprefix("hlsgd-"), made.tables[0], made.files[0].parent
    assert tuple(table.columns) == OTHER_COLUMNS.get(name, COLUMNS)
    assert all(len(row) == len(table.columns) for row in table.rows)
    alone = name in OTHER_COLUMNS
    assert [row[0 if alone else 1] for row in table.rows] == LABELS[name]
    assert alone or {row[0] for row in table.rows} == {"cifar10"}
    picture = place / (f"{short}.png" if alone else f"{short}-cifar10.png")
    assert set(made.files) == {place / f"{short}.md", place / f"{short}.json", picture} == set(place.iterdir())
    assert len(made.files) == 3
    assert picture.read_bytes().startswith(PNG)
    text = (place / f"{short}.md").read_text()
    assert text.startswith("# HL-SGD ")
    assert all(f"| {label} |" in text for label in LABELS[name])
    assert all(note in text for note in made.notes)
    assert json.loads((place / f"{short}.json").read_text()) == json.loads(json.dumps(made.figures))
    assert len(made.figures) == len(table.rows)
    if name != "hlsgd-table2":
        assert "figures mean nothing" in made.notes[0]
        assert {(figure["task"], figure["fleet"]) for figure in made.figures} == {("digits", "hlsgd")}
        assert {figure["commits"] for figure in made.figures} == {3 if short == "slow-cluster" else ROUNDS}


@pytest.mark.parametrize("name", NAMES)
def test_words_that_fit_nothing_are_refused(name, tmp_path):
    with pytest.raises(ConfigError, match=r"--only zzz.* fits nothing here; the words are: "):
        PAPERS[name](smoke(tmp_path, "zzz"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", NAMES)
def test_n_is_refused(name, tmp_path):
    with pytest.raises(ConfigError, match=r"takes? no --n"):
        PAPERS[name](smoke(tmp_path, *LABELS[name][0].split(), n=(7,)))
    assert not list(tmp_path.iterdir())


# ---- the paper's clock and bytes ----------------------------------------------------------------
def test_the_hours_of_figure_1_are_equation_2(makes):
    made = makes("hlsgd-fig1")
    assert told(made) == pytest.approx({"hl-sgd": hours(), "local-sgd": hours(exchanges=0)}, rel=1e-12)
    assert hours() == pytest.approx(ROUNDS * (TAU * (0.01 + 0.005) + 8 * 0.05))
    assert [row[5] for row in made.tables[0].rows] == ["2.20", "2.00"]
    assert [row[2] for row in made.tables[0].rows] == ["0.1", "0.1"]
    assert [row[4] for row in made.tables[0].rows] == ["0.6871", "0.6368"]
    gossip, local = made.figures
    vector = local["bytes_up"] / (32 * ROUNDS)
    assert gossip["bytes_up"] == local["bytes_up"] == gossip["bytes_down"]
    assert (gossip["bytes_d2d"], local["bytes_d2d"]) == (ROUNDS * TAU * 4 * 16 * vector, 0)  # 16 directed links a ring
    best = [figure["accuracy_best"] for figure in made.figures]
    assert [row[3] for row in made.tables[0].rows] == [f"{accuracy:.4f}" for accuracy in best]


def test_the_hours_of_the_other_figures_are_equation_2(makes):
    two = {f"{name} tau={tau}": hours(steps, steps if name == "hl-sgd" else 0)
           for tau, steps in ((5, 2), (50, 10)) for name in ("hl-sgd", "local-sgd")}  # fmt: skip
    assert told(makes("hlsgd-fig2")) == pytest.approx(two, rel=1e-12)
    three = {f"p={p:g}": hours(reports=8 * p) for p in (0.125, 0.25, 0.5, 1.0)}
    assert told(makes("hlsgd-fig3")) == pytest.approx(three, rel=1e-12)
    five = {"l=1": hours(), "l=5": hours(exchanges=5), "l=10": hours(exchanges=5), "local-sgd": hours(exchanges=0)}
    assert told(makes("hlsgd-fig5")) == pytest.approx(five, rel=1e-12)  # l is at most 2 here
    rates = told(makes("hlsgd-rates"))
    assert rates == pytest.approx(dict.fromkeys(rates, hours()), rel=1e-12)


def test_figure_4_pays_for_the_largest_degree(makes):
    made = makes("hlsgd-fig4")
    found = told(made)
    assert found["er=1"] == pytest.approx(hours(degree=7, reports=1), rel=1e-12)
    assert found["local-sgd"] == pytest.approx(hours(exchanges=0, reports=1), rel=1e-12)
    degrees = {label: 2 * (value / ROUNDS - TAU * 0.01 - 0.05) / (TAU * 0.005) for label, value in found.items()}
    assert all(degree == pytest.approx(round(degree), abs=1e-9) for degree in degrees.values())
    assert 2 <= degrees["er=0.2"] <= degrees["er=0.5"] <= degrees["er=0.8"] <= 7
    assert made.notes[1].startswith("rho_max by edge probability, seed 0")
    assert "1: 0.0000 (0)" in made.notes[1]


def test_the_slow_cluster_holds_up_rounds_but_not_the_buffer(makes):
    """Three rounds of steps that take 0.05 h there; a quarter of eight devices reports."""
    made = makes("hlsgd-slow-cluster")
    waiting, free = made.figures
    assert waiting["virtual_seconds"] / 3600 == pytest.approx(3 * (10 * 0.05 + 10 * 0.005 + 2 * 0.05), rel=1e-12)
    assert free["virtual_seconds"] < waiting["virtual_seconds"] / 3
    assert free["idle_share"] < waiting["idle_share"]
    assert (free["updates_consumed"], waiting["updates_consumed"]) == (6, 12)


# ---- table 2 ------------------------------------------------------------------------------------
def test_the_fitted_orders_of_table_2(makes):
    made = makes("hlsgd-table2")
    fitted = {figure["graph"]: figure["fitted"] for figure in made.figures}
    assert fitted["ring"] == pytest.approx(2, abs=0.1)
    assert fitted["path"] == pytest.approx(2, abs=0.1)
    assert fitted["torus"] == pytest.approx(1, abs=0.2)
    assert fitted["erdos-renyi"] < 0 < fitted["exponential"] < 0.5
    assert [row[4] for row in made.tables[0].rows] == [f"{value:.2f}" for value in fitted.values()]
    assert [row[5] for row in made.tables[0].rows] == [order for order, _ in hlsgd.STATED.values()]
    ring = made.figures[0]
    assert list(ring["n"]) == [16, 36, 64]
    assert ring["gap"] == pytest.approx([2 / 3 * (1 - math.cos(2 * math.pi / n)) for n in (16, 36, 64)], rel=1e-9)


def test_one_graph_of_table_2_alone(tmp_path):
    made = hlsgd.table2(smoke(tmp_path, "torus"))
    assert [row[0] for row in made.tables[0].rows] == ["torus"]


# ---- what --only lets through, and seeds --------------------------------------------------------
def labels(tmp_path, recipe, *only):
    return [figure["label"] for figure in recipe(smoke(tmp_path, *only)).figures]


@pytest.fixture
def unrun(monkeypatch):
    """Recipes choose their cells, and the outcome of the first stands for all; nothing is drawn."""
    kept, original = [], hlsgd.run_cell

    def once(experiment, label):
        if not kept:
            kept.append(original(experiment, label))
        return kept[0]

    monkeypatch.setattr(hlsgd, "run_cell", once)
    monkeypatch.setattr(hlsgd.plots, "panels", lambda panels, path, title, against: path)


def test_only_chooses_cells_and_data(tmp_path, unrun):
    assert labels(tmp_path, hlsgd.fig1, "local-sgd") == ["cifar10 local-sgd"]
    assert labels(tmp_path, hlsgd.fig1, "femnist", "hl-sgd") == ["femnist hl-sgd"]
    assert labels(tmp_path, hlsgd.fig2, "tau=20 hl-sgd") == ["cifar10 hl-sgd tau=20"]
    assert labels(tmp_path, hlsgd.fig3, "femnist", "cifar10", "p=1") == ["cifar10 p=1", "femnist p=1"]
    assert labels(tmp_path, hlsgd.rates) == [
        f"cifar10 {name} {rate}" for name in ("hl-sgd", "local-sgd") for rate in ("0.01", "0.02", "0.05", "0.08", "0.1")
    ]
    assert labels(tmp_path, hlsgd.rates, "femnist", "hl-sgd") == [
        f"femnist hl-sgd {rate}" for rate in ("0.005", "0.01", "0.02", "0.05", "0.08")
    ]


def test_rates_are_those_of_the_data_however_it_is_named(tmp_path, unrun):
    assert labels(tmp_path, hlsgd.rates, "femnist hl-sgd")[0] == "femnist hl-sgd 0.005"


def test_the_papers_best_of_figure_1_stands_only_there(makes):
    assert makes("hlsgd-fig4").tables[0].rows[-1][4] == "-"


def test_seeds_are_averaged(tmp_path):
    made = hlsgd.fig1(smoke(tmp_path, "local-sgd", seeds=2))
    assert [figure["seed"] for figure in made.figures] == [0, 1]
    best = sum(figure["accuracy_best"] for figure in made.figures) / 2
    assert [row[3] for row in made.tables[0].rows] == [f"{best:.4f}"]


def test_figure_1_at_full_size_is_the_paper_s():
    settings = Settings(scale="full", device="cpu")
    e = hlsgd.experiment("cifar10", (hlsgd.HL, {}), settings, 2)
    assert e.task == {
        "name": "cifar10", "model": "fedavg-cifar-cnn", "clients": 32, "batch_size": 50, "scale": "standard",
        "split": {"name": "dirichlet", "alpha": 0.1},
    }  # fmt: skip
    assert e.method == {"name": "hl-sgd", "local_steps": 50, "client_lr": 0.1}
    assert (e.fleet, e.seed, e.until) == ({"name": "hlsgd"}, 2, {"commits": 100})
    falling = hlsgd.experiment("cifar10", (hlsgd.LOCAL, {}), settings, 0, decay=True)
    rate = {"schedule": "step", "value": 0.1, "at": [50, 75], "factor": 0.5}
    assert falling.method == {"n": None, "name": "local-sgd", "local_steps": 50, "client_lr": rate}
