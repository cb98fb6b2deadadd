"""Cases that once went wrong: schedules that stalled, waves that differed, bookkeeping that grew."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from offbeat import Experiment, Task, compare, run
from offbeat.engines.engine import Engine
from offbeat.experiments.assemble import build, build_method
from offbeat.fleets.make import build as build_fleet
from offbeat.keys import generator
from offbeat.records import Arrived, Begun, Commit, Joined, Left, Start
from offbeat.schedule.buffer import Buffer
from offbeat.schedule.clock import VirtualClock
from offbeat.schedule.horizon import Horizon
from offbeat.schedule.sampled import Sampled
from worlds import play, quadratic_world, times


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_sampled_rounds_go_on_when_everyone_was_gone(seed: int, overlap: bool) -> None:
    fleet = build_fleet("custom", 3, seed, step_seconds=0.05, drop_out=0.1, mean_on=1.0, mean_off=3.0)
    clock = VirtualClock(Sampled(3, 2, overlap), fleet.durations(seed, 0, 0), generator(seed, "policy"))
    commits = (record for _, record in itertools.islice(clock, 60_000) if isinstance(record, Commit))
    assert len(list(itertools.islice(commits, 100))) == 100


def test_a_time_limit_ends_a_schedule_that_never_commits() -> None:
    fleet = {"name": "custom", "step_seconds": 0.1, "mean_on": 0.001, "mean_off": 1.0}
    made = run(Experiment(method="local-sgd", fleet=fleet, device="cpu", until={"virtual_seconds": 20.0}))
    assert made.commits == 0
    assert made.ended.startswith("virtual_seconds")


def test_fresh_clients_do_not_repeat_a_version_after_coming_back() -> None:
    conductor = Buffer(size=3, steps=1, restart="fresh").conductor(3, random.Random(0))
    conductor.begin(0.0, range(3))
    assert conductor.arrived(1.0, Arrived(0, 0, 0, 1)) == []
    assert conductor.left(2.0, Left(0)) == []
    assert conductor.joined(3.0, Joined(0)) == []  # it has version 0 behind it
    conductor.arrived(4.0, Arrived(1, 0, 0, 1))
    orders = conductor.arrived(5.0, Arrived(2, 0, 0, 1))
    assert orders[1:] == [Start(client, 1, 1) for client in (0, 1, 2)]


def whole_shards(loss: Any, model: nn.Module) -> Task:
    rng = np.random.default_rng(0)
    x, y = torch.from_numpy(rng.standard_normal((60, 4))), torch.from_numpy(rng.integers(0, 3, 60))
    ends = np.cumsum([5, 12, 12, 20, 11])
    shards = [np.arange(a, b) for a, b in itertools.pairwise([0, *ends])]
    return Task(model, loss, (x, y), shards, batch_size=None)


@pytest.mark.parametrize(
    ("loss", "norm"),
    [
        (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 0.2], dtype=torch.float64)), None),
        (nn.CrossEntropyLoss(reduction="sum"), None),
        (functional.cross_entropy, nn.BatchNorm1d(3, track_running_stats=False)),
    ],
    ids=["class weights", "sum", "batch norm"],
)
def test_whole_shards_of_unequal_size_are_exact_for_any_loss(loss: Any, norm: nn.Module | None) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 3), *([norm] if norm else [])]
    task = whole_shards(loss, nn.Sequential(*layers))
    spec = {"name": "local-sgd", "n": None, "local_steps": 3, "client_lr": 0.01}
    one, two = (play(spec, task, times(5), 3, mode=mode)[0].server.state["model"] for mode in ("wave", "twin"))
    assert torch.allclose(one, two, rtol=0, atol=1e-12)


def test_frozen_parameters_stay_and_cost_no_bytes() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    x, y = torch.linspace(-1, 1, 160).reshape(40, 4), torch.arange(40) % 3
    task = Task(model, functional.cross_entropy, (x, y), [range(8 * i, 8 * i + 8) for i in range(5)])
    chosen = Experiment(method={"name": "fedbuff", "buffer_size": 2}, task=task, fleet="equal", device="cpu",
                        until={"commits": 5})  # fmt: skip
    made = run(chosen)
    assert torch.equal(made.model["0.weight"], before)
    assert not torch.equal(made.model["2.weight"], model[2].weight)
    assert build(chosen).vector_bytes == 4 * (8 * 3 + 3)


def test_a_beta_of_zero_is_refused_not_replaced() -> None:
    with pytest.raises(Exception, match="a rate must be a positive number"):
        build_method({"name": "fedbuff", "beta": 0.0})


def test_the_horizon_counts_just_the_versions_that_known_jobs_need() -> None:
    for policy in (
        Buffer(3, 1),
        Buffer(3, 1, concurrency=4),
        Buffer(3, 1, restart="fresh", overlap=True),
        Sampled(3, 1),
    ):
        horizon = Horizon(VirtualClock(policy, times(9), generator(0, "policy")), 60, 200)
        for _ in horizon:
            jobs: list[Begun] = [*horizon.wanted.values(), *horizon.begun.values()]
            orders = [v for versions in horizon.ordered.values() for v in versions]
            assert set(horizon.held) == {job.version for job in jobs} | set(orders)
            assert all(horizon.ordered.values())
            for job in horizon.ready(horizon.given):
                horizon.computed(job[:2])


def test_versions_are_let_go_under_heavy_tailed_downloads() -> None:
    fleet = build_fleet("uniform", 8, latency=0.02, jitter={"law": "lognormal", "median": 1.0, "sigma": 1.0})
    made = build_method({"name": "dlsgd-homo", "n": 2, "local_steps": 2})
    engine = Engine(made, quadratic_world(), 0, torch.device("cpu"), "float64")
    clock = VirtualClock(made.when, fleet.durations(0, 0, 0), generator(0, "policy"))
    most = max(len(engine.server.versions) for _ in engine.commits(Horizon(clock, 128, 600)))
    assert most < 250  # of 600


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


def test_options_that_a_given_policy_overrides_are_refused() -> None:
    with pytest.raises(Exception, match="local_steps has no effect with when"):
        build_method({"name": "local-sgd", "local_steps": 20, "when": {"policy": "rounds", "size": 5}})


@pytest.mark.soak
def test_every_method_learns_with_its_defaults() -> None:
    from offbeat import METHODS

    for name in METHODS:
        clusters = 1 if name.startswith("gossip") else 10  # those that need none do not mind them
        fleet = {"name": "straggling", "clusters": clusters}
        commits = {"fedasync": 2000, "async-hl-sgd": 400}.get(name, 200)
        made = run(Experiment(method=name, fleet=fleet, device="cpu", until={"commits": commits}))
        assert made.accuracy_best > 0.8, (name, made.accuracy_best)


def test_a_loss_that_gives_no_number_is_said_so() -> None:
    task = replace(whole_shards(nn.CrossEntropyLoss(reduction="none"), nn.Linear(4, 3)), batch_size=2)
    with pytest.raises(Exception, match="the loss must give one number for a batch"):
        run(Experiment(method={"name": "local-sgd", "n": 2}, task=task, fleet="equal", device="cpu", mode="twin"))


@pytest.mark.parametrize(
    "wrong", [lambda w, u, c: w["model"], lambda w, u, c: {"model": u["delta"]}], ids=["tensor", "matrix"]
)
def test_a_commit_that_makes_no_state_is_said_so(wrong: Any) -> None:
    made = build_method({"name": "local-sgd", "n": 4})
    broken = replace(made, what=replace(made.what, weigh=None, apply=None, commit=wrong))
    with pytest.raises(Exception, match="its commit must give the vectors"):
        play(broken, quadratic_world(), times(8), 2)
