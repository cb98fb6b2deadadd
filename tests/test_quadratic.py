"""Families of quadratics: closed forms against brute force, and builders that keep their promises."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.errors import ConfigError
from offbeat.tasks.quadratic import (
    Family,
    alike,
    noise_of,
    nonconvex,
    opposed,
    optimum,
    quadratic,
    random_quadratic,
    regressions,
)

Builder = Callable[..., Family]
BUILDERS: list[Builder] = [
    alike,
    opposed,
    nonconvex,
    lambda *shape, seed=0: nonconvex(*shape, low=-1.0, seed=seed),
    lambda *shape, seed=0: Family(*random_quadratic(*shape, seed=seed)),
    lambda *shape, seed=0: regressions(*shape, seed=seed),
]
SEEDS = st.integers(0, 10_000)
FAMILIES = st.builds(
    lambda make, clients, dimension, seed: make(clients, dimension, seed=seed),
    st.sampled_from(BUILDERS),
    st.integers(2, 5),
    st.integers(2, 4),
    SEEDS,
)
few = settings(max_examples=25, deadline=None)


def drift(family: Family, models: np.ndarray) -> np.ndarray:
    """L_h^2 as Assumption 4.2 would have it at these models (cases x clients x dimension)."""
    mean = models.mean(axis=1)
    pulls = np.einsum("ijk,cik->cij", np.asarray(family.matrices), models).mean(axis=1)
    apart = np.square(models - mean[:, None]).sum(axis=2).mean(axis=1)
    return np.asarray(np.square(pulls - mean @ family.hessian).sum(axis=1) / apart)


# ---- closed forms -------------------------------------------------------------------------------
@few
@given(FAMILIES, SEEDS)
def test_no_direction_exceeds_the_constants(family: Family, seed: int) -> None:
    rng = np.random.default_rng(seed)
    steps = rng.standard_normal((500, len(family.linear[0])))
    steps /= np.linalg.norm(steps, axis=1)[:, None]
    slack = 1 + 1e-9
    for a in family.matrices:
        assert np.linalg.norm(steps @ a, axis=1).max() <= family.smoothness * slack
    assert np.linalg.norm(steps @ family.hessian, axis=1).max() <= family.global_smoothness * slack
    assert (steps @ family.hessian * steps).sum(axis=1).min() >= family.convexity - 1e-9
    models = rng.standard_normal((500, family.clients, len(family.linear[0])))
    assert drift(family, models).max() <= family.heterogeneity**2 * slack + 1e-12


@few
@given(FAMILIES)
def test_the_constants_are_reached(family: Family) -> None:
    """Each by the vector that its proof names: none of them could be smaller."""
    spectra = [np.linalg.eigh(a) for a in family.matrices]
    reached = [np.linalg.norm(a @ v, axis=0).max() for a, (_, v) in zip(family.matrices, spectra, strict=True)]
    assert max(reached) == pytest.approx(family.smoothness)
    if family.heterogeneity > 0:
        squares = np.mean([(a - family.hessian) @ (a - family.hessian) for a in family.matrices], axis=0)
        models = 3.0 + family.deviations @ np.linalg.eigh(squares)[1][:, -1]
        assert drift(family, models[None])[0] == pytest.approx(family.heterogeneity**2)
        assert np.linalg.eigvalsh(squares)[-1] == pytest.approx(family.heterogeneity**2)


@pytest.mark.parametrize("make", [opposed, nonconvex, BUILDERS[4]])
def test_random_directions_come_near(make: Builder) -> None:
    family = make(2, 2, seed=3)
    rng = np.random.default_rng(0)
    models = rng.standard_normal((20_000, 2, 2))
    assert 0.99 < math.sqrt(drift(family, models).max()) / family.heterogeneity <= 1 + 1e-9
    steps = rng.standard_normal((2_000, 2))
    ratios = np.linalg.norm(steps @ np.asarray(family.matrices), axis=2) / np.linalg.norm(steps, axis=1)
    assert 0.99 < ratios.max() / family.smoothness <= 1 + 1e-9


@few
@given(FAMILIES)
def test_how_the_constants_stand_to_each_other(family: Family) -> None:
    """Proposition 5.1: L_g and L_h are at most L-tilde; Proposition 5.2's L_h is twice as large as need be."""
    slack = 1 + 1e-9
    assert family.global_smoothness <= family.smoothness * slack
    assert family.heterogeneity <= family.smoothness * slack
    assert 2 * family.heterogeneity <= family.heterogeneity_bound * slack
    assert abs(family.convexity) <= family.global_smoothness * slack


def test_constants_by_hand() -> None:
    matrices = [np.diag([3.0, 1.0]), np.diag([-1.0, 1.0]), np.diag([1.0, 4.0])]
    linear = [np.array([1.0, 0.0]), np.array([-1.0, 0.0]), np.array([0.0, 3.0])]
    family = Family(matrices, linear)  # A = diag(1, 2), b = (0, 1)
    assert (family.clients, family.smoothness, family.global_smoothness) == (3, 4.0, 2.0)
    assert family.heterogeneity == pytest.approx(math.sqrt(8 / 3))  # deviations 2, -2, 0 and -1, -1, 2
    assert (family.heterogeneity_bound, family.convexity) == (4.0, 1.0)
    w = np.array([1.0, 1.0])  # gradients (2, 1), (0, 1), (1, 1); their mean is (1, 1)
    assert (family.gradient(w), family.global_gradient(w)) == (5.0, 2.0)
    assert (family.divergence(w), family.mean_divergence(w)) == (1.0, pytest.approx(2 / 3))
    assert family.dissimilarity(w) == 2.5
    assert family.value(w) == pytest.approx(0.5)  # 1/2 (1 + 2) - 1
    assert family.gap(w) == pytest.approx(0.75)  # from (0, 1/2): 1/2 (1 + 2 / 4)


@few
@given(FAMILIES, SEEDS)
def test_values_and_gradients_are_those_of_the_task(family: Family, seed: int) -> None:
    w = np.random.default_rng(seed).standard_normal(len(family.linear[0]))
    task = family.task(w)
    losses = [task.model(task.data[0][i]) for i in range(family.clients)]
    slopes = [torch.autograd.grad(loss, list(task.model.parameters()))[0].numpy() for loss in losses]
    np.testing.assert_allclose(family.gradients(w), slopes, atol=1e-12)
    assert family.value(w) == pytest.approx(float(torch.stack(losses).detach().mean()), abs=1e-12)
    mean = np.mean(slopes, axis=0)
    ways = np.eye(len(w)) * 1e-4
    ahead, behind = ([family.value(w + sign * way) for way in ways] for sign in (1, -1))
    np.testing.assert_allclose((np.array(ahead) - behind) / 2e-4, mean, atol=1e-6)
    assert family.gradient(w) == pytest.approx(max(s @ s for s in slopes))
    assert family.global_gradient(w) == pytest.approx(mean @ mean)
    assert family.divergence(w) == pytest.approx(max((s - mean) @ (s - mean) for s in slopes))
    assert family.mean_divergence(w) == pytest.approx(np.mean([(s - mean) @ (s - mean) for s in slopes]))
    assert family.dissimilarity(w) >= 1 - 1e-12  # FedaGrac asks B >= 1
    assert max(s @ s for s in slopes) == pytest.approx(family.dissimilarity(w) * (mean @ mean))


def test_the_gap_is_from_the_optimum_and_infinite_without_one() -> None:
    family, w = opposed(seed=4), np.arange(5.0)
    best = optimum(family.matrices, family.linear)
    assert family.gap(w) == pytest.approx(family.value(w) - family.value(best))
    assert family.gap(best) == 0
    assert nonconvex(low=-0.1).gap(w) == math.inf


def test_dissimilarity_where_gradients_vanish() -> None:
    one = np.eye(2)
    assert Family([one, one], [np.ones(2), -np.ones(2)]).dissimilarity(np.zeros(2)) == math.inf
    assert Family([one, one], [np.zeros(2), np.zeros(2)]).dissimilarity(np.zeros(2)) == 1


@pytest.mark.parametrize("samples", [1, 2, 3, 7])
def test_noise_is_that_of_the_gradients_of_the_samples(samples: int) -> None:
    family, w = opposed(3, 4, seed=1), np.array([1.0, -2.0, 0.5, 3.0])
    task = family.task(w, noise=0.7, samples=samples, seed=5)
    found = noise_of(task)
    for client, shard in enumerate(task.shards):
        losses = [task.model(task.data[0][row]) for row in shard]
        slopes = np.array([torch.autograd.grad(loss, list(task.model.parameters()))[0].numpy() for loss in losses])
        off = slopes - family.gradients(w)[client]
        assert np.abs(off.mean(axis=0)).max() < 1e-12  # no bias
        assert found[client] == pytest.approx(np.square(off).sum(axis=1).mean(), abs=1e-12)
    assert (found > 0).all() == (samples > 1)
    assert not noise_of(family.task(samples=samples)).any()


def test_noise_of_many_samples_is_about_what_was_asked() -> None:
    found = noise_of(quadratic([np.eye(3)], [np.zeros(3)], noise=2.0, samples=4000))
    assert found[0] == pytest.approx(3 * 4.0, rel=0.05)


# ---- builders -----------------------------------------------------------------------------------
@few
@given(st.integers(2, 7), st.integers(2, 5), st.floats(0, 100), st.floats(-3, 3), SEEDS)
def test_alike_differs_by_its_spread_alone(clients: int, dimension: int, spread: float, low: float, seed: int) -> None:
    family = alike(clients, dimension, spread, low, 3.0, seed)
    assert family.heterogeneity == family.heterogeneity_bound == 0  # exactly: theorems ask for it
    assert family.convexity == pytest.approx(low, abs=1e-12)
    assert family.global_smoothness == pytest.approx(3)
    for w in np.random.default_rng(seed).standard_normal((3, dimension)):
        assert math.sqrt(family.divergence(w)) == pytest.approx(spread, abs=1e-9)


@few
@given(st.integers(2, 7), st.integers(1, 5), st.floats(0, 10), st.floats(0, 10), SEEDS)
def test_opposed_has_the_constants_it_was_asked_for(
    clients: int, dimension: int, heterogeneity: float, spread: float, seed: int
) -> None:
    family = opposed(clients, dimension, heterogeneity, spread, -0.5, 1.5, seed)
    assert family.heterogeneity == pytest.approx(heterogeneity, abs=1e-12)
    assert family.convexity == pytest.approx(-0.5 if dimension > 1 else 1.5)
    assert family.global_smoothness == pytest.approx(1.5)
    assert math.sqrt(family.divergence(np.zeros(dimension))) == pytest.approx(spread, abs=1e-12)
    if clients % 2 == 0:
        assert family.heterogeneity_bound == pytest.approx(2 * heterogeneity, abs=1e-12)


@few
@given(st.integers(2, 7), st.integers(2, 5), st.sampled_from([0.5, -1.0, -4.0]), SEEDS)
def test_nonconvex_clients_are_all_indefinite(clients: int, dimension: int, low: float, seed: int) -> None:
    family = nonconvex(clients, dimension, low=low, seed=seed)
    for a in family.matrices:
        spectrum = np.linalg.eigvalsh(a)
        assert spectrum[0] < -0.1
        assert spectrum[-1] > 0.1
    assert family.convexity == pytest.approx(low)


def test_regressions_are_those_of_table_3() -> None:
    family = regressions(seed=2)
    assert (family.clients, len(family.linear[0]), family.heterogeneity) == (10, 100, 0.0)
    assert np.trace(family.hessian) == pytest.approx(100)  # columns of length 1
    assert family.convexity > 0
    assert family.divergence(np.zeros(100)) == pytest.approx(family.divergence(np.ones(100)))
    drawn = regressions(3, 6, unit=False, seed=2)
    rng = np.random.default_rng([2, 9])
    u, v = rng.standard_normal((6, 6)), rng.standard_normal((3, 6))
    w = np.arange(6.0)
    values = np.square(u @ w - v).sum(axis=1) / 2 - np.square(v).sum(axis=1) / 2
    assert drawn.value(w) == pytest.approx(values.mean())


def test_rounds_of_table_3_are_of_the_order_of_the_paper() -> None:
    """The gap falls to 0.8 in hundreds of rounds of one step of 0.005; I steps a round take an I-th of them."""
    rounds = []
    for seed in range(5):
        family = regressions(seed=seed)
        spectrum, axes = np.linalg.eigh(family.hessian)
        parts = spectrum * np.square(axes.T @ optimum(family.matrices, family.linear)) / 2
        assert parts.sum() == pytest.approx(family.gap(np.zeros(100)))
        gaps = (1 - 0.005 * spectrum) ** (2 * np.arange(5_000)[:, None]) @ parts
        rounds.append(int(np.argmax(gaps <= 0.8)))
    assert min(rounds) > 400
    assert max(rounds) < 4_000
    assert min(rounds) < 927 < max(rounds)


@pytest.mark.parametrize("make", BUILDERS)
def test_the_seed_alone_decides(make: Builder) -> None:
    one, two, other = (make(4, 3, seed=seed) for seed in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(one.matrices, two.matrices, strict=True))
    assert all(np.array_equal(a, b) for a, b in zip(one.linear, two.linear, strict=True))
    assert not np.array_equal(one.matrices[0], other.matrices[0])


def test_one_client_alone() -> None:
    family = alike(1, 3, spread=0.0)
    assert (family.heterogeneity, family.divergence(np.ones(3)), family.dissimilarity(np.ones(3))) == (0, 0, 1)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Family([], []), "a family needs as many 0 x 0 matrices as vectors of length 0, at least one"),
        (lambda: Family([np.eye(2)], [np.ones(3)]), "as many 3 x 3 matrices as vectors of length 3"),
        (lambda: Family([np.eye(2)], [np.ones(2)] * 2), "as many 2 x 2 matrices as vectors"),
        (lambda: Family([np.array([[1.0, 2.0], [0.0, 1.0]])], [np.ones(2)]), "needs symmetric matrices; give"),
        (lambda: alike(0), "clients is 0; give a whole number of at least 1"),
        (lambda: opposed(3, 0), "dimension is 0; give a whole number of at least 1"),
        (lambda: opposed(3, 2, -1.0), "heterogeneity is -1.0; give 0 or more"),
        (lambda: alike(3, 2, -1.0), "spread is -1.0; give 0 or more"),
        (lambda: alike(1), "spread is 1.0, but one client does not differ from itself; give 0, or more clients"),
        (lambda: alike(low=3.0), "low is 3.0 and high is 2.0; give eigenvalues in their order"),
        (lambda: nonconvex(1), "nonconvex: 1 clients in 5 dimensions; give at least 2 of both"),
    ],
)
def test_sentences(make: Callable[[], Family], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make()


def test_every_problem_of_a_family_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        opposed(0, 0, -1.0, -1.0, 2.0, 1.0)
    assert len(caught.value.problems) == 5
