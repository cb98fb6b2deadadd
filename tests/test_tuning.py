"""Tuning: it finds what a grid finds, does not look at the test set, gives equal budgets, and can be resumed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from linear_runs import error, small
from offbeat import ConfigError, Experiment, OffbeatError, Task, run
from offbeat.config.toml import read
from offbeat.studies import trials, tuning
from offbeat.studies.proposals import parse_search, proposed
from offbeat.studies.trials import NEVER, Aim, Tried, judging, run_heat
from offbeat.studies.tuning import Between, tune
from offbeat.studies.tuning_ledger import Entry

BUDGET = {"until": {"commits": 12}, "evaluate": {"every_commits": 3}, "device": "cpu", "fleet": "uniform"}
FEDBUFF = {"name": "fedbuff", "buffer_size": 3}


def experiment(task=None, **options):
    return Experiment(**{"method": FEDBUFF, "task": task or small(), **BUDGET, **options})


def test_it_finds_what_a_grid_finds():
    found = tune({"fedbuff": experiment()}, by="loss", trials=8, seeds=(0, 1))
    best = found.best["fedbuff"]["client_lr"]
    judged = judging(experiment(), 0.2, Aim("loss", False))
    grid = {
        rate: run(replace(judged, method={**FEDBUFF, "client_lr": rate})).metrics for rate in (0.01, 0.1, 1.0, best)
    }
    losses = {rate: Aim("loss", False).value(rows) for rate, rows in grid.items()}
    assert losses[best] >= max(losses[rate] for rate in (0.01, 0.1, 1.0)) - 0.02
    assert len(found.trials("fedbuff")) == 8
    assert max(entry.company for entry in found.entries) == 4
    assert any(entry.cut for entry in found.entries)
    again = [entry for entry in found.entries if entry.fresh]
    assert len(again) > 1
    assert best in [entry.options["client_lr"] for entry in again]


def test_the_test_set_is_not_looked_at():
    task = small()
    spoilt = Task(task.model, task.loss, task.data, task.shards, (task.test[0] * 0, task.test[1] * 0))
    ways = [tune({"fedbuff": experiment(which)}, trials=4, seeds=(0,), by="loss") for which in (task, spoilt)]
    assert [e.score for e in ways[0].entries] == [e.score for e in ways[1].entries]
    assert judging(experiment(), 0.2, Aim()).evaluate["on"] == "held-out"


def test_choices_of_sizes_and_steps_and_methods_that_cannot_share(monkeypatch):
    monkeypatch.setattr(trials, "ROOM", 0)  # for what SCAFFOLD has of each client
    search = {"client_lr": Between(0.01, 1.0), "local_steps": [2, 4], "buffer_size": [2, 4]}
    scaffold = experiment(method={"name": "scaffold", "n": 3})
    found = tune({"fedbuff": experiment(method="fedbuff"), "scaffold": scaffold}, search, trials=4, seeds=(0,))
    assert set(found.best["fedbuff"]) == {"client_lr", "local_steps", "buffer_size"}
    assert set(found.best["scaffold"]) == {"client_lr", "local_steps"}
    assert {e.company for e in found.trials("scaffold")} == {1}
    assert [len(found.trials(label)) for label in found.best] == [4, 4]


def test_a_tuning_that_was_broken_off_goes_on_as_if_it_had_not(tmp_path, monkeypatch):
    whole = tune({"fedbuff": experiment()}, trials=4, seeds=(0,), by="loss", out=tmp_path / "whole")
    calls = []

    def dying(heat):
        calls.append(heat)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return run_heat(heat)

    monkeypatch.setattr(tuning, "run_heat", dying)
    with pytest.raises(KeyboardInterrupt):
        tune({"fedbuff": experiment()}, trials=4, seeds=(0,), by="loss", out=tmp_path / "part")
    assert len((tmp_path / "part" / "trials.jsonl").read_text().splitlines()) == 1 + 2
    with pytest.raises(OffbeatError, match="holds a tuning already"):
        tune({"fedbuff": experiment()}, trials=4, seeds=(0,), by="loss", out=tmp_path / "part")
    with pytest.raises(OffbeatError, match="a tuning of something else"):
        tune({"fedbuff": experiment()}, trials=5, seeds=(0,), by="loss", out=tmp_path / "part", resume=True)
    rest = tune({"fedbuff": experiment()}, trials=4, seeds=(0,), by="loss", out=tmp_path / "part", resume=True)
    assert rest.best == whole.best
    assert [(e.options, e.scores) for e in rest.entries] == [(e.options, e.scores) for e in whole.entries]
    assert (tmp_path / "part" / "tuned.toml").read_text() == (tmp_path / "whole" / "tuned.toml").read_text()


def test_what_is_written_is_a_comparison_at_the_same_budget(tmp_path):
    plain = {"task": {"name": "quadratic", "samples": 5, "noise": 0.1}, "until": {"commits": 8}}
    pair = {name: experiment(method={"name": name, "n": 3}, **plain) for name in ("local-sgd", "dlsgd-homo")}
    found = tune(pair, trials=4, seeds=(0,), out=tmp_path / "tune")
    table = read(tmp_path / "tune" / "tuned.toml")
    assert table["until"] == {"commits": 8}
    assert "hold_out" not in table["evaluate"]  # final figures use all of the data, and the test set
    for name, best in found.best.items():
        assert table["methods"][name] == {"name": name, "n": 3, **best}
    assert found.aim.metric == "loss"


def test_times_to_a_target_are_smoothed_and_lie_between_evaluations():
    values = (0.1, 0.9, 0.1, 0.5, 0.5, 0.5, 0.9)  # the means of five: 0.42, 0.5, 0.5
    rows = [{"commit": n, "virtual_seconds": 10.0 * n, "accuracy": value} for n, value in enumerate(values)]
    assert Aim(target=0.45).seconds(rows) == pytest.approx(43.75)
    assert Aim(target=0.45, smooth=1).seconds(rows) == pytest.approx(4.375)
    assert Aim(target=0.9).seconds(rows) is None  # one evaluation is not enough
    assert Aim(target=0.05).score(Tried(rows)) == -40.0  # the first five
    late = Aim(target=0.95).score(Tried(rows))
    assert late < -NEVER  # behind all who reached it
    assert late > Aim(target=0.96).score(Tried(rows))  # the nearest first
    assert not Aim(target=0.95).reached((late - 20.0 - 30.0) / 3)  # one seed of three
    assert Aim(target=0.7).score(Tried(rows, failed="x")) is None
    falling = [{"commit": t, "virtual_seconds": float(t), "loss": v} for t, v in ((0, 2.0), (10, 1.0))]
    assert Aim("loss", False, 1.75, smooth=1).score(Tried(falling)) == pytest.approx(-2.5)


def test_first_spread_then_near_the_best():
    space = {"client_lr": Between(0.01, 1.0)}
    first = [options["client_lr"] for options in proposed(space, [], 8, 0)]
    assert first == pytest.approx([0.01 * 100 ** ((n + 0.5) / 4) for n in range(4)])
    done = [Entry("m", n, {"client_lr": x}, [-abs(x - first[2])], False, 4, 0.0) for n, x in enumerate(first)]
    again = proposed(space, done, 8, 0)
    assert again == proposed(space, done, 8, 0)
    assert len(again) == 4


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"by": "mae"}, "unknown metric 'mae'"),
        ({"by": "plain"}, "nobody said whether more of it is better"),
        ({"search": {"client_rl": Between(0.1, 1.0)}}, "did you mean 'client_lr'"),
        ({"search": {"client_lr": Between(1.0, 0.1)}}, "the smaller first"),
        ({"search": {"buffer_size": [3]}}, "is set and cannot be searched"),
        ({"hold_out": 1.0}, "the share of every shard that judges"),
        ({"trials": 0}, "at least one of each"),
    ],
)
def test_mistakes_get_a_sentence(given, sentence):
    task = small(metrics={"error": error, "plain": lambda outputs, targets: 1.0})
    with pytest.raises(ConfigError, match=sentence):
        tune({"fedbuff": experiment(task)}, **given)


def test_searches_are_parsed_or_refused():
    assert parse_search(["n=1,2"]) == {"n": [1, 2]}
    for text in ("client_lr", "client_lr=a..b", "=3"):
        with pytest.raises(ConfigError, match="write client_lr"):
            parse_search([text])
