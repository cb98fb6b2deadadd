"""The table of laws: every method passes every line. A new method is one more entry in METHODS_UNDER_LAW."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from offbeat import METHODS
from offbeat.assemble import build_method
from offbeat.keys import generator
from offbeat.method import Cohort
from offbeat.records import Begun, Commit
from offbeat.runs.stored import read_trace
from offbeat.runs.tables import write_trace
from offbeat.schedule.clock import VirtualClock
from offbeat.schedule.horizon import Horizon
from offbeat.schedule.hybrid import Hybrid
from offbeat.schedule.trace import Replay
from offbeat.tasks.quadratic import optimum, quadratic, random_quadratic
from worlds import Times, engine_of, final, play, quadratic_world, times

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
    "fedagrac-avg": {"calibration": {"schedule": "stages", "values": [0.1, 0.5, 1.0], "at": [5, 10]}},
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
every_method = pytest.mark.parametrize("name", sorted(METHODS_UNDER_LAW))
HYBRID = ("async-hl-sgd", "gossip-pga", "gossip-sgd", "hierarchical-local-sgd", "hl-sgd")
WORLD = times(8, steps=(3, 1, 4, 2, 6, 3, 5, 2))


def world(name: str) -> Any:
    """Eight clients, or eight clusters of 1 to 7."""
    return quadratic_world(24 if isinstance(build_method(method(name)).when, Hybrid) else 8)


def method(name: str, **options: Any) -> dict[str, Any]:
    return {"name": name, **METHODS_UNDER_LAW[name], **options}


def test_every_method_is_under_law() -> None:
    assert set(METHODS_UNDER_LAW) == set(METHODS)


@every_method
def test_waves_equal_the_slow_twin(name: str) -> None:
    task = world(name)
    wave = final(method(name), task, WORLD)
    assert torch.allclose(wave, final(method(name), task, WORLD, mode="twin"), rtol=0, atol=1e-12)
    assert not torch.allclose(wave, torch.ones_like(wave))


@every_method
def test_how_jobs_are_cut_into_waves_does_not_matter(name: str) -> None:
    made = build_method(method(name))
    whole, _ = play(made, world(name), WORLD)
    for limit in (1, 2, 3):
        engine, _ = play_limited(made, world(name), limit)
        assert torch.allclose(whole.server["model"], engine.server["model"], rtol=0, atol=1e-12)
        assert engine.waves >= whole.waves


def horizon(made: Any, driver: Any) -> Horizon:
    return Horizon(driver, 256, 30, memory=bool(made.what.local.remembers))


def play_limited(made: Any, task: Any, limit: int) -> Any:
    engine = engine_of(made, task, WORLD)
    engine.limit = limit
    clock = VirtualClock(made.when, WORLD, generator(0, "policy"))
    return engine, list(engine.commits(horizon(made, clock)))


@pytest.mark.parametrize("name", sorted(set(METHODS_UNDER_LAW) - {"fedasync"}))
def test_order_of_updates_in_a_commit_does_not_matter(name: str) -> None:
    """FedAsync is left out: it mixes one update after the other, and its buffer holds one."""
    made = build_method(method(name))
    engine, _ = play(made, world(name), WORLD, commits=5)
    rng = torch.Generator().manual_seed(0)
    vectors = (*made.what.local.sends, *made.what.keeps)
    updates = {key: torch.randn(4, 4, generator=rng, dtype=torch.float64) for key in vectors}
    numbers = {key: torch.rand(4, generator=rng, dtype=torch.float64) for key in made.what.local.numbers}
    columns = [torch.rand(4, generator=rng, dtype=torch.float64) for _ in range(3)]
    columns += [torch.arange(4), torch.tensor([1.0, 2.0, 1.0, 3.0], dtype=torch.float64)]
    back = [3, 1, 0, 2]
    mixed = {key: u[back] for key, u in updates.items()}
    there = made.what.renew(engine.server, updates, Cohort(*columns, 5, 8, 48, 8, 0, numbers))
    turned = {key: u[back] for key, u in numbers.items()}
    again = made.what.renew(engine.server, mixed, Cohort(*(c[back] for c in columns), 5, 8, 48, 8, 0, turned))
    assert torch.allclose(there["model"], again["model"], atol=1e-12)


@every_method
def test_numbers_of_clients_do_not_matter_to_a_wave(name: str) -> None:
    """Jobs keep their updates when they stand in another order beside others."""
    engine, _ = play(method(name), world(name), WORLD, commits=1)
    jobs = [Begun(client, client % 2, 1, 1 + client % 4) for client in range(6)]
    plain = engine.solve(jobs)
    order = [4, 0, 5, 2]
    mixed = engine.solve([jobs[i] for i in order])
    row = {job[:2]: place for place, job in enumerate(engine.rows(jobs))}
    rows = [row[job[:2]] for job in engine.rows([jobs[i] for i in order])]
    for key, update in plain.updates.items():
        assert torch.allclose(update[rows], mixed.updates[key], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", sorted(set(METHODS_UNDER_LAW) - {"fedagrac-first", "fedagrac-reverse"}))
def test_one_client_is_plain_sgd(name: str) -> None:
    """With one client, rates (lr, 1) and no options, K steps and a commit are K steps of SGD.

    FedaGrac-first and -reverse are left out: they calibrate even a single client, by its own first gradient.
    """
    matrices, linear = random_quadratic(1, 3, seed=5)
    task = quadratic(matrices, linear, np.ones(3))
    options: dict[str, Any] = {"client_lr": 0.1, "local_steps": 4}
    if name in ("minibatch-sgd", "asysg"):
        options = {"server_lr": 0.1}
    if name == "fedasync":
        options |= {"alpha": 1.0}
    elif name in HYBRID:
        options |= {"staleness": "constant"} if name == "async-hl-sgd" else {}
    elif name in ("local-sgd", "dlsgd-homo", "dlsgd-hetero"):
        options |= {"server_lr": 1.0}
    sizes = {other: {} for other in (*HYBRID, "fedasync")} | {
        "fedbuff": {"buffer_size": 1},
        "fedprox": {"proximal": 0.0},
    }
    options |= sizes.get(name, {"n": 1})
    if name == "fedlin":
        options["client_lr"] = 0.4  # its rate is for all steps of a round together
    w = np.ones(3)
    for _ in range({"fedlin": 24}.get(name, 48) if "client_lr" in options else 12):
        w = w - 0.1 * (matrices[0] @ w - linear[0])
    model = final({"name": name, **options}, task, Times([0.1], [0.1], [0.1]), commits=12)
    assert np.allclose(model.numpy(), w, rtol=0, atol=1e-12)


@every_method
def test_same_seed_same_trace_bytes_and_replay(name: str, tmp_path: Any) -> None:
    made = build_method(method(name))

    def rows(seed: int) -> list[Any]:
        found, commits = [], 0
        for row in VirtualClock(made.when, WORLD, generator(seed, "policy")):
            found.append(row)
            commits += isinstance(row[1], Commit)
            if commits == 40:
                return found
        raise AssertionError("the schedule ended")

    files = []
    for place in range(2):
        write_trace(rows(7), tmp_path / f"{place}.parquet")
        files.append((tmp_path / f"{place}.parquet").read_bytes())
    assert files[0] == files[1]
    stored = read_trace(tmp_path / "0.parquet")
    assert stored == rows(7)
    assert list(Replay(stored, made.when, 8, generator(7, "policy"))) == stored


@every_method
def test_replay_of_a_trace_gives_the_same_bits(name: str) -> None:
    made = build_method(method(name))
    clock = VirtualClock(made.when, WORLD, generator(0, "policy"))
    engine, done = play(made, world(name), WORLD)
    rows = [row for commit in done for row in commit.step.rows]
    assert rows == [row for _, row in zip(rows, clock, strict=False)]
    again, _ = play(made, world(name), WORLD)
    replayed = engine_of(made, world(name), WORLD)
    driver = Replay(rows, made.when, 8, generator(0, "policy"))
    assert len(list(replayed.commits(horizon(made, driver)))) == 30
    assert torch.equal(replayed.server["model"], engine.server["model"])
    assert torch.equal(again.server["model"], engine.server["model"])


# ---- special cases of the papers ----------------------------------------------------------------
def test_dlsgd_hetero_without_delay_is_generalised_fedavg() -> None:
    """No computing time and no transfers: every update is of the newest version; both draw the same clients."""
    instant = Times([0.0] * 8, [0.0] * 8, [0.0] * 8)
    common = {"n": 5, "local_steps": 3, "client_lr": 0.1, "server_lr": 0.7}
    task = one_sample_world()
    hetero, done = play({"name": "dlsgd-hetero", **common}, task, instant, commits=25)
    fedavg, _ = play({"name": "local-sgd", "replacement": True, **common}, task, instant, commits=25)
    assert all(staleness == 0 for commit in done for staleness in commit.staleness)
    assert torch.allclose(hetero.server["model"], fedavg.server["model"], rtol=0, atol=1e-12)


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
    assert np.allclose(engine.server["model"].numpy(), w, rtol=0, atol=1e-12)


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
    assert np.allclose(engine.server["model"].numpy(), y, atol=1e-12)


def test_size_weights_are_proportional_to_the_shards() -> None:
    matrices, linear = random_quadratic(3, 2, seed=1)
    task = quadratic(matrices, linear, np.zeros(2), samples=1)
    x, y = task.data
    shards = [np.array([0]), np.array([1]), np.array([2, 2, 2])]  # the third client has three times the data
    skewed = replace(task, data=(x, y), shards=shards)
    spec = {"name": "local-sgd", "n": None, "local_steps": 1, "client_lr": 1.0, "weights": "size"}
    step = final(spec, skewed, times(3), commits=1)
    assert np.allclose(step.numpy(), (linear[0] + linear[1] + 3 * linear[2]) / 5, atol=1e-12)
