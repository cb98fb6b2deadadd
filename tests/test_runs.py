"""Runs: the account against hand-made numbers, what stops a run, and that a stopped run goes on with the same bits."""

import json
import math
import re
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file

from digits_runs import FEDBUFF, TASK, experiment
from offbeat import Experiment, OffbeatError, replay, resume, run
from offbeat.config import toml
from offbeat.errors import BadNumbers, ConfigError
from offbeat.records import Arrived, Begun, Commit, Finished, Joined, Left, Offer, Overwritten, Start
from offbeat.runs.account import Account
from offbeat.runs.logbook import Evaluate
from offbeat.runs.loop import Interrupted
from offbeat.runs.report import comparison_table
from offbeat.runs.stored import read_metrics, read_trace
from offbeat.runs.target import Crossing, crossing, limit_problems, stop_reason
from stopped_runs import InterruptAt, figures, interrupted, killed_process, same_bits

METHODS = {
    "fedbuff": FEDBUFF | {"staleness": "polynomial"},
    "dlsgd-homo": {"name": "dlsgd-homo", "n": 3, "local_steps": 2},
    "dlsgd-hetero": {"name": "dlsgd-hetero", "n": 4, "local_steps": 2},
    "local-sgd": {"name": "local-sgd", "n": 4, "local_steps": 2, "server_optimiser": {"name": "sgd", "momentum": 0.9}},
}
COMING_AND_GOING = {
    "name": "custom", "step_seconds": {"law": "uniform", "low": 0.01, "high": 0.05}, "latency": 0.02,
    "drop_out": 0.1, "mean_on": 0.5, "mean_off": 0.2,
}  # fmt: skip
every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())


# ---- the account --------------------------------------------------------------------------------
def test_an_account_of_broadcasts_by_hand():
    account = Account(clients=3, samples_per_step=[5, 7, 11], down_bytes=100.0, up_bytes=40.0)
    first = [
        (0.0, Left(2)),
        (0.0, Offer(0, 2)),  # to clients 0 and 1
        (1.0, Begun(0, 0, 0, 2)),
        (1.5, Begun(1, 0, 0, 2)),
        (3.0, Finished(0, 0)),
        (3.5, Arrived(0, 0, 0, 2)),
        (4.0, Joined(2)),  # is sent what it missed
        (4.5, Begun(2, 0, 0, 2)),
        (5.0, Finished(1, 0)),
        (5.5, Arrived(1, 0, 0, 2)),
        (5.5, Commit(((0, 0), (1, 0)))),
    ]
    account.take(first, first[-1][1].jobs, [0, 0])
    made = account.summary()
    assert (made["commits"], made["virtual_seconds"]) == (1, 5.5)
    assert (made["client_steps"], made["samples"]) == (2 + 2, 2 * 5 + 2 * 7)
    assert (made["bytes_up"], made["bytes_down"]) == (2 * 40, 2 * 100 + 100)
    assert made["participation"] == {"min": 0, "mean": 2 / 3, "max": 1, "never": 1}
    # 3 clients were there for 16.5 - 4 s and computed for 2 + 3.5 + 1 s, the last of which is still going on
    assert made["idle_share"] == pytest.approx(1 - 6.5 / 12.5)

    second = [
        (5.5, Offer(1, 2)),  # to all three
        (6.0, Begun(0, 1, 1, 2)),
        (6.5, Left(1)),
        (7.0, Finished(2, 0)),
        (7.0, Begun(2, 1, 1, 3)),
        (8.0, Finished(2, 1)),
        (8.0, Overwritten(2, 0)),  # in the send buffer
        (8.5, Overwritten(0, 1)),  # given up while it was computed
        (8.5, Left(0)),
        (9.5, Joined(0)),
        (10.0, Arrived(2, 1, 1, 3)),
        (10.0, Commit(((2, 1), (2, 1)))),  # drawn twice
    ]
    account.take(second, second[-1][1].jobs, [3, 0])
    made = account.summary()
    assert (made["commits"], made["virtual_seconds"]) == (2, 10.0)
    assert (made["client_steps"], made["samples"]) == (4 + 2 + 3, 24 + 2 * 11 + 3 * 11)
    assert (made["bytes_up"], made["bytes_down"]) == (3 * 40, 300 + 300 + 100)
    assert (made["jobs_started"], made["jobs_finished"], made["jobs_dead"]) == (5, 4, 2)
    assert made["updates_consumed"] == 4
    assert made["staleness"] == {"mean": 0.75, "max": 3, "histogram": {"0": 3, "3": 1}}
    assert made["participation"] == {"min": 1, "mean": 4 / 3, "max": 2, "never": 0}
    # there: 30 s but for 4 + 1 + 3.5 s away; computing: 5.5 s before, then 2.5 (client 2), 1 and 2.5 (given up)
    assert made["idle_share"] == pytest.approx(1 - 11.5 / 21.5)


def test_an_account_of_orders_by_hand():
    account = Account(clients=2, samples_per_step=[3, 4], down_bytes=10.0, up_bytes=1.0)
    assert account.summary()["idle_share"] == 0.0
    assert account.summary()["staleness"] == {"mean": 0.0, "max": 0, "histogram": {}}
    rows = [
        (0.0, Left(1)),
        (0.0, Start(0, 0, 5)),
        (1.0, Joined(1)),  # nothing was broadcast, so nothing is sent
        (1.0, Start(1, 0, 5)),
        (1.0, Begun(0, 0, 0, 5)),
        (4.0, Finished(0, 0)),
        (4.0, Arrived(0, 0, 0, 5)),
        (4.0, Commit(((0, 0),))),
    ]
    account.take(rows, ((0, 0),), [0])
    made = account.summary()
    assert (made["bytes_down"], made["bytes_up"], made["samples"]) == (20, 1, 15)
    assert made["idle_share"] == pytest.approx(1 - 3 / 7)


@every_method
@pytest.mark.parametrize("fleet", ["straggling", COMING_AND_GOING], ids=["straggling", "coming-and-going"])
def test_the_result_agrees_with_a_recount_of_the_trace(method, fleet, tmp_path):
    result = run(experiment(method=method, fleet=fleet, until={"commits": 15}), tmp_path).result
    rows = read_trace(tmp_path)
    records = [record for _, record in rows]
    count = [type(record) for record in records].count
    begun = {(r.client, r.job): r for r in records if isinstance(r, Begun)}
    finished = [begun[r.client, r.job].steps for r in records if isinstance(r, Finished)]
    commits = [r.jobs for r in records if isinstance(r, Commit)]
    staleness = [version - begun[job].version for version, jobs in enumerate(commits) for job in jobs]
    assert (result["commits"], result["virtual_seconds"]) == (15, rows[-1][0])
    assert (result["client_steps"], result["samples"]) == (sum(finished), 10 * sum(finished))
    assert (result["jobs_started"], result["jobs_finished"]) == (len(begun), len(finished))
    assert result["jobs_dead"] == count(Overwritten)
    assert result["bytes_up"] == 650 * 4 * count(Arrived)
    assert result["staleness"]["mean"] == pytest.approx(sum(staleness) / len(staleness))
    assert result["staleness"]["max"] == max(staleness)
    assert result["jobs_computed"] >= len({job for jobs in commits for job in jobs})
    assert 0 < result["idle_share"] < 1
    if not count(Offer):
        assert result["bytes_down"] == 650 * 4 * count(Start)
    if fleet == "straggling" and count(Offer):
        assert result["bytes_down"] == 650 * 4 * 12 * count(Offer)


# ---- targets and limits -------------------------------------------------------------------------
def curve(*accuracies):
    return [{"commit": 10 * i, "virtual_seconds": i / 2, "accuracy": a} for i, a in enumerate(accuracies)]


def test_the_first_crossing_counts_even_if_the_curve_falls_back():
    rows = curve(0.1, 0.6, 0.3, 0.7)
    assert crossing(rows, 0.6) == Crossing(10, 0.5)
    assert crossing(rows, 0.61) == Crossing(30, 1.5)
    assert crossing(rows, 0.71) is None
    assert crossing([], 0.1) is None


def test_a_smoothed_limit_counts_evaluations_that_have_a_value():
    values = [0.9, None, 0.9, 0.9, None, 0.9, 0.9, None]
    rows = [{"accuracy": v, "loss": 1.0, "commit": n, "virtual_seconds": float(n)} for n, v in enumerate(values)]
    limit = {"accuracy_smoothed": 0.8}
    stops = [n for n in range(len(rows)) if stop_reason(limit, rows[: n + 1])]
    assert stops == [6] == [crossing(rows, 0.8, 5).commit]


def test_the_smoothed_crossing_waits_for_the_mean_of_a_full_window():
    rows = curve(0.9, 0.1, 0.2, 0.6, 0.7, 0.8)
    assert crossing(rows, 0.5) == Crossing(0, 0.0)
    assert crossing(rows, 0.5, smooth=3) == Crossing(40, 2.0)  # (0.2 + 0.6 + 0.7) / 3
    assert crossing(rows, 0.51, smooth=3) == Crossing(50, 2.5)
    assert crossing(rows, 0.71, smooth=3) is None
    assert crossing(rows[:2], 0.1, smooth=3) is None  # not yet three


def test_rows_without_accuracy_are_no_evaluations():
    rows = curve(None, 0.4, None, 0.6)
    assert crossing(rows, 0.5, smooth=2) == Crossing(30, 1.5)
    assert crossing(curve(None, None), 0.1) is None


@pytest.mark.parametrize(
    ("until", "said"),
    [
        ({}, "never end; give one of accuracy"),
        ({"comits": 3}, "unknown limit 'comits': did you mean 'commits'?"),
        ({"commits": 0}, "until.commits = 0; it must be a positive number"),
        ({"commits": -5}, "until.commits = -5; it must be a positive number"),
        ({"commits": 2.5}, "until.commits = 2.5; it must be a whole number"),
        ({"samples": 1.5}, "until.samples = 1.5; it must be a whole number"),
        ({"commits": "many"}, "until.commits = 'many'; it must be a positive number"),
        ({"commits": True}, "until.commits = True; it must be a positive number"),
        ({"virtual_seconds": math.nan}, "until.virtual_seconds = nan; it must be a positive number"),
        ({"accuracy": 90}, "write 0.9 for 90 %"),
        ({"accuracy": 0}, "until.accuracy = 0; it must be a positive number"),
    ],
)
def test_each_bad_limit_gets_its_sentence(until, said):
    problems = limit_problems(until)
    assert len(problems) == 1
    assert said in problems[0]


def test_an_unknown_limit_is_told_each_known_one_once():
    (said,) = limit_problems({"foo": 5}, {"accuracy": None, "loss": None, "mae": None})
    known = said.partition("Known: ")[2].split(", ")
    assert len(known) == len(set(known))
    assert "mae" in known


def test_good_limits_have_no_problems_and_bad_ones_are_all_named():
    assert limit_problems({"accuracy": 1, "loss": 0.5, "virtual_seconds": 1e-3, "commits": 4.0, "samples": 1}) == []
    assert limit_problems({"loss": -1}) == []  # a quadratic's value may well be negative
    assert len(limit_problems({"accuracy": 2, "loss": math.inf, "commits": 0.5, "sample": 1})) == 4


@pytest.fixture(scope="module")
def long():
    """A run with an evaluation after every commit, long enough to hold all limits below."""
    return run(experiment(until={"commits": 40}, evaluate={"every_commits": 1}))


def first(rows, fits):
    return next(row["commit"] for row in rows if fits(row))


@pytest.mark.parametrize(
    ("until", "fits"),
    [
        ({"accuracy": 0.4}, lambda row: row["accuracy"] >= 0.4),
        ({"loss": 2.1}, lambda row: row["loss"] <= 2.1),
        ({"commits": 13}, lambda row: row["commit"] == 13),
        ({"commits": 13, "accuracy": 0.99}, lambda row: row["commit"] == 13),
        ({"commits": 39, "accuracy": 0.4}, lambda row: row["accuracy"] >= 0.4),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_run_stops_at_the_first_commit_that_meets_a_limit(until, fits, long):
    stopped = run(experiment(until=until, evaluate={"every_commits": 1}))
    last = first(long.metrics, fits)
    assert 1 < last < 40
    assert stopped.commits == last
    assert stopped.metrics == long.metrics[: last + 1]
    assert any(stopped.ended.startswith(name) for name in until)


def test_a_run_stops_at_the_first_commit_with_enough_samples(long):
    enough = long.metrics[12]["samples"]
    assert long.metrics[11]["samples"] < enough < long.metrics[13]["samples"]
    for limit, commits in ((enough, 12), (enough + 1, 13)):
        stopped = run(experiment(until={"samples": limit}, evaluate={"every_commits": 99}))
        assert stopped.commits == commits
        assert stopped.metrics == [long.metrics[0], long.metrics[commits]]
        assert stopped.ended == f"samples {long.metrics[commits]['samples']} >= {limit}"


def test_the_smoothed_limit_waits_longer_than_the_single_one(long):
    aim = 0.35
    stopped = run(experiment(until={"accuracy_smoothed": aim, "commits": 40}, evaluate={"every_commits": 1}))
    at = crossing(long.metrics, aim, smooth=5)
    assert crossing(long.metrics, aim).commit < at.commit == stopped.commits < 40
    assert stopped.reached_smoothed[str(aim)] == {"commit": at.commit, "virtual_seconds": at.virtual_seconds}


def test_the_table_of_a_smoothed_limit_has_its_time(long):
    """The time of the limit that ends the run, not the earlier one of a single evaluation."""
    aim = 0.35
    stopped = run(experiment(until={"accuracy_smoothed": aim, "commits": 40}, evaluate={"every_commits": 1}))
    end = {"commit": stopped.commits, "virtual_seconds": stopped.virtual_seconds}
    assert stopped.reached[f"accuracy_smoothed {aim}"] == end
    assert stopped.reached[str(aim)]["commit"] < stopped.commits
    target = next(iter(stopped.reached))
    columns, (row,), _ = comparison_table({"it": [stopped.result]}, target)
    assert (columns[-1], row[-1]) == (f"s to accuracy_smoothed {aim}", f"{stopped.virtual_seconds:,.1f}")
    assert long.reaching(target)["reached"][target] == end  # of a run whose config has no such limit


def test_evaluations_by_seconds_are_due_at_every_multiple():
    """The floats 0.3 / 0.1 and 0.6 / 0.1 lie below 3 and 6."""
    look = Evaluate(every_seconds=0.1)
    times = [tick / 10 for tick in range(1, 400)]
    assert [time for before, time in pairwise(times) if not look.due(0, before, time)] == []
    between = [time + 0.05 for time in times]
    assert not any(look.due(0, time, later) for time, later in zip(times, between, strict=True))
    task = {"name": "quadratic", "clients": 2, "dimension": 2}
    fleet = {"name": "custom", "step_seconds": 0.1}
    method = {"name": "local-sgd", "n": 2, "local_steps": 1}
    made = run(Experiment(method, task, fleet, until={"commits": 12}, evaluate={"every_seconds": 0.1}, device="cpu"))
    assert [row["commit"] for row in made.metrics] == list(range(13))


def test_a_payload_of_no_bytes_is_no_default():
    """Transfers of zero bytes take no time and are not counted."""
    fleet = {"name": "custom", "step_seconds": 0.1, "down_mbit": 0.01, "up_mbit": 0.01}
    task = {"name": "digits", "clients": 2, "model": "logistic"}
    given = Experiment({"name": "local-sgd", "n": 2, "local_steps": 1}, task, fleet, until={"commits": 1}, device="cpu")
    assert run(given).virtual_seconds > 1
    made = run(replace(given, fleet=fleet | {"payload_bytes": 0}))
    assert (made.virtual_seconds, made.bytes_up, made.bytes_down) == (0.1, 0, 0)
    still = replace(given, fleet=fleet | {"payload_bytes": 0, "step_seconds": 0}, until={"virtual_seconds": 1})
    with pytest.raises(ConfigError, match="never reached"):
        run(still)


def test_a_target_met_at_the_start_needs_no_commit():
    stopped = run(experiment(until={"accuracy": 0.01, "commits": 5}))
    assert stopped.commits == 0
    assert stopped.reached == {"0.01": {"commit": 0, "virtual_seconds": 0.0}}


def test_virtual_seconds_admit_a_commit_at_the_limit_and_none_after_it(long):
    times = [row["virtual_seconds"] for row in long.metrics]
    at, before = times[9], math.nextafter(times[9], 0.0)
    assert times[8] < before
    for limit, commits in ((at, 9), (before, 8), (times[1] / 2, 0)):
        stopped = run(experiment(until={"virtual_seconds": limit}, evaluate={"every_commits": 1}))
        assert stopped.commits == commits
        assert stopped.virtual_seconds == times[commits] <= limit
        assert stopped.ended.startswith("virtual_seconds")


def test_targets_are_reported_reached_or_not(long):
    stopped = run(experiment(targets=(0.2, 1.0), until={"commits": 40}, evaluate={"every_commits": 1}))
    at = first(long.metrics, lambda row: row["accuracy"] >= 0.2)
    assert stopped.reached == {
        "0.2": {"commit": at, "virtual_seconds": long.metrics[at]["virtual_seconds"]},
        "1.0": None,
    }
    smoothed = stopped.reached_smoothed["0.2"]["commit"]
    window = [row["accuracy"] for row in long.metrics[smoothed - 4 : smoothed + 1]]
    assert sum(window) / 5 >= 0.2
    assert stopped.reached_smoothed["1.0"] is None


# ---- the same run, the same bytes ---------------------------------------------------------------
@every_method
def test_evaluation_never_disturbs_the_run(method, tmp_path):
    looked = {"often": {"every_commits": 1}, "seldom": {"every_commits": 99}, "by-time": {"every_seconds": 0.05}}
    made = {
        name: run(experiment(method=method, evaluate=evaluate), tmp_path / name) for name, evaluate in looked.items()
    }
    traces = {(tmp_path / name / "trace.parquet").read_bytes() for name in looked}
    assert len(traces) == 1
    assert all(same_bits(made["often"].model, outcome.model) for outcome in made.values())
    assert [row["commit"] for row in made["often"].metrics] == list(range(11))
    assert [row["commit"] for row in made["seldom"].metrics] == [0, 10]
    often = {row["commit"]: row for row in made["often"].metrics}
    assert all(row == often[row["commit"]] for row in made["by-time"].metrics)


def test_evaluation_by_seconds_looks_at_the_first_commit_after_each_mark(long):
    every = 0.07
    looked = run(experiment(until={"commits": 40}, evaluate={"every_seconds": every})).metrics
    times = [row["virtual_seconds"] for row in long.metrics]
    due = [v for v in range(1, 41) if times[v] // every > times[v - 1] // every]
    assert [row["commit"] for row in looked] == [0, *due, *([] if due[-1] == 40 else [40])]
    assert 3 < len(due) < 35


@every_method
def test_the_seed_decides_the_trace_byte_for_byte(method, tmp_path):
    made = {
        name: run(experiment(method=method, seed=seed), tmp_path / name)
        for name, seed in (("one", 5), ("again", 5), ("other", 6))
    }
    trace = {name: (tmp_path / name / "trace.parquet").read_bytes() for name in made}
    assert trace["one"] == trace["again"] != trace["other"]
    assert same_bits(made["one"].model, made["again"].model)
    assert figures(made["one"]) == figures(made["again"])
    assert not same_bits(made["one"].model, made["other"].model)


@every_method
def test_the_written_config_reproduces_the_run(method, tmp_path):
    chosen = experiment(method=method, seed=3, precision="float64", fleet={"name": "uniform", "mbit": 50.0})
    made = run(chosen, tmp_path / "first")
    again = Experiment.of(toml.read(tmp_path / "first" / "config.toml"))
    repeated = run(again, tmp_path / "second")
    assert (tmp_path / "first" / "trace.parquet").read_bytes() == (tmp_path / "second" / "trace.parquet").read_bytes()
    assert (tmp_path / "first" / "config.toml").read_bytes() == (tmp_path / "second" / "config.toml").read_bytes()
    assert same_bits(made.model, repeated.model)
    assert figures(made) == figures(repeated)


def test_the_run_directory_says_what_the_outcome_says(tmp_path):
    outcome = run(experiment(targets=(0.2,)), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoint-000000.safetensors", "checkpoint-000003.safetensors", "clients.parquet", "config.toml",
        "manifest.json", "metrics.parquet", "model.safetensors", "offbeat.lock", "result.json", "trace.parquet",
    ]  # fmt: skip
    result = json.loads((tmp_path / "result.json").read_text())
    assert result == outcome.result
    assert result.keys() >= {
        "method", "task", "fleet", "seed", "device", "commits", "virtual_seconds", "client_steps", "samples",
        "bytes_up", "bytes_down", "accuracy_final", "accuracy_best", "reached", "staleness", "jobs_started",
        "jobs_computed", "waves", "wall_seconds",
    }  # fmt: skip
    assert result["staleness"].keys() >= {"mean", "max"}
    assert (result["method"], result["task"], result["fleet"]) == ("fedbuff", "digits", "straggling")
    assert (result["seed"], result["device"], result["commits"]) == (0, "cpu", 10)
    assert read_metrics(tmp_path) == outcome.metrics
    assert result["accuracy_final"] == outcome.metrics[-1]["accuracy"]
    assert result["accuracy_best"] == max(row["accuracy"] for row in outcome.metrics)
    assert same_bits(load_file(tmp_path / "model.safetensors"), outcome.model)
    assert 0 < result["waves"] <= result["jobs_computed"]


# ---- going on -----------------------------------------------------------------------------------
@every_method
@pytest.mark.parametrize("commits", [1, 7])
def test_a_resumed_run_is_the_straight_run_bit_for_bit(method, commits, tmp_path):
    chosen = experiment(method=method, until={"commits": 16})
    straight = run(chosen, tmp_path / "straight")
    halted = interrupted(chosen, tmp_path / "halted", commits)
    left = json.loads((halted / "result.json").read_text())
    assert (left["commits"], left["ended"]) == (commits, "interrupted")
    assert [type(record) for _, record in read_trace(halted)].count(Commit) == commits
    assert read_metrics(halted) == straight.metrics[: len(read_metrics(halted))]
    assert not same_bits(load_file(halted / "model.safetensors"), straight.model)

    resumed = resume(halted)
    assert (halted / "trace.parquet").read_bytes() == (tmp_path / "straight" / "trace.parquet").read_bytes()
    assert same_bits(resumed.model, straight.model)
    assert same_bits(load_file(halted / "model.safetensors"), straight.model)
    assert read_metrics(halted) == resumed.metrics == straight.metrics
    assert figures(resumed) == figures(straight)


def test_a_run_may_be_interrupted_again_and_again(tmp_path):
    chosen = experiment(method=METHODS["dlsgd-hetero"], fleet=COMING_AND_GOING)
    straight = run(chosen, tmp_path / "straight")
    interrupted(chosen, tmp_path / "halted", 2)
    for commits in (3, 8):
        with pytest.raises(Interrupted):
            resume(tmp_path / "halted", None, InterruptAt(commits))
    resumed = resume(tmp_path / "halted")
    assert (tmp_path / "halted/trace.parquet").read_bytes() == (tmp_path / "straight/trace.parquet").read_bytes()
    assert same_bits(resumed.model, straight.model)
    assert resumed.metrics == straight.metrics


def test_what_was_recorded_after_the_checkpoint_is_made_again(tmp_path):
    """Where the last checkpoint is lost, there are more rows than the one before knows."""
    straight = run(experiment(), tmp_path / "straight")
    late = interrupted(experiment(), tmp_path / "late", 3)
    with pytest.raises(Interrupted):
        resume(late, None, InterruptAt(9))
    max(late.glob("checkpoint-*")).unlink()
    with pytest.warns(UserWarning, match=r"going on from the one before, checkpoint-\d+.safetensors, at commit 3"):
        resumed = resume(late)
    assert (late / "trace.parquet").read_bytes() == (tmp_path / "straight" / "trace.parquet").read_bytes()
    assert read_metrics(late) == resumed.metrics == straight.metrics
    assert same_bits(resumed.model, straight.model)
    assert figures(resumed) == figures(straight)


def test_resuming_a_finished_run_changes_nothing(tmp_path):
    made = run(experiment(), tmp_path)
    before = (tmp_path / "trace.parquet").read_bytes()
    again = resume(tmp_path)
    assert figures(again) == figures(made)
    assert same_bits(again.model, made.model)
    assert (tmp_path / "trace.parquet").read_bytes() == before


@every_method
def test_a_finished_run_with_a_further_limit_is_the_longer_run(method, tmp_path):
    short = experiment(method=method, until={"commits": 8})
    longer = run(replace(short, until={"commits": 20}), tmp_path / "longer")
    run(short, tmp_path / "short")
    resumed = resume(tmp_path / "short", {"commits": 20})
    assert (tmp_path / "short" / "trace.parquet").read_bytes() == (tmp_path / "longer" / "trace.parquet").read_bytes()
    # The short run did not look beyond its last commit, so its waves were others: equal to rounding.
    for name, value in longer.model.items():
        torch.testing.assert_close(resumed.model[name], value, rtol=0, atol=1e-6)
    assert [row["commit"] for row in resumed.metrics] == [row["commit"] for row in longer.metrics]
    assert resumed.ended == longer.ended
    assert toml.read(tmp_path / "short" / "config.toml")["until"] == {"commits": 20}


def test_a_further_limit_that_leaves_the_waves_alone_gives_the_same_bits(tmp_path):
    short = experiment(until={"samples": 500}, evaluate={"every_commits": 1})
    longer = run(replace(short, until={"samples": 1500}), tmp_path / "longer")
    run(short, tmp_path / "short")
    resumed = resume(tmp_path / "short", {"samples": 1500})
    assert same_bits(resumed.model, longer.model)
    assert resumed.metrics == longer.metrics


def test_without_a_checkpoint_there_is_nothing_to_resume(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(OffbeatError, match="there is no run in") as caught:
            resume(path)
        assert path.name in str(caught.value)


@pytest.mark.parametrize(("was", "now"), [("seed = 0", "seed = 1"), ("local_steps = 2", "local_steps = 3")])
def test_a_changed_config_is_refused_and_put_back_it_goes_on(was, now, tmp_path):
    straight = run(experiment())
    halted = interrupted(experiment(), tmp_path, 5)
    written = (halted / "config.toml").read_text()
    assert was in written
    (halted / "config.toml").write_text(written.replace(was, now))
    with pytest.raises(OffbeatError, match=rf"was changed since the run began \((method\.)?{was.split()[0]}\)"):
        resume(halted)
    (halted / "config.toml").write_text(written)
    resumed = resume(halted)
    assert same_bits(resumed.model, straight.model)
    assert resumed.metrics == straight.metrics


def test_objects_of_your_own_are_asked_for_and_passed_again(tmp_path):
    from offbeat.methods import METHODS as table

    def made():
        return table["fedbuff"](buffer_size=3, local_steps=2)

    chosen = experiment(method=made())
    straight = run(chosen)
    interrupted(chosen, tmp_path, 4)
    with pytest.raises(OffbeatError, match="method 'fedbuff' was given as an object; pass the object again"):
        resume(tmp_path)
    with pytest.raises(OffbeatError, match=r"its schedule has changed \(row \d+: .*Commit"):
        resume(tmp_path, method=table["fedbuff"](buffer_size=4, local_steps=2))
    with pytest.raises(OffbeatError, match=r"was made with another task\.batch_size"):
        resume(tmp_path, method=made(), task=TASK | {"batch_size": 7})
    assert same_bits(resume(tmp_path, method=made()).model, straight.model)


@every_method
def test_a_replayed_trace_gives_the_model_its_bits(method, tmp_path):
    made = run(experiment(method=method, fleet=COMING_AND_GOING), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    again = replay(tmp_path)
    assert same_bits(again.model, made.model)
    assert again.metrics == made.metrics
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_replay_refuses_a_policy_that_says_something_else(tmp_path):
    from offbeat.methods import METHODS as table

    run(experiment(method=table["fedbuff"](buffer_size=3, local_steps=2)), tmp_path)
    with pytest.raises(OffbeatError, match=r"replay: .*the trace has Commit.*the policy says Start"):
        replay(tmp_path, method=table["fedbuff"](buffer_size=4, local_steps=2))


# ---- bad ends -----------------------------------------------------------------------------------
def test_bad_numbers_stop_the_run_and_keep_what_was_committed(tmp_path):
    rate = {"schedule": "step", "value": 0.02, "at": [4], "factor": 1e40}  # infinite from version 4 on
    with pytest.raises(BadNumbers) as caught:
        run(experiment(method=FEDBUFF | {"client_lr": rate}, until={"commits": 30}), tmp_path)
    found = re.match(r"client (\d+), version (\d+): the loss at local step (\d+) is not finite", str(caught.value))
    assert found is not None
    client, version, step = map(int, found.groups())
    rows = read_trace(tmp_path)
    made = [record for _, record in rows if isinstance(record, Commit)]
    assert version >= 4
    assert step == 1  # the first loss after the first infinite step
    assert any(r.client == client and r.version == version for _, r in rows if isinstance(r, Begun))

    result = json.loads((tmp_path / "result.json").read_text())
    assert result["commits"] == len(made) >= version
    assert result["ended"] == f"stopped: {caught.value}"
    assert f"stopped at commit {len(made)}" in str(caught.value)
    assert [row["commit"] for row in read_metrics(tmp_path)] == list(range(0, len(made) + 1, 2))
    good = run(experiment(until={"commits": len(made)})).model
    for name, value in load_file(tmp_path / "model.safetensors").items():
        torch.testing.assert_close(value, good[name], rtol=0, atol=1e-6)

    with pytest.raises(BadNumbers, match=f"client {client}, version {version}"):
        resume(tmp_path)
    assert json.loads((tmp_path / "result.json").read_text())["commits"] == len(made)


def test_bad_numbers_in_the_first_wave_leave_a_readable_directory(tmp_path):
    with pytest.raises(BadNumbers, match=r"client \d+, version 0: the loss at local step 1 is not finite"):
        run(experiment(method=FEDBUFF | {"client_lr": 1e39}), tmp_path)
    assert read_trace(tmp_path) == []
    assert [row["commit"] for row in read_metrics(tmp_path)] == [0]
    assert json.loads((tmp_path / "result.json").read_text())["commits"] == 0


def test_a_killed_run_can_be_resumed_to_the_straight_result(tmp_path):
    chosen = experiment(until={"commits": 40}, evaluate={"every_commits": 5}, checkpoint_seconds=1e-6)
    out = tmp_path / "killed"
    killed_process(13, chosen, out)
    assert len(list(out.glob("parts/trace-*.parquet"))) == 13
    straight = run(replace(chosen, checkpoint_seconds=60.0), tmp_path / "straight")
    resumed = resume(out)
    assert (out / "trace.parquet").read_bytes() == (tmp_path / "straight" / "trace.parquet").read_bytes()
    assert same_bits(resumed.model, straight.model)
    assert read_metrics(out) == resumed.metrics == straight.metrics
    assert figures(resumed) == figures(straight)


def test_result_json_is_strict_json(tmp_path):
    with pytest.raises(BadNumbers, match="after commit 2 is of no use: its loss is inf"):
        run(experiment(method=FEDBUFF | {"client_lr": 1e36}), tmp_path)

    def refuse(name):
        raise ValueError(name)

    assert json.loads((tmp_path / "result.json").read_text(), parse_constant=refuse)["loss_final"] is None


def test_a_time_limit_ends_a_schedule_that_never_commits():
    fleet = {"name": "custom", "step_seconds": 0.1, "mean_on": 0.001, "mean_off": 1.0}
    made = run(Experiment(method="local-sgd", fleet=fleet, device="cpu", until={"virtual_seconds": 20.0}))
    assert made.commits == 0
    assert made.ended.startswith("virtual_seconds")
