"""FedBuff's theorem: numbers worked out by hand, runs on quadratics that keep to the bound, plans that do not hold."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from known_quadratics import World, failing, keeps_its_units, measured, walk, world
from offbeat.errors import ConfigError
from offbeat.theory import fedbuff
from offbeat.theory.constants import Constants, Plan, Rates
from worlds import Times

KNOWN = Constants(4, gap=2.0, smoothness=0.25, noise=1.0, mean_divergence=0.5)
PLAN = Plan(local_steps=1, cohort=2, commits=6400, staleness=1)


def test_theorem1_by_hand() -> None:
    advice = fedbuff.theorem1(KNOWN, PLAN)
    assert (advice.client_lr, advice.server_lr) == (1 / 40, 1 / 2)  # sqrt(0.25 * 6400) = 40
    assert advice.bound == pytest.approx(0.1 + 0.15 + 0.15)  # sqrt(L / T) = 1/160; 320 * 0.25 * 2 * 2 / 6400 * (1 + 2)
    assert fedbuff.theorem1(replace(KNOWN, divergence=1.0), PLAN).bound == pytest.approx(
        0.35
    )  # Remark 2: n gamma^2 -> 1
    assert fedbuff.theorem1(replace(KNOWN, divergence=9.0), PLAN).bound == advice.bound
    assert fedbuff.bound(KNOWN, replace(PLAN, staleness=2)) == pytest.approx(0.25 + 0.375)
    assert fedbuff.needed_commits(KNOWN, PLAN) == 160 * 0.25 * 8 * 8
    assert fedbuff.largest_rate(KNOWN, PLAN) == 1 / 2


def test_the_bound_of_the_proof_by_hand() -> None:
    """At the theorem's rates: phi = 16 (1 + 2 Q) / (L T) = 0.03, c = 1.025, B = 1/40."""
    rates = fedbuff.own_rates(KNOWN, PLAN)
    once = 0.25**2 * 1.025 * 0.03
    assert fedbuff.losses(KNOWN, PLAN, rates) == pytest.approx((0.025, 2 * once, 4 * once))
    above = 4 / 160 + 0.025 * 1.5 + 4 * once * 3
    assert fedbuff.any_bound(KNOWN, PLAN, rates) == pytest.approx(above / (1 - 0.025 - 6 * once))
    assert fedbuff.any_bound(KNOWN, PLAN, rates._replace(client=0.2)) == math.inf  # the losses add up to 1.064
    whole = 0.25**2 * 1.05 * 0.075  # beta K = 2: c = 1.05, phi = 8 / 1600 * 3 * 5
    assert fedbuff.losses(KNOWN, PLAN, rates._replace(server=1.0)) == pytest.approx((0.05, 2 * whole, 4 * whole))
    assert keeps_its_units(fedbuff.any_bound, KNOWN, PLAN, rates)


def test_the_theorem_rounds_its_proof_up() -> None:
    """From 160 L (Q + 7) (tau + 1)^3 on, (58) and (105) hold and (101)-(104) stay below the theorem's bound."""
    rng, tightest = np.random.default_rng(0), 0.0
    for _ in range(300):
        gap, smoothness, noise, gamma = np.exp(rng.uniform(-4, 4, 4)).tolist()
        known = Constants(int(rng.integers(1, 50)), gap, smoothness, noise=noise, mean_divergence=gamma)
        steps, cohort, late = rng.integers(1, 20), rng.integers(1, 20), rng.integers(0, 10)
        plan = Plan(local_steps=int(steps), cohort=int(cohort), staleness=int(late))
        plan = replace(plan, commits=math.ceil(fedbuff.needed_commits(known, plan)))
        advice = fedbuff.theorem1(known, plan)
        assert advice.failing == []
        assert advice.bound is not None
        proof = fedbuff.any_bound(known, plan, fedbuff.own_rates(known, plan))
        assert proof <= advice.bound
        tightest = max(tightest, proof / advice.bound)
    assert tightest > 0.2


def test_what_does_not_hold_is_reported() -> None:
    assert failing(fedbuff.theorem1(KNOWN, replace(PLAN, commits=2560))) == []
    assert failing(fedbuff.theorem1(KNOWN, replace(PLAN, commits=2559))) == ["Theorem 1"]
    assert failing(fedbuff.theorem1(KNOWN, replace(PLAN, commits=2))) == ["Theorem 1", "(58)", "(105)"]
    other = fedbuff.theorem1(KNOWN, replace(PLAN, client_lr=0.02))  # the theorem's T is not asked of other rates
    assert failing(other) == []
    assert other.bound == fedbuff.any_bound(KNOWN, PLAN, Rates(0.02, 0.5))
    assert failing(fedbuff.theorem1(KNOWN, replace(PLAN, staleness=9, client_lr=0.2))) == ["(105)"]
    assert failing(fedbuff.theorem1(KNOWN, replace(PLAN, client_lr=0.125))) == []  # the largest loss is 0.211 ...
    assert failing(fedbuff.theorem1(KNOWN, replace(PLAN, client_lr=0.14))) == ["(105)"]  # ... and here 0.268
    assert failing(fedbuff.theorem1(KNOWN, replace(PLAN, client_lr=0.6))) == ["(58)", "(105)"]
    same = replace(PLAN, client_lr=1 / 40, server_lr=1 / 2)
    assert fedbuff.theorem1(KNOWN, same) == fedbuff.theorem1(KNOWN, PLAN)


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ConfigError, match="not known: gap, smoothness, mean_divergence"):
        fedbuff.theorem1(Constants(4, noise=1.0), PLAN)
    with pytest.raises(ConfigError, match="smoothness = 0"):
        fedbuff.theorem1(replace(KNOWN, smoothness=0.0), PLAN)
    with pytest.raises(ConfigError, match="divergence = nan"):
        fedbuff.theorem1(replace(KNOWN, divergence=math.nan), PLAN)


def slow_world() -> World:
    return world(0.003, 0.003 * np.random.default_rng(3).standard_normal((8, 12)), 8.0, 0.02)


EVEN = Times([0.1] * 8, [0.1] * 8, [0.1] * 8)
SPEC = {"name": "fedbuff", "buffer_size": 2, "local_steps": 2, "concurrency": 4}


@pytest.mark.parametrize("client_lr", [None, 0.7])
def test_theorem1_bounds_a_run(client_lr: float | None) -> None:
    """Equal speeds, and each place goes to a client drawn from the idle: every update is equally likely anyone's."""
    found = slow_world()
    plan = Plan(local_steps=2, cohort=2, commits=120, staleness=2, client_lr=client_lr)
    advice = fedbuff.theorem1(found.constants, plan)
    assert advice.failing == []
    spec = SPEC | {"client_lr": advice.client_lr, "beta": advice.server_lr}
    walks = [walk(spec, found.task, EVEN, plan.commits, seed) for seed in range(2)]
    assert max(w.staleness for w in walks) == plan.staleness
    assert advice.bound is not None
    assert 0.05 * advice.bound < measured(found, walks) < advice.bound


def test_a_run_outside_the_conditions_breaks_the_bound() -> None:
    found, plan = slow_world(), Plan(local_steps=2, cohort=2, commits=120, staleness=2)
    wild = fedbuff.theorem1(found.constants, replace(plan, client_lr=750.0))
    assert failing(wild) == ["(58)", "(105)"]
    assert wild.bound == math.inf
    walked = walk(SPEC | {"client_lr": 750.0}, found.task, EVEN, plan.commits)
    assert measured(found, [walked]) > fedbuff.bound(found.constants, plan)


def test_table_1_is_the_papers() -> None:
    """Only delays cost tau^2 / T, and only two analyses need no bound on gradients."""
    lines = {(name, line.reference): line for name, analyses in fedbuff.TABLE_1.items() for line in analyses}
    assert {key: (line.asynchronous, line.buffered, line.unbounded) for key, line in lines.items()} == {
        ("local-sgd", "Yu et al."): (False, True, False), ("local-sgd", "Wang et al."): (False, True, True),
        ("fedasync", "Xie et al."): (True, False, False), ("fedbuff", "Nguyen et al."): (True, True, False),
        ("fedbuff", "this paper"): (True, True, True),
    }  # fmt: skip
    assert {key: line.rate(100, 3) for key, line in lines.items()} == {
        key: pytest.approx(0.1 + 0.09 * line.asynchronous) for key, line in lines.items()
    }
