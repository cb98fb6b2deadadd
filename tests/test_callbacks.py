"""Callbacks: what they are told, that they may stop a run and save their state, and that they change no bit."""

from __future__ import annotations

import json
import math
import sys
import warnings

import pytest
import torch
from safetensors.torch import load_file

from linear_runs import error, experiment, small
from offbeat import Callback, ConfigError, resume, run
from offbeat.errors import Interrupted
from offbeat.runs.callbacks import Callbacks, EarlyStopping, KeepBest, TimeLimit
from offbeat.runs.watchers import callbacks_of
from stopped_runs import killed_after


class Diary(Callback):
    """Writes down everything."""

    def __init__(self):
        self.said = []

    def began(self, run):
        self.said.append(("began", run.commit))

    def committed(self, run):
        self.said.append(("committed", run.commit))

    def evaluated(self, run):
        self.said.append(("evaluated", run.commit, run.rows[-1]["loss"]))

    def ended(self, run, result):
        self.said.append(("ended", result["ended"]))


class Vandal(Callback):
    """Does whatever might change a run."""

    def committed(self, run):
        torch.manual_seed(run.commit)
        torch.set_num_threads(1 + run.commit % 2)
        torch.set_default_dtype(torch.float64)
        torch.set_float32_matmul_precision("medium")
        torch.set_grad_enabled(run.commit % 2 == 0)
        for value in run.model().values():
            value.zero_()
        run.spent["samples"] = 0
        run.rows.clear()

    def evaluated(self, run):
        with pytest.raises(TypeError):
            run.rows[-1]["loss"] = 0.0


class Closer(Callback):
    """Has something to say at the end, and a file to close."""

    def __init__(self, stops=False):
        self.stops, self.closed = stops, 0

    def committed(self, run):
        if self.stops:
            raise KeyboardInterrupt

    def warning(self):
        return "look at me"

    def close(self):
        self.closed += 1


def test_a_callback_is_closed_however_a_run_ends_and_its_warning_is_in_the_result():
    well, badly = Closer(), Closer(stops=True)
    assert run(experiment(small()), callbacks=[well]).diverging == "look at me"
    with pytest.raises(Interrupted):
        run(experiment(small()), callbacks=[badly])
    assert (well.closed, badly.closed) == (1, 1)


class Wrong(Callback):
    def __init__(self, moment):
        def raises(*_):
            raise OSError("the service is down")

        setattr(self, moment, raises)


class Counts(Callback):
    """Stops after so many evaluations."""

    def __init__(self, most=4):
        self.many, self.most = 0, most
        self.seen = torch.zeros(0)

    def evaluated(self, run):
        self.many += 1
        self.seen = torch.cat([self.seen, torch.tensor([float(run.commit)])])
        return f"counted {self.many}" if self.many >= self.most else None

    def state(self):
        return {"many": self.many, "seen": self.seen}

    def restore(self, state):
        self.many, self.seen = state["many"], state["seen"]


def same(one, other):
    return all(torch.equal(one.model[name], other.model[name]) for name in one.model)


def test_everything_is_told_in_order():
    diary = Diary()
    outcome = run(experiment(small(), until={"commits": 5}, evaluate={"every_commits": 2}), callbacks=[diary])
    kinds = [said[:2] for said in diary.said]
    assert kinds == [
        ("began", 0), ("evaluated", 0), ("committed", 1), ("evaluated", 2), ("committed", 2), ("committed", 3),
        ("evaluated", 4), ("committed", 4), ("committed", 5), ("evaluated", 5), ("ended", "commits 5 >= 5"),
    ]  # fmt: skip
    assert [said[2] for said in diary.said if said[0] == "evaluated"] == [row["loss"] for row in outcome.metrics]


def test_callbacks_cannot_change_bits(tmp_path):
    plain = run(experiment(small()), tmp_path / "plain")
    vandal = run(experiment(small()), tmp_path / "vandal", callbacks=[Vandal()])
    assert same(plain, vandal)
    assert plain.metrics == vandal.metrics
    for name in ("trace.parquet", "metrics.parquet", "model.safetensors"):
        assert (tmp_path / "plain" / name).read_bytes() == (tmp_path / "vandal" / name).read_bytes()
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("moment", ["began", "committed", "evaluated", "ended", "state"])
def test_one_that_fails_is_left_out_and_the_run_goes_on(moment, tmp_path):
    with pytest.warns(UserWarning, match="Wrong failed and is left out; the run goes on: OSError: the service is down"):
        outcome = run(experiment(small()), tmp_path / "run", callbacks=[Wrong(moment)])
    assert outcome.commits == 12
    assert outcome.callback_faults == {"Wrong": "OSError: the service is down"}


def test_a_warning_that_was_turned_into_an_error_is_no_fault_of_the_callback():
    class Warns(Callback):
        def committed(self, run):
            warnings.warn("soon gone", DeprecationWarning, stacklevel=2)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(DeprecationWarning, match="soon gone"):
            run(experiment(small()), callbacks=[Warns()])


def test_a_stop_and_its_state_survive_a_kill(tmp_path):
    looks = {"evaluate": {"every_commits": 2}, "until": {"commits": 30}, "checkpoint_seconds": 1e-9}
    straight = run(experiment(small(), **looks), tmp_path / "straight", callbacks=[Counts()])
    assert straight.ended == "counted 4"
    assert straight.commits == 6
    for commit in (1, 3, 5):
        where = tmp_path / f"killed{commit}"
        killed_after(commit, experiment(small(), **looks), where, callbacks=[Counts()])
        counts = Counts()
        again = resume(where, task=small(), callbacks=[counts])
        assert again.ended == "counted 4"
        assert same(again, straight)
        assert counts.seen.tolist() == [0.0, 2.0, 4.0, 6.0]
        assert again.metrics == straight.metrics


def test_a_last_look_that_was_not_due_does_not_count_when_a_run_goes_on(tmp_path):
    looks = {"evaluate": {"every_commits": 4}}
    run(experiment(small(), **looks, until={"commits": 6}), tmp_path / "part", callbacks=[Counts(9)])
    counts = Counts(9)
    resume(tmp_path / "part", until={"commits": 12}, task=small(), callbacks=[counts])
    assert counts.seen.tolist() == [0.0, 4.0, 8.0, 12.0]


def test_early_stopping_by_any_metric(tmp_path):
    task = small(metrics={"error": error})
    whole = run(experiment(task, evaluate={"every_commits": 1}, until={"commits": 60}))
    best, waited, want = math.inf, 0, None
    for row in whole.metrics:
        best, waited = (row["error"], 0) if row["error"] < best else (best, waited + 1)
        if waited == 3:
            want = row["commit"]
            break
    asked = {"name": "early-stopping", "metric": "error", "patience": 3}
    config = experiment(task, evaluate={"every_commits": 1}, until={"commits": 60}, callbacks=[asked])
    outcome = run(config, tmp_path / "run")
    assert outcome.commits == want
    assert outcome.ended.startswith("early stopping: error has not become better for 3 evaluations")
    again = resume(tmp_path / "run", task=task)  # the config says what watches
    assert again.commits == want
    assert again.ended == outcome.ended


def test_the_best_model_is_kept_also_over_a_kill(tmp_path):
    config = experiment(small(), evaluate={"every_commits": 1}, checkpoint_seconds=1e-9)
    keeper = KeepBest("loss")
    outcome = run(config, tmp_path / "run", callbacks=[keeper])
    best = min(outcome.metrics, key=lambda row: row["loss"])
    assert keeper.best == best["loss"]
    assert keeper.commit == best["commit"]
    stored = load_file(tmp_path / "run" / "best.safetensors")
    there = run(experiment(small(), until={"commits": keeper.commit}, evaluate={"every_commits": 1}))
    assert all(torch.equal(stored[name], there.model[name]) for name in stored)
    killed_after(7, config, tmp_path / "killed", callbacks=[KeepBest("loss")])
    resume(tmp_path / "killed", task=small(), callbacks=[KeepBest("loss")])
    assert (tmp_path / "killed" / "best.safetensors").read_bytes() == (
        tmp_path / "run" / "best.safetensors"
    ).read_bytes()


def test_a_time_limit_ends_a_run_that_can_go_on(tmp_path):
    outcome = run(experiment(small()), tmp_path / "run", callbacks=[TimeLimit(1e-9)])
    assert outcome.commits == 1
    assert outcome.ended.startswith("time limit")
    assert resume(tmp_path / "run", task=small()).commits == 12


def test_a_diverging_run_says_so_and_names_the_remedy(tmp_path):
    wild = experiment(small(), until={"commits": 40}, evaluate={"every_commits": 1})
    wild = type(wild)(**{**vars(wild), "method": {"name": "fedbuff", "client_lr": 60.0, "buffer_size": 4}})
    with pytest.warns(UserWarning, match=r"this run is diverging: its loss was .* client_lr = 60.0.*offbeat tune"):
        outcome = run(wild, tmp_path / "run")
    assert "diverging" in json.loads((tmp_path / "run" / "result.json").read_text())["diverging"]
    assert outcome.commits == 40
    assert run(experiment(small())).diverging is None


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["early-stoping"], "did you mean 'early-stopping'"),
        ([{"name": "early-stopping", "patience": "x"}], "it must be a whole number"),
        ([{"name": "time-limit"}], "minutes is missing"),
        ([3], "a table with one"),
    ],
)
def test_mistakes_get_a_sentence(given, sentence):
    with pytest.raises(ConfigError, match=sentence):
        callbacks_of(given)


def test_a_metric_that_is_not_there_is_said_and_the_run_goes_on():
    with pytest.warns(UserWarning, match="this run has no metric 'mae'"):
        assert run(experiment(small()), callbacks=[EarlyStopping("mae")]).commits == 12


class Collector(Callback):
    """Its state is nothing that JSON has."""

    def state(self):
        return {"thing": object(), "tensor": torch.zeros(2)}


def test_a_state_that_cannot_be_written_leaves_its_callback_out(tmp_path):
    with pytest.warns(UserWarning, match="Collector failed and is left out; the run goes on: .*not JSON serializable"):
        outcome = run(experiment(small()), tmp_path, callbacks=[Collector()])
    assert "Collector" in outcome.callback_faults
    assert outcome.model.keys() == run(experiment(small())).model.keys()


def test_a_callback_that_is_left_out_takes_nobodys_place():
    callbacks = Callbacks([Collector(), EarlyStopping()])
    with pytest.warns(UserWarning, match="Collector failed"):
        callbacks.state()
    assert list(callbacks.state()[1]) == ["1 EarlyStopping"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"name": "early-stopping", "patience": 0}, "patience = 0; it must be 1 evaluation or more"),
        ({"name": "time-limit", "minutes": 0}, "minutes = 0; it must be a positive number"),
    ],
)
def test_limits_that_would_end_a_run_at_once_are_refused(given, said):
    with pytest.raises(ConfigError, match=said):
        callbacks_of([given])


def test_a_tracker_names_the_package_that_is_not_there(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match="needs the package tensorboard"):
        callbacks_of(["tensorboard"])
