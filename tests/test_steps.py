"""Step asynchronism: the methods against a second implementation, their fixed points, and the laws between them."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

import step_oracle as oracle
from offbeat.errors import ConfigError
from offbeat.tasks.quadratic import quadratic, random_quadratic
from worlds import final, play, times

STEPS = (3, 1, 9, 4, 7, 2)
CLIENTS = len(STEPS)
MATRICES, LINEAR = random_quadratic(CLIENTS, 4, seed=11)
SIZES = (1, 2, 1, 3, 1, 2)
WEIGHTS = [size / sum(SIZES) for size in SIZES]
UNIFORM = [1 / CLIENTS] * CLIENTS
START = np.ones(4)
WORLD = times(CLIENTS, steps=STEPS)
ROUNDS = 12


def task(start: np.ndarray = START) -> Any:
    """Exact gradients: client i has its one sample as often as it has weight, and a step takes one of them."""
    made = quadratic(MATRICES, LINEAR, start)
    object.__setattr__(made, "shards", [np.full(size, client) for client, size in enumerate(SIZES)])
    return made


def ours(name: str, commits: int = ROUNDS, lr: float = 0.03, **options: Any) -> np.ndarray:
    return final({"name": name, "client_lr": lr, **options}, task(), WORLD, commits=commits).numpy()


def world(weights: list[float], rounds: int = ROUNDS) -> tuple[Any, ...]:
    return MATRICES, LINEAR, weights, START, [STEPS] * rounds


def close(a: np.ndarray, b: np.ndarray, atol: float = 1e-11) -> None:
    assert np.allclose(a, b, rtol=0, atol=atol), np.abs(a - b).max()


# ---- against the second implementation ----------------------------------------------------------
VARIANTS = {"fedagrac": "fedagrac", "fedagrac-avg": "avg", "fedagrac-first": "first", "fedagrac-reverse": "reverse"}


@pytest.mark.parametrize("saving", [False, True])
@pytest.mark.parametrize("start", ["gradients", "zeros"])
@pytest.mark.parametrize("name", VARIANTS)
def test_fedagrac(name: str, start: str, saving: bool) -> None:
    for calibration in (0.3, 1.0):
        expected = oracle.fedagrac(*world(WEIGHTS), 0.03, calibration, VARIANTS[name], ROUNDS, init=start)[-1]
        close(ours(name, calibration=calibration, start=start, saving=saving), expected)


@pytest.mark.parametrize("start", ["gradients", "zeros"])
@pytest.mark.parametrize("weights", ["size", "uniform"])
def test_fedagrac_by_equation_4(start: str, weights: str) -> None:
    """A fast client keeps its first gradient as nu_i, where line 11 keeps the mean."""
    options = {"calibration": 0.7, "start": start, "weights": weights}
    shares = WEIGHTS if weights == "size" else UNIFORM
    expected = oracle.fedagrac(*world(shares), 0.03, 0.7, "fedagrac", ROUNDS, init=start, reference="transit")[-1]
    close(ours("fedagrac", reference="equation-4", **options), expected)
    assert np.abs(ours("fedagrac", **options) - expected).max() > 1e-4


def test_equation_4_needs_everyone() -> None:
    for more in ({"n": 3}, {"saving": True}):
        with pytest.raises(ConfigError, match=r"equation \(4\) needs all clients in every round"):
            ours("fedagrac", reference="equation-4", **more)


@pytest.mark.parametrize("name", VARIANTS)
def test_fedagrac_whose_first_gradient_is_the_mean_of_an_epoch(name: str) -> None:
    """A step takes one sample, so a client's epoch is as long as its shard; here all have three."""
    made = quadratic(MATRICES, LINEAR, START)
    object.__setattr__(made, "shards", [np.full(3, client) for client in range(CLIENTS)])
    spec = {"name": name, "client_lr": 0.03, "first": "epoch"}
    expected = oracle.fedagrac(*world(UNIFORM), 0.03, 1.0, VARIANTS[name], ROUNDS, epoch=3)[-1]
    close(final(spec, made, WORLD, commits=ROUNDS).numpy(), expected)


def test_fedagrac_with_a_calibration_that_grows() -> None:
    schedule = {"schedule": "stages", "values": [0.1, 0.5, 1.0], "at": [3, 7]}
    rates = lambda t: 0.1 if t < 3 else 0.5 if t < 7 else 1.0  # noqa: E731
    expected = oracle.fedagrac(*world(WEIGHTS), 0.03, rates, "fedagrac", ROUNDS)[-1]
    close(ours("fedagrac", calibration=schedule), expected)


@pytest.mark.parametrize("saving", [False, True])
@pytest.mark.parametrize("name", VARIANTS)
def test_fedagrac_sampled(name: str, saving: bool) -> None:
    spec = {"name": name, "client_lr": 0.03, "calibration": 0.7, "n": 3, "saving": saving}
    engine, done = play(spec, task(), WORLD, commits=ROUNDS)
    drawn = [[client for client, _ in commit.step.commit.jobs] for commit in done]
    assert any(sorted(a) != sorted(b) for a, b in itertools.pairwise(drawn))
    expected = oracle.fedagrac(*world(WEIGHTS), 0.03, 0.7, VARIANTS[name], ROUNDS, participants=drawn)[-1]
    close(engine.server.state["model"].numpy(), expected)


@pytest.mark.parametrize("option", ["I", "II"])
@pytest.mark.parametrize(("weights", "parts"), [("uniform", UNIFORM), ("size", WEIGHTS), (WEIGHTS, WEIGHTS)])
def test_scaffold(option: str, weights: Any, parts: list[float]) -> None:
    for n in (None, 3):
        spec = {"name": "scaffold", "client_lr": 0.03, "option": option, "weights": weights, "n": n, "server_lr": 0.8}
        engine, done = play(spec, task(), WORLD, commits=ROUNDS)
        drawn = [[client for client, _ in commit.step.commit.jobs] for commit in done]
        expected = oracle.scaffold(*world(parts), 0.03, ROUNDS, len(option), 0.8, participants=drawn)[-1]
        close(engine.server.state["model"].numpy(), expected)


@pytest.mark.parametrize(("rho", "mu"), [(0.0, 0.0), (0.6, 0.0), (0.0, 0.5), (0.6, 0.5)])
def test_fednova(rho: float, mu: float) -> None:
    expected = oracle.fednova(*world(WEIGHTS), 0.03, ROUNDS, rho, mu)[-1]
    close(ours("fednova", momentum=rho, proximal=mu), expected)


def test_fedprox() -> None:
    close(ours("fedprox", proximal=0.7), oracle.fedprox(*world(WEIGHTS), 0.03, 0.7, ROUNDS)[-1])


def test_fedlin() -> None:
    close(ours("fedlin", 2 * ROUNDS, 0.1), oracle.fedlin(*world(UNIFORM), 0.1, ROUNDS)[-1])


# ---- laws between methods -----------------------------------------------------------------------
@pytest.mark.parametrize("name", VARIANTS)
def test_fedagrac_without_calibration_is_fedavg(name: str) -> None:
    close(ours(name, calibration=0.0), ours("local-sgd", n=None, weights="size"), 1e-12)


@pytest.mark.parametrize("start", ["zeros", "gradients"])
def test_fedagrac_avg_at_one_is_scaffold(start: str) -> None:
    for weights in ("size", "uniform"):
        close(ours("fedagrac-avg", weights=weights, start=start), ours("scaffold", weights=weights, start=start), 1e-12)


def test_with_equal_steps_fednova_is_fedavg_and_all_transits_of_fedagrac_are_two() -> None:
    close(ours("fednova", local_steps=4), ours("local-sgd", n=None, weights="size", local_steps=4), 1e-12)
    close(ours("fedagrac", local_steps=4), ours("fedagrac-avg", local_steps=4), 1e-12)
    close(ours("fedagrac-reverse", local_steps=4), ours("fedagrac-first", local_steps=4), 1e-12)


def test_fedprox_without_a_pull_is_fedavg() -> None:
    close(ours("fedprox", proximal=0.0), ours("local-sgd", n=None, weights="size"), 1e-12)


CORRECTED = {"scaffold": {"weights": "size"}, "fedlin": {"weights": "size"}, **{name: {} for name in VARIANTS}}


@pytest.mark.parametrize("name", CORRECTED)
def test_the_optimum_is_a_fixed_point_of_corrected_methods(name: str) -> None:
    """Begun there, with every client's own gradient remembered, the model stays."""
    best = oracle.optimum(MATRICES, LINEAR, WEIGHTS)
    made = task()
    made.model.w.data = torch.tensor(best)
    options = dict(CORRECTED[name]) | ({} if name == "fedlin" else {"start": "gradients"})
    stayed = final({"name": name, "client_lr": 0.05, **options}, made, WORLD, commits=10).numpy()
    close(stayed, best, 1e-14)
    moved = final({"name": "local-sgd", "n": None, "weights": "size", "client_lr": 0.05}, made, WORLD, commits=10)
    assert np.abs(moved.numpy() - best).max() > 0.01


# ---- where they end -----------------------------------------------------------------------------
def test_fedavg_and_fednova_end_at_their_closed_form_limits() -> None:
    """Where the weighted displacements cancel, which is not the optimum."""
    best = oracle.optimum(MATRICES, LINEAR, WEIGHTS)
    ends = {
        "local-sgd": oracle.fedavg_limit(MATRICES, LINEAR, WEIGHTS, STEPS, 0.2),
        "fednova": oracle.fednova_limit(MATRICES, LINEAR, WEIGHTS, STEPS, 0.2),
    }
    for name, limit in ends.items():
        close(ours(name, 30, 0.2, n=None, weights="size"), limit, 1e-6)
        assert np.abs(limit - best).max() > 1e-3


def test_as_the_rate_falls_fednova_tends_to_the_optimum_and_fedavg_to_the_surrogate() -> None:
    """Begun where the closed form says that it ends, a run stays there; these ends come nearer to their aims."""
    best = oracle.optimum(MATRICES, LINEAR, WEIGHTS)
    surrogate = oracle.surrogate(MATRICES, LINEAR, WEIGHTS, STEPS)
    cases = {"fednova": (oracle.fednova_limit, best), "local-sgd": (oracle.fedavg_limit, surrogate)}
    far: dict[str, list[float]] = {"fednova": [], "local-sgd": []}
    for lr in (0.08, 0.02):
        for name, (limit, aim) in cases.items():
            end = limit(MATRICES, LINEAR, WEIGHTS, STEPS, lr)
            spec = {"name": name, "client_lr": lr, "n": None, "weights": "size"}
            close(final(spec, task(end), WORLD, commits=4).numpy(), end, 1e-14)
            far[name].append(float(np.abs(end - aim).max()))
    for gaps in far.values():
        assert gaps[1] < gaps[0] / 3
    assert np.abs(surrogate - best).max() > 5 * far["local-sgd"][1]


@pytest.mark.parametrize("name", CORRECTED)
def test_corrected_methods_end_at_the_true_optimum(name: str) -> None:
    best = oracle.optimum(MATRICES, LINEAR, WEIGHTS)
    lr, rounds = (0.8, 40) if name == "fedlin" else (0.15, 45)
    close(ours(name, rounds, lr, **CORRECTED[name]), best, 1e-8)


def test_a_calibration_other_than_one_is_biased() -> None:
    best = oracle.optimum(MATRICES, LINEAR, WEIGHTS)
    assert np.abs(ours("fedagrac", 40, 0.15, calibration=0.5) - best).max() > 0.01
