"""FedAvg's theorems: numbers worked out by hand, runs on quadratics that keep to the bounds, plans that do not hold."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from known_quadratics import Bound, World, failing, keeps_its_units, measured, walk, world
from offbeat.errors import ConfigError
from offbeat.theory import fedavg
from offbeat.theory.constants import Advice, Constants, Plan, Rates
from worlds import Times

KNOWN = Constants(10, gap=2.0, smoothness=1.5, global_smoothness=1.0, heterogeneity=0.5, noise=4.0, divergence=3.0)
PLAN = Plan(local_steps=5, cohort=10, commits=200)
EVEN = Times([0.1] * 6, [0.1] * 6, [0.1] * 6)


# ---- Theorem 4.3, Corollary 4.4 -----------------------------------------------------------------
def test_theorem43_by_hand() -> None:
    advice = fedavg.theorem43(KNOWN, PLAN)
    assert advice.client_lr == pytest.approx(1 / 225)
    assert advice.server_lr == pytest.approx(11.25)  # gamma eta = 1 / 20
    sgd = 0.16 + 0.04 + 32 / 50625  # 4 * 2 / (1000 / 20), 2 / 20 * 4 / 10, 20 / 225^2 * 4 * 4 / 10
    local = (72 * 16 * 3 + 24 * 4 * 4) / 4 / 50625
    assert advice.bound == pytest.approx(sgd + local)


def test_without_heterogeneity_local_steps_cost_nothing_but_noise() -> None:
    """L_h = 0: zeta may be what it will, and gamma, eta count by their product but for sigma."""
    same = replace(KNOWN, heterogeneity=0.0)
    wild = fedavg.theorem43(replace(same, divergence=1e9), PLAN)
    assert wild.bound == fedavg.theorem43(same, PLAN).bound
    assert wild.client_lr == pytest.approx(1 / 150)
    exact = replace(same, noise=0.0)
    bounds = [fedavg.full_bound(exact, PLAN, Rates(g, 0.01 / g)) for g in (0.001, 0.005)]
    assert bounds[0] == pytest.approx(bounds[1])
    assert bounds[0] == pytest.approx(8 / (0.01 * 1000))


def test_largest_rates_are_admitted_and_larger_are_not() -> None:
    for steps in range(1, 60):
        for theorem, cohort in ((fedavg.theorem43, 10), (fedavg.theorem45, 1), (fedavg.theorem45, 3)):
            plan = replace(PLAN, local_steps=steps, cohort=cohort)
            advice = theorem(KNOWN, plan)
            again = theorem(KNOWN, replace(plan, client_lr=advice.client_lr, server_lr=advice.server_lr))
            assert again == advice
            assert again.failing == []
            assert theorem(KNOWN, replace(plan, server_lr=1e3)).failing == []  # a smaller gamma makes room for it
            assert theorem(KNOWN, replace(plan, client_lr=1e-5)).failing == []
    bigger = replace(PLAN, client_lr=1 / 224, server_lr=1.0)
    assert failing(fedavg.theorem43(KNOWN, bigger)) == ["Theorem 4.3"]
    assert failing(fedavg.theorem43(KNOWN, replace(bigger, server_lr=12.0))) == ["Theorem 4.3", "Theorem 4.3"]
    assert failing(fedavg.theorem43(KNOWN, replace(PLAN, cohort=9))) == ["full participation"]


def test_corollary44_by_hand() -> None:
    known = replace(KNOWN, clients=4, global_smoothness=0.5, heterogeneity=0.25, noise=8.0)
    plan = Plan(local_steps=2, cohort=4, commits=100_000)
    advice = fedavg.corollary44(known, plan)
    assert advice.client_lr == pytest.approx(1 / math.sqrt(800_000))
    assert advice.client_lr * advice.server_lr == pytest.approx(math.sqrt(1e-5))  # sqrt(2 * 4 / (1e5 * 2 * 0.5 * 8))
    assert advice.failing == []
    assert advice.notes == ("up to I = 790 local steps keep the rate",)  # 4e5 / (900 * 0.75^2) = 790.1
    assert failing(fedavg.corollary44(known, replace(plan, local_steps=791))) == ["(B.21)"]  # gamma itself still holds
    assert fedavg.full_steps(known, plan) == pytest.approx(12_500)
    assert failing(fedavg.corollary44(replace(known, noise=1e-6), plan)) == ["Theorem 4.3", "B.7"]
    order = math.sqrt(2 * 0.5 * 8 / 800_000) + (3 + 4) / 800_000  # (13), which has no constants
    assert advice.bound is not None
    assert order < advice.bound < 8 * order
    far = fedavg.corollary44(replace(known, heterogeneity=5.0), plan)  # L_h I = 10
    assert far.client_lr == pytest.approx(0.1 / math.sqrt(800_000))
    assert fedavg.short_rate(replace(known, heterogeneity=0.0), plan) == pytest.approx(1 / math.sqrt(800_000))


@pytest.mark.parametrize("theorem", [fedavg.corollary44, fedavg.corollary46])
def test_the_rate_of_the_corollaries_falls_as_they_say(theorem: Callable[[Constants, Plan], Advice]) -> None:
    """Four times the rounds: half the bound, once the root rules."""
    plan = Plan(local_steps=2, cohort=10, commits=10**9)
    bounds = [theorem(KNOWN, replace(plan, commits=plan.commits * k)).bound for k in (1, 4)]
    assert bounds[0] is not None
    assert bounds[1] == pytest.approx(bounds[0] / 2, rel=1e-3)


# ---- Theorem 4.5, Corollary 4.6 -----------------------------------------------------------------
def test_theorem45_by_hand() -> None:
    advice = fedavg.theorem45(KNOWN, replace(PLAN, cohort=2))
    assert advice.client_lr * advice.server_lr == pytest.approx(1 / 20)
    first = 0.32 + 0.4 + 6.0  # 8 * 2 / 50, 4 / 20 * 4 / 2, 16 / 20 * 5 * 3 / 2
    local = (16 * (0.25 + 0.125) * (9 * 16 * 3 + 3 * 4 * 4) + 60 * 4 * 4 / 10) / 50625
    assert advice.bound == pytest.approx(first + local)
    one = fedavg.theorem45(KNOWN, replace(PLAN, cohort=1))
    assert one.client_lr * one.server_lr == pytest.approx(1 / 40)  # (B.37)
    wide = replace(PLAN, cohort=1, client_lr=1 / 225, server_lr=11.0)
    assert failing(fedavg.theorem45(KNOWN, wide)) == ["(B.37)"]
    assert failing(fedavg.theorem45(KNOWN, replace(PLAN, cohort=11))) == ["Theorem 4.5"]


def test_corollary46_by_hand() -> None:
    plan = Plan(local_steps=2, cohort=5, commits=50_000)
    advice = fedavg.corollary46(KNOWN, plan)
    assert advice.client_lr * advice.server_lr == pytest.approx(0.1 * math.sqrt(1e-3))  # sqrt(5 * 2 / (1e5 * (4 + 6)))
    assert advice.failing == []
    assert fedavg.partial_steps(KNOWN, plan) == math.inf  # 50000 * 3 > 16 * 2 * 5
    assert advice.notes == ("up to I = 246 local steps keep the rate",)  # 5e5 / (900 * 1.5^2) = 246.9
    alike = replace(KNOWN, divergence=0.0)
    assert fedavg.partial_steps(alike, plan) == pytest.approx(1250)  # 50000 * 4 / (16 * 2 * 5)
    assert fedavg.partial_steps(alike, replace(plan, cohort=1)) == pytest.approx(1562.5)
    assert fedavg.partial_steps(replace(KNOWN, divergence=159.5), replace(plan, commits=1)) == pytest.approx(8)
    assert failing(fedavg.corollary46(KNOWN, replace(plan, local_steps=247))) == ["(B.21)"]
    quiet = fedavg.corollary46(replace(alike, noise=1e-4), plan)
    assert failing(quiet) == ["Theorem 4.5", "(B.37)", "B.7"]


# ---- Theorems 5.5 and A.1 -----------------------------------------------------------------------
COMMON = Constants(10, gap=3.0, smoothness=2.5, global_smoothness=2.0, heterogeneity=0.0, noise=5.0, divergence=0.5)


def test_theorem55_by_hand() -> None:
    plan = Plan(local_steps=4, cohort=10, commits=25)
    advice = fedavg.theorem55(COMMON, plan)
    assert (advice.client_lr, advice.server_lr) == (0.1, 1.0)
    assert advice.bound == pytest.approx(0.6 + 0.1)
    assert advice.failing == []
    assert fedavg.minibatch_bound(COMMON, plan, 0.1) == pytest.approx(2.4 + 0.025)
    assert "0.605," in advice.notes[0]  # at 1/2: 0.48 + 0.125
    assert fedavg.theorem55(replace(COMMON, noise=0.0), plan).client_lr == 0.5
    worse = replace(plan, client_lr=0.51, server_lr=2.0, cohort=5)
    names = ["Theorem 5.5", "Theorem 5.5", "Theorem 5.5", "full participation"]
    assert failing(fedavg.theorem55(replace(COMMON, heterogeneity=0.1), worse)) == names
    calm = fedavg.theorem55(replace(COMMON, noise=1e-9), replace(plan, client_lr=0.5))
    assert "is below" in calm.notes[0]
    assert "is not below" in fedavg.theorem55(replace(COMMON, noise=1e3), replace(plan, client_lr=0.5)).notes[0]


def test_theorem_a1_by_hand() -> None:
    known, plan = replace(COMMON, heterogeneity=1.0), Plan(local_steps=4, cohort=10, commits=16)
    advice = fedavg.corollary_a3(known, plan)
    assert advice.client_lr == pytest.approx(0.25)
    assert advice.bound == pytest.approx(0.75 + 0.5 + 9.5)  # 12 / 16, 10 / 4 * 2 / 10, (16 * 9 / 2 + 16 * 5) / 16
    assert [c.allowed for c in advice.conditions] == pytest.approx([1 / 8, 0, 10, 1, 7.5])
    assert failing(advice) == ["Theorem A.1", "Corollary A.3"]
    assert failing(fedavg.corollary_a3(replace(known, noise=8.0), plan)) == ["Theorem A.1", *["Corollary A.3"] * 2]
    assert fedavg.quadratic_limit(COMMON, plan) == 1 / 2.5  # L_h = 0
    assert failing(fedavg.theorem_a1(COMMON, plan)) == []
    exact = fedavg.corollary_a3(replace(COMMON, noise=0.0, heterogeneity=0.25), plan)  # Corollary A.2
    assert exact.failing == []
    assert exact.bound is not None
    assert exact.bound < 16 * (3 + 0.5) / 64 ** (2 / 3)


@pytest.mark.parametrize(
    "bound",
    [
        fedavg.full_bound,
        fedavg.partial_bound,
        lambda constants, plan, rates: fedavg.common_bound(constants, plan, rates.client),
        lambda constants, plan, rates: fedavg.minibatch_bound(constants, plan, rates.client),
        lambda constants, plan, rates: fedavg.quadratic_bound(constants, plan, rates.client),
    ],
)
def test_bounds_keep_their_units(bound: Bound) -> None:
    assert keeps_its_units(bound, KNOWN, PLAN, Rates(0.2, 1.5))


def test_what_is_missing_is_named() -> None:
    for theorem in (fedavg.theorem43, fedavg.theorem45, fedavg.corollary44, fedavg.corollary46):
        with pytest.raises(ConfigError, match="not known: gap, heterogeneity, divergence"):
            theorem(Constants(4, global_smoothness=1.0, noise=1.0), PLAN)
    with pytest.raises(ConfigError, match="not known: smoothness, gap"):
        fedavg.theorem_a1(Constants(4, global_smoothness=1, heterogeneity=0, noise=1, divergence=1), PLAN)
    with pytest.raises(ConfigError, match="server_lr: a constant is 0"):
        fedavg.corollary44(replace(KNOWN, noise=0.0), PLAN)
    with pytest.raises(ConfigError, match="global_smoothness = 0"):
        fedavg.theorem55(replace(COMMON, global_smoothness=0.0), PLAN)


# ---- runs ---------------------------------------------------------------------------------------
def some_world(top: float, unlike: float, start: float, noise: float = 0.3) -> World:
    rng = np.random.default_rng(3)
    return world(np.linspace(top / 2, top, 8), 0.3 * top * rng.standard_normal((6, 8)), start, noise, unlike)


RUNS = {  # theorem, world, plan, least share of the bound
    "4.3": (fedavg.theorem43, some_world(1.0, 0.0, 1.0), Plan(3, 6, 40), 0.2),
    "4.3, L_h > 0": (fedavg.theorem43, some_world(1.0, 0.2, 1.0), Plan(3, 6, 40), 0.2),
    "4.4": (fedavg.corollary44, some_world(0.1, 0.01, 1.0), Plan(3, 6, 40), 0.2),
    "4.5": (fedavg.theorem45, some_world(1.0, 0.02, 1.0), Plan(3, 2, 40), 0.04),
    "4.6": (fedavg.corollary46, some_world(0.1, 0.0, 1.0), Plan(3, 2, 40), 0.05),
    "5.5": (fedavg.theorem55, some_world(1.0, 0.0, 1.0), Plan(3, 6, 30), 0.4),
    "A.1": (fedavg.theorem_a1, some_world(1.0, 0.05, 1.0), Plan(3, 6, 30), 0.15),
}


def spec_of(plan: Plan, advice: Advice) -> dict[str, Any]:
    cohort = {"n": None} if plan.cohort == 6 else {"n": plan.cohort, "replacement": True}
    rates = {"client_lr": advice.client_lr, "server_lr": advice.server_lr}
    return {"name": "local-sgd", "local_steps": plan.local_steps, **cohort, **rates}


@pytest.mark.parametrize("name", RUNS)
def test_the_theorem_bounds_a_run(name: str) -> None:
    """Of Theorems 5.5 and A.1 the mean runs over the local steps too."""
    theorem, found, plan, share = RUNS[name]
    advice = theorem(found.constants, plan)
    assert advice.failing == []
    inside = plan.local_steps if advice.bounded == fedavg.STEPS else 1
    spec = spec_of(plan, advice)
    walks = [walk(spec, found.task, EVEN, plan.commits, seed, inside) for seed in range(2)]
    assert all(len(w.models) == plan.commits * inside and found.stays(w.models) for w in walks)
    assert advice.bound is not None
    assert share * advice.bound < measured(found, walks) < advice.bound


def test_models_between_commits_lead_to_the_next() -> None:
    found, plan = some_world(1.0, 0.2, 1.0), Plan(3, 6, 3)
    models = walk(spec_of(plan, fedavg.theorem_a1(found.constants, plan)), found.task, EVEN, 3, inside=4).models
    assert np.allclose(models[3::4][:2], models[4::4], rtol=0, atol=1e-12)
    assert not np.allclose(models[2], models[3])


@pytest.mark.parametrize(("name", "rates"), [("4.3", (0.7, 7.0)), ("5.5", (2.3, 1.0))])
def test_a_run_outside_the_conditions_breaks_the_bound(name: str, rates: tuple[float, float]) -> None:
    theorem, found, plan, _ = RUNS[name]
    advice = theorem(found.constants, replace(plan, client_lr=rates[0], server_lr=rates[1]))
    assert {condition.name for condition in advice.failing} == {f"Theorem {name}"}
    assert advice.bound is not None
    assert measured(found, [walk(spec_of(plan, advice), found.task, EVEN, plan.commits)]) > advice.bound
