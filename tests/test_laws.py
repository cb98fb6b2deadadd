"""Every method passes the table of laws (`offbeat.laws`). A new method is one more entry in METHODS_UNDER_LAW."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from offbeat import METHODS
from offbeat.experiments.assemble import build_method
from offbeat.laws import Alone, law_cases
from offbeat.tasks.quadratic import optimum, quadratic, random_quadratic
from worlds import Times, final, play, times

METHODS_UNDER_LAW: dict[str, dict[str, Any]] = {
    "minibatch-sgd": {"n": 4},
    "local-sgd": {"n": 4, "local_steps": 3, "weights": "size", "server_optimiser": {"name": "sgd", "momentum": 0.5}},
    "async-hl-sgd": {"buffer_size": 2, "local_steps": 4, "gossip_every": 2, "p": 0.5, "server_lr": 0.8},
    "asysg": {"n": 3},
    "fedasync": {"local_steps": 3, "proximal": 0.1},
    "fedbuff": {"buffer_size": 3, "local_steps": 3, "staleness": "polynomial", "server_optimiser": "adam"},
    "dlsgd-homo": {"n": 3, "local_steps": 3, "client_options": {"momentum": 0.9, "clip": 1.0}},
    "dlsgd-hetero": {"n": 3, "local_steps": 3, "client_options": {"weight_decay": 0.01}},
    "fedagrac": {"calibration": 0.5, "n": 5, "saving": True},
    "fedagrac-avg": {"calibration": {"schedule": "stages", "values": [0.1, 0.5, 1.0], "at": [3, 6]}},
    "fedagrac-first": {"first": "epoch", "start": "zeros"},
    "fedagrac-reverse": {"weights": "uniform", "saving": True},
    "fedlin": {"n": 5, "probes": 2},
    "fednova": {"n": 4, "momentum": 0.5, "proximal": 0.1},
    "fedprox": {"n": 4, "local_steps": 3, "proximal": 0.2},
    "gossip-pga": {"local_steps": 5, "gossip_rounds": 2},
    "gossip-sgd": {"local_steps": 3},
    "hierarchical-local-sgd": {"local_steps": 4, "gossip_every": 2, "weights": "size"},
    "hl-sgd": {"local_steps": 5, "gossip_every": 2, "p": 0.5, "client_options": {"momentum": 0.5}},
    "scaffold": {"n": 4, "option": "I", "server_lr": 0.8},
}
SINGLE: dict[str, dict[str, Any]] = {  # options under which one client is plain SGD, where they are not n = 1
    **{name: {"n": 1, "server_lr": 0.1} for name in ("minibatch-sgd", "asysg")},
    **{name: {"n": 1, "server_lr": 1.0} for name in ("local-sgd", "dlsgd-homo", "dlsgd-hetero")},
    **{name: {} for name in ("hl-sgd", "gossip-sgd", "gossip-pga", "hierarchical-local-sgd")},
    "async-hl-sgd": {"buffer_size": 1, "staleness": "constant"},
    "fedasync": {"alpha": 1.0},
    "fedbuff": {"buffer_size": 1},
    "fedlin": {"n": 1, "client_lr": 0.4},  # its rate is for all steps of a round together
    "fedprox": {"n": 1, "proximal": 0.0},
}
COMMITS = 8  # of a run; `offbeat check` takes 12
SGD_STEPS = {"fedlin": 4 * COMMITS // 2}  # half of FedLin's commits only look
ITS_OWN = ("fedagrac-first", "fedagrac-reverse")  # they calibrate even a single client, by its own first gradient
WORLD = times(8, steps=(3, 1, 4, 2, 6, 3, 5, 2))


def alone(name: str) -> Alone | None:
    if name in ITS_OWN:
        return None
    steps = {} if name in ("minibatch-sgd", "asysg") else {"client_lr": 0.1, "local_steps": 4}
    options = {**steps, **SINGLE.get(name, {"n": 1})}
    return Alone(partial(build_method, {"name": name, **options}), 0.1, SGD_STEPS.get(name))


def cases() -> list[Any]:
    """Every law on every method."""
    return [
        pytest.param(law, id=f"{name}-{law}")
        for name, options in METHODS_UNDER_LAW.items()
        for law in law_cases(partial(build_method, {"name": name, **options}), alone(name))
    ]


def test_every_method_is_under_law() -> None:
    assert set(METHODS_UNDER_LAW) == set(METHODS)


@pytest.fixture(scope="module")
def few_commits() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("offbeat.laws.worlds.COMMITS", COMMITS)
        patch.setattr("offbeat.laws.worlds.HALF", 3)
        yield


@pytest.mark.usefixtures("few_commits")
@pytest.mark.parametrize("law", cases())
def test_a_method_keeps_the_law(law: Any) -> None:
    law()


# ---- special cases of the papers ----------------------------------------------------------------
def test_dlsgd_hetero_without_delay_is_generalised_fedavg() -> None:
    """No computing time and no transfers: every update is of the newest version; both draw the same clients."""
    instant = Times([0.0] * 8, [0.0] * 8, [0.0] * 8)
    common = {"n": 5, "local_steps": 3, "client_lr": 0.1, "server_lr": 0.7}
    task = one_sample_world()
    hetero, done = play({"name": "dlsgd-hetero", **common}, task, instant, commits=25)
    fedavg, _ = play({"name": "local-sgd", "replacement": True, **common}, task, instant, commits=25)
    assert all(staleness == 0 for commit in done for staleness in commit.staleness)
    assert torch.allclose(hetero.server.state["model"], fedavg.server.state["model"], rtol=0, atol=1e-12)


def one_sample_world() -> Any:
    """Exact gradients, so that job numbers (which key the batches) do not matter."""
    matrices, linear = random_quadratic(8, 4, seed=3)
    return quadratic(matrices, linear, np.ones(4))


def test_fedbuff_with_a_buffer_of_one_is_plain_asynchronous_sgd() -> None:
    """Against a loop written by hand: every arrival is applied at once, then the client pulls the result."""
    matrices, linear = random_quadratic(8, 4, seed=3)
    w, history = np.ones(4), []
    busy = [(WORLD.down[i] + 2 * WORLD.step[i] + WORLD.up[i], i, w.copy()) for i in range(8)]
    for _ in range(60):
        busy.sort(key=lambda job: job[0])
        now, i, y = busy.pop(0)
        start = y.copy()
        for _ in range(2):
            y = y - 0.1 * (matrices[i] @ y - linear[i])
        w = w - (start - y)
        history.append(i)
        busy.append((now + WORLD.down[i] + 2 * WORLD.step[i] + WORLD.up[i], i, w.copy()))
    spec = {"name": "fedbuff", "buffer_size": 1, "local_steps": 2, "client_lr": 0.1}
    engine, done = play(spec, one_sample_world(), WORLD, commits=60)
    assert [commit.step.commit.jobs[0][0] for commit in done] == history
    assert np.allclose(engine.server.state["model"].numpy(), w, rtol=0, atol=1e-12)


def test_fedavg_of_quadratics_follows_its_closed_form() -> None:
    """All clients, exact gradients: w <- w - eta mean_i (I - (I - lr A_i)^K)(w - w_i*)."""
    matrices, linear = random_quadratic(8, 4, seed=3)
    w, steps, lr, eta = np.ones(4), 5, 0.1, 0.8
    for _ in range(20):
        moved = []
        for a, b in zip(matrices, linear, strict=True):
            least = np.linalg.solve(a, b)
            shrink = np.linalg.matrix_power(np.eye(4) - lr * a, steps)
            moved.append((np.eye(4) - shrink) @ (w - least))
        w = w - eta * np.mean(moved, axis=0)
    spec = {"name": "local-sgd", "n": None, "local_steps": steps, "client_lr": lr, "server_lr": eta}
    assert np.allclose(final(spec, one_sample_world(), WORLD, commits=20).numpy(), w, rtol=0, atol=1e-12)


def test_minibatch_sgd_of_quadratics_reaches_the_optimum() -> None:
    matrices, linear = random_quadratic(8, 4, seed=3)
    model = final({"name": "minibatch-sgd", "server_lr": 0.5}, one_sample_world(), WORLD, commits=200)
    assert np.allclose(model.numpy(), optimum(matrices, linear), atol=1e-9)


def test_fedasync_with_full_mixing_takes_the_clients_model() -> None:
    spec = {"name": "fedasync", "alpha": 1.0, "staleness": "constant", "local_steps": 2, "client_lr": 0.1}
    engine, done = play(spec, one_sample_world(), WORLD, commits=1)
    matrices, linear = random_quadratic(8, 4, seed=3)
    client = done[0].step.commit.jobs[0][0]
    y = np.ones(4)
    for _ in range(2):
        y = y - 0.1 * (matrices[client] @ y - linear[client])
    assert np.allclose(engine.server.state["model"].numpy(), y, atol=1e-12)


def test_size_weights_are_proportional_to_the_shards() -> None:
    matrices, linear = random_quadratic(3, 2, seed=1)
    task = quadratic(matrices, linear, np.zeros(2), samples=1)
    x, y = task.data
    shards = [np.array([0]), np.array([1]), np.array([2, 2, 2])]  # the third client has three times the data
    skewed = replace(task, data=(x, y), shards=shards)
    spec = {"name": "local-sgd", "n": None, "local_steps": 1, "client_lr": 1.0, "weights": "size"}
    step = final(spec, skewed, times(3), commits=1)
    assert np.allclose(step.numpy(), (linear[0] + linear[1] + 3 * linear[2]) / 5, atol=1e-12)
