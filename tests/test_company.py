"""Trials in company: each ends where it would have ended alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from linear_runs import small
from offbeat import METHODS, Experiment, Method, run
from offbeat.engines.company import share_steps, shareable
from offbeat.experiments.assemble import build, build_method
from offbeat.studies import trials as trials_module
from offbeat.studies.trials import SLACK, Aim, Heat, Race, judging, run_heat, run_together

SHARING = [name for name, make in METHODS.items() if shareable(make()) is None]


def trial(name, rate, commits=8, **options):
    key = "server_lr" if name in ("asysg", "minibatch-sgd") else "client_lr"
    return Experiment(
        method={"name": name, key: rate, **options}, task=small(), fleet="uniform", device="cpu", precision="float64",
        until={"commits": commits}, evaluate={"every_commits": 2}, seed=4,
    )  # fmt: skip


@pytest.mark.parametrize("name", SHARING)
def test_every_method_that_shares_waves_ends_as_alone(name):
    few = {"buffer_size": 3} if name == "fedbuff" else {"n": 3} if "n" in METHODS[name].__code__.co_varnames else {}
    rates = (0.02, 0.3, 0.1)
    apart = [run(trial(name, rate, **few)) for rate in rates]
    found = run_together([build(trial(name, rate, **few)) for rate in rates])
    assert [one.failed for one in found] == [None] * 3
    for alone, one in zip(apart, found, strict=True):
        assert [row["commit"] for row in one.rows] == [row["commit"] for row in alone.metrics]
        assert [row["virtual_seconds"] for row in one.rows] == [row["virtual_seconds"] for row in alone.metrics]
        assert [row["loss"] for row in one.rows] == pytest.approx([row["loss"] for row in alone.metrics], rel=1e-9)
        assert one.company == 3
    assert len({one.rows[-1]["loss"] for one in found}) == 3


def test_many_methods_share():
    clustered = {"hl-sgd", "async-hl-sgd", "gossip-sgd", "gossip-pga", "hierarchical-local-sgd"}
    assert set(METHODS) - set(SHARING) == clustered
    assert shareable(build_method("hl-sgd")) == "hl-sgd steps in clusters"


def test_rates_by_version_and_by_step_and_own_server_rates():
    falling = {"schedule": "step", "value": 0.3, "at": [3]}
    warm = {"schedule": "warm-up", "value": 0.2, "steps": 3}
    trials = [trial("local-sgd", rate, n=3, server_lr=eta) for rate, eta in ((falling, 1.0), (warm, 0.5), (0.1, 1.5))]
    for alone, one in zip(map(run, trials), run_together([build(t) for t in trials]), strict=True):
        assert one.rows[-1]["loss"] == pytest.approx(alone.loss_final, rel=1e-9)


def ends_as_alone(trials):
    apart, found = [run(each) for each in trials], run_together([build(each) for each in trials])
    for alone, one in zip(apart, found, strict=True):
        assert one.rows[-1]["loss"] == pytest.approx(alone.loss_final, rel=1e-9)
    assert len({one.rows[-1]["loss"] for one in found}) == len(trials)


@pytest.mark.parametrize("options", [{"n": 3}, {"saving": True}, {"reference": "equation-4"}, {"start": "zeros"}])
def test_what_there_is_of_each_client_is_each_trials_own(options):
    ends_as_alone([trial("fedagrac", rate, **options) for rate in (0.02, 0.3, 0.1)])


def test_optimisers_that_clients_keep_are_each_trials_own():
    kept = {"momentum": 0.9, "state": "kept"}
    ends_as_alone([trial("local-sgd", rate, n=3, client_options=kept) for rate in (0.02, 0.3, 0.1)])


@pytest.mark.parametrize("rule", ["averaged", "local"])
def test_running_statistics_are_each_trials_own(rule):
    layers = torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3)
    task = replace(small(), model=torch.nn.Sequential(*layers), batch_norm=rule)
    ends_as_alone([replace(trial("local-sgd", rate, n=3), task=task) for rate in (0.02, 0.3, 0.1)])


def test_a_rule_that_reads_its_version_is_told_it():
    def reading(client_lr: float = 0.1) -> Method:
        def step(path, g, job):
            return path._replace(y=path.y - job.lr / (1 + job.version) * g)

        method = METHODS["local-sgd"](n=3, client_lr=client_lr)
        return replace(method, what=replace(method.what, local=replace(method.what.local, step=step)))

    ends_as_alone([replace(trial("local-sgd", rate), method=reading(rate)) for rate in (0.02, 0.3, 0.1)])


@pytest.mark.parametrize("name", SHARING)
def test_shipped_rules_take_their_rates_from_the_job(name):
    key = "server_lr" if name in ("asysg", "minibatch-sgd") else "client_lr"
    assert share_steps([METHODS[name](**{key: rate}) for rate in (0.1, 0.3)])


def test_rules_are_told_apart_by_what_they_close_over():
    def made(number, array, again=False):
        def step(path, g, job):
            return step if again else path._replace(y=path.y - number * array[0] * g)

        method = METHODS["local-sgd"](n=3)
        return replace(method, what=replace(method.what, local=replace(method.what.local, step=step)))

    ones, twos = (torch.full((2,), value) for value in (1.0, 2.0))
    assert share_steps([made(1, ones), made(1, ones.clone())])
    assert not share_steps([made(1, ones), made(1, twos)])
    assert not share_steps([made(1, ones), made(2, ones)])
    assert share_steps([made(1, ones, again=True), made(1, ones, again=True)])  # it closes over itself
    assert not share_steps([made(1, ones.numpy()), made(1, ones.numpy() + 1)])


def test_a_rule_that_takes_its_rate_from_elsewhere_runs_alone():
    def own(client_lr: float = 0.1, unused: float = 0.0) -> Method:
        method = METHODS["local-sgd"](n=3, client_lr=0.1)
        inner = method.what.local.step
        local = replace(method.what.local, step=lambda y, g, job: inner(y, g * client_lr, job))
        return replace(method, what=replace(method.what, local=local))

    assert share_steps([own(0.1), own(0.1)])
    assert share_steps([own(0.1, unused=1.0), own(0.1, unused=2.0)])
    assert not share_steps([own(0.1), own(0.2)])
    trials = [replace(trial("local-sgd", 0.1), method=own(rate)) for rate in (0.1, 0.5)]
    found = run_heat(Heat(tuple(trials), Aim("loss", more=False), halve=False))
    assert [one.company for one in found] == [1, 1]
    assert found[0].rows[-1]["loss"] > found[1].rows[-1]["loss"]


def test_trials_whose_memories_would_fill_the_machine_run_alone(monkeypatch):
    monkeypatch.setattr(trials_module, "ROOM", 100)
    found = run_heat(Heat(tuple(trial("scaffold", rate) for rate in (0.1, 0.2)), Aim("loss", more=False), halve=False))
    assert [one.company for one in found] == [1, 1]


def test_one_that_breaks_leaves_and_the_others_go_on():
    trials = [trial("fedbuff", rate, buffer_size=3, commits=12) for rate in (0.1, 1e308, 0.2)]
    found = run_together([build(t) for t in trials])
    assert found[1].failed is not None
    assert "not finite" in found[1].failed
    assert [one.rows[-1]["commit"] for one in (found[0], found[2])] == [12, 12]
    assert found[2].rows[-1]["loss"] == pytest.approx(run(trials[2]).loss_final, rel=1e-9)


def test_those_that_are_cut_off_stop_there():
    trials = [trial("fedbuff", rate, buffer_size=3, commits=12) for rate in (0.1, 0.0001, 0.05)]
    found = run_together([build(t) for t in trials], Race(Aim("loss", more=False), shares=[0.5]))
    assert [one.cut for one in found] == [False, True, False]
    assert [one.rows[-1]["commit"] for one in found] == [12, 6, 12]


def test_whoever_cannot_win_any_more_is_cut_off(monkeypatch):
    aim, each = Aim("loss", more=False, target=1.0), {"buffer_size": 3, "commits": 40}
    trials = [judging(trial("fedbuff", rate, **each), 0.2, aim) for rate in (0.3, 0.0001)]
    fast, slow = run_heat(Heat(tuple(trials), aim))
    assert aim.seconds(fast.rows) is not None
    assert slow.cut
    assert slow.rows[-1]["commit"] < 40
    monkeypatch.setattr(trials_module, "ROOM", 0)
    personal = judging(trial("scaffold", 0.0001, n=3, commits=40), 0.2, aim)
    (alone,) = run_heat(Heat((personal,), aim, best=aim.seconds(fast.rows)))
    assert alone.cut
    assert alone.rows[-1]["virtual_seconds"] <= SLACK * aim.seconds(fast.rows)
