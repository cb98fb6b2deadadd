"""Power iteration against spectra that are known: each operator ends by itself, whoever is beside it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from offbeat.tasks.quadratic import Family
from offbeat.theory import curvature
from offbeat.theory.gauge import Gauge


def meter(matrices: list[np.ndarray], limit: int) -> Gauge:
    task = Family(matrices, [np.zeros(len(matrices[0]))] * len(matrices)).task()
    return Gauge(task.flat_model(torch.float64), task.samples(torch.float64), limit, 0, None)


def turned(eigenvalues: list[float], seed: int) -> np.ndarray:
    """A symmetric matrix with these eigenvalues, along random axes."""
    q, _ = np.linalg.qr(np.random.default_rng(seed).standard_normal((len(eigenvalues),) * 2))
    a = q @ np.diag(eigenvalues) @ q.T
    return (a + a.T) / 2


FLAT = [1.0] * 12
SPECTRA = {
    "beside the identity": ([FLAT, [1.5] + [0.8] * 11], 1.5),
    "hidden in a plateau": ([FLAT, [1.01] + [1.0] * 11], 1.01),
    "below zero": ([FLAT, [-3.0] + [0.1] * 11, [2.9] * 12], 3.0),
    "both signs": ([[-2.0, 2.0] + [0.0] * 10, FLAT], 2.0),
    "nothing": ([[0.0] * 12, [0.0] * 12], 0.0),
    "one that is zero": ([[0.0] * 12, [0.25] + [0.0] * 11], 0.25),
    "a line of them": ([list(np.linspace(0.1, 1.0, 12)), list(np.linspace(0.1, 1.3, 12))], 1.3),
    "far apart": ([[1e-8] * 12, [1e6] + [1e-3] * 11], 1e6),
}


@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize("limit", [1, 2, 100])
def test_the_largest_of_all_clients_in_any_grouping(name: str, limit: int) -> None:
    spectra, largest = SPECTRA[name]
    gauge = meter([turned(list(values), seed) for seed, values in enumerate(spectra)], limit)
    found = curvature.smoothness(gauge, torch.zeros(12, dtype=torch.float64), 100, 1e-3)
    assert found.settled
    assert found.value == pytest.approx(largest, rel=1e-3, abs=1e-9)
    assert found.value <= largest * (1 + 1e-9) + 1e-12


def test_one_large_eigenvalue_among_many_small_ones_is_seen() -> None:
    v = torch.from_numpy(np.random.default_rng(0).standard_normal((2, 5000)))
    scale = torch.ones(2, 5000, dtype=torch.float64)
    scale[1, 0] = 1.5
    values, _, settled = curvature.norms(lambda rows, v: scale[rows] * v, v, 100, 1e-3)
    assert settled
    assert values.tolist() == pytest.approx([1.0, 1.5], rel=1e-3)


def test_who_is_in_the_group_changes_nothing() -> None:
    rng = np.random.default_rng(1)
    scale = torch.from_numpy(rng.uniform(-1, 1, (7, 60)) * 10.0 ** rng.integers(-3, 3, (7, 1)))
    v = torch.from_numpy(rng.standard_normal(60))
    together = curvature.norms(lambda rows, v: scale[rows] * v, v.expand(7, -1), 200, 1e-6)[0]
    for client in range(7):
        own = scale[client : client + 1]
        alone = curvature.norms(lambda rows, v, own=own: own[rows] * v, v[None], 200, 1e-6)[0]
        assert together[client] == pytest.approx(float(alone[0]), rel=1e-12)
        assert float(alone[0]) == pytest.approx(float(own.abs().max()), rel=1e-4)


def test_too_few_steps_are_told() -> None:
    scale = torch.linspace(0.999, 1.0, 500, dtype=torch.float64)[None]
    v = torch.ones(1, 500, dtype=torch.float64)
    values, number, settled = curvature.norms(lambda rows, v: scale[rows] * v, v, 3, 1e-12)
    assert (number, settled) == (3, False)
    assert float(values[0]) <= 1.0
