"""Batch normalisation by a stated rule: statistics of each batch, averaged at the server, or kept at the clients."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from offbeat import ConfigError, Experiment, Task, replay, resume, run
from offbeat.engines import tiles
from offbeat.engines.engine import Engine
from offbeat.experiments.assemble import build, build_method
from offbeat.numerics import local
from offbeat.numerics.buffers import OWN, REAL, WHOLE, memory_shapes, method_problems
from offbeat.numerics.reference_loop import reference
from offbeat.numerics.wave import Problem, columns, draw, wave
from offbeat.records import Begun

CLIENTS = 3
JOBS = [Begun(0, 0, 0, 3), Begun(1, 0, 0, 2), Begun(2, 0, 0, 3)]
METHOD = {"name": "local-sgd", "n": None, "local_steps": 3, "client_lr": 0.1}


def net() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, momentum=0.3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 5),
            nn.BatchNorm1d(5), nn.Linear(5, 3),
        )  # fmt: skip


def task(rule: Any, model: nn.Module | None = None, **more: Any) -> Task:
    generator = torch.Generator().manual_seed(2)
    x, y = 3 * torch.randn(30, 1, 4, 4, generator=generator) + 1, torch.randint(3, (30,), generator=generator)
    shards = [range(i, 30, CLIENTS) for i in range(CLIENTS)]
    given = net() if model is None else model
    return Task(given, functional.cross_entropy, (x, y), shards, batch_size=4, batch_norm=rule, **more)


def problem(rule: Any, options: Any = None) -> Problem:
    of, sgd = task(rule), local.sgd(0.1, options)
    model = of.flat_model(torch.float64)
    method = build_method(METHOD)
    assert model.ruled is not None
    ruled = model.ruled.method(replace(method, what=replace(method.what, local=sgd)))
    return Problem(model, of.samples(torch.float64), ruled.what.local, 7)


def plainly(p: Problem, job: Begun) -> nn.Module:
    """A job by PyTorch alone, on the caller's own model."""
    model = net().double()
    optimiser = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.1)
    rows, _ = draw(p, columns(p, [job], torch.device("cpu")), 0, job.steps, 4)
    for batch in rows[0]:
        optimiser.zero_grad()
        functional.cross_entropy(model(p.samples.x[batch]), p.samples.y[batch]).backward()
        optimiser.step()
    return model


def start(p: Problem) -> dict[str, Tensor]:
    shapes = memory_shapes(p.local.remembers, p.model.dimension, p.model.dtype, p.model.layout)
    memory = {
        name: p.model.initial().new_zeros(len(JOBS), width, dtype=dtype) for name, (width, dtype) in shapes.items()
    }
    initial = dict(zip((REAL, WHOLE), p.model.initial_values(len(JOBS)), strict=False))  # none without buffers
    return {"model": p.model.initial().repeat(len(JOBS), 1), **initial, **memory}


def ended(p: Problem, updates: dict[str, Tensor], i: int, rule: str) -> dict[str, Tensor]:
    """Parameters and buffers where job i ended."""
    state = p.model.views(p.model.initial() - updates["delta"][i])
    if rule == "batch":
        return state
    assert p.model.layout is not None
    names = (REAL, WHOLE) if rule == "averaged" else (OWN[REAL], OWN[WHOLE])
    widths = p.model.layout.widths.values()
    return state | p.model.buffers(tuple(updates[name][i, :n] for name, n in zip(names, widths, strict=True)))


# ---- numbers ------------------------------------------------------------------------------------
@pytest.mark.parametrize("rule", ["batch", "local", "averaged"])
def test_steps_are_pytorchs_statistics_too_and_waves_are_the_twin(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "WORTH", 1)
    p = problem(rule, {"momentum": 0.9, "weight_decay": 0.1})
    one = reference(p, start(p), JOBS).updates
    advance = tiles.TiledAdvance(p, 2, 2)
    for how in (wave(p, start(p), JOBS), *(wave(p, start(p), JOBS, advance) for _ in range(3))):
        for name, update in one.items():
            torch.testing.assert_close(how.updates[name], update, rtol=1e-10, atol=1e-12)
    for i, job in enumerate(JOBS):
        ends, theirs = ended(p, one, i, rule), plainly(p, job).state_dict()
        for name, value in ends.items():
            torch.testing.assert_close(value, theirs[name], rtol=1e-10, atol=1e-12)
        assert ("1.running_var" in ends) == ("1.num_batches_tracked" in ends) == (rule != "batch")


class Twice(nn.Module):
    """A layer that a step calls twice, and one that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.a, self.b = nn.Linear(16, 5), nn.Linear(5, 3)
        self.norm, self.other = nn.BatchNorm1d(5), nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.norm(3 * self.norm(self.a(x.flatten(1))) + 1))


@pytest.mark.parametrize("mode", ["wave", "reference"])
def test_a_layer_moves_its_statistics_as_often_as_it_is_called(mode: Any) -> None:
    whole = replace(task("averaged", Twice()), batch_size=None)
    outcome = run(
        Experiment(method=METHOD, task=whole, until={"commits": 1}, device="cpu", mode=mode, precision="float64")
    )
    (x, y), ends = whole.training, []
    for shard in whole.shards:
        model = Twice().double()
        optimiser = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            optimiser.zero_grad()
            functional.cross_entropy(model(x[shard].double()), y[shard]).backward()
            optimiser.step()
        ends.append(model.state_dict())
    for name in ends[0]:
        each = torch.stack([end[name] for end in ends])
        want = each.amax(0) if "num_batches" in name else each.mean(0)
        torch.testing.assert_close(outcome.model[name], want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("method", ["fedbuff", "dlsgd-homo", "dlsgd-hetero"])
def test_averaged_statistics_of_late_updates_are_means_too(method: str) -> None:
    """The start of a late update is not the model of today: differences would add up, and variances become negative."""
    x, y = 3 + 0.3 * torch.randn(240, 5, generator=torch.manual_seed(0)), torch.arange(240) % 4
    model = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 4))
    shards = [range(i, 240, 20) for i in range(20)]
    given = Task(model, functional.cross_entropy, (x, y), shards, batch_norm="averaged")
    until = {"commits": 12}
    found = run(Experiment(method=method, task=given, fleet="straggling", until=until, device="cpu")).model
    assert torch.allclose(found["0.running_mean"], x.mean(0), atol=0.3)
    assert bool((found["0.running_var"] > 0).all())
    assert bool((found["0.running_var"] < 0.3).all())


def test_averaged_statistics_are_the_mean_of_the_clients_whatever_the_servers_optimiser() -> None:
    for server in ("sgd", "adam"):
        spec = {**METHOD, "server_optimiser": server, "server_lr": 0.3}
        outcome = run(
            Experiment(method=spec, task=task("averaged"), until={"commits": 1}, device="cpu", precision="float64")
        )
        p = problem("averaged")
        jobs = [Begun(client, 0, 0, 3) for client in range(CLIENTS)]
        updates = wave(p._replace(seed=0), start(p), jobs).updates
        mean, most = updates[REAL].mean(0), updates[WHOLE].amax(0)
        for name, value in p.model.buffers((mean, most)).items():
            torch.testing.assert_close(outcome.model[name], value, rtol=1e-9, atol=1e-12)
        assert bool((outcome.model["1.running_var"] > 0).all())


def test_evaluation_uses_the_averaged_statistics_or_those_of_the_batch() -> None:
    until = {"commits": 3}
    averaged = run(Experiment(method=METHOD, task=task("averaged"), until=until, device="cpu", precision="float64"))
    model = net().double()
    model.load_state_dict(averaged.model)  # all that it asks for is there
    x, y = task(None).data
    loss = functional.cross_entropy(model.eval()(x.double()), y)
    assert averaged.loss_final == pytest.approx(float(loss.detach()), rel=1e-9)
    for rule in ("batch", "local"):
        outcome = run(Experiment(method=METHOD, task=task(rule), until=until, device="cpu", precision="float64"))
        model.load_state_dict(outcome.model)
        loss = functional.cross_entropy(model.train()(x.double()), y)
        assert outcome.loss_final == pytest.approx(float(loss.detach()), rel=1e-9)


def test_local_statistics_stay_with_their_clients() -> None:
    engine = Engine(build_method(METHOD), task("local"), 0, torch.device("cpu"), "float64")
    built = build(Experiment(method=METHOD, task=task("local"), until={"commits": 2}, device="cpu"))
    horizon = built.horizon(built.clock())
    commits = engine.commits(horizon)
    for _ in range(2):
        next(commits)
    flat = engine.solver.problem.model
    assert torch.equal(engine.model()["1.running_mean"], torch.zeros(4, dtype=torch.float64))
    own = engine.solver.memory.read(tuple(OWN.values()), torch.arange(CLIENTS))
    assert flat.layout is not None
    cut = zip((own[name] for name in OWN.values()), flat.layout.widths.values(), strict=True)
    buffers = flat.buffers(tuple(values[:, :width] for values, width in cut))
    assert bool((buffers["1.running_mean"][0] != buffers["1.running_mean"][1]).all())
    assert buffers["1.num_batches_tracked"].tolist() == [6, 6, 6]


def digits_net(input_shape: tuple[int, ...], outputs: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, outputs))


@pytest.mark.parametrize("rule", ["averaged", "local"])
def test_a_run_is_resumed_and_replayed_to_the_same_bits(rule: str, tmp_path: Path) -> None:
    named = {"name": "digits", "clients": 5, "model": "test_batch_norm:digits_net", "batch_norm": rule}
    method = {"name": "fedbuff", "buffer_size": 2, "local_steps": 2}
    given = Experiment(method=method, task=named, until={"commits": 6}, device="cpu")
    straight = run(given)
    run(replace(given, until={"commits": 3}), out=tmp_path / "run")
    resumed = resume(tmp_path / "run", until={"commits": 6})
    again = replay(tmp_path / "run")
    for name, value in straight.model.items():
        assert torch.equal(value, resumed.model[name])
        assert torch.equal(value, again.model[name])


def test_the_callers_model_stays_as_it_is() -> None:
    for rule in ("batch", "averaged", "local"):
        model = net()
        before = copy.deepcopy(model.state_dict())
        run(Experiment(method=METHOD, task=task(rule, model), until={"commits": 1}, device="cpu"))
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        assert type(model[1]) is nn.BatchNorm2d


def test_what_travels() -> None:
    plain, averaged = (
        build(Experiment(method=METHOD, task=task(rule), until={"commits": 1}, device="cpu")).numbers
        for rule in ("batch", "averaged")
    )
    assert averaged == plain + 2 * (4 + 5)


# ---- refusals -----------------------------------------------------------------------------------
def resting() -> nn.Module:
    model = net()
    model[1].eval()
    model[5].eval()
    return model


@pytest.mark.parametrize(
    ("rule", "model", "method", "sentence"),
    [
        (
            None,
            net(),
            METHOD,
            "BatchNorm2d ('1') with running statistics, and each client has its own: say what",
        ),
        ("mean", net(), METHOD, "batch_norm = 'mean'; it is one of 'batch', 'local', 'averaged', or none"),
    ],
)
def test_sentences(rule: Any, model: nn.Module, method: Any, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run(Experiment(method=method, task=task(rule, model), until={"commits": 1}, device="cpu"))
    assert sentence in str(caught.value)


def test_a_method_without_a_server_averages_nothing() -> None:
    (problem,) = method_problems(build_method("gossip-sgd"), "averaged")
    assert "gossip-sgd has no server that could average running statistics" in problem
    assert method_problems(build_method("gossip-sgd"), "local") == []


def test_parts_in_eval_mode_need_no_rule() -> None:
    assert task(None, resting()).problems() == []


@pytest.mark.parametrize("rule", ["batch", "averaged", "local"])
@pytest.mark.parametrize(
    "name", ["fedbuff", "dlsgd-hetero", "fedasync", "scaffold", "fednova", "minibatch-sgd", "fedlin", "fedagrac"]
)
def test_methods_run_by_each_rule(name: str, rule: str) -> None:
    size = {"buffer_size": 2} if name == "fedbuff" else {} if name == "fedasync" else {"n": 2}
    given = Experiment(
        method={"name": name, **size, **({} if name == "minibatch-sgd" else {"local_steps": 2})},
        task=task(rule),
        until={"commits": 3},
        device="cpu",
    )
    one, two = (run(replace(given, mode=mode, precision="float64")) for mode in ("wave", "reference"))
    assert one.rung == "captured"
    for key, value in two.model.items():
        torch.testing.assert_close(one.model[key], value, rtol=1e-9, atol=1e-12)
