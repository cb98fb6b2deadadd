"""The local engine: lazy waves, what is never computed, what is refused, and how it falls back."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from offbeat import Experiment, Task, run
from offbeat.engines.captured import LADDER, OFTEN, GraphAdvance, fitting, padded, run_steps
from offbeat.engines.engine import Engine, pick_device
from offbeat.engines.stepping import PlainSteps, Stepping
from offbeat.engines.tiles import TiledAdvance
from offbeat.errors import BadNumbers, ConfigError, OffbeatError
from offbeat.experiments.assemble import build, build_method
from offbeat.fleets.make import build as build_fleet
from offbeat.keys import generator
from offbeat.records import Begun, Overwritten
from offbeat.schedule.clock import VirtualClock
from offbeat.schedule.horizon import Horizon
from worlds import play, quadratic_world, times


def test_updates_that_nobody_consumes_are_never_computed() -> None:
    engine, done = play({"name": "dlsgd-hetero", "n": 2, "local_steps": 2}, quadratic_world(), times(8), commits=60)
    dead = sum(isinstance(record, Overwritten) for commit in done for _, record in commit.step.rows)
    consumed = {job for commit in done for job in commit.step.commit.jobs}
    assert dead > 20
    assert engine.jobs_computed == len(consumed) + len(engine.results)  # the last wave was not made for the last commit
    assert not consumed & set(engine.results)


def test_asynchronous_jobs_are_computed_together() -> None:
    engine, _ = play({"name": "fedbuff", "buffer_size": 2, "local_steps": 2}, quadratic_world(), times(8), commits=60)
    assert engine.jobs_computed / engine.solver.waves > 4  # commits hold 2; waves hold many more


def test_versions_are_let_go() -> None:
    for name in ("fedbuff", "dlsgd-homo", "dlsgd-hetero", "local-sgd"):
        size = {"buffer_size": 2} if name == "fedbuff" else {"n": 2}
        engine, _ = play({"name": name, **size}, quadratic_world(), times(8), commits=120)
        assert len(engine.server.versions) < 60
        assert len(engine.results) <= 30


class Branching(nn.Module):
    """Python control flow on values: vmap cannot batch it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        return out * 2 if float(out.detach().sum()) > 0 else out


def small_task(model: nn.Module, x: torch.Tensor | None = None) -> Task:
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.standard_normal((12, 3))).float() if x is None else x
    y = torch.from_numpy(rng.integers(0, 2, 12))
    return Task(model, functional.cross_entropy, (x, y), [range(3 * i, 3 * i + 3) for i in range(4)], batch_size=2)


def test_a_model_that_cannot_be_batched_runs_one_by_one_and_says_why() -> None:
    experiment = Experiment(
        method={"name": "fedbuff", "buffer_size": 2}, task=small_task(Branching()), fleet="equal", device="cpu",
        until={"commits": 5},
    )  # fmt: skip
    with pytest.warns(UserWarning, match="cannot be batched over clients, so jobs run one after another"):
        outcome = run(experiment)
    assert outcome.mode == "reference"
    assert outcome.commits == 5
    assert "cannot be batched" in outcome.notes[0]


def test_nan_stops_the_run_and_keeps_what_was_committed() -> None:
    x = torch.linspace(-1.0, 1.0, 36).reshape(12, 3)
    x[3:6] = 3e38  # client 1's data: finite, but its outputs will not be
    model = nn.Linear(3, 2)
    nn.init.constant_(model.weight, 10.0)
    task = small_task(model, x)
    made = build_method({"name": "local-sgd", "n": 1, "local_steps": 4, "client_lr": 1.0})
    engine = Engine(made, task, 0, torch.device("cpu"))
    clock = VirtualClock(made.when, times(4), generator(0, "policy"))
    good: list[Any] = []
    with pytest.raises(BadNumbers, match=r"client 1, version \d+: (the loss at|its update).* is not finite"):
        good.extend(engine.commits(Horizon(clock, 64, 50)))
    assert bool(engine.server.state["model"].isfinite().all())
    assert 0 < engine.version < 50
    assert 1 in {job.client for job in (r.job for r in engine.results.values())}


def test_out_of_memory_halves_the_wave_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = play({"name": "local-sgd", "n": 8}, quadratic_world(), times(8), commits=10)
    made = build_method({"name": "local-sgd", "n": 8})
    engine = Engine(made, quadratic_world(), 0, torch.device("cpu"), "float64")
    way = engine.solver.way

    def short_of_memory(starts: Any, jobs: Any) -> Any:
        if len(jobs) > 3:
            raise torch.OutOfMemoryError("no room")
        return way(starts, jobs)

    monkeypatch.setattr(engine.solver, "way", short_of_memory)
    with pytest.warns(UserWarning, match="waves are cut to"):
        list(engine.commits(Horizon(VirtualClock(made.when, times(8), generator(0, "policy")), 64, 10)))
    assert engine.solver.limit == 2
    assert torch.allclose(engine.server.state["model"], whole.server.state["model"], atol=1e-12)
    assert engine.solver.record == [(0, "limit", 4), (0, "limit", 2)]
    follower = Engine(made, quadratic_world(), 0, torch.device("cpu"), "float64")
    follower.follow(engine.state()[1])
    list(follower.commits(Horizon(VirtualClock(made.when, times(8), generator(0, "policy")), 64, 10)))
    assert torch.equal(engine.server.state["model"], follower.server.state["model"])  # cut at the same places
    assert follower.solver.waves == engine.solver.waves
    engine = Engine(made, quadratic_world(), 0, torch.device("cpu"), "float64")
    monkeypatch.setattr(engine.solver, "way", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("none")))
    with pytest.raises(OffbeatError, match="one job alone does not fit"), pytest.warns(UserWarning, match="cut"):
        list(engine.commits(Horizon(VirtualClock(made.when, times(8), generator(0, "policy")), 64, 10)))


@pytest.mark.parametrize("error", [RuntimeError, TypeError, Exception])  # Triton's own are plain exceptions
def test_a_way_that_fails_is_left_for_the_next(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(build_method({"name": "local-sgd"}), quadratic_world(), 0, torch.device("cpu"), "float64")
    way = engine.solver.way

    def fails_at_first(starts: Any, jobs: Any) -> Any:
        if engine.solver.rung == "captured":
            raise error("no such kernel")
        return way(starts, jobs)

    monkeypatch.setattr(engine.solver, "way", fails_at_first)
    with pytest.warns(UserWarning, match="so they run plainly: no such kernel"):
        engine.solve([Begun(0, 0, 0, 1)])
    assert engine.solver.record == [(0, "rung", "plain")]


def test_a_memory_limit_cuts_waves() -> None:
    task = quadratic_world()
    made = build_method({"name": "local-sgd", "n": 8})
    tiny = Engine(made, task, 0, torch.device("cpu"), "float64", memory_gib=1e-9)
    assert tiny.solver.limit == 1
    assert Engine(made, task, 0, torch.device("cpu"), "float64", memory_gib=1.0).solver.limit > 1000


@pytest.mark.parametrize("name", ["gpu", "cuda:x"])
def test_unknown_devices(name: str) -> None:
    with pytest.raises(ConfigError, match="it is 'auto', 'cpu', 'cuda' or 'cuda:N'"):
        pick_device(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_a_cuda_device_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="no CUDA device is there; use --device cpu"):
        pick_device("cuda")


def test_waves_are_padded_little() -> None:
    """The ladder of graph sizes wastes at most a half on small waves and a fifth on large ones."""
    for clients in range(1, 1000):
        assert clients <= padded(clients) <= max(clients + 2, 1.35 * clients)
    assert list(LADDER) == sorted(set(LADDER))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"shards": []}, "shards is empty"),
        ({"shards": [[0], []]}, "client 1 has an empty shard"),
        ({"shards": [[0], [99]]}, "client 1 has sample 99"),
        ({"batch_size": 0}, "batch_size = 0"),
        ({"sampling": "some"}, "sampling = 'some'"),
        ({"data": (torch.zeros(3, 3), torch.zeros(2).long())}, "3 inputs and 2 targets"),
        ({"data": (torch.full((12, 3), float("nan")), torch.zeros(12).long())}, "NaN or infinity, first in row 0"),
        ({"data": (torch.zeros(12, 3), torch.full((12,), 2))}, "the model has 2 outputs, so they must be 0..1"),
        ({"model": nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))}, "running statistics"),
    ],
)
def test_tasks_that_cannot_run(change: dict[str, Any], sentence: str) -> None:
    from dataclasses import replace

    found = replace(small_task(nn.Linear(3, 2)), **change).problems()
    assert any(sentence in problem for problem in found), found


class Pairs(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.full((3,), float(i)), i % 2


def test_a_dataset_will_do() -> None:
    task = Task(nn.Linear(3, 2), functional.cross_entropy, Pairs(), [range(6), range(6, 12)])
    assert task.problems() == []
    outcome = run(
        Experiment(method={"name": "local-sgd", "n": 2}, task=task, fleet="equal", device="cpu", until={"commits": 2})
    )
    assert outcome.accuracy_final is not None


class Eager(GraphAdvance):
    """Replays by running what would have been captured: all of the logic of graphs but the capture itself."""

    def capture(self, problem: Any, at: Any, steps: int, width: int) -> Any:
        return SimpleNamespace(replay=lambda: run_steps(problem, at, steps, width))


@pytest.mark.parametrize("batch", [4, None])
def test_padded_buffers_and_unrolled_steps_change_nothing(batch: int | None) -> None:
    """Waves of many sizes one after another, with steps that are no multiple of the unrolling and leave early."""
    rng = np.random.default_rng(1)
    x, y = torch.from_numpy(rng.standard_normal((66, 3))), torch.from_numpy(rng.integers(0, 2, 66))
    shards = [range(6 * i, 6 * i + (6 if i % 2 else 3)) for i in range(11)]
    task = Task(nn.Linear(3, 2), functional.cross_entropy, (x, y), shards, batch_size=batch)
    made = build_method({"name": "local-sgd", "local_steps": 2, "client_options": {"momentum": 0.9}})
    engine = Engine(made, task, 0, torch.device("cpu"), "float64")
    plain, eager = engine.solver.advance, Eager()
    for size in (1, 3, 5, 11, 7, 3, 3):
        jobs = [Begun(client, size, 0, (23, 10, 4)[client % 3]) for client in range(size)]
        engine.solver.advance = plain
        one = engine.solve(jobs)
        engine.solver.advance = eager
        two = engine.solve(jobs)
        assert torch.allclose(one.updates["delta"], two.updates["delta"], rtol=0, atol=1e-13)
        assert torch.allclose(one.losses, two.losses, rtol=0, atol=1e-13)
        assert two.bad.tolist() == [-1] * size
    assert {width for _, width in eager.graphs} == ({4} if batch else {3, 6})
    assert any(size > 5 for size, _ in eager.graphs)  # six clients with whole shards of one size, eleven without


def test_a_size_that_keeps_coming_gets_a_graph_of_its_own() -> None:
    engine, _ = play({"name": "local-sgd", "n": 7}, quadratic_world(), times(8), commits=1)
    engine.solver.advance = Eager()
    for number in range(OFTEN):
        engine.solve([Begun(client, number, 1, 2) for client in range(7)])
    assert {size for size, _ in engine.solver.advance.graphs} == {padded(7), 7}


def ways_to_step(counts: bool = True) -> list[Stepping]:
    engine = Engine(build_method("local-sgd"), quadratic_world(), 0, torch.device("cpu"), "float64")
    return [PlainSteps(), Eager(counts), TiledAdvance(engine.solver.problem, 3, 1, counts)]


@pytest.mark.parametrize("way", [0, 1, 2], ids=["plain", "graphs", "tiles"])
def test_a_solver_asks_every_way_to_step_the_same_things(way: int) -> None:
    """It goes on from a checkpoint with what was counted, and below its rung steps are taken plainly."""
    engine, again = (
        Engine(build_method("local-sgd"), quadratic_world(), 0, torch.device("cpu"), "float64") for _ in range(2)
    )
    for each in (engine, again):
        each.solver.advance = ways_to_step()[way]
        each.solver.rung = each.solver.advance.rung
    outcomes = [engine.solve([Begun(client, number, 0, 2) for client in range(7)]) for number in range(3)]
    with pytest.warns(UserWarning, match="waves are cut to 2"):
        engine.solver.halve(4)
    assert engine.solver.limit == 2
    tensors, facts = engine.solver.save()
    again.solver.restore(tensors, facts | {"threads": 3})
    assert again.solver.advance.save() == engine.solver.advance.save()
    assert bool(again.solver.advance.save().get("seen")) == (way > 0)
    assert again.solver.fitting(7, 1) == (6 if way == 1 else 7)
    again.solver.rung = "plain"
    assert again.solver.fitting(7, 1) == 7
    plain = again.solve([Begun(client, 2, 0, 2) for client in range(7)])
    assert torch.allclose(plain.updates["delta"], outcomes[2].updates["delta"], rtol=0, atol=1e-13)


@pytest.mark.parametrize("way", [1, 2], ids=["graphs", "tiles"])
def test_steps_that_do_not_count_waves_are_cut_as_at_first(way: int) -> None:
    engine = Engine(build_method("local-sgd"), quadratic_world(), 0, torch.device("cpu"), "float64")
    for counts in (True, False):
        engine.solver.advance = steps = ways_to_step(counts)[way]
        for number in range(OFTEN):
            engine.solve([Begun(client, number, 0, 2) for client in range(7)])
        sizes = {size for size, _ in steps.graphs} if way == 1 else set(steps.tiles(7, 1))
        at_first = {padded(7)} if way == 1 else {6, 1}
        assert (sizes == at_first) == (not counts)


@given(ready=st.integers(1, 2000), data=st.data())
def test_a_wave_takes_what_is_urgent_and_is_padded_only_for_it(ready: int, data: st.DataObject) -> None:
    urgent = data.draw(st.integers(1, ready))
    size = fitting(ready, urgent)
    assert urgent <= size <= ready
    assert size == ready or padded(size) == size
    assert size in LADDER or size % 64 == 0 or size == ready


@given(ready=st.integers(1, 2000), data=st.data())
def test_a_wave_is_the_largest_without_padding_that_holds_what_is_urgent(ready: int, data: st.DataObject) -> None:
    urgent = data.draw(st.integers(1, ready))
    whole = [size for size in range(urgent, ready + 1) if padded(size) == size]
    assert fitting(ready, urgent) == max(whole, default=ready)


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
    one, two = (play(spec, task, times(5), 3, mode=mode)[0].server.state["model"] for mode in ("wave", "reference"))
    assert torch.allclose(one, two, rtol=0, atol=1e-12)


def test_a_loss_that_gives_no_number_is_said_so() -> None:
    task = replace(whole_shards(nn.CrossEntropyLoss(reduction="none"), nn.Linear(4, 3)), batch_size=2)
    with pytest.raises(Exception, match="the loss must give one number for a batch"):
        run(Experiment(method={"name": "local-sgd", "n": 2}, task=task, fleet="equal", device="cpu", mode="reference"))


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


def test_versions_are_let_go_under_heavy_tailed_downloads() -> None:
    fleet = build_fleet("uniform", 8, latency=0.02, jitter={"law": "lognormal", "median": 1.0, "sigma": 1.0})
    made = build_method({"name": "dlsgd-homo", "n": 2, "local_steps": 2})
    engine = Engine(made, quadratic_world(), 0, torch.device("cpu"), "float64")
    clock = VirtualClock(made.when, fleet.durations(0, 0, 0), generator(0, "policy"))
    most = max(len(engine.server.versions) for _ in engine.commits(Horizon(clock, 128, 600)))
    assert most < 250  # of 600
