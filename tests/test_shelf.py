"""Runs afterwards: listed, shown, drawn, explained and removed; in notebooks; what a trace says of time, by hand."""

from __future__ import annotations

import csv
import json
import shutil
import sys

import numpy as np
import pytest
from rich.cells import cell_len
from typer.testing import CliRunner

from linear_runs import error, experiment, small
from offbeat import ConfigError, Experiment, OffbeatError, compare, run
from offbeat.cli import app
from offbeat.records import Arrived, Begun, Commit, Finished, Joined, Left, Start
from offbeat.runs import curves, shelf
from offbeat.runs.disk import mark_of
from offbeat.runs.explain import counsel, spent
from offbeat.runs.manifest import read_manifest
from stopped_runs import interrupted

FEW = {"device": "cpu", "until": {"commits": 6}, "evaluate": {"every_commits": 2}, "targets": (0.3, 0.99)}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Four runs: two methods with two seeds each, in the directory of a comparison; and something of the user's."""
    place = tmp_path_factory.mktemp("shelf")
    methods = {"fedbuff": {"name": "fedbuff", "buffer_size": 3}, "local-sgd": {"name": "local-sgd", "n": 4}}
    compare({label: Experiment(method=method, **FEW) for label, method in methods.items()}, (0, 1), place / "both")
    (place / "notes.txt").write_text("mine")
    return place


def offbeat(*words, code=0, given=None):
    done = CliRunner().invoke(app, [str(word) for word in words], input=given)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == code, done.output
    return done.stdout


def test_runs_are_listed_filtered_and_sorted(home):
    lines = json.loads(offbeat("runs", home, "--json"))
    assert [line["method"] for line in lines] == ["fedbuff", "fedbuff", "local-sgd", "local-sgd"]
    best = json.loads(offbeat("runs", home, "--sort", "-accuracy", "--json"))
    scores = [line["accuracy"] for line in best]
    assert scores == sorted(scores, reverse=True)
    assert len(json.loads(offbeat("runs", home, "--where", "method=fedbuff", "--where", "seed=1", "--json"))) == 1
    assert json.loads(offbeat("runs", home, "--where", f"accuracy>{max(scores)}", "--json")) == []
    assert "4 runs" in offbeat("runs", home)
    with pytest.raises(ConfigError, match="write it as name=value"):
        offbeat("runs", home, "--where", "method")
    with pytest.raises(ConfigError, match="did you mean"):
        offbeat("runs", home, "--sort", "comits")


def test_removal_asks_and_touches_offbeat_runs_only(home, tmp_path):
    place = tmp_path / "copy"
    shutil.copytree(home, place)
    one = place / "both" / "fedbuff-seed0"
    (one / "thesis.tex").write_text("mine")
    outside = tmp_path / "outside"
    shutil.copytree(home / "both" / "fedbuff-seed0", outside)
    (place / "link").symlink_to(outside)
    before = sorted(str(path) for path in place.rglob("*"))
    with pytest.raises(OffbeatError, match="nothing was removed"):
        offbeat("runs", place, "--where", "method=fedbuff", "--remove", given="n\n")
    assert sorted(str(path) for path in place.rglob("*")) == before
    offbeat("runs", place, "--where", "method=fedbuff", "--remove", given="y\n")
    assert [path.name for path in one.iterdir()] == ["thesis.tex"]
    assert not (place / "both" / "fedbuff-seed1").exists()
    assert (place / "notes.txt").read_text() == "mine"
    assert (outside / "model.safetensors").exists()  # links are not followed
    assert len(shelf.find_runs(place)) == 2


def test_a_run_is_shown_with_the_data_of_each_figure(home):
    text = offbeat("show", home / "both" / "fedbuff-seed0")
    assert "the test set" in text
    assert "first reached 0.99: not reached" in text
    table = json.loads(offbeat("show", home / "both" / "fedbuff-seed0", "--json"))
    assert table["result"]["commits"] == 6
    with pytest.raises(OffbeatError, match="holds 4 runs"):
        offbeat("show", home)


def test_tables_in_every_form(home):
    read = list(csv.reader(offbeat("table", home, "--format", "csv", "--target", "0.3").splitlines()))
    assert [row[0] for row in read] == ["method", "fedbuff", "local-sgd"]
    column = read[0].index("s to 0.3")
    results = [r.result for r in shelf.opened([home]) if r.method == "fedbuff"]
    times = [r["reached"]["0.3"] and r["reached"]["0.3"]["virtual_seconds"] for r in results]
    there = [time for time in times if time is not None]
    want = f"{np.mean(there):,.1f}" if len(there) == 2 else f"{len(there)} of 2 seeds" if there else "not reached"
    assert read[1][column] == want
    assert "not reached" in offbeat("table", home, "--format", "markdown", "--target", "0.99")
    assert offbeat("table", home, "--format", "latex").startswith("\\begin{tabular}{lr")
    assert "accuracy (test)" in offbeat("table", home)
    with pytest.raises(ConfigError, match="did you mean 'latex'"):
        offbeat("table", home, "--format", "latx")
    with pytest.raises(ConfigError, match="unknown metric 'mae'"):
        offbeat("table", home, "--target", "mae 0.5")
    with pytest.raises(ConfigError, match="write an accuracy"):
        offbeat("table", home, "--target", "high")


def test_a_table_takes_a_target_that_no_config_named(home):
    made = json.loads(offbeat("table", home, "--target", "0.05", "--json"))
    assert made["columns"][-1] == "s to 0.05"
    assert all("reached" not in row[-1] for row in made["rows"])
    assert [len(results) for results in made["runs"].values()] == [2, 2]  # with every figure as a number
    assert all(result["reached"]["0.05"]["commit"] >= 0 for result in made["runs"]["fedbuff"])
    assert all(row[-1] == "0.0" for row in json.loads(offbeat("table", home, "--target", "loss 99", "--json"))["rows"])


def test_copies_of_a_run_count_once(home, tmp_path):
    one = home / "both" / "fedbuff-seed0"
    for name in ("a", "b", "c"):
        shutil.copytree(one, tmp_path / name)
    text = offbeat("table", tmp_path)
    assert "±" not in text
    assert text.count("has the same config and seed 0") == 2
    made = json.loads(offbeat("plot", tmp_path, "--out", tmp_path / "p.png", "--json"))
    assert len(made["notes"]) == 2


def test_interrupted_runs_are_named_beside_tables_and_pictures(home, tmp_path):
    shutil.copytree(home / "both", tmp_path / "both")
    interrupted(Experiment(method={"name": "asysg"}, **FEW), tmp_path / "both" / "cut", 3)
    assert "1 run was interrupted" in offbeat("table", tmp_path)
    assert "1 run was interrupted" in offbeat("plot", tmp_path, "--out", tmp_path / "p.png")
    assert "interrupted" not in offbeat("table", tmp_path, "--format", "csv")  # it is said elsewhere


def test_a_mistyped_key_matches_no_run(home):
    for text in ("methd!=fedbuff", "methd=fedbuff", "method.bufer_size!=3"):
        with pytest.raises(ConfigError, match=r"--where: unknown figure '.*': did you mean '"):
            offbeat("runs", home, "--where", text, "--remove", "--yes")
    assert len(shelf.find_runs(home)) == 4
    for text in (
        "method.buffer_size=3",
        "state=done",
        "accuracy>=0",
        "staleness.mean>=0",
        "metrics.loss.final>0",
        "diverging!=1",
        "loss>0",
    ):
        assert json.loads(offbeat("runs", home, "--where", text, "--json"))


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("result.json", '"commits": 6', '"commits": 7', "result.json has another content"),
        (
            "config.toml",
            "buffer_size = 3",
            "buffer_size = 4",
            r"was changed since the run began \(method.buffer_size\)",
        ),
    ],
)
def test_edited_files_are_not_shown_as_genuine(home, tmp_path, file, old, new, said):
    place = tmp_path / "edited"
    shutil.copytree(home / "both" / "fedbuff-seed0", place)
    text = (place / file).read_text()
    assert old in text
    (place / file).write_text(text.replace(old, new))
    for command in ("show", "table", "plot"):
        with pytest.raises(OffbeatError, match=said):
            offbeat(command, place)
    assert [line["state"] for line in json.loads(offbeat("runs", place, "--json"))] == ["damaged"]


def test_runs_of_an_older_offbeat_are_read(home, tmp_path):
    place = tmp_path / "old"
    shutil.copytree(home / "both" / "fedbuff-seed0", place)
    result = json.loads((place / "result.json").read_text())
    for name in ("metrics", "metric_faults", "callback_faults", "diverging"):
        del result[name]
    (place / "result.json").write_text(json.dumps(result))
    manifest = read_manifest(place)
    manifest.files["result.json"] = mark_of(place / "result.json")
    manifest.write(place)
    assert json.loads(offbeat("runs", place, "--json"))[0]["accuracy"] == result["accuracy_final"]
    for words in (("show", place), ("explain", place), ("plot", place, "--out", tmp_path / "p.png")):
        assert offbeat(*words)
    assert offbeat("table", place, "--format", "csv").startswith("method,accuracy,best,loss,")


@pytest.mark.parametrize(("suffix", "head"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_pictures_in_every_format(home, tmp_path, suffix, head):
    out = tmp_path / f"plot{suffix}"
    offbeat("plot", home, "--against", "bytes", "--target", "0.99", "--out", out)
    assert out.read_bytes().startswith(head)
    again = tmp_path / f"again{suffix}"
    offbeat("plot", home, "--against", "bytes", "--target", "0.99", "--out", again)
    assert out.read_bytes() == again.read_bytes()


def test_what_cannot_be_drawn_gets_a_sentence(home, tmp_path):
    with pytest.raises(ConfigError, match="ending in"):
        offbeat("plot", home, "--out", tmp_path / "plot.gif")
    with pytest.raises(ConfigError, match="unknown axis"):
        offbeat("plot", home, "--against", "tme", "--out", tmp_path / "p.png")
    with pytest.raises(ConfigError, match="unknown metric 'mae'"):
        offbeat("plot", home, "--metric", "mae", "--out", tmp_path / "p.png")
    with pytest.raises(OffbeatError, match="there is no run in"):
        offbeat("plot", tmp_path, "--out", tmp_path / "p.png")


def test_bands_targets_and_those_that_do_not_reach_them():
    def rows(values):
        return [{"commit": n, "virtual_seconds": float(n), "accuracy": v, "loss": 0.0} for n, v in enumerate(values)]

    figure = curves.picture({"a<b": [rows([0.1, 0.2])], "c": [rows([0.0, 1.0]), rows([0.0, 0.5])]}, target=0.9)
    texts = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert texts == ["a<b: not reached", "c, 2 seeds: 1 s (1 of 2 seeds)"]
    (drawn,) = figure.axes[0].collections  # the band of the second
    ends = drawn.get_paths()[0].vertices[:, 1]
    assert ends.max() == pytest.approx(0.75 + 12.706204736 * 0.25)


# ---- where time went ----------------------------------------------------------------------------
def test_time_by_hand():
    rows = [
        (0.0, Start(0, 0, 2)), (0.0, Start(1, 0, 2)),
        (1.0, Begun(0, 0, 0, 2)), (2.0, Begun(1, 0, 0, 2)),
        (4.0, Finished(0, 0)), (5.0, Arrived(0, 0, 0, 2)),  # then it waits
        (8.0, Finished(1, 0)), (10.0, Arrived(1, 0, 0, 2)),
        (10.0, Commit(((0, 0), (1, 0)))),
    ]  # fmt: skip
    found = spent(rows, 3)  # client 2 is never asked
    assert found.shares == pytest.approx(
        {"computing": 9 / 30, "download": 3 / 30, "upload": 3 / 30, "waiting": 15 / 30, "away": 0.0}
    )
    assert found.last == [(1, 1)]
    away = [(0.0, Left(0)), (4.0, Joined(0)), (4.0, Start(0, 0, 1)), (5.0, Begun(0, 0, 0, 1)), (10.0, Finished(0, 0))]
    assert spent(away, 1).shares == pytest.approx(
        {"computing": 0.5, "download": 0.1, "upload": 0.0, "waiting": 0.0, "away": 0.4}
    )


def test_shares_add_up_and_agree_with_the_account(home):
    for one in shelf.opened([home]):
        told = json.loads(offbeat("explain", one.path, "--json"))
        assert sum(told["shares"].values()) == pytest.approx(1.0)
        assert 1 - told["shares"]["computing"] - told["shares"]["away"] == pytest.approx(
            one.result["idle_share"] * (1 - told["shares"]["away"]), abs=1e-9
        )
    text = offbeat("explain", home / "both" / "local-sgd-seed0")
    assert "for the slowest of their round" in text
    assert "dead updates" in text


def test_advice_has_reasons():
    rows = [(0.0, Start(0, 0, 1)), (6.0, Begun(0, 0, 0, 1)), (7.0, Finished(0, 0)), (10.0, Arrived(0, 0, 0, 1))]
    result = {"staleness": {"mean": 9.0, "max": 12}, "share_dead": 0.4, "ended": "x", "diverging": "it is diverging"}
    said = " ".join(counsel(spent(rows, 1), result, {}, []))
    for part in ("it is diverging", "Transfers take 90%", "40% of the updates", "9.0 versions old"):
        assert part in said


# ---- notebooks ----------------------------------------------------------------------------------
def test_outcomes_in_a_notebook(monkeypatch):
    task = small(metrics={"error": error})
    outcome = run(experiment(task, targets={"error": [0.2]}))
    assert cell_len(repr(outcome)) < 140
    assert repr(outcome).startswith("Outcome(fedbuff on custom: 12 commits, accuracy ")
    assert "<td>fedbuff</td>" in outcome._repr_html_()
    monkeypatch.setitem(sys.modules, "pandas", None)
    frame = outcome.frame()
    assert len(frame) == len(outcome.metrics)
    assert outcome.plot("error", "commits").axes[0].get_ylabel() == "error (test)"
    with pytest.raises(ConfigError, match="unknown metric"):
        outcome.plot("mae")


def test_a_picture_in_python_speaks_of_no_flag():
    with pytest.raises(ConfigError, match=r"^metric: unknown metric 'nope'"):
        run(experiment(small())).plot("nope")


def test_comparisons_in_a_notebook():
    made = compare({"<b>a": experiment(small()), "c": experiment(small())}, (0, 1))
    assert "&lt;b&gt;a" in made._repr_html_()
    assert repr(made) == "Comparison(<b>a, c; 2 seeds)"
    assert len(made.frame()) == sum(len(o.metrics) for group in made.outcomes.values() for o in group)
    assert len(made.plot().axes[0].collections) == 2  # bands


def test_progress_in_a_notebook(monkeypatch, capsys):
    class ZMQInteractiveShell:
        pass

    kernel = type("IPython", (), {"get_ipython": staticmethod(ZMQInteractiveShell)})
    monkeypatch.setitem(sys.modules, "IPython", kernel)
    run(experiment(small()), progress=True)
    said = capsys.readouterr().err
    assert said.startswith("\rfedbuff seed 0  preparing")
    assert said.endswith("\n")
