"""Sweeps: comparisons that go on where they broke off, and runs side by side on workers."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments import digest
from offbeat import Experiment, resume
from offbeat.errors import ConfigError, Interrupted, OffbeatError
from offbeat.papers import RECIPES
from offbeat.papers.ledger import Ledger
from offbeat.papers.recipe import Settings
from offbeat.papers.runner import resume as fill
from offbeat.runs.manifest import read_manifest
from offbeat.studies import comparison
from offbeat.studies.comparison import compare
from stopped_runs import InterruptAt
from worlds import quadratic_world

PLAIN = Experiment(
    method={"name": "fedbuff", "local_steps": 2, "buffer_size": 3}, task={"name": "digits", "clients": 8}, device="cpu",
    until={"commits": 6},
)  # fmt: skip
PAIR = {"fedbuff": PLAIN, "local-sgd": replace(PLAIN, method={"name": "local-sgd", "local_steps": 2, "n": 4})}


class Stopped(BaseException):
    """Ends a sweep between two runs."""


def test_a_comparison_goes_on_where_it_broke_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = compare(PAIR, (0, 1), tmp_path / "whole")
    plain, runs = comparison.run, list[Any]()

    def counted(experiment: Experiment, *others: Any, **named: Any) -> Any:
        if len(runs) == 2:
            raise Stopped
        runs.append(experiment)
        return plain(experiment, *others, **named)

    monkeypatch.setattr(comparison, "run", counted)
    with pytest.raises(Stopped):
        compare(PAIR, (0, 1), tmp_path / "cut")
    runs.clear()
    rest = compare(PAIR, (0, 1), tmp_path / "cut", resumed=True)
    assert [(e.method["name"], e.seed) for e in runs] == [("local-sgd", 0), ("local-sgd", 1)]
    assert str(rest) == str(whole)
    for label, outcomes in whole.outcomes.items():
        assert [digest(o.model) for o in outcomes] == [digest(o.model) for o in rest.outcomes[label]]


def test_a_comparison_of_something_else_is_not_gone_on_with(tmp_path: Path) -> None:
    compare({"fedbuff": PLAIN}, (0,), tmp_path)
    other = replace(PLAIN, method={"name": "fedbuff", "local_steps": 3, "buffer_size": 3})
    with pytest.raises(OffbeatError, match="holds a run with another config; give --overwrite"):
        compare({"fedbuff": other}, (0,), tmp_path, resumed=True)


def test_an_interrupted_run_of_a_comparison_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = compare(PAIR, (0,), tmp_path / "whole")
    plain, runs = comparison.run, list[Experiment]()

    def cut(experiment: Experiment, out: Path, *others: Any, **named: Any) -> Any:
        runs.append(experiment)
        return plain(experiment, out, InterruptAt(3) if len(runs) == 2 else None)

    monkeypatch.setattr(comparison, "run", cut)
    with pytest.raises(Interrupted):
        compare(PAIR, (0,), tmp_path / "cut")
    assert read_manifest(tmp_path / "cut" / "local-sgd-seed0").finished  # in good order, but not at its end
    rest = compare(PAIR, (0,), tmp_path / "cut", resumed=True)
    assert str(rest) == str(whole)
    assert [o.ended for outcomes in rest.outcomes.values() for o in outcomes] == ["commits 6 >= 6"] * 2


def test_a_comparison_goes_on_to_a_further_limit(tmp_path: Path) -> None:
    further = {label: replace(e, until={"commits": 9}) for label, e in PAIR.items()}
    compare(PAIR, (0,), tmp_path / "short")
    longer = compare(further, (0,), tmp_path / "short", resumed=True)
    assert str(longer) == str(compare(further, (0,)))


def test_objects_of_ones_own_are_passed_to_a_run_that_goes_on(tmp_path: Path) -> None:
    own = replace(PLAIN, task=quadratic_world(8), until={"commits": 3})
    compare({"own": own}, (0,), tmp_path)
    longer = compare({"own": replace(own, until={"commits": 5})}, (0,), tmp_path, resumed=True)
    assert longer.outcomes["own"][0].commits == 5


def test_seeds_are_a_number_or_a_list_with_each_once() -> None:
    assert [o.seed for o in compare({"fedbuff": PLAIN}, 2).outcomes["fedbuff"]] == [0, 1]
    with pytest.raises(ConfigError, match=r"seeds = \(\) is no seed at all; give some"):
        compare({"fedbuff": PLAIN}, ())
    with pytest.raises(ConfigError, match=r"seeds = \(0, 1, 0\) has 0 more than once"):
        compare({"fedbuff": PLAIN}, (0, 1, 0))


def test_a_target_of_one_experiment_is_looked_for_in_all() -> None:
    pair = {"with": replace(PLAIN, targets=(0.05,)), "without": PLAIN}
    columns, rows, _ = compare(pair).table()
    assert columns[-1] == "s to 0.05"
    assert rows[0][-1] == rows[1][-1] != "not reached"


@pytest.fixture(scope="module")
def started() -> Any:
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    from offbeat.engines.ray_crew import connect, quietly

    connect(None, 2)
    import ray

    assert ray.util.get_node_ip_address().startswith("127.")  # nobody else's network
    yield

    with quietly():
        ray.shutdown()


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore")
def test_one_worker_and_two_tune_to_the_same(started: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("optuna", reason="the extra `tune` is not installed")
    from offbeat.studies import tuning

    pair = {"fedbuff": PLAIN, "scaffold": replace(PLAIN, method={"name": "scaffold", "local_steps": 2, "n": 4})}
    asked: dict[str, Any] = {"target": 0.2, "trials": 6, "seeds": (0, 1)}
    one = tuning.tune(pair, **asked, out=tmp_path / "one", workers=1)
    plain, rounds = tuning.run_side_by_side, list[int]()

    def dying(heats: Any, *others: Any) -> Any:
        rounds.append(len(heats))
        if len(rounds) == 3:
            raise Stopped
        return plain(heats, *others)

    monkeypatch.setattr(tuning, "run_side_by_side", dying)
    with pytest.raises(Stopped):
        tuning.tune(pair, **asked, out=tmp_path / "two", workers=2)
    two = tuning.tune(pair, **asked, out=tmp_path / "two", workers=2, resume=True)
    assert max(rounds) > 1  # heats of both methods at once
    assert two.best == one.best
    for label in pair:
        assert [(e.options, e.scores) for e in two.trials(label)] == [(e.options, e.scores) for e in one.trials(label)]
    assert (tmp_path / "one" / "tuned.toml").read_text() == (tmp_path / "two" / "tuned.toml").read_text()


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore")
def test_one_worker_and_two_give_the_same_comparison(started: None, tmp_path: Path) -> None:
    one = compare(PAIR, (0, 1), tmp_path / "one", workers=1)
    two = compare(PAIR, (0, 1), tmp_path / "two", workers=2)
    for label, outcomes in one.outcomes.items():
        assert [o.seed for o in outcomes] == [0, 1]
        assert [digest(o.model) for o in outcomes] == [digest(o.model) for o in two.outcomes[label]]
    again = compare(PAIR, (0, 1, 2), tmp_path / "two", workers=2, resumed=True)
    assert [len(outcomes) for outcomes in again.outcomes.values()] == [3, 3]
    assert len({digest(c.outcomes["fedbuff"][0].model) for c in (two, again)}) == 1


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore")
def test_a_run_whose_worker_dies_is_made_again(started: None, tmp_path: Path) -> None:
    from offbeat.studies.spread import Call, spread

    def dies_once(mark: Path) -> str:
        if mark.exists():
            return "again"
        mark.touch()
        os._exit(1)

    calls = [Call("dies once", dies_once, (tmp_path / "dead",)), Call("lives", len, ([1, 2],))]
    assert dict(spread(calls, 2)) == {0: "again", 1: 2}
    with pytest.raises(OffbeatError, match="its worker died 3 times"):
        list(spread([Call("dies", os._exit, (1,))], 1))
    with pytest.raises(OffbeatError, match="there is no run in"):
        list(spread([Call("bad", resume, (tmp_path,))], 1))


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore")
def test_cells_of_a_paper_are_spread_and_kept(started: None, tmp_path: Path) -> None:
    recipe = RECIPES["dlsgd-table2"]
    settings = Settings(scale="smoke", device="cpu", out=tmp_path / "out", workers=2, seeds=1)
    kept, said = Ledger(tmp_path / "kept"), list[str]()
    done = fill([recipe], kept, settings, 1e6, said.append)
    assert done > 0
    assert fill([recipe], Ledger(tmp_path / "kept"), settings, 1e6, said.append) == 0


def test_one_method_that_diverges_does_not_end_a_comparison(tmp_path: Any) -> None:
    usual = Experiment(device="cpu", until={"commits": 4})
    good = replace(usual, method="local-sgd")
    bad = replace(usual, method={"name": "local-sgd", "client_lr": 1e39})
    made = compare({"a": good, "b": bad, "c": good}, out=tmp_path)
    assert [o[0].commits for o in made.outcomes.values()][::2] == [4, 4]
    assert len(made.broken()) == 1
    picture, table = made.write(str(tmp_path), "three")
    assert picture.exists()
    assert "| b |" in table.read_text()
