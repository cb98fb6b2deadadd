"""Models of sequences and of the bench: their sizes, and the law that a wave of them is the twin."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from offbeat.errors import ConfigError
from offbeat.numerics import local
from offbeat.numerics.reference_loop import reference
from offbeat.numerics.samples import Samples
from offbeat.numerics.vector import FlatModel
from offbeat.numerics.wave import Problem, wave
from offbeat.records import Begun
from offbeat.tasks.losses import sequence_cross_entropy
from offbeat.tasks.models import build, parameters

TOKENS = ("char-lstm", "gpt", "gru", "recommender", "transformer-10m")
ALONE = ("char-lstm", "gru")  # they may run client after client
SMALL: dict[str, tuple[tuple[int, ...], int, dict[str, int]]] = {  # shape of a sample, outputs, options
    "char-lstm": ((5,), 7, {"width": 3, "hidden": 4}),
    "gpt": ((5,), 7, {"width": 8, "layers": 2, "heads": 2}),
    "gru": ((5,), 7, {"width": 3, "hidden": 4, "layers": 2}),
    "har-conv1d": ((20,), 3, {}),
    "mobilenet": ((2, 8, 8), 3, {}),
    "recommender": ((4,), 9, {"width": 3, "hidden": 5}),
    "resnet18-gn": ((2, 16, 16), 3, {"width": 4}),
    "transformer-10m": ((6,), 5, {"width": 6, "layers": 1, "heads": 3}),
    "vit": ((3, 8, 8), 3, {"width": 6, "layers": 2, "heads": 3}),
}


@pytest.mark.parametrize(
    ("name", "shape", "outputs", "options", "count"),
    [
        ("char-lstm", (80,), 80, {}, 80 * 8 + 4 * 256 * (8 + 256 + 2) + 4 * 256 * (512 + 2) + 257 * 80),
        ("gru", (40,), 80, {}, 80 * 32 + 3 * 128 * (32 + 128 + 2) + 129 * 80),
        ("gpt", (64,), 65, {}, 2 * 65 * 128 + 64 * 128 + 4 * (12 * 128**2 + 13 * 128) + 256),
        ("transformer-10m", (256,), 65, {}, 2 * 65 * 384 + 256 * 384 + 6 * (12 * 384**2 + 4 * 384) + 768),
        ("vit", (3, 32, 32), 10, {}, 49 * 96 + 64 * 96 + 6 * (12 * 96**2 + 13 * 96) + 192 + 970),
        ("har-conv1d", (561,), 6, {}, 32 * 6 + 32 * 161 + 64 * (32 * 137 + 1) + 6 * 65),
        ("recommender", (20,), 2000, {}, 2000 * 32 + 64 * 33 + 2000 * 65),
        ("mobilenet", (3, 32, 32), 10, {}, 136_778),
        ("resnet18-gn", (3, 32, 32), 10, {}, 11_173_962),
        ("resnet18-gn", (3, 32, 32), 10, {"width": 16}, 701_466),
    ],
)
def test_parameters(name: str, shape: tuple[int, ...], outputs: int, options: dict[str, int], count: int) -> None:
    assert parameters(name, shape, outputs, options) == count


def example(name: str, rows: int = 12) -> tuple[nn.Module, Any, Tensor, Tensor]:
    """A small model, its loss, and samples."""
    shape, outputs, options = SMALL[name]
    model = build(name, shape, outputs, 3, **options)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, *shape, generator=generator, dtype=torch.float64)
    if name in TOKENS:
        x = torch.randint(outputs, (rows, *shape), generator=generator)
    places = model.double()(x).shape[:-1]
    y = torch.randint(outputs, places, generator=generator)
    return model, sequence_cross_entropy if len(places) > 1 else functional.cross_entropy, x, y


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_wave_is_the_twin_and_plain_pytorch(name: str) -> None:
    model, loss, x, y = example(name)
    shards = [np.arange(i, 12, 3) for i in range(3)]
    problem = Problem(FlatModel(model, loss, torch.float64), Samples.of(x, y, shards, 2, "in-order"), local.sgd(0.1), 5)
    jobs = [Begun(0, 0, 0, 2), Begun(1, 0, 0, 2), Begun(2, 0, 0, 1)]
    start = {"model": problem.model.initial().repeat(3, 1)}
    one = reference(problem, start, jobs)
    for _ in range(2):
        again = reference(problem, start, jobs)
        assert torch.equal(again.updates["delta"], one.updates["delta"])
    try:
        many = wave(problem, start, jobs)
    except RuntimeError:
        assert name in ALONE
        many = one
    assert float((many.updates["delta"] - one.updates["delta"]).norm() / one.updates["delta"].norm()) < 1e-10
    plain = copy.deepcopy(model).train()
    optimiser = torch.optim.SGD(plain.parameters(), 0.1)
    for rows in (shards[0][:2], shards[0][2:]):
        optimiser.zero_grad()
        loss(plain(x[rows]), y[rows]).backward()
        optimiser.step()
    moved = start["model"][0] - nn.utils.parameters_to_vector(plain.parameters())
    torch.testing.assert_close(one.updates["delta"][0], moved.detach(), rtol=1e-10, atol=1e-12)


def test_attention_sees_no_later_token() -> None:
    model, _, x, _ = example("gpt")
    changed = x.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 7
    before, after = model(x), model(changed)
    assert torch.equal(before[:, :-1], after[:, :-1])
    assert not torch.equal(before[:, -1], after[:, -1])


@pytest.mark.parametrize(
    ("name", "shape", "options", "sentence"),
    [
        ("gpt", (3, 4), {}, "'gpt' needs lines of at least 1 numbers, the data has samples of shape 3x4"),
        ("har-conv1d", (9,), {}, "'har-conv1d' needs lines of at least 16"),
        ("gpt", (4,), {"width": 9}, "width = 9 is no multiple of heads = 4"),
        ("char-lstm", (4,), {"hidden": 0}, "hidden is 0; give a whole number of at least 1"),
        ("vit", (3, 10, 8), {}, "images of 10x8 pixels are no whole patches of 4"),
        ("resnet18-gn", (3, 8, 8), {"width": 0}, "width is 0"),
    ],
)
def test_sentences(name: str, shape: tuple[int, ...], options: dict[str, int], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        build(name, shape, 5, 0, **options)
