"""FedaGrac's theorems: numbers worked out by hand, runs on quadratics that the bounds must cover, and conditions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import step_oracle as oracle
from offbeat.engines.engine import Engine
from offbeat.errors import ConfigError
from offbeat.experiments.assemble import build_method
from offbeat.keys import generator
from offbeat.schedule.clock import VirtualClock
from offbeat.schedule.horizon import Horizon
from offbeat.tasks.quadratic import quadratic, random_quadratic
from offbeat.theory import fedagrac
from offbeat.theory.constants import Advice, Constants, Plan
from offbeat.theory.fedagrac import Steps
from worlds import times

TWO = Steps((1, 3), (0.5, 0.5))
HAND = Constants(2, gap=3.0, smoothness=2.0, convexity=1.0, noise=4.0, dissimilarity=9.0)


def names(advice: Advice) -> list[str]:
    return [condition.name for condition in advice.failing]


# ---- by hand ------------------------------------------------------------------------------------
def test_pieces_by_hand() -> None:
    assert TWO.mean == 2
    assert TWO.sum(-1, 2) == pytest.approx(1 / 3)
    assert fedagrac.inconsistency(TWO, (1.0, 0.5)) == pytest.approx(0.5)  # 1/2 (3 - 1) 1/2
    assert fedagrac.inconsistency(Steps((4, 4), (0.3, 0.7)), (1.0, 0.5)) == 0
    assert fedagrac.lost(0.05, 2.0, 1) == pytest.approx(0.2 + 0.16 + 0.016)
    assert fedagrac.decay(0.5, 2) == pytest.approx(1 / 6)  # 2 + 4 = 6
    assert fedagrac.decay(0.0, 7) == pytest.approx(1 / 7) == pytest.approx(fedagrac.decay(1e-12, 7))
    assert fedagrac.decay(1.5, 7) == fedagrac.decay(0.5, 10**6) == 0
    assert fedagrac.variance3(TWO) == pytest.approx(1 + 1 / 3 + 4 / 3)
    assert fedagrac.variance3(Steps((5, 5), (0.5, 0.5))) == pytest.approx(2.5)
    assert fedagrac.descent(TWO, 9.0, 1.0) == pytest.approx(1.0)
    assert fedagrac.descent(TWO, 9.0, 0.5) == pytest.approx((1 + 0.5 * (3 - 9)) / 2)


def test_orders_by_hand() -> None:
    second = 3 + 0.8 + 0.4 * 0.25 * 8 / 3 + 0.16 * 41 + 0.04 * (41 / 3 + 14)
    assert fedagrac.order2(HAND, TWO, 0.1, 0.5, 10) == pytest.approx(second)
    third = 8 * math.exp(-5) + (0.25 * (4 + 16 / 3)) / 10 + 16 * 14 / 3 / 100
    assert fedagrac.order3(HAND, TWO, 8.0, 10) == pytest.approx(third)
    assert fedagrac.order2(HAND, TWO, 0.1, 0.0, 10) == math.inf


@pytest.mark.parametrize("commits", [1, 10, 400])
def test_bounds_1_and_3_are_where_their_recursions_come_to_nothing(commits: int) -> None:
    """With F(x_t) - F(x_*) at the bound in every commit, d_T of the proof's last inequality is exactly zero."""
    lr, start, at = 0.01, 8.0, (1.0, 0.5)
    u, k = lr * 2 * 3, 2
    s = 2 * u * (1 + 8 * u + 8 * u**2)
    noise = 4 * (8 * lr**3 * 2 * (0.5 * 1 + 0.5 * 9) + lr**2 * 1.0 + 8 * lr**4 * 4 * (0.5 + 0.5 * 27))
    push = 2 * lr * (0.5 * (1 - (1 - s)) * at[0] + 0.5 * (3 - (1 - s)) * at[1])
    first = fedagrac.bound1(HAND, TWO, at, start, lr, commits)
    third = fedagrac.bound3(HAND, TWO, start, lr, commits)
    d, e = start, start
    for _ in range(commits):
        d = (1 - lr * k / 2) * d - 2 * lr * (1 - s) * first + push + noise
        e = (1 - lr * k / 4) * e - 2 * lr * k * third + 6 * lr**2 * 4 * (1 + 1 / 3 + 4 / 3)
    assert d == pytest.approx(0, abs=1e-9)
    assert e == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("noise", [0.0, 4.0])
def test_bound_1_tends_to_the_inconsistency_and_bound_3_to_nothing(noise: float) -> None:
    hand = replace(HAND, noise=noise)

    def ends(commits: int) -> tuple[float, float]:
        plan = Plan(commits=commits, steps=(1, 3))
        one, three = fedagrac.theorem1(hand, plan, at_optimum=(1.0, 0.5)), fedagrac.theorem3(hand, plan)
        assert not one.failing
        assert not three.failing
        return one.bound or 0.0, three.bound or 0.0

    sequence = [ends(10**power) for power in (2, 4, 6, 8)]
    assert sequence == sorted(sequence, reverse=True)
    assert sequence[-1][0] == pytest.approx(0.5, rel=1e-4)  # (3)
    assert sequence[-1][1] == pytest.approx(0, abs=1e-5)


def test_order_2_is_that_of_corollary_2_1_and_order_3_that_of_corollary_3_1() -> None:
    def scaled(commits: int) -> tuple[float, float]:
        constants, steps = replace(HAND, clients=8), Steps((4,) * 8, (1 / 8,) * 8)
        lr = fedagrac.theorem2(constants, Plan(commits=commits, local_steps=4)).client_lr
        second = fedagrac.order2(constants, steps, lr, 1.0, commits) * math.sqrt(8 * commits * 4)
        return second, fedagrac.order3(constants, steps, 8.0, commits) * 8 * commits * 4 / 4

    assert scaled(10**12) == pytest.approx(scaled(10**14), rel=1e-2)
    assert scaled(10**14)[0] == pytest.approx(3 + 4 * 2 * 2, rel=1e-3)  # gap + 2 sigma^2 L
    assert scaled(10**14)[1] == pytest.approx(2, rel=1e-3)  # H = 2 sigma^2 / (M K)


# ---- runs ---------------------------------------------------------------------------------------
COUNTS = (2, 1, 6, 3, 4, 1)
CLIENTS = len(COUNTS)
EVEN = (1 / CLIENTS,) * CLIENTS
MATRICES, LINEAR = random_quadratic(CLIENTS, 4, seed=11)
MEAN = np.mean(MATRICES, axis=0)
SMOOTH = max(float(np.linalg.eigvalsh(a)[-1]) for a in MATRICES)
CONVEX = min(float(np.linalg.eigvalsh(a)[0]) for a in MATRICES)
BEST = oracle.optimum(MATRICES, LINEAR, EVEN)
SHARED = [a @ np.ones(4) for a in MATRICES]  # all are least at the same point, so that Assumption 4 holds
START = BEST + 2
AT_BEST = tuple(
    float(g @ np.linalg.solve(a, g)) / 2 for a, b in zip(MATRICES, LINEAR, strict=True) for g in [a @ BEST - b]
)


def task(linear: Any, noise: float) -> Any:
    return quadratic(MATRICES, linear, START, noise, 6 if noise else 1, seed=1)


def variance(made: Any) -> float:
    """sigma^2: of a client's samples about their mean, the largest."""
    b = made.data[0][:, 16:].numpy()
    return max(float(((b[s] - b[s].mean(0)) ** 2).sum(1).mean()) for s in made.shards)


def versions(made: Any, commits: int, seed: int, **method: Any) -> np.ndarray:
    """The models x_0 .. x_{T-1} of a run in which client i takes its own number of steps."""
    spec = build_method({"weights": "uniform", **method})
    engine = Engine(spec, made, seed, torch.device("cpu"), "float64")
    clock = VirtualClock(spec.when, times(CLIENTS, steps=COUNTS), generator(seed, "policy"))
    models = [engine.server.state["model"].numpy().copy()]
    for _ in engine.commits(Horizon(clock, 256, commits, memory=bool(spec.what.local.remembers))):
        models.append(engine.server.state["model"].numpy().copy())
    return np.array(models[:-1])


def over_seeds(measure: Callable[[np.ndarray], np.ndarray], noise: float, made: Any, *given: Any, **method: Any) -> Any:
    runs = [measure(versions(made, *given, seed, **method)) for seed in range(2 if noise else 1)]
    return np.mean(runs, axis=0)


def gaps(models: np.ndarray) -> np.ndarray:
    return np.einsum("td,de,te->t", models - BEST, MEAN, models - BEST) / 2


def weighted(values: np.ndarray, a: float) -> float:
    return float(np.average(values, weights=(1 - a) ** -(np.arange(len(values)) + 1.0)))


def constants(sigma: float) -> Constants:
    return Constants(CLIENTS, smoothness=SMOOTH, convexity=CONVEX, noise=sigma)


@pytest.mark.parametrize(("noise", "commits", "lr"), [(0.0, 30, None), (1.0, 20, None), (9.0, 10, 0.002)])
def test_fedavg_with_unequal_steps_stays_below_theorem_1(noise: float, commits: int, lr: float | None) -> None:
    made = task(LINEAR, noise)
    plan = Plan(commits=commits, steps=COUNTS, client_lr=lr)
    distance = float(((START - BEST) ** 2).sum())
    advice = fedagrac.theorem1(constants(variance(made)), plan, at_optimum=AT_BEST, distance=distance)
    assert not advice.failing
    assert advice.bound is not None
    measured = over_seeds(gaps, noise, made, commits, name="local-sgd", n=None, client_lr=advice.client_lr)
    found = weighted(measured, advice.client_lr * CONVEX * np.mean(COUNTS) / 2)
    assert 0.01 * advice.bound < found <= advice.bound


def test_where_fedavg_ends_is_off_the_optimum_by_no_more_than_3() -> None:
    surrogate = oracle.surrogate(MATRICES, LINEAR, EVEN, COUNTS)
    off = float(gaps(surrogate[None])[0])
    allowed = fedagrac.inconsistency(Steps(COUNTS, EVEN), AT_BEST)
    assert 0.001 * allowed < off <= allowed


@pytest.mark.parametrize(
    ("noise", "commits", "part"), [(0.0, 30, 1.0), (0.0, 10, 0.1), (1.0, 10, 1.0), (30.0, 15, 0.5)]
)
def test_fedagrac_stays_below_theorem_3(noise: float, commits: int, part: float) -> None:
    made = task(LINEAR, noise)
    plan = Plan(commits=commits, steps=COUNTS)
    distance = float(((START - BEST) ** 2).sum())
    known = constants(variance(made))
    lr = part * min(c.allowed for c in fedagrac.theorem3(known, plan, distance=distance).conditions[:2])
    advice = fedagrac.theorem3(known, replace(plan, client_lr=lr), distance=distance)
    assert not advice.failing
    assert advice.bound is not None
    measured = over_seeds(gaps, noise, made, commits, name="fedagrac", client_lr=lr)
    found = weighted(measured, lr * CONVEX * np.mean(COUNTS) / 4)
    assert 0.01 * advice.bound < found <= advice.bound


@pytest.mark.parametrize("calibration", [0.7, 1.0])
def test_fedagrac_falls_as_theorem_2_orders(calibration: float) -> None:
    """Measured over ordered does not grow with T; and without noise appendix B leaves gap / (eta descent T)."""
    inverse = np.linalg.inv(MEAN)
    squared = max(float(np.linalg.norm(a @ inverse, 2)) ** 2 for a in MATRICES)
    away = START - np.ones(4)
    known = Constants(CLIENTS, float(away @ MEAN @ away) / 2, SMOOTH, dissimilarity=squared)
    method = {"name": "fedagrac", "calibration": calibration}
    ratios = []
    for noise, commits in ((0.0, 12), (2.0, 8), (2.0, 24)):
        made = task(SHARED, noise)
        plan = Plan(commits=commits, steps=COUNTS, calibration=calibration)
        advice = fedagrac.theorem2(replace(known, noise=variance(made)), plan)
        assert not advice.failing
        assert advice.bound is None

        def square(models: np.ndarray) -> np.ndarray:
            return np.asarray((((models - np.ones(4)) @ MEAN) ** 2).sum(1))

        found = float(np.mean(over_seeds(square, noise, made, commits, client_lr=advice.client_lr, **method)))
        if noise:
            order = fedagrac.order2(
                replace(known, noise=variance(made)), Steps(COUNTS, EVEN), advice.client_lr, calibration, commits
            )
            ratios.append(found / order)
        else:
            rate = fedagrac.descent(Steps(COUNTS, EVEN), squared, calibration)
            allowed = (known.gap or 0.0) / (advice.client_lr * rate * commits)
            assert 0.01 * allowed < found <= allowed
    assert ratios[1] <= ratios[0] < 2


# ---- conditions ---------------------------------------------------------------------------------
FULL = replace(HAND, clients=2)


@pytest.mark.parametrize(("lr", "failing"), [
    (0.01, []), (0.03, ["appendix A"]), (0.2, ["(17)", "appendix A"]), (0.3, ["Theorem 1", "(17)", "appendix A"]),
])  # fmt: skip
def test_theorem_1_reports_what_fails(lr: float, failing: list[str]) -> None:
    advice = fedagrac.theorem1(FULL, Plan(commits=9, steps=(1, 3), client_lr=lr), at_optimum=(1, 1))
    assert names(advice) == failing
    assert advice.client_lr == lr


@pytest.mark.parametrize(("plan", "failing"), [
    (Plan(calibration=0.8), []), (Plan(calibration=0.7), ["(22)"]), (Plan(calibration=1.2), ["(23)"]),
    (Plan(calibration=0.0), ["lambda", "(22)"]), (Plan(client_lr=0.1), ["(30)"]), (Plan(server_lr=2.0), ["server_lr"]),
])  # fmt: skip
def test_theorem_2_reports_what_fails(plan: Plan, failing: list[str]) -> None:
    assert fedagrac.least_calibration(TWO, 9.0) == pytest.approx(0.75)
    assert names(fedagrac.theorem2(FULL, replace(plan, commits=50, steps=(1, 3)))) == failing


@pytest.mark.parametrize(("plan", "failing"), [
    (Plan(), []), (Plan(calibration=1.0, client_lr=0.05, server_lr=1.0), []), (Plan(calibration=0.9), ["lambda"]),
    (Plan(client_lr=0.1), ["(30)"]), (Plan(client_lr=0.3), ["Theorem 3", "(30)"]),
])  # fmt: skip
def test_theorem_3_reports_what_fails(plan: Plan, failing: list[str]) -> None:
    assert names(fedagrac.theorem3(FULL, replace(plan, commits=50, steps=(1, 3)))) == failing


def test_what_is_missing_is_named_at_once() -> None:
    bare = Constants(2)
    for theorem, words in (
        (fedagrac.theorem1, "smoothness, convexity, noise, gap"),
        (fedagrac.theorem2, "gap, smoothness, noise, dissimilarity"),
        (fedagrac.theorem3, "smoothness, convexity, noise, gap"),
    ):
        with pytest.raises(ConfigError, match=words):
            theorem(bare, Plan())
    with pytest.raises(ConfigError, match="at_optimum"):
        fedagrac.theorem1(HAND, Plan())
    with pytest.raises(ConfigError, match="3 steps and 2 weights for 2 clients") as problems:
        fedagrac.theorem3(HAND, Plan(steps=(1, 2, 0), commits=0), weights=(0.5, 0.6))
    assert len(problems.value.problems) == 4
    with pytest.raises(ConfigError, match="convexity: must be above zero"):
        fedagrac.theorem3(replace(HAND, convexity=0.0), Plan())


def test_limits_are_numbers() -> None:
    still = Constants(3, gap=0.0, smoothness=1.0, convexity=1.0, noise=0.0, dissimilarity=1.0)
    assert fedagrac.theorem1(still, Plan(), at_optimum=(0, 0, 0)).bound == 0
    assert fedagrac.theorem3(still, Plan()).bound == 0
    assert fedagrac.theorem1(HAND, Plan(client_lr=9.0), at_optimum=(1, 1)).bound == math.inf
    assert "constants left out" in fedagrac.theorem2(still, Plan()).notes[0]
