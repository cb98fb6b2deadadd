"""Recipes are data: every one runs at the smoke size, keeps to what its paper states, and its records say what "
"agrees."""

import json
import math
import signal
from dataclasses import replace

import pytest

from offbeat.errors import ConfigError, OffbeatError
from offbeat.papers import RECIPES, agreement, page, runner
from offbeat.papers.ledger import PACES, Ledger, estimate
from offbeat.papers.recipe import Cell, Claim, Recipe, Run, Settings, Training

PNG = b"\x89PNG\r\n\x1a\n"
ONE = {  # cells enough to see every branch; others have few
    "dlsgd-table2": ("asysg", "cifar10", "n=10"), "dlsgd-fig2": ("n=5", "iid", "cifar10"),
    "dlsgd-fig3": ("cifar10", "fedbuff"), "dlsgd-fig4": ("cifar10", "local-sgd", "iid"), "dlsgd-fig5": ("cifar10",
    "asysg"),
    "dlsgd-fig6": ("K=100", "cifar10"), "fedagrac-fig2": ("lambda=0.1", "lambda=increase", "constant"),
    "fedagrac-fig3": ("various", "lr"), "fedagrac-fig4": ("eta=0.1", "lambda=1", "a9a"), "fedagrac-fig5": ("a9a",
    "mean=500"),
    "fedagrac-table1": ("both",), "fedagrac-table2": ("rtx-2080-ti",), "fedagrac-table6": ("alexnet", "dp2", "v100",
    "random"),
    "fedagrac-fig1": ("fednova",), "fedagrac-a9a": ("fedagrac",),
    "heterogeneity-table1": ("100%",), "heterogeneity-table2": ("25%", "whole"), "heterogeneity-tableC1": ("25%",),
    "heterogeneity-table3": ("I=10",), "heterogeneity-tableC2": ("I=40",), "hlsgd-fig3": ("cifar10", "p=0.125"),
    "hlsgd-fig4": ("er=0.5", "rate=0.08"), "hlsgd-rates": ("cifar10", "hl-sgd", "0.01"),
    "questions-table1": ("in-order",),
    "questions-loaders": ("shards-continued", "n=10", "fedbuff"), "questions-rates": ("rate=0.01",),
    "questions-reference": ("lr",), "fedbuff-theorem1": ("T=130", "K=1"),
}  # fmt: skip


def smoke(tmp_path, *only, **more):
    return Settings(only=only, device="cpu", scale="smoke", out=tmp_path, **more)


@pytest.fixture(scope="module")
def makes(tmp_path_factory):
    """What a recipe made, each made once."""
    made = {}

    def make(name):
        if name not in made:
            made[name] = runner.make(RECIPES[name], smoke(tmp_path_factory.mktemp(name), *ONE.get(name, ())))
        return made[name]

    return make


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_makes_its_table_and_picture(name, makes):
    made, recipe = makes(name), RECIPES[name]
    table, folder = made.tables[0], made.files[0].parent
    assert all(len(row) == len(table.columns) for row in table.rows)
    assert [path.name for path in made.files[:2]] == [f"{recipe.short}.md", f"{recipe.short}.json"]
    assert json.loads(made.files[1].read_text()) == json.loads(json.dumps(made.figures))
    assert (len(made.files) > 2) == (recipe.picture is not None)
    assert all(path.read_bytes().startswith(PNG) for path in made.files[2:])
    assert set(folder.iterdir()) == set(made.files)
    text = made.files[0].read_text()
    assert text.startswith(f"# {recipe.title}")
    assert all(note in text for note in made.notes)
    assert "figures mean nothing" in made.notes[0]
    assert not [figure["failed"] for figure in made.figures if figure["failed"]]
    shown = set(recipe.values) & {value for figure in made.figures for value in figure["values"]}
    assert shown, "no value of the table was measured"


@pytest.mark.parametrize("name", RECIPES)
def test_words_that_fit_nothing_and_unknown_n_are_refused(name, tmp_path):
    with pytest.raises(ConfigError, match=r"--only zzz fits nothing here; the words are: "):
        runner.make(RECIPES[name], smoke(tmp_path, "zzz"))
    with pytest.raises(ConfigError, match=r"--n 7; "):
        runner.make(RECIPES[name], smoke(tmp_path, n=(7,)))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", RECIPES)
def test_every_cell_keeps_to_what_the_paper_states(name):
    recipe = RECIPES[name]
    for stated in recipe.stated:
        words = set(stated.only.split())
        cells = [cell for cell in recipe.cells if words <= set(cell.words)]
        assert cells, f"{stated.where}: no cell has the words {stated.only}"
        for cell in cells:
            if isinstance(cell.work, Training):
                assert stated.at(cell.work) in stated.values, f"{cell.name}, {stated.path}: {stated.where}"


@pytest.mark.parametrize("name", RECIPES)
def test_cells_are_named_by_kind_and_can_be_estimated(name):
    recipe = RECIPES[name]
    names = [cell.name for cell in recipe.cells]
    assert len(set(names)) == len(names)
    assert all(len(cell.words) == len(recipe.kinds) for cell in recipe.cells)
    assert all(
        cell.cost[0] >= 0 and cell.cost[1] in PACES["h200"] and cell.cost[1] in PACES["cpu"] for cell in recipe.cells
    )
    homes = {cell.home: RECIPES[cell.home] for cell in recipe.cells}
    assert all(homes[cell.home].cell(cell.record).work == cell.work for cell in recipe.cells if cell.home != name)
    for claim in recipe.claims:
        assert {claim.cell, claim.other} <= set(names)
        assert claim.value in recipe.values


# ---- records ------------------------------------------------------------------------------------
def job(values, failed=None):
    return lambda run: {"values": values, "failed": failed}


def toy(**more):
    cells = (Cell("a slow", job({"rounds": 40}), {"rounds": 50}, priority=2), Cell("a fast", job({"rounds": 10}),
    {"rounds": 10}),
             Cell("b slow", job({"rounds": None}, "stopped"), {"rounds": math.inf}, priority=1),
             Cell("b fast", job({"rounds": 60}), {"rounds": 20}))  # fmt: skip
    return Recipe("toy", "Toy", "Toy.", ("kind", "pace"), cells, ("rounds",), "pace", seeds=2, **more)


def filled(tmp_path, recipe, minutes=5.0, **more):
    kept = Ledger(tmp_path)
    done = runner.resume([recipe], kept, Settings(device="cpu", scale="full", **more), minutes, lambda text: None)
    return kept, done


def test_missing_cells_come_by_seed_priority_and_name(tmp_path):
    found = runner.missing([toy()], Ledger(tmp_path), Settings(device="cpu", scale="full"))
    assert [(cell.name, run.seed) for cell, run in found] == [
        ("b slow", 0), ("a slow", 0), ("a fast", 0), ("b fast", 0), ("b slow", 1), ("a slow", 1), ("a fast", 1),
        ("b fast", 1),
    ]  # fmt: skip


def test_a_resumed_recipe_runs_nothing_twice_and_keeps_failures(tmp_path):
    kept, done = filled(tmp_path, toy())
    assert done == 8
    again, more = filled(tmp_path, toy())
    assert more == 0
    assert again.records == kept.records
    failed = again.of(again_cell := toy().cell("b slow"))
    assert [record["failed"] for record in failed] == ["stopped", "stopped"]
    assert again.has(replace(again_cell, home="toy"), Run("full", 1))
    assert not again.has(replace(again_cell, home="toy"), Run("full", 2))


def test_a_run_that_breaks_down_is_recorded_and_missing_data_is_not(tmp_path):
    def breaks(run):
        raise RuntimeError("out of memory")

    def lacks(run):
        raise OffbeatError("data set 'x' was not found. Looked for it in\n  nowhere")

    recipe = Recipe("toy", "Toy", "Toy.", ("kind",), (Cell("one", breaks), Cell("two", lacks)), ("rounds",), seeds=1)
    kept, done = filled(tmp_path, recipe)
    assert done == 1
    assert [(r["cell"], r["failed"]) for r in kept.records["toy"]] == [("one", "RuntimeError: out of memory")]


@pytest.mark.parametrize("background", [False, True])
def test_a_cell_that_does_not_fit_is_left_and_one_that_runs_over_is_cut(tmp_path, background):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN if background else signal.default_int_handler)

    def long(run):
        while True:
            pass

    slow = Cell("one", job({}), client_steps=1e9, pace="quadratic")
    recipe = Recipe("toy", "Toy", "Toy.", ("kind",), (slow, Cell("two", long)), ("rounds",), seeds=1)
    try:
        kept, done = filled(tmp_path, recipe, minutes=1.5 / 60)
    finally:
        signal.signal(signal.SIGINT, before)
    assert done == 0
    (record,) = kept.records["toy"]
    assert (record["cell"], "cut" in record) == ("two", True)
    assert not kept.has(recipe.cell("two"), Run("full", 0))
    seconds, how = estimate(recipe.cell("two"), "cpu", kept)
    assert (seconds >= 1.5 * record["cut"], how) == (True, "cut before")


def test_records_of_another_folder_are_merged(tmp_path):
    filled(tmp_path / "here", toy(), seed=0)
    filled(tmp_path / "there", toy(), seed=1)
    kept = Ledger(tmp_path / "here")
    assert kept.merge(tmp_path / "there") == 4
    assert [record["seed"] for record in Ledger(tmp_path / "here").of(toy().cell("a fast"))] == [0, 1]
    with pytest.raises(OffbeatError, match="holds no records"):
        kept.merge(tmp_path)
    (tmp_path / "here" / "toy.json").write_text("{}")
    with pytest.raises(OffbeatError, match=r"toy\.json holds no records of cells"):
        Ledger(tmp_path / "here")


def test_stored_wall_times_are_the_estimate(tmp_path):
    kept, cell = Ledger(tmp_path), toy().cell("a slow")
    assert estimate(cell, "h200", kept)[1] == "by rate"
    kept.add(
        cell, {"cell": "a slow", "seed": 0, "size": "full", "device": "NVIDIA H200", "wall_seconds": 12.0, "values": {}}
    )
    kept.add(
        cell, {"cell": "a slow", "seed": 1, "size": "full", "device": "NVIDIA H200", "wall_seconds": 14.0, "values": {}}
    )
    assert estimate(cell, "h200", kept) == (13.0, "stored")
    assert estimate(cell, "cpu", kept)[1] == "by rate"


# ---- agreement ----------------------------------------------------------------------------------
def test_ratio_and_order_are_marked(tmp_path):
    recipe = toy(claims=(Claim("a slow takes 4 times as long", "rounds", "a slow", "a fast", 4.0),
                         Claim("b is faster", "rounds", "b fast", "a fast", above=False)))  # fmt: skip
    kept, _ = filled(tmp_path, recipe)
    records, older = page.records_of(recipe, kept)
    assert older == set()
    made = agreement.table(recipe, records, "")
    assert made.columns == ("kind", "rounds, slow", "rounds, fast")
    assert made.rows == [["a", "40 (50) =", "10 (10) ="], ["b", "not reached (not reached)", "60 (20) !"]]
    found = {(low.name, high.name): right for low, high, _, right in agreement.pairs(recipe, records)}
    assert found == {("a fast", "a slow"): True, ("b fast", "b slow"): True, ("a slow", "b slow"): True,
                     ("a fast", "b fast"): True}  # fmt: skip
    assert page.claimed(recipe.claims[0], records) == (4.0, True, True)
    assert page.claimed(recipe.claims[1], records) == (6.0, False, None)
    assert page.counts(recipe, records) == (5, 6, 3, 4)
    lines = page.status([recipe], kept)
    assert lines[0] == {
        "recipe": "toy", "cell": "a slow", "state": "run", "seeds": [0, 1], "commits": lines[0]["commits"],
        "ours": {"rounds": 40}, "paper": {"rounds": 50}, "within 25 %": {"rounds": True}, "pairs": 2,
        "pairs in order": 2,
        "failed": None,
    }  # fmt: skip
    assert agreement.pairs(replace(recipe, apart=("kind",)), records)
    assert len(list(agreement.pairs(replace(recipe, apart=("kind",)), records))) == 2


def test_older_results_count_as_older_until_a_cell_is_run(tmp_path):
    old = {"recipe": "toy", "cell": "a slow", "seed": 0, "size": "full", "commit": "abc", "device": "cpu",
           "wall_seconds": 3.0, "values": {"rounds": 45}, "failed": None}  # fmt: skip
    (tmp_path / "older.json").write_text(json.dumps([old]))
    assert [line["state"] for line in page.status([toy()], Ledger(tmp_path))] == ["older", *["missing"] * 3]
    kept, done = filled(tmp_path, toy(), seed=0)
    assert done == 4
    assert {line["state"] for line in page.status([toy()], kept)} == {"some seeds"}
    assert estimate(toy().cell("a slow"), "cpu", kept)[1] == "stored"


def test_seeds_have_a_mean_and_a_deviation():
    records = [{"values": {"best": value}, "failed": None} for value in (0.5, 0.6, 0.7)]
    found = agreement.ours(records, "best")
    assert (found.mean, found.spread, found.seeds) == pytest.approx((0.6, 0.1, 3))
    assert str(found) == "0.6 ± 0.1"
    assert agreement.ours(records, "rounds") is None
    assert str(agreement.ours([{"values": {"best": None}, "failed": "stopped"}], "best")) == "failed"


def test_a_curve_of_best_values_never_falls():
    rows = agreement.unpacked(
        [[0, 0.0, 0.1, None, None], [1, 1.0, 0.5, None, None], [2, 2.0, 0.3, None, None]], best=True
    )
    assert [row["accuracy"] for row in rows] == [0.1, 0.5, 0.5]
