"""The recipes of the FedAvg paper on heterogeneity and FedBuff's Theorem 1, at the smoke scale: what they make and
what holds at any scale: the relations of Table 3, estimates of linear regression below the eigenvalues that bound them.
"""

import json
import re

import numpy as np
import pytest
import torch

from offbeat.errors import ConfigError
from offbeat.papers import PAPERS, fedbuff, heterogeneity
from offbeat.papers.recipe import Settings
from offbeat.tasks.task import tensors

PNG = b"\x89PNG\r\n\x1a\n"
NAMES = [name for name in PAPERS if name.startswith("heterogeneity-")]
CHOSEN = {  # enough to see every branch
    "heterogeneity-fig2": ("50%", "I=20"),
    "heterogeneity-figC": ("75%", "I=20"),
    "heterogeneity-table2": ("100%",),
    "heterogeneity-tableC2": ("I=10", "I=40"),
}
CURVES = ("model", "percent", "I", "rounds", "training loss", "accuracy", "best", "wall s")
COLUMNS = {
    "heterogeneity-fig2": CURVES,
    "heterogeneity-figC": CURVES,
    "heterogeneity-table1": heterogeneity.CONSTANTS,
    "heterogeneity-table2": heterogeneity.CONSTANTS,
    "heterogeneity-table3": ("eta", "gamma", "I", "s", "ours, rounds", "paper, rounds", "of I = s = 1", "wall s"),
    "heterogeneity-tableC1": heterogeneity.CONSTANTS,
    "heterogeneity-tableC2": ("R I", "ours, I=10", "ours, I=40", "paper, I=10", "paper, I=40"),
}
ROWS = {"heterogeneity-fig2": 1, "heterogeneity-figC": 2, "heterogeneity-table1": 4, "heterogeneity-table2": 1,
        "heterogeneity-table3": 9, "heterogeneity-tableC1": 4, "heterogeneity-tableC2": 1}  # fmt: skip
PICTURES = {"heterogeneity-fig2": ("fig2-cnn", "fig2-cnn-loss"),
            "heterogeneity-figC": ("figC-mlp", "figC-mlp-loss", "figC-linear", "figC-linear-loss")}  # fmt: skip


def smoke(tmp_path, *only, **more):
    return Settings(only=only, device="cpu", scale="smoke", out=tmp_path, **more)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Every recipe, made once."""
    found = {}

    def make(name):
        if name not in found:
            found[name] = PAPERS[name](smoke(tmp_path_factory.mktemp(name), *CHOSEN.get(name, ())))
        return found[name]

    return make


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_makes_its_table_and_picture(name, made):
    found = made(name)
    short, table, folder = name.removeprefix("heterogeneity-"), found.tables[0], found.files[0].parent
    assert tuple(table.columns) == COLUMNS[name]
    assert len(table.rows) == ROWS[name]
    assert all(len(row) == len(table.columns) for row in table.rows)
    pictures = [folder / f"{picture}.png" for picture in PICTURES.get(name, (short,))]
    assert found.files == [folder / f"{short}.md", folder / f"{short}.json", *pictures]
    assert all(path.read_bytes().startswith(PNG) for path in pictures)
    assert found.files[0].read_text().startswith("# FedAvg, heterogeneity, ")
    assert json.loads(found.files[1].read_text()) == json.loads(json.dumps(found.figures))
    assert "figures mean nothing" in found.notes[0]


@pytest.mark.parametrize("name", [*NAMES, "fedbuff-theorem1"])
def test_words_that_fit_nothing_and_n_are_refused(name, tmp_path):
    with pytest.raises(ConfigError, match="--only zzz fits nothing here; the words are: "):
        PAPERS[name](smoke(tmp_path, "zzz"))
    with pytest.raises(ConfigError, match="--n 7; "):
        PAPERS[name](smoke(tmp_path, n=(7,)))
    assert not list(tmp_path.iterdir())


def test_the_paper_s_figures_stand_beside_ours(made):
    row = made("heterogeneity-table1").tables[0].rows[-1]
    assert row[0] == "100"
    assert row[5:9] == ["141.9 ± 13", "2.36 ± 0.29", "122.2 ± 9.8", "60.1"]
    assert made("heterogeneity-tableC2").tables[0].rows[0][3:] == ["0.34/88.84%", "0.35/89.45%"]
    assert all(
        re.fullmatch(r"\d\.\d\d/\d\d\.\d\d%", shown) for shown in made("heterogeneity-tableC2").tables[0].rows[0][1:]
    )
    assert [row[5] for row in made("heterogeneity-table3").tables[0].rows][4:] == [
        "927 ± 3.4", "927 ± 3.4", "925 ± 1.7", "187 ± 2.3", "95 ± 2.4"]  # fmt: skip


def test_table_3_s_relations(made):
    """Rates with one product need the same rounds; I steps need 1 / I of them; larger batches need as many as small."""
    rounds = {figure["cell"]: figure["commits"] for figure in made("heterogeneity-table3").figures}
    pairs = [many for cell, many in rounds.items() if cell.startswith("rates")]
    assert max(pairs) - min(pairs) <= 2
    steps = {cell.split(maxsplit=3)[3]: many for cell, many in rounds.items() if cell.startswith("steps")}
    one = steps["I=1 s=1"]
    assert one > 100
    assert steps["I=5 s=1"] == pytest.approx(one / 5, rel=0.05)
    assert steps["I=10 s=1"] == pytest.approx(one / 10, rel=0.05)
    assert steps["I=1 s=5"] == pytest.approx(one, rel=0.02)
    assert steps["I=1 s=10"] == pytest.approx(one, rel=0.02)
    assert all(0.9 * 0.08 < figure["excess"] <= 0.08 for figure in made("heterogeneity-table3").figures)


def test_estimates_of_linear_regression_keep_below_its_eigenvalues(tmp_path):
    """The Hessian is 2 mean(x x') for every output, whatever the labels: no path passes its largest eigenvalue."""
    settings, begin = smoke(tmp_path), None
    for percent in (25, 100):
        task = heterogeneity.task(heterogeneity.LINEAR, heterogeneity.single(percent), settings, 0)
        begin = begin or {name: value.detach() for name, value in task.model.named_parameters()}
        x = tensors(task.data)[0].flatten(1).double().numpy()
        x = np.hstack([x, np.ones((len(x), 1))])
        hessians = [2 * x[shard].T @ x[shard] / len(shard) for shard in task.shards]
        most = [float(np.linalg.eigvalsh(h).max()) for h in hessians]
        big = Settings(device="cpu", scale="smoke", precision="float64", out=tmp_path)
        much = heterogeneity.Effort(0, 2, 3, None)
        found = heterogeneity.estimates(heterogeneity.LINEAR, percent, begin, big, 0, much)
        assert 0.2 * max(most) < max(found["L~"]) <= max(most) * (1 + 1e-9)
        assert max(found["L_g"]) <= np.linalg.eigvalsh(np.mean(hessians, axis=0)).max() * (1 + 1e-9)
        apart = np.vstack([h - np.mean(hessians, axis=0) for h in hessians])
        assert max(found["L_h^2"]) <= np.linalg.norm(apart, 2) ** 2 / len(hessians) * (1 + 1e-9)


def test_squares_of_one_hot_labels():
    outputs, labels = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 2.0]]), torch.tensor([0, 1])
    assert float(heterogeneity.squares(outputs, labels)) == pytest.approx((0 + 0.25 + 0.25 + 4) / 2)


def test_full_size_is_the_paper_s(monkeypatch):
    seen = {}
    monkeypatch.setattr(heterogeneity, "build_task", lambda name, options, seed: seen.update(options, name=name))
    heterogeneity.task(heterogeneity.CNN, heterogeneity.single(75), Settings(scale="full"), 0)
    assert seen == {
        "name": "cifar10", "model": {"name": "heterogeneity-cnn", "filters": 64}, "clients": 100, "batch_size": 20,
        "split": {"name": "single-label", "percent": 75}, "scale": "standard",
    }  # fmt: skip
    heterogeneity.task(heterogeneity.MLP, "iid", Settings(scale="full"), 0)
    assert (seen["name"], seen["model"], seen["clients"]) == ("mnist", {"name": "mlp", "hidden": 200}, 10)
    assert heterogeneity.effort(heterogeneity.MLP, Settings(scale="full")).samples is None


def test_vgg16_runs_where_it_is_asked_for(tmp_path):
    found = heterogeneity.figC(smoke(tmp_path, "vgg16", "50%", "I=40"))
    assert [row[:3] for row in found.tables[0].rows] == [["vgg16", "50", "40"]]
    assert "CINIC-10" in found.notes[-1]


def test_a_run_that_diverges_is_a_result(tmp_path, monkeypatch):
    monkeypatch.setitem(heterogeneity.RATES, "mlp", 1e30)
    row = heterogeneity.tableC2(smoke(tmp_path, "I=10")).tables[0].rows[0]
    assert row[1] == "diverged"


def test_fedbuff_keeps_below_theorem_1(tmp_path):
    found = fedbuff.theorem1(smoke(tmp_path))
    assert found.files == [tmp_path / f"theorem1.{kind}" for kind in ("md", "json", "png")]
    assert [row[:3] for row in found.tables[0].rows] == [["1", "1", "130"], ["4", "1", "130"], ["4", "4", "130"]]
    holds = [figure for figure in found.figures if not figure["failing"]]
    assert holds
    assert all(0.01 * figure["bound"] < figure["measured"] < figure["bound"] for figure in holds)
    assert found.tables[0].rows[0][4] == "yes"
    assert found.tables[0].rows[2][4].startswith("no: Theorem 1")
