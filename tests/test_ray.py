"""Waves on a Ray cluster of several nodes, on one machine: the same trace and model, whoever computes or dies.

`make test-ray` runs them. Nodes have one core each; actors are kept from test to test, because a process that imports
PyTorch takes seconds.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from experiments import METHODS, digest, drawn
from offbeat import Experiment, Task, resume, run, windows
from offbeat.engines.ray_crew import RayCrew
from offbeat.errors import OffbeatError
from offbeat.experiments import assemble

os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # else Ray puts the network card's address for 127.0.0.1
pytest.importorskip("ray", reason="the extra `ray` is not installed")
pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]

IDLE: list[Any] = []  # actors that wait for the next run


class Lent(RayCrew):
    """A crew that takes actors that are there, and leaves them there."""

    def hire(self) -> None:
        if not IDLE:
            super().hire()
            return
        self.number += 1
        actor = IDLE.pop(0)
        self.coming[actor.begin.remote(self.parcel)] = (self.number, actor)

    def close(self) -> None:
        IDLE.extend(self.live.values())
        self.live.clear()
        super().close()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    import ray
    from ray.cluster_utils import Cluster

    node: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 100 << 20, "node_ip_address": "127.0.0.1"}
    nodes = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    for _ in range(2):
        nodes.add_node(**node)
    ray.init(address=nodes.address, log_to_driver=False, logging_level="error")
    try:
        yield nodes
    finally:
        IDLE.clear()
        ray.shutdown()
        nodes.shutdown()


@pytest.fixture
def lent(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assemble, "ray_crew", lambda workers, address: lambda spec: Lent(spec, workers, address))


def all_nodes(cluster: Any, many: int) -> None:
    import ray

    while len(cluster.worker_nodes) < many - 1:
        cluster.add_node(num_cpus=1, object_store_memory=100 << 20, node_ip_address="127.0.0.1")
    end = time.monotonic() + 60
    while ray.cluster_resources().get("CPU", 0) < many and time.monotonic() < end:
        time.sleep(0.1)


def happening(monkeypatch: pytest.MonkeyPatch, turn: int, what: Callable[[RayCrew, int], None]) -> list[int]:
    """Have something happen when the crew has sent tiles for the `turn`-th time; whom it was sent to."""
    plain, sent = RayCrew.ask, []

    def ask(self: RayCrew, worker: int, name: str, *given: Any) -> int:
        ticket = plain(self, worker, name, *given)
        if name == "solve":
            sent.append(worker)
            if len(sent) == turn:
                what(self, worker)
        return ticket

    monkeypatch.setattr(RayCrew, "ask", ask)
    return sent


FEW = ("dlsgd-hetero", "fedbuff", "hl-sgd", "scaffold")  # of the methods; the others in the soak
EACH = [
    pytest.param(number, id=name, marks=() if name in FEW else pytest.mark.soak)
    for number, name in enumerate(sorted(METHODS))
]


@pytest.mark.parametrize("number", EACH)
def test_any_number_of_actors_gives_the_same_trace_and_bits(number: int, lent: None, tmp_path: Path) -> None:
    experiment = replace(drawn(number), checkpoint_seconds=60.0, until={"commits": 5})
    run(experiment, tmp_path / "local")
    want = digest(run(replace(experiment, engine="tiles")).model)
    trace = (tmp_path / "local" / "trace.parquet").read_bytes()
    for workers in (1, 2, 3):
        out = tmp_path / f"{workers}"
        outcome = run(replace(experiment, engine="ray", workers=workers), out)
        assert outcome.workers == workers
        assert digest(outcome.model) == want, f"{workers} actors"
        assert (out / "trace.parquet").read_bytes() == trace


def of(name: str, **others: Any) -> Experiment:
    return replace(drawn(sorted(METHODS).index(name)), until={"commits": 8}, checkpoint_seconds=60.0, **others)


@pytest.mark.parametrize("name", ["fedbuff", "scaffold", "fedasync", "fedagrac"])
@pytest.mark.parametrize("turn", [1, 5])
def test_a_worker_killed_in_mid_wave_changes_nothing(
    name: str, turn: int, lent: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    experiment = of(name)
    want = digest(run(replace(experiment, engine="tiles")).model)
    happening(monkeypatch, turn, lambda crew, worker: ray.kill(crew.live[worker]))
    outcome = run(replace(experiment, engine="ray", workers=2))
    assert digest(outcome.model) == want
    assert any("a worker was lost" in note for note in outcome.notes)


@pytest.mark.parametrize("name", ["fedbuff", "scaffold"])
def test_a_node_that_is_lost_and_one_that_is_added_change_nothing(
    name: str, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    IDLE.clear()
    all_nodes(cluster, 3)
    experiment = of(name)
    want = digest(run(replace(experiment, engine="tiles")).model)

    def replaced(crew: RayCrew, worker: int) -> None:
        cluster.remove_node(cluster.worker_nodes and sorted(cluster.worker_nodes, key=str)[-1], allow_graceful=False)

    happening(monkeypatch, 3, replaced)
    outcome = run(replace(experiment, engine="ray", workers=3))
    assert digest(outcome.model) == want
    monkeypatch.undo()
    monkeypatch.setattr(RayCrew, "grace", 0.0)

    def added(crew: RayCrew, worker: int) -> None:
        all_nodes(cluster, 3)
        crew.ray.wait(list(crew.coming), num_returns=len(crew.coming), timeout=120)

    happening(monkeypatch, 3, added)
    outcome = run(replace(experiment, engine="ray", workers=3))
    assert digest(outcome.model) == want
    assert outcome.workers == 3


DRIVER = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from dataclasses import replace
from pathlib import Path
from experiments import drawn
from offbeat import run
from offbeat.runs.loop import Loop
take = Loop.take
def dying(self, done, horizon):
    reason = take(self, done, horizon)
    if done.version == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return reason
Loop.take = dying
run(replace(drawn({number}), until={{"commits": 8}}, checkpoint_seconds=1e-9, engine="ray", workers=2,
    address={address!r}), Path({out!r}))
"""


@pytest.mark.parametrize("name", ["scaffold"])
def test_a_driver_that_is_killed_is_resumed(name: str, cluster: Any, tmp_path: Path) -> None:
    IDLE.clear()
    all_nodes(cluster, 3)
    experiment = of(name)
    want = digest(run(replace(experiment, engine="tiles")).model)
    script = DRIVER.format(
        tests=str(Path(__file__).parent), number=sorted(METHODS).index(name), address=cluster.address,
        out=str(tmp_path / "run"),
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], env=dict(os.environ), timeout=120, check=False
    )
    assert done.returncode == -signal.SIGKILL
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcome = resume(tmp_path / "run", task=experiment.task, workers=1)
    assert digest(outcome.model) == want


def test_a_run_goes_from_one_machine_to_actors_and_back(lent: None, tmp_path: Path) -> None:
    experiment = of("scaffold")
    own = {"task": experiment.task}
    models = []
    for engine in ("tiles", "ray"):
        out = tmp_path / engine
        run(replace(experiment, until={"commits": 3}), out)
        resume(out, until={"commits": 6}, engine=engine, workers=2, **own)
        models.append(digest(resume(out, until={"commits": 8}, engine="local", **own).model))
    assert models[0] == models[1]
    assert (tmp_path / "ray" / "trace.parquet").read_bytes() == (tmp_path / "tiles" / "trace.parquet").read_bytes()


def test_windows_of_a_stream_travel_once(lent: None) -> None:
    """A task whose samples are places in one long array, which lies in the object store."""
    tokens = np.random.default_rng(0).integers(0, 16, 200_000)
    x, y = windows(tokens, 8, predict="last")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(16, 4), nn.Flatten(), nn.Linear(32, 16))
    shards = [range(1000 * i, 1000 * i + 60) for i in range(12)]
    task = Task(model, nn.functional.cross_entropy, (x, y), shards, test=(x[:100], y[:100]))
    experiment = Experiment(
        method={"name": "fedbuff", "buffer_size": 3, "local_steps": 3}, task=task, device="cpu", until={"commits": 4}
    )
    want = digest(run(replace(experiment, engine="tiles")).model)
    assert digest(run(replace(experiment, engine="ray", workers=2)).model) == want


def test_what_goes_wrong_is_a_sentence(lent: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    experiment = replace(of("fedbuff"), engine="ray", workers=1)
    crew = assemble.build(experiment).engine().solver.crew
    said = crew.sentence(ray.exceptions.ObjectStoreFullError())
    assert "object store of a node is full" in str(said)
    get = ray.get

    def elsewhere(ref: Any) -> Any:
        facts, sizes = get(ref)
        return facts | {"torch": "1.0"}, sizes

    actor = crew.live[1]
    ref = actor.begin.remote(crew.parcel)
    crew.coming[ref] = (9, actor)
    monkeypatch.setattr(ray, "kill", lambda _: None)
    monkeypatch.setattr(ray, "get", elsewhere)
    with pytest.raises(OffbeatError, match=r"nodes of the cluster differ \(torch: .* on one node, 1.0 on another\)"):
        crew.welcome(ref)
    monkeypatch.undo()
    crew.close()


def test_code_that_a_node_does_not_have_is_a_sentence(
    lent: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here.py").write_text(
        "from offbeat.methods.fedbuff import fedbuff\n"
        "from dataclasses import replace\n"
        "def begin(state, job):\n    return BEGIN(state, job)\n"
        "def mine():\n"
        "    global BEGIN\n"
        "    method = fedbuff()\n"
        "    BEGIN = method.what.local.begin\n"
        "    local = replace(method.what.local, begin=begin)\n"
        "    return replace(method, what=replace(method.what, local=local))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    experiment = replace(of("fedbuff"), method="only_here:mine", engine="ray", workers=1)
    with pytest.raises(OffbeatError, match="does not find the module 'only_here'"):
        run(experiment)


def test_a_cluster_that_is_not_there_is_a_sentence() -> None:
    script = (
        "from offbeat.engines.ray_crew import connect\nfrom offbeat.errors import OffbeatError\n"
        "try:\n    connect('127.0.0.1:1', 1)\nexcept OffbeatError as error:\n    print(error)\n"
    )
    words = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    assert "no Ray cluster could be reached by address = '127.0.0.1:1'" in done.stdout
