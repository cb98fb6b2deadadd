"""What only a CUDA device can show; skipped where there is none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from offbeat import Experiment, Task, run
from offbeat.engines.captured import GraphAdvance
from offbeat.engines.engine import Engine
from offbeat.experiments.assemble import build_method
from offbeat.records import Begun
from offbeat.tasks.models import build as build_model

pytestmark = pytest.mark.cuda


def task(model: str = "dlsgd-cnn", clients: int = 20) -> Task:
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.standard_normal((clients * 30, 1, 28, 28), dtype=np.float32))
    y = torch.from_numpy(rng.integers(0, 10, clients * 30))
    shards = [np.arange(30 * i, 30 * (i + 1)) for i in range(clients)]
    return Task(build_model(model, (1, 28, 28), 10, 0), functional.cross_entropy, (x, y), shards)


@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize("model", ["logistic", "mlp", "dlsgd-cnn"])
def test_graphs_replay_the_plain_wave_and_equal_the_twin(model: str, precision: Any) -> None:
    """In float32 single jobs may cross a kink of ReLU or pooling by rounding and part; most must agree."""
    method = build_method({"name": "local-sgd", "local_steps": 23, "client_options": {"momentum": 0.9}})
    engine = Engine(method, task(model), 0, torch.device("cuda"), precision)
    jobs = [Begun(client, client % 3, 0, 23 if client % 4 else 12) for client in range(17)]
    assert isinstance(engine.solver.advance, GraphAdvance)
    first, *_, graphs = (engine.solve(jobs) for _ in range(6))
    assert any(size.graphs for size in engine.solver.advance.graphs.values())
    assert torch.equal(first.updates["delta"], graphs.updates["delta"])  # not captured yet, and captured
    engine.solver.rung = "plain"
    plain = engine.solve(jobs)
    engine.solver.rung = "reference"
    slow = engine.solve(jobs).updates["delta"]
    assert torch.allclose(graphs.updates["delta"], plain.updates["delta"], rtol=0, atol=1e-6)
    off = (graphs.updates["delta"] - slow).norm(dim=1) / slow.norm(dim=1)
    assert float(off.median() if precision == "float32" else off.max()) < (1e-4 if precision == "float32" else 1e-9)
    assert graphs.bad.tolist() == [-1] * 17


@pytest.mark.parametrize("name", ["local-sgd", "fedagrac", "fedlin"])
def test_captured_steps_follow_rates_by_local_step(name: str) -> None:
    """The number of the step and its rates move on inside the graphs; int8 draws the same on the way up."""
    rate = {"schedule": "local-cosine", "value": 0.05, "floor": 0.01}
    method = build_method({"name": name, "local_steps": 23, "client_lr": rate, "stages": {"up": "int8"}})
    engine = Engine(method, task("logistic"), 0, torch.device("cuda"), "float64")
    engine.server.versions[1] = engine.server.versions[0]
    jobs = [Begun(client, 0, 1, 23 if client % 4 else 12) for client in range(17)]
    before = engine.solver.save()[0]
    before = {name: vectors.clone() for name, vectors in before.items()}

    def forget() -> None:
        """What clients remember of jobs is as it was."""
        if engine.solver.memory is not None:
            engine.solver.memory.restore({name: vectors.clone() for name, vectors in before.items()})

    for _ in range(4):  # plainly first, then captured
        forget()
        graphs = engine.solve(jobs).updates
    forget()
    engine.solver.rung = "reference"
    for vector, slow in engine.solve(jobs).updates.items():
        assert torch.allclose(graphs[vector], slow, rtol=0, atol=1e-9)


def test_the_same_run_on_cpu_and_cuda() -> None:
    outcomes = []
    for device in ("cpu", "cuda", "cuda"):
        outcomes.append(run(Experiment(
            method={"name": "fedbuff", "buffer_size": 5, "local_steps": 12}, task=task("mlp"), fleet="uniform",
            device=device, until={"commits": 12},
        )))  # fmt: skip
    cpu, one, two = outcomes
    assert cpu.virtual_seconds == one.virtual_seconds
    for name, value in one.model.items():
        assert torch.equal(value, two.model[name])  # same device, same waves, same bits
        assert torch.allclose(value, cpu.model[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("method", ["hl-sgd", "gossip-sgd", "async-hl-sgd"])
def test_clusters_on_cpu_and_cuda(method: str) -> None:
    """Blocks mix in full precision even where gradients are in tf32, and give the same bits twice."""
    clusters = {"sizes": [20] if method == "gossip-sgd" else [3, 7, 5, 5], "graph": "ring"}
    found = []
    for device, precision in (("cpu", "float64"), ("cuda", "float64"), ("cuda", "tf32"), ("cuda", "tf32")):
        found.append(run(Experiment(
            method={"name": method, "local_steps": 6, "gossip_every": 2}, task=task("mlp"), device=device,
            fleet={"name": "uniform", "clusters": clusters}, precision=precision, until={"commits": 6},
        )))  # fmt: skip
    cpu, exact, one, two = found
    assert cpu.virtual_seconds == exact.virtual_seconds == one.virtual_seconds
    for name, value in one.model.items():
        assert torch.equal(value, two.model[name])
        assert torch.allclose(cpu.model[name], exact.model[name], rtol=0, atol=1e-9)
        assert torch.allclose(exact.model[name].float(), value.float(), rtol=0, atol=1e-2)


def test_overlapping_pools_give_the_same_bits_twice() -> None:
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.standard_normal((400, 3, 32, 32), dtype=np.float32))
    shards = [np.arange(20 * i, 20 * (i + 1)) for i in range(20)]
    model = build_model("fedavg-cifar-cnn", (3, 32, 32), 10, 0)
    images = Task(model, functional.cross_entropy, (x, torch.arange(400) % 10), shards, batch_size=10)
    runs = [run(Experiment(method={"name": "local-sgd", "local_steps": 12}, task=images, fleet="uniform", device="cuda",
                           precision="tf32", until={"commits": 6})) for _ in range(2)]  # fmt: skip
    for name, value in runs[0].model.items():
        assert torch.equal(value, runs[1].model[name])
