"""DLSGD's theorems: numbers worked out by hand, runs on quadratics that keep to the bounds, plans that do not hold."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from known_quadratics import World, failing, keeps_its_units, measured, walk, world
from offbeat.errors import ConfigError
from offbeat.theory import dlsgd
from offbeat.theory.constants import Constants, Plan, Rates
from worlds import Times

# ---- Theorem 1 ----------------------------------------------------------------------------------
HOMO = Constants(6, gap=2.0, smoothness=0.5, noise=8.0)
HOMO_PLAN = Plan(local_steps=4, cohort=2, commits=100, staleness=3)


def test_theorem1_by_hand() -> None:
    advice = dlsgd.theorem1(HOMO, HOMO_PLAN)
    assert advice.client_lr == pytest.approx(1 / 80)  # 4 sqrt(8 * 0.5 * 100) = 80
    assert advice.server_lr == pytest.approx(math.sqrt(8))
    assert advice.bound == pytest.approx(math.sqrt(1.28) + 0.01)  # sqrt(128 * 8 * 0.5 * 2 / 800) + 8 * 0.5 / 400
    assert [c.allowed for c in advice.conditions] == pytest.approx([1 / (8 * math.sqrt(3)), 1 / 24])
    assert dlsgd.homo_commits(HOMO, HOMO_PLAN) == pytest.approx(72)
    quiet = replace(HOMO, gap=1e-6)  # now 48 L / sigma^2, and the root is the smaller term up to n L / (2 K sigma^2 D)
    assert dlsgd.homo_commits(quiet, HOMO_PLAN) == pytest.approx(3)
    assert dlsgd.homo_speedup(quiet, HOMO_PLAN) == pytest.approx(15625)
    assert [dlsgd.homo_limits(HOMO, replace(HOMO_PLAN, staleness=s))[1] for s in (0, 1, 2)] == [1 / 8, 1 / 8, 1 / 16]
    assert keeps_its_units(dlsgd.homo_bound, HOMO, HOMO_PLAN, dlsgd.homo_rates(HOMO, HOMO_PLAN))


def test_theorem1_chooses_the_best_server_rate() -> None:
    rates = dlsgd.homo_rates(HOMO, HOMO_PLAN)
    at = [dlsgd.homo_bound(HOMO, HOMO_PLAN, rates._replace(server=rates.server * k)) for k in (0.99, 1, 1.01)]
    assert at[1] < min(at[0], at[2])


def test_theorem1_holds_from_its_number_of_commits_on() -> None:
    assert failing(dlsgd.theorem1(HOMO, replace(HOMO_PLAN, commits=73))) == []
    assert failing(dlsgd.theorem1(HOMO, replace(HOMO_PLAN, commits=71))) == ["(10)"]
    assert failing(dlsgd.theorem1(HOMO, replace(HOMO_PLAN, client_lr=0.1, server_lr=0.1))) == ["(10)"]
    assert failing(dlsgd.theorem1(HOMO, replace(HOMO_PLAN, client_lr=0.07, server_lr=0.5))) == []


HOMO_TIMES = Times([0.1] * 6, [0.1, 0.13, 0.1, 0.12, 0.11, 0.14], [0.1] * 6)


def homo_world() -> World:
    return world(1.0, np.tile(np.linspace(0, 1, 12), (6, 1)), 0.65, 1.0)


def test_theorem1_bounds_a_run() -> None:
    found, plan = homo_world(), Plan(local_steps=2, cohort=3, commits=150, staleness=5)
    advice = dlsgd.theorem1(found.constants, plan)
    assert advice.failing == []
    spec = {"name": "dlsgd-homo", "n": 3, "local_steps": 2}
    rates = {"client_lr": advice.client_lr, "server_lr": advice.server_lr}
    walks = [walk(spec | rates, found.task, HOMO_TIMES, plan.commits, seed) for seed in range(2)]
    assert 1 <= max(w.staleness for w in walks) <= plan.staleness
    assert advice.bound is not None
    assert 0.05 * advice.bound < measured(found, walks) < advice.bound


def test_a_run_outside_condition_10_breaks_the_bound() -> None:
    found, plan = homo_world(), Plan(local_steps=2, cohort=3, commits=60, client_lr=0.05, server_lr=30.0, staleness=5)
    advice = dlsgd.theorem1(found.constants, plan)
    assert failing(advice) == ["(10)"]
    spec = {"name": "dlsgd-homo", "n": 3, "local_steps": 2, "client_lr": 0.05, "server_lr": 30.0}
    assert advice.bound is not None
    assert measured(found, [walk(spec, found.task, HOMO_TIMES, plan.commits)]) > advice.bound


# ---- Theorem 2 ----------------------------------------------------------------------------------
HETERO = Constants(6, gap=1.0, smoothness=0.5, noise=2.0, gradient=6.0, mean_divergence=1.0)
HETERO_PLAN = Plan(local_steps=2, cohort=4, commits=25, staleness=2)


def test_theorem2_by_hand() -> None:
    advice = dlsgd.theorem2(HETERO, HETERO_PLAN)  # S = 4 * 2 * 0.5 + 2 * 0.5 * 2 * 6 = 16
    assert advice.client_lr == pytest.approx(1 / 40)
    assert advice.server_lr == pytest.approx(math.sqrt(32))
    assert advice.bound == pytest.approx(math.sqrt(8) + 0.045)  # sqrt(1600 / 200) + 8 * 0.25 * 18 / 800
    assert [c.allowed for c in advice.conditions] == pytest.approx([1 / 8, 1 / 8, 1 / 14, 6])
    assert dlsgd.hetero_commits(HETERO, HETERO_PLAN) == pytest.approx(98)
    assert dlsgd.hetero_commits(replace(HETERO, gap=1e-9), HETERO_PLAN) == pytest.approx(1)  # 64 * 0.25 / 16
    assert keeps_its_units(dlsgd.hetero_bound, HETERO, HETERO_PLAN, dlsgd.hetero_rates(HETERO, HETERO_PLAN))
    printed = math.sqrt(256 * (16 * 2 * 0.5 + 8 * 0.5 * 6 * 2) / 200) + 0.045  # (14)
    assert advice.bound is not None
    assert advice.bound < printed
    spiky = replace(HETERO, mean_divergence=100.0)  # 8 L^2 (sigma^2 + 8 K nu^2) = 3204
    assert dlsgd.hetero_speedup(spiky, HETERO_PLAN) == pytest.approx(98)
    assert dlsgd.hetero_speedup(replace(spiky, gap=0.01), HETERO_PLAN) == pytest.approx(4 * 3204**2 / 8192)


def test_theorem2_holds_from_its_number_of_commits_on() -> None:
    assert failing(dlsgd.theorem2(HETERO, replace(HETERO_PLAN, commits=99))) == []
    assert failing(dlsgd.theorem2(HETERO, replace(HETERO_PLAN, commits=97))) == ["(13)"]
    many = replace(HETERO_PLAN, cohort=7, client_lr=0.2, server_lr=0.1)
    assert failing(dlsgd.theorem2(HETERO, many)) == ["(13)", "(41)"]
    later = [dlsgd.hetero_commits(HETERO, replace(HETERO_PLAN, staleness=s)) for s in (100, 200)]
    assert later[1] / later[0] == pytest.approx(16, rel=0.01)  # the order lambda^4


def test_theorem2_bounds_a_run() -> None:
    rng = np.random.default_rng(2)
    found = world(1.0, 0.3 * rng.standard_normal((6, 12)), 1.0, 0.3)
    plan = Plan(local_steps=2, cohort=3, commits=320, staleness=2)
    advice = dlsgd.theorem2(found.constants, plan)
    assert advice.failing == []
    spec = {"name": "dlsgd-hetero", "n": 3, "local_steps": 2}
    rates = {"client_lr": advice.client_lr, "server_lr": advice.server_lr}
    even = Times([0.1] * 6, [0.02] * 6, [0.1] * 6)
    walks = [walk(spec | rates, found.task, even, plan.commits, seed) for seed in range(2)]
    assert all(found.stays(w.models) for w in walks)
    assert 1 <= max(w.staleness for w in walks) <= plan.staleness
    assert advice.bound is not None
    assert 0.02 * advice.bound < measured(found, walks) < advice.bound


# ---- staleness, and constants that cannot be -----------------------------------------------------
def test_likely_staleness_holds_as_often_as_it_says() -> None:
    clients, cohort, commits, risk = 5, 2, 200, 0.1
    most = dlsgd.likely_staleness(clients, cohort, commits, risk)
    assert most == pytest.approx((1 + math.log(10000)) / 0.36)
    rng, longest = np.random.default_rng(0), []
    for _ in range(200):
        draws = rng.integers(clients, size=(commits, cohort))
        rounds = [[-1, *np.flatnonzero((draws == i).any(axis=1)), commits] for i in range(clients)]
        longest.append(max(np.diff(r).max() for r in rounds))
    assert np.mean(np.array(longest) > most) <= risk
    assert np.mean(np.array(longest) > most / 3) > 0.9
    assert dlsgd.likely_staleness(1, 1, 1, 0.5) == pytest.approx(1 + math.log(2))
    with pytest.raises(ConfigError, match="risk between 0 and 1"):
        dlsgd.likely_staleness(5, 2, 200, 1.0)


def test_what_is_missing_or_out_of_range_is_named() -> None:
    with pytest.raises(ConfigError, match="not known: gap, noise, gradient, mean_divergence"):
        dlsgd.theorem2(Constants(4, smoothness=1.0), Plan())
    with pytest.raises(ConfigError, match=r"smoothness = 0.0.*\n.*noise = nan.*\n.*cohort = 0"):
        dlsgd.theorem1(Constants(4, gap=1.0, smoothness=0.0, noise=math.nan), Plan(cohort=0))
    with pytest.raises(ConfigError, match="client_lr: a constant is 0"):
        dlsgd.theorem1(replace(HOMO, noise=0.0), HOMO_PLAN)
    with pytest.raises(ConfigError, match=r"staleness = -1.*\n.*server_lr = 0.0"):
        dlsgd.theorem1(HOMO, Plan(staleness=-1, server_lr=0.0))


def test_without_noise_given_rates_have_a_bound() -> None:
    advice = dlsgd.theorem1(replace(HOMO, noise=0.0), replace(HOMO_PLAN, client_lr=0.02, server_lr=1.0))
    assert advice.bound == pytest.approx(8 / (4 * 100 * 0.02))
    assert dlsgd.homo_commits(replace(HOMO, noise=0.0), HOMO_PLAN) == math.inf
    assert dlsgd.homo_bound(replace(HOMO, gap=0.0, noise=0.0), HOMO_PLAN, Rates(0.0, 1.0)) == 0
    still = replace(HETERO, noise=0.0, gradient=0.0)
    assert dlsgd.hetero_limits(still, HETERO_PLAN)[2] == math.inf
