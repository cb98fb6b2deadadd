"""`offbeat choose`: what is dropped and why, tuning on held-out data, a ranking with intervals, a TOML that runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from offbeat import Experiment
from offbeat.cli import app
from offbeat.config import toml
from offbeat.errors import ConfigError
from offbeat.experiments.assemble import build
from offbeat.runs.outcome import Outcome
from offbeat.studies.choosing import BRIEF, admitted, choose, rank, rows
from offbeat.studies.search import COHORT, SERVER, Candidate, Search, changed, judged, reached
from offbeat.theory.measure import measure

TASK = {"name": "digits", "clients": 12, "model": "logistic"}
PROBLEM = Experiment(task=TASK, fleet="straggling", until={"virtual_seconds": 2.0}, device="cpu")


@pytest.fixture(scope="module")
def measured() -> Any:
    return measure(replace(PROBLEM, method="local-sgd"), effort=BRIEF)


def test_what_cannot_work_is_dropped_with_its_reason(measured: Any) -> None:
    candidates, dropped = admitted(PROBLEM, ("local-sgd", "fedbuff", "hl-sgd"), measured)
    assert [candidate.method for candidate in candidates] == ["local-sgd", "fedbuff"]
    assert "needs a fleet with clusters" in dropped["hl-sgd"]
    short = replace(PROBLEM, until={"virtual_seconds": 0.05})
    candidates, dropped = admitted(short, ("local-sgd", "fedbuff"), measured)
    assert "makes no commit within the budget" in dropped["local-sgd"]
    steps = {"name": "straggling", "local_steps": {"law": "linear", "low": 2, "high": 20}}
    candidates, dropped = admitted(replace(PROBLEM, fleet=steps), ("local-sgd", "fedagrac", "fednova"), measured)
    assert [candidate.method for candidate in candidates] == ["fedagrac", "fednova"]
    assert "2 to 20 local steps" in dropped["local-sgd"]
    assert "FedaGrac, Theorem 1" in dropped["local-sgd"]


def test_notes_say_the_pace_and_cohorts_fit_the_fleet(measured: Any) -> None:
    candidates, _ = admitted(PROBLEM, ("local-sgd", "fedbuff"), measured)
    waits, buffered = candidates
    assert waits.options == {"n": 6}
    assert buffered.options == {"buffer_size": 6}
    assert buffered.commits > waits.commits
    assert waits.idle > buffered.idle
    assert "commits in the budget" in waits.notes[0]


def test_trials_are_judged_by_held_out_samples_and_never_by_the_test_set() -> None:
    task = build(PROBLEM).task
    spoilt = replace(task, test=(task.test[0] * 0, task.test[1] * 0))
    scores = [
        Search(replace(PROBLEM, task=which), None).trial(Candidate("fedbuff"), {"buffer_size": 4})
        for which in (task, spoilt)
    ]
    assert scores[0] == scores[1]
    assert build(judged(PROBLEM, 0.5)).task.held_out is not None
    for shards, sentence in (
        ([[0], [1]], "no client has two samples"),
        ([[0, 1, 2], [3, 4, 5]], "is 2 samples in all.*none of them from the test set.*give clients more samples"),
    ):
        small = replace(PROBLEM, task=replace(task, shards=shards))
        with pytest.raises(ConfigError, match=sentence):
            choose(small, methods=("minibatch-sgd", "fedasync"))


def test_options_are_changed_within_what_a_method_takes() -> None:
    assert changed({"client_lr": 0.05}, "client_lr", 0.4, PROBLEM, "fedbuff") == {"client_lr": 0.02}
    assert changed({"buffer_size": 4}, "beta", 0.5, PROBLEM, "fedbuff") == {"buffer_size": 4, "beta": 0.125}
    assert changed({"alpha": 0.6}, "alpha", 2.0, PROBLEM, "fedasync") == {"alpha": 1.0}
    assert changed({"alpha": 1.0}, "alpha", 2.0, PROBLEM, "fedasync") is None
    assert changed({"n": 12}, "n", 2.0, PROBLEM, "local-sgd") is None  # more than there are clients
    assert changed({"n": 1}, "n", 0.5, PROBLEM, "local-sgd") is None


def test_a_trial_that_diverges_comes_last_and_slow_ones_are_cut() -> None:
    search = Search(PROBLEM, 0.5)
    wild = Candidate("fedbuff")
    assert search.trial(wild, {"buffer_size": 6, "client_lr": 1e38})[0] == 2.0
    good = search.trial(Candidate("fedbuff"), {"buffer_size": 4, "client_lr": 0.1})
    assert good[0] == 0.0
    assert search.fastest == good[1]
    slow = search.trial(Candidate("local-sgd"), {"n": 6, "client_lr": 1e-5})
    assert slow[0] == 1.0


def test_trials_of_unequal_length_are_compared_at_the_same_time() -> None:
    search = Search(PROBLEM, 0.9)
    rows = [{"virtual_seconds": t, "accuracy": a, "loss": 1.0} for t, a in ((0.0, 0.1), (0.1, 0.3), (1.0, 0.8))]
    candidate = Candidate("fedbuff", score=(1.0, -0.4), best_rows=rows)
    assert search.standing(candidate) == (1.0, pytest.approx(-0.4))
    search.fastest = 0.2  # from now on a trial ends after half a second
    assert search.standing(candidate) == (1.0, pytest.approx(-0.2))
    end = {"commit": 9, "accuracy": 0.95, "loss": 0.5}
    late = [*rows, {"virtual_seconds": 1.7, **end}]  # at the target, and too late to count
    assert search.standing(replace(candidate, score=(0.0, 1.7), best_rows=late)) == (1.0, pytest.approx(-0.2))
    soon = [*rows[:2], {"virtual_seconds": 0.3, **end}]
    assert search.standing(replace(candidate, score=(0.0, 0.3), best_rows=soon)) == (0.0, 0.3)
    assert search.standing(replace(candidate, score=(2.0, 0.0))) == (2.0, 0.0)


def seeds(*accuracies: float) -> list[Outcome]:
    """Runs that reach 0.8 after a second, or end with another accuracy."""
    runs = [
        [{"virtual_seconds": float(t), "commit": t, "loss": 1.0, "accuracy": a * t} for t in (0, 1)] for a in accuracies
    ]
    return [Outcome({"accuracy_final": rows[-1]["accuracy"]}, rows, {}) for rows in runs]


def test_a_method_is_ranked_by_all_of_its_seeds() -> None:
    """More seeds at the target come first, then less time, and without any the accuracy decides."""
    ranked = [
        Candidate("all", outcomes=seeds(0.8, 0.9, 0.8)),
        Candidate("two", outcomes=seeds(0.8, 0.1, 0.9)),
        Candidate("one", outcomes=seeds(0.1, 0.1, 0.9)),
        Candidate("none", outcomes=seeds(0.7, 0.7, 0.7)),
        Candidate("less", outcomes=seeds(0.75, 0.6, 0.6)),
        Candidate("not run", score=(0.0, 0.1)),
    ]
    orders = [rank(one, 0.8) for one in ranked]
    assert orders == sorted(orders)
    assert len(set(orders)) == len(orders)
    late = Candidate("late", outcomes=seeds(0.8, 0.1, 0.9))
    for outcome in late.outcomes:
        outcome.metrics[-1]["virtual_seconds"] = 2.0
    assert rank(ranked[1], 0.8) < rank(late, 0.8) < rank(ranked[2], 0.8)
    assert rank(ranked[0], None) < rank(ranked[3], None) < rank(ranked[1], None)


def test_the_choice_is_ranked_and_its_toml_runs(tmp_path: Path) -> None:
    path = tmp_path / "best.toml"
    words = ["choose", "--task", "digits", "--set", "task.clients=12", "--set", "task.model=logistic", "--budget",
             "virtual_seconds=2", "--target", "0.6", "--method", "local-sgd", "--method", "fedbuff", "--method",
             "hl-sgd", "--trials", "2", "--seeds", "2", "--device", "cpu", "--out", str(path)]  # fmt: skip
    done = CliRunner().invoke(app, [*words, "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["recommended"]["name"] == told["ranked"][0]["method"]["name"] == "fedbuff"
    second = told["ranked"][1]["seconds"]
    assert second is None or told["ranked"][0]["seconds"]["mean"] < second["mean"]
    assert told["ranked"][0]["seconds"]["low"] < told["ranked"][0]["seconds"]["mean"]
    assert "does not wait" in told["reason"]
    assert "hl-sgd" in told["dropped"]
    assert toml.parse(told["toml"]) == toml.read(path)
    again = CliRunner().invoke(app, ["run", str(path), "--json"])  # what is recommended gives what it was chosen for
    seconds = told["ranked"][0]["seconds"]
    assert seconds["low"] <= json.loads(again.stdout)["reached"]["0.6"]["virtual_seconds"] <= seconds["high"]
    ran = CliRunner().invoke(app, ["run", str(path), "--until", "commits=2", "--json"])
    assert ran.exit_code == 0, ran.output
    shown = CliRunner().invoke(app, words)
    assert shown.output.startswith("fedbuff with ")
    assert "dropped hl-sgd" in shown.output
    assert "what it rests on" in shown.output
    assert "theory: fedbuff with" in shown.output


def test_bad_asks_get_sentences() -> None:
    with pytest.raises(ConfigError) as caught:
        choose(replace(PROBLEM, until={"accuracy": 0.9}), 1.5, ("fedbuf",), 0, 3)
    assert [problem.split(";")[0] for problem in caught.value.problems][1:] == [
        "target = 1.5",
        "give a budget, such as virtual_seconds=60: without one a method that never learns never ends",
        "trials = 0",
    ]
    assert "unknown method to choose from 'fedbuf'" in caught.value.problems[0]


FLEETS = {
    "equal": {"name": "equal", "latency": 0.02, "mbit": 100.0},
    "one straggler": {"name": "measured", "step_seconds": [0.01] * 19 + [0.5], "latency": [0.02] * 20},
    "phones": {"name": "lognormal", "sigma": 1.5, "latency": 0.02},
    "clusters": {"name": "hlsgd", "clusters": {"count": 4, "graph": "complete"}},
}


TARGET = 0.9


def table_of(search: Search, candidate: Candidate) -> dict[str, Any]:
    return replace(search.experiment, method=candidate.method).table()["method"]  # type: ignore[no-any-return]


def grid(search: Search, candidate: Candidate, lr: float, share: float) -> None:
    """One place of a plain grid: the clients' rate, and a part of the server's."""
    server = next((name for name in SERVER if name in table_of(search, candidate)), None)
    rate = "client_lr" if "client_lr" in table_of(search, candidate) else server
    start = {key: value for key, value in candidate.options.items() if key in COHORT}
    options = {**start, rate: lr}
    if server and server != rate:
        options = changed(options, server, share, search.experiment, candidate.method) or options
    score = search.trial(candidate, options)
    if score < candidate.score:
        candidate.options, candidate.score = options, score


@pytest.mark.soak
@pytest.mark.parametrize("name", FLEETS)
def test_the_named_method_is_nearly_the_best_of_all_tuned(name: str) -> None:
    """Time to the target on made fleets: within 15 % of the best of all methods, each tuned with many trials."""
    budget = 2e5 if name == "clusters" else 20.0
    task = {"name": "digits", "clients": 20, "model": "logistic", "split": {"name": "dirichlet", "alpha": 0.5}}
    problem = Experiment(task=task, fleet=FLEETS[name], until={"virtual_seconds": budget}, device="cpu")
    found = choose(problem, TARGET, seeds=3)
    named = found.figures(found.best)["seconds"].mean
    best, who = np.inf, ""
    for candidate in admitted(problem, [c.method for c in found.ranked], found.measured)[0]:
        search = Search(replace(problem, targets=(TARGET,)), TARGET)
        for lr in (0.05, 0.15, 0.5, 1.5):
            for share in (0.5, 1.0):
                grid(search, candidate, lr, share)
        search.final(candidate, 3)
        times = [reached(outcome, TARGET) for outcome in candidate.outcomes]
        if None not in times and float(np.mean(times)) < best:
            best, who = float(np.mean(times)), str(candidate.spec)
    print(f"{name}: {found.best.spec} {named:.4g} s, best of all tuned {best:.4g} s: {who}; {found.reason}")
    assert named <= 1.15 * best
    assert rows(found)[0][1] == found.best.method
