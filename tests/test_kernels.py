"""Our Triton kernels against PyTorch: on a GPU, or on the CPU by Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from offbeat import keys
from offbeat.numerics.draws import keep, limit
from offbeat.numerics.fast.entropy import IGNORED
from offbeat.numerics.fast.places import Places
from offbeat.numerics.samples import ROUNDS, Samples

pytest.importorskip("triton", reason="Triton is not installed")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("no CUDA device, and TRITON_INTERPRET is not 1", allow_module_level=True)

from offbeat.numerics.fast import convolution_kernels, kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def exact() -> Any:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def normal(*shape: int, slope: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(DEVICE).requires_grad_(slope)


def close(ours: Tensor, theirs: Tensor) -> None:
    assert torch.isfinite(ours).all()
    assert (ours - theirs).norm() <= 1e-5 * theirs.norm()


@pytest.mark.parametrize(
    ("x", "w", "step", "padding"),
    [
        ((3, 2, 1, 12, 11), (8, 1, 5, 5), 1, 0),
        ((2, 3, 5, 9, 8), (17, 5, 3, 3), 2, 1),
        ((2, 2, 32, 7, 7), (20, 32, 3, 3), 1, 1),
        ((2, 2, 3, 24, 24), (16, 3, 3, 3), 1, 0),  # long enough that the sum over pixels is made in parts
        ((1, 2, 20, 6, 5), (70, 20, 2, 3), 1, 0),
    ],
)
@pytest.mark.parametrize("places", [False, True])
def test_convolutions(x: Any, w: Any, step: int, padding: int, places: bool) -> None:
    images, weights, bias = normal(*x), normal(x[0], *w), normal(x[0], w[0])
    step2, padding2 = (step, step), (padding, padding)
    each = [functional.conv2d(images[i], weights[i], bias[i], step, padding) for i in range(x[0])]
    want = torch.stack(each)
    held = None
    if places:  # gradients go where they belong, into rows that are longer
        rows = torch.full((x[0], weights[0].numel() + w[0] + 3), float("nan"), device=DEVICE)
        at = rows[:, : weights[0].numel()].unflatten(1, w), rows[:, weights[0].numel() : -3]
        held = Places([weights, bias], at)
    found = convolution_kernels.Convolve.apply(images, weights, bias, step2, padding2, held)
    close(found, want)
    g = torch.randn_like(want)
    theirs = torch.autograd.grad(want, (images, weights, bias), g)
    ours = torch.autograd.grad(found, (images, weights, bias), g, allow_unused=True)
    close(ours[0], theirs[0])
    for made, wanted in zip(at if places else ours[1:], theirs[1:], strict=True):
        close(made, wanted)


@pytest.mark.parametrize("layout", ["channels last", "channels first"])
def test_pooling(layout: str) -> None:
    x = normal(4, 3, 9, 8, slope=False).mul(2).round()  # with ties
    x[0, 0, 0, 0] = float("nan")
    x = (x.contiguous(memory_format=torch.channels_last) if layout == "channels last" else x).requires_grad_()
    want, found = functional.max_pool2d(x, (2, 3)), kernels.Pool.apply(x, (2, 3))
    assert torch.equal(want.nan_to_num(99), found.nan_to_num(99))
    g = torch.randn_like(want)
    assert torch.equal(torch.autograd.grad(found, x, g)[0], torch.autograd.grad(want, x, g)[0])


def test_cross_entropy() -> None:
    z, y = normal(5, 10, 7), torch.arange(50, device=DEVICE).reshape(5, 10) % 7
    y[1, :4] = IGNORED
    want = torch.stack([functional.cross_entropy(z[i], y[i]) for i in range(5)])
    found = kernels.Entropy.apply(z, y, IGNORED)
    close(found, want)
    g = torch.randn_like(want)
    close(torch.autograd.grad(found, z, g)[0], torch.autograd.grad(want, z, g)[0])


@pytest.mark.parametrize("sampling", ["replacement", "shuffle"])
def test_draws_are_the_same_everywhere(sampling: Any) -> None:
    shards = [np.arange(100 * i, 100 * i + size) for i, size in enumerate((7, 50, 1, 33))]
    held = Samples.of(torch.zeros(400, 1), torch.zeros(400), shards, 10, sampling).to(DEVICE)
    client = torch.tensor([1, 3, 0, 2], device=DEVICE)
    key = keys.key(5, "batch", client, client)
    rounds = ROUNDS if sampling == "shuffle" else 0
    begin = torch.tensor(3, device=DEVICE)
    rows, noise = kernels.draw(held.order, held.first, held.size, client, key, begin, 9, 10, rounds)
    assert torch.equal(rows.transpose(0, 1), held.rows(client, key, 3, 9))
    steps = torch.arange(3, 12, device=DEVICE)
    assert torch.equal(noise.T, keys.fold(keys.fold(key, -1)[:, None], steps[None]))


def test_dropout() -> None:
    x = normal(4, 3, 5, 6, 2).permute(0, 1, 4, 2, 3)
    key = keys.key(7, "noise", torch.arange(4, device=DEVICE))
    found = kernels.Dropout.apply(x, key, limit(0.3), 0.3)
    factors = keep(x, key, 0.3)
    close(found, x * factors)
    close(torch.autograd.grad(found.sum(), x)[0], factors)


def test_steps() -> None:
    y, g, lr = (normal(*shape, slope=False) for shape in ((3, 5000), (3, 5000), (3,)))
    close(kernels.descend(y, lr, g), y - lr[:, None] * g)


@pytest.mark.parametrize(("t", "s", "d"), [(17, 17, 8), (64, 64, 32), (70, 20, 16), (9, 100, 33)])
@pytest.mark.parametrize("causal", [False, True])
def test_attention(t: int, s: int, d: int, causal: bool) -> None:
    from offbeat.numerics.fast.attention_kernels import Attend

    qkv = normal(2, 3, t, 2, d), normal(2, 3, s, 2, d), normal(2, 3, s, 2, d)
    q, k, v = (each.transpose(2, 3) for each in qkv)  # heads beside each other
    want = functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.3)
    alike(Attend.apply(q, k, v, causal, 0.3), want, qkv)


@pytest.mark.parametrize(("channels", "groups"), [(6, 2), (12, 3), (24, 8), (16, 16), (64, 2), (10, 5)])
@pytest.mark.parametrize("layout", ["channels last", "channels first"])
def test_group_norm(channels: int, groups: int, layout: str) -> None:
    from offbeat.numerics.fast.norm_kernels import GroupNorm

    x, weight, bias = normal(2, 3, channels, 5, 7), normal(2, channels), normal(2, channels)
    seen = x.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3) if layout == "channels last" else x
    want = torch.stack([functional.group_norm(x[i], groups, weight[i], bias[i]) for i in range(2)])
    alike(GroupNorm.apply(seen, groups, weight, bias, 1e-5, None), want, (x, weight, bias))


def test_layer_norm() -> None:
    from offbeat.numerics.fast.norm_kernels import LayerNorm

    x, weight, bias = normal(2, 35, 12), normal(2, 12), normal(2, 12)
    want = torch.stack([functional.layer_norm(x[i], (12,), weight[i], bias[i]) for i in range(2)])
    alike(LayerNorm.apply(x, weight, bias, 1e-5, None), want, (x, weight, bias))


@pytest.mark.parametrize(("channels", "kernel", "step", "padding"), [(5, 3, 1, 1), (40, 3, 2, 1), (8, 2, 1, 0)])
def test_depthwise(channels: int, kernel: int, step: int, padding: int) -> None:
    from offbeat.numerics.fast.depthwise_kernels import Depthwise

    x, weight, bias = normal(2, 2, channels, 19, 17), normal(2, channels, 1, kernel, kernel), normal(2, channels)
    each = [functional.conv2d(x[i], weight[i], bias[i], step, padding, groups=channels) for i in range(2)]
    found = Depthwise.apply(x, weight, bias, (step, step), (padding, padding), None)
    alike(found, torch.stack(each), (x, weight, bias))


def alike(found: Tensor, want: Tensor, of: tuple[Tensor, ...]) -> None:
    """Values and slopes."""
    close(found, want)
    g = torch.randn_like(want)
    for ours, theirs in zip(torch.autograd.grad(found, of, g), torch.autograd.grad(want, of, g), strict=True):
        close(ours, theirs)
