"""A zoo of small modules, one line each: the laws of `test_zoo.py` hold for every one of them, at any width.

Which of them `vmap` cannot batch is `test_zoo.ALONE`; those run one client after another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, rnn
from torch.utils.checkpoint import checkpoint

CLASSES = 4


class Animal(NamedTuple):
    """A module, the shape of one input, and what its outputs are compared with."""

    module: nn.Module
    shape: tuple[int, ...]
    loss: str = "cross-entropy"
    tokens: int = 0  # inputs are whole numbers below it; 0: they are real numbers
    head: bool = True  # a last layer makes `CLASSES` scores of whatever comes out


class Own(nn.Module):
    """Parameters of these shapes, and a forward of its own: `run(module, x)`."""

    def __init__(self, run: Callable[[Any, Tensor], Any], *parts: nn.Module, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.run = run
        self.parts = nn.ModuleList(parts)
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape) / max(shape[-1:] or (1,)) ** 0.5))

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


class Headed(nn.Module):
    def __init__(self, body: nn.Module, features: int) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(features, CLASSES)

    def forward(self, x: Tensor) -> Any:
        out = self.body(x)
        return self.head((out[0] if isinstance(out, tuple) else out).flatten(1))


class Reversed(torch.autograd.Function):
    """The same memory, another gradient."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return -3.0 * g

    generate_vmap_rule = True


def seq(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers)


def tied(w: int) -> nn.Module:
    one, two = nn.Linear(w, w), nn.Linear(w, w)
    two.weight = one.weight
    return seq(one, nn.Tanh(), two)


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def partly_frozen(w: int) -> nn.Module:
    layer = nn.Linear(w, w)
    layer.weight.requires_grad_(False)
    return seq(nn.Linear(w, w), layer, nn.Tanh(), nn.Linear(w, w))


def resting(module: nn.Module, part: nn.Module) -> nn.Module:
    part.eval()
    return module


def buffered(module: nn.Module, run: Callable[[Any, Tensor], Any], buffer: Tensor) -> nn.Module:
    own = Own(run, module)
    own.register_buffer("buffer", buffer)
    return own


def filled(m: Any, x: Tensor) -> Tensor:
    out = torch.zeros(len(x), 3, x.shape[-1], dtype=x.dtype, device=x.device)
    for t in range(3):
        out[:, t] = m.parts[0](x[:, t]).tanh()
    return out


def complex_linear(m: Any, x: Tensor) -> Tensor:
    w, z = torch.view_as_complex(m.w), torch.complex(x, x.flip(-1))
    return torch.view_as_real(F.linear(z, w)).flatten(1)


def hook(x: Tensor) -> Tensor:
    """The gradient that comes to it is doubled."""
    x.register_hook(lambda g: 2 * g)
    return x


def attend(m: Any, x: Tensor, **options: Any) -> Tensor:
    q, k, v = (F.linear(x, part).unflatten(-1, (2, -1)).transpose(1, 2) for part in m.w.chunk(3))
    return F.scaled_dot_product_attention(q, k, v, **options)


def packed(m: Any, x: Tensor) -> Tensor:
    """Sequences of one, two and three places."""
    lengths = torch.arange(len(x)) % 3 + 1
    out, _ = m.parts[0](rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
    return rnn.pad_packed_sequence(out, batch_first=True, total_length=3)[0]


def some(n: int, device: torch.device) -> Tensor:
    """What each of n places may look at: those before it and itself; the second nothing at all."""
    place = torch.arange(n, device=device)
    return (place[None] <= place[:, None]) & (place[:, None] != 1)


def smooth(m: Any, x: Tensor) -> Tensor:
    return torch.tanh(m.parts[0](x))


def decoder(w: int, p: float) -> nn.Module:
    return Own(lambda m, x: m.parts[0](x, x.flip(1)), nn.TransformerDecoderLayer(w, 2, 2 * w, p, batch_first=True))


LAYERS: dict[str, Callable[[int], Animal]] = {
    # dense layers, and every way to use a weight
    "linear": lambda w: Animal(nn.Linear(w, w), (w,)),
    "linear without bias": lambda w: Animal(nn.Linear(w, w, bias=False), (w,)),
    "mlp": lambda w: Animal(seq(nn.Linear(w, 2 * w), nn.ReLU(), nn.Linear(2 * w, w), nn.Tanh()), (w,)),
    "sequence": lambda w: Animal(seq(nn.Linear(w, w), nn.Tanh(), nn.Linear(w, 2)), (3, w)),
    "two axes": lambda w: Animal(nn.Linear(w, w), (2, 3, w)),
    "rows": lambda w: Animal(Own(lambda m, x: torch.stack([m.parts[0](row) for row in x]), nn.Linear(w, w)), (w,)),
    "bilinear": lambda w: Animal(Own(lambda m, x: m.parts[0](x, x.flip(1)), nn.Bilinear(w, w, 3)), (w,)),
    "identity": lambda w: Animal(nn.Identity(), (w,)),
    "transposed": lambda w: Animal(Own(lambda m, x: F.linear(x, m.w.t()), w=(w, w)), (w,)),
    "transposed and straight": lambda w: Animal(Own(lambda m, x: F.linear(F.linear(x, m.w.t()), m.w), w=(w, w)), (w,)),
    "straight and transposed": lambda w: Animal(Own(lambda m, x: F.linear(F.linear(x, m.w), m.w.t()), w=(w, w)), (w,)),
    "product": lambda w: Animal(Own(lambda m, x: x @ m.w, w=(w, w)), (w,)),
    "product and linear": lambda w: Animal(Own(lambda m, x: F.linear(x @ m.w, m.w), w=(w, w)), (w,)),
    "einsum": lambda w: Animal(Own(lambda m, x: torch.einsum("bi,oi->bo", x, m.w), w=(w, w)), (w,)),
    "twice": lambda w: Animal(Own(lambda m, x: m.parts[0](torch.tanh(m.parts[0](x))), nn.Linear(w, w)), (w,)),
    "tied": lambda w: Animal(tied(w), (w,)),
    "sliced": lambda w: Animal(Own(lambda m, x: F.linear(x, m.w[:w], m.b[:w]), w=(2 * w, w), b=(2 * w,)), (w,)),
    "sliced and whole": lambda w: Animal(Own(lambda m, x: F.linear(x, m.w[: w // 2]) + F.linear(x, m.w)[:, : w // 2],
                                             w=(w, w)), (w,)),
    "first slice": lambda w: Animal(Own(lambda m, x: F.linear(x, m.w[0]) + F.linear(x, m.w[1]), w=(2, w, w)), (w,)),
    "chunks": lambda w: Animal(Own(lambda m, x: sum(F.linear(x, p) for p in m.w.chunk(2)), w=(2 * w, w)), (w,)),
    "expanded": lambda w: Animal(Own(lambda m, x: F.linear(x, m.w.expand(w, w), m.b.expand(w)), w=(1, w), b=(1,)), (w,)),
    "flipped": lambda w: Animal(Own(lambda m, x: F.linear(x, m.w.flip(0)), w=(w, w)), (w,)),
    "viewed": lambda w: Animal(Own(lambda m, x: F.linear(x, m.w.view(w, w)), w=(w * w,)), (w,)),
    "same view": lambda w: Animal(Own(lambda m, x: F.linear(x, m.w.view_as(m.w)), w=(w, w)), (w,)),
    "gradient reversed": lambda w: Animal(Own(lambda m, x: F.linear(x, Reversed.apply(m.w)), w=(w, w)), (w,)),
    "detached": lambda w: Animal(Own(lambda m, x: F.linear(x, m.w.detach()) * m.b, w=(w, w), b=(w,)), (w,)),
    "detached and straight": lambda w: Animal(Own(lambda m, x: F.linear(F.linear(x, m.w), m.w.detach()), w=(w, w)), (w,)),
    "weight as bias": lambda w: Animal(Own(lambda m, x: F.linear(x, m.w, m.w[0]), w=(w, w)), (w,)),
    "bias twice": lambda w: Animal(Own(lambda m, x: F.linear(x, m.w, m.b) * m.b, w=(w, w), b=(w,)), (w,)),
    "one output": lambda w: Animal(seq(nn.Linear(w, 1), nn.Linear(1, 1), nn.Linear(1, w)), (w,)),
    "vector weight": lambda w: Animal(Own(lambda m, x: F.linear(x, m.w), w=(w,)), (3, w)),
    "one bias": lambda w: Animal(Own(lambda m, x: F.linear(x, m.w, m.b), w=(w, w), b=(1,)), (w,)),
    "number": lambda w: Animal(Own(lambda m, x: x * m.s, s=()), (w,)),
    "scaled weight": lambda w: Animal(Own(lambda m, x: F.linear(x, m.w * 2), w=(w, w)), (w,)),
    "complex, odd": lambda w: Animal(Own(complex_linear, w=(w, w, 2), a=(1,)), (w,)),
    "rows filled in": lambda w: Animal(Own(filled, nn.Linear(w, w)), (3, w)),
    "rows added in": lambda w: Animal(Own(lambda m, x: torch.zeros(len(x), w, dtype=x.dtype, device=x.device).index_add_(
        1, torch.arange(w, device=x.device), m.parts[0](x)), nn.Linear(w, w)), (w,)),
    "dropout of rows": lambda w: Animal(Own(lambda m, x: torch.vmap(lambda row: F.dropout(m.parts[0](row), 0.4),
                                            randomness="different")(x), nn.Linear(w, w)), (w,)),
    "embedding, sparse function": lambda w: Animal(Own(lambda m, x: F.embedding(x, m.t, sparse=True), t=(9, w)), (3,), tokens=9),
    "complex": lambda w: Animal(Own(complex_linear, w=(w, w, 2)), (w,)),
    "unused": lambda w: Animal(Own(lambda m, x: m.parts[0](x), nn.Linear(w, w), nn.Linear(w, w)), (w,)),
    "output not used": lambda w: Animal(Own(lambda m, x: m.parts[0](x) + 0 * len(m.parts[1](x)), nn.Linear(w, w),
                                            nn.Linear(w, w)), (w,)),
    "frozen": lambda w: Animal(seq(nn.Linear(w, w), frozen(nn.Linear(w, w)), nn.Tanh(), nn.Linear(w, w)), (w,)),
    "frozen first": lambda w: Animal(seq(frozen(nn.Linear(w, w)), nn.Tanh(), nn.Linear(w, w)), (w,)),
    "frozen weight": lambda w: Animal(partly_frozen(w), (w,)),
    "buffer": lambda w: Animal(buffered(nn.Linear(w, w), lambda m, x: m.parts[0](x * m.buffer), torch.rand(w)), (w,)),
    "linear of a buffer": lambda w: Animal(buffered(nn.Linear(w, w), lambda m, x: x + m.parts[0](m.buffer),
                                                    torch.rand(1, w)), (w,)),
    "sparse buffer": lambda w: Animal(buffered(nn.Linear(w, w), lambda m, x: m.parts[0](
        torch.sparse.mm(m.buffer, x.mT).mT), torch.eye(w).to_sparse()), (w,)),
    "hook on an activation": lambda w: Animal(Own(lambda m, x: hook(m.parts[0](x)), nn.Linear(w, w)), (w,)),
    "checkpoint": lambda w: Animal(Own(lambda m, x: checkpoint(m.parts[0], x, use_reentrant=False), nn.Linear(w, w)),
                                   (w,)),
    "checkpoint of two": lambda w: Animal(Own(lambda m, x: checkpoint(lambda t: m.parts[1](torch.tanh(m.parts[0](t))), x,
                                              use_reentrant=False), nn.Linear(w, w), nn.Linear(w, w)), (w,)),
    "layer in two places": lambda w: Animal((lambda one: seq(one, nn.Tanh(), one))(nn.Linear(w, w)), (w,)),
    "gradient inside": lambda w: Animal(Own(lambda m, x: smooth(m, x) + torch.func.grad(lambda t: smooth(m, t).square(
        ).sum())(x), nn.Linear(w, w)), (w,)),
    "weights mapped": lambda w: Animal(Own(lambda m, x: torch.vmap(lambda v: F.linear(x, v))(m.w).sum(0), w=(2, w, w)),
                                       (w,)),
    # keyword calls
    "linear by names": lambda w: Animal(Own(lambda m, x: F.linear(input=x, weight=m.w, bias=m.b), w=(w, w), b=(w,)), (w,)),
    "linear, weight by name": lambda w: Animal(Own(lambda m, x: F.linear(x, weight=m.w), w=(w, w)), (w,)),
    "conv2d by names": lambda w: Animal(Own(lambda m, x: F.conv2d(input=x, weight=m.w, bias=m.b, stride=(1,), padding=1),
                                            w=(w, 2, 3, 3), b=(w,)), (2, 5, 5)),
    "torch.conv2d": lambda w: Animal(Own(lambda m, x: torch.conv2d(x, m.w, stride=2), w=(w, 2, 3, 3)), (2, 6, 5)),
    "group norm by names": lambda w: Animal(Own(lambda m, x: F.group_norm(input=x, num_groups=2, weight=m.g, bias=m.b),
                                                g=(w,), b=(w,)), (w, 3)),
    "torch.group_norm": lambda w: Animal(Own(lambda m, x: torch.group_norm(x, 2, m.g), g=(w,)), (w, 3)),
    "max pool by names": lambda w: Animal(seq(nn.Conv2d(2, w, 1), Own(lambda m, x: F.max_pool2d(
        input=x, kernel_size=2, stride=2))), (2, 6, 4)),
    "dropout by names": lambda w: Animal(Own(lambda m, x: F.dropout(input=m.parts[0](x), p=0.3), nn.Linear(w, w)), (w,)),
    # convolutions
    "conv1d": lambda w: Animal(nn.Conv1d(2, w, 3, padding=1), (2, 7)),
    "conv2d": lambda w: Animal(nn.Conv2d(w, w, 3), (w, 5, 6)),
    "conv2d 1x1": lambda w: Animal(nn.Conv2d(w, w, 1, bias=False), (w, 3, 3)),
    "conv2d strided": lambda w: Animal(nn.Conv2d(2, w, (3, 2), (2, 1), (1, 2)), (2, 8, 7)),
    "conv2d dilated": lambda w: Animal(nn.Conv2d(2, w, 3, dilation=2), (2, 8, 7)),
    "conv2d same": lambda w: Animal(nn.Conv2d(2, w, 4, padding="same"), (2, 5, 5)),
    "conv2d circular": lambda w: Animal(nn.Conv2d(2, w, 3, padding=1, padding_mode="circular"), (2, 5, 5)),
    "conv2d reflected": lambda w: Animal(nn.Conv2d(2, w, 3, padding=1, padding_mode="reflect"), (2, 5, 5)),
    "conv2d grouped": lambda w: Animal(nn.Conv2d(w, 2 * w, 3, groups=2), (w, 5, 5)),
    "conv2d depthwise": lambda w: Animal(seq(nn.Conv2d(w, w, 3, groups=w), nn.Conv2d(w, w, 1)), (w, 5, 5)),
    "conv2d twice": lambda w: Animal(Own(lambda m, x: m.parts[0](torch.tanh(m.parts[0](x))), nn.Conv2d(w, w, 3,
                                         padding=1)), (w, 4, 4)),
    "conv2d turned": lambda w: Animal(Own(lambda m, x: F.conv2d(x, m.w.transpose(0, 1)), w=(w, w, 3, 3)), (w, 5, 5)),
    "conv2d mirrored": lambda w: Animal(Own(lambda m, x: F.conv2d(x, m.w.transpose(2, 3)), w=(w, w, 3, 3)), (w, 5, 5)),
    "conv2d frozen": lambda w: Animal(seq(frozen(nn.Conv2d(2, w, 3)), nn.Tanh(), nn.Conv2d(w, w, 2)), (2, 6, 6)),
    "conv2d in place": lambda w: Animal(seq(nn.Conv2d(2, w, 3), nn.ReLU(inplace=True), nn.Conv2d(w, w, 3)), (2, 6, 6)),
    "pool in place": lambda w: Animal(seq(nn.Conv2d(2, w, 3), nn.MaxPool2d(2), nn.ReLU(inplace=True)), (2, 8, 8)),
    "depthwise in place": lambda w: Animal(seq(nn.Conv2d(w, w, 3, groups=w), nn.ReLU6(inplace=True)), (w, 6, 6)),
    "conv3d": lambda w: Animal(nn.Conv3d(2, w, 2, padding=1), (2, 3, 4, 3)),
    "conv transpose 1d": lambda w: Animal(nn.ConvTranspose1d(2, w, 3, 2), (2, 4)),
    "conv transpose 2d": lambda w: Animal(nn.ConvTranspose2d(w, w, 3, 2, output_padding=1), (w, 3, 3)),
    "conv transpose 3d": lambda w: Animal(nn.ConvTranspose3d(2, w, 2), (2, 2, 3, 2)),
    # normalisation
    "group norm": lambda w: Animal(seq(nn.Conv2d(2, w, 3), nn.GroupNorm(2, w)), (2, 5, 5)),
    "group norm of vectors": lambda w: Animal(seq(nn.Linear(w, w), nn.GroupNorm(2, w)), (w,)),
    "layer norm": lambda w: Animal(seq(nn.Linear(w, w), nn.LayerNorm(w)), (w,)),
    "layer norm of images": lambda w: Animal(nn.LayerNorm((2, 3, 3), bias=False), (2, 3, 3)),
    "rms norm": lambda w: Animal(seq(nn.Linear(w, w), nn.RMSNorm(w)), (w,)),
    "instance norm": lambda w: Animal(seq(nn.Conv2d(2, w, 2), nn.InstanceNorm2d(w, affine=True)), (2, 5, 5)),
    "instance norm 1d": lambda w: Animal(seq(nn.Conv1d(2, w, 2), nn.InstanceNorm1d(w)), (2, 5)),
    "local response": lambda w: Animal(seq(nn.Conv2d(2, w, 2), nn.LocalResponseNorm(2)), (2, 4, 4)),
    "batch norm of the batch": lambda w: Animal(seq(nn.Linear(w, w), nn.BatchNorm1d(w, track_running_stats=False)), (w,)),
    "batch norm at rest": lambda w: Animal((lambda b: resting(seq(nn.Linear(w, w), b), b))(nn.BatchNorm1d(w)), (w,)),
    "batch norm of images": lambda w: Animal(seq(nn.Conv2d(2, w, 2), nn.BatchNorm2d(w, track_running_stats=False)),
                                             (2, 4, 4)),
    "batch norm of images at rest": lambda w: Animal(
        (lambda b: resting(seq(nn.Conv2d(2, w, 2), b), b))(nn.BatchNorm2d(w)), (2, 4, 4)),
    "cosine similarity": lambda w: Animal(Own(lambda m, x: F.cosine_similarity(m.parts[0](x)[:, None], m.w[None], -1),
                                              nn.Linear(w, w), w=(5, w)), (w,)),
    "pairwise distance": lambda w: Animal(Own(lambda m, x: torch.cdist(m.parts[0](x), m.w), nn.Linear(w, w), w=(5, w)),
                                          (w,)),
    "normalised weight": lambda w: Animal(Own(lambda m, x: F.linear(x, F.normalize(m.w)), w=(w, w)), (w,)),
    "weight norm": lambda w: Animal(parametrizations.weight_norm(nn.Linear(w, w)), (w,)),
    "orthogonal": lambda w: Animal(parametrizations.orthogonal(nn.Linear(w, w), orthogonal_map="cayley"), (w,)),
    # tokens, recurrence, attention
    "embedding": lambda w: Animal(nn.Embedding(9, w), (3,), tokens=9),
    "embedding with padding": lambda w: Animal(nn.Embedding(9, w, padding_idx=0), (3,), tokens=9),
    "embedding with padding last": lambda w: Animal(nn.Embedding(9, w, padding_idx=-1), (3,), tokens=9),
    "embedding by frequency": lambda w: Animal(nn.Embedding(9, w, scale_grad_by_freq=True), (3,), tokens=9),
    "embedding, sparse": lambda w: Animal(nn.Embedding(9, w, sparse=True), (3,), tokens=9),
    "embedding, tied": lambda w: Animal(Own(lambda m, x: F.linear(F.embedding(x, m.w), m.w), w=(w, w)), (3,), tokens=w),
    "embedding bag": lambda w: Animal(nn.EmbeddingBag(9, w, mode="sum"), (3,), tokens=9),
    "rnn": lambda w: Animal(nn.RNN(w, w, batch_first=True), (3, w)),
    "lstm": lambda w: Animal(nn.LSTM(w, w, 2, batch_first=True, bidirectional=True), (3, w)),
    "lstm projected": lambda w: Animal(nn.LSTM(w, w, proj_size=2, batch_first=True), (3, w)),
    "lstm with dropout": lambda w: Animal(nn.LSTM(w, w, 2, dropout=0.5, batch_first=True), (3, w)),
    "lstm, last state": lambda w: Animal(Own(lambda m, x: m.parts[0](x)[1][0][-1], nn.LSTM(
        w, w, 2, bias=False, batch_first=True)), (3, w)),
    "lstm, own start": lambda w: Animal(Own(lambda m, x: m.parts[0](x, (m.h.expand(1, len(x), w).contiguous(),
                                            m.c.expand(1, len(x), w).contiguous()))[0], nn.LSTM(w, w, batch_first=True),
                                            h=(1, 1, w), c=(1, 1, w)), (3, w)),
    "lstm, packed": lambda w: Animal(Own(packed, nn.LSTM(w, w, 2, batch_first=True)), (3, w)),
    "gru, packed": lambda w: Animal(Own(packed, nn.GRU(w, w, batch_first=True, bidirectional=True)), (3, w)),
    "gru": lambda w: Animal(nn.GRU(w, w, 2, batch_first=True), (3, w)),
    "gru both ways": lambda w: Animal(nn.GRU(w, w, 2, dropout=0.3, batch_first=True, bidirectional=True), (3, w)),
    "gru without bias": lambda w: Animal(nn.GRU(w, w, bias=False), (3, w)),
    "gru, frozen": lambda w: Animal(seq(nn.Linear(w, w), Own(lambda m, x: m.parts[0](x)[0], frozen(nn.GRU(w, w)))), (3, w)),
    "rnn relu both ways": lambda w: Animal(nn.RNN(w, w, 2, "relu", batch_first=True, bidirectional=True), (3, w)),
    "rnn cells": lambda w: Animal(Own(lambda m, x: m.parts[1](x[:, 1], m.parts[0](x[:, 0])), nn.RNNCell(w, w),
                                      nn.GRUCell(w, w)), (3, w)),
    "lstm cells": lambda w: Animal(Own(lambda m, x: m.parts[0](x[:, 1], m.parts[0](x[:, 0]))[0], nn.LSTMCell(w, w)),
                                   (3, w)),
    "rnn cell": lambda w: Animal(nn.RNNCell(w, w), (w,)),
    "lstm cell": lambda w: Animal(nn.LSTMCell(w, w), (w,)),
    "gru cell": lambda w: Animal(nn.GRUCell(w, w), (w,)),
    "attention": lambda w: Animal(Own(lambda m, x: m.parts[0](x, x, x)[0], nn.MultiheadAttention(w, 2, batch_first=True)),
                                  (3, w)),
    "attention, weights kept": lambda w: Animal(Own(lambda m, x: m.parts[0](x, x, x, need_weights=False)[0],
                                                    nn.MultiheadAttention(w, 2, batch_first=True)), (3, w)),
    "scaled attention": lambda w: Animal(Own(lambda m, x: attend(m, x, is_causal=True), w=(3 * w, w)), (3, w)),
    "attention with a mask": lambda w: Animal(Own(lambda m, x: attend(m, x, attn_mask=some(3, x.device)), w=(3 * w, w)),
                                              (3, w)),
    "attention with learned shifts": lambda w: Animal(Own(lambda m, x: attend(m, x, attn_mask=m.s), w=(3 * w, w), s=(3, 3)),
                                                      (3, w)),
    "attention with masks of samples": lambda w: Animal(Own(lambda m, x: attend(m, x, attn_mask=(
        x[..., 0] < 9)[:, None, None].expand(len(x), 1, 3, 3)), w=(3 * w, w)), (3, w)),
    "attention of one head": lambda w: Animal(Own(lambda m, x: F.scaled_dot_product_attention(
        F.linear(x, m.w), x, x, scale=0.3), w=(w, w)), (3, w)),
    "attention by groups": lambda w: Animal(Own(lambda m, x: F.scaled_dot_product_attention(F.linear(x, m.w).unflatten(
        -1, (2, -1)).transpose(1, 2), *(F.linear(x, m.v)[:, None],) * 2, enable_gqa=True), w=(w, w), v=(w // 2, w)), (3, w)),
    "embedding bag, means": lambda w: Animal(nn.EmbeddingBag(9, w), (3,), tokens=9),
    "embedding bag, maxima": lambda w: Animal(nn.EmbeddingBag(9, w, mode="max"), (3,), tokens=9),
    "embedding bag, maxima of equals": lambda w: Animal(Own(lambda m, x: F.embedding_bag(
        x, m.w - m.w.detach(), mode="max"), w=(9, w)), (3,), tokens=9),
    "embedding bag with padding": lambda w: Animal(nn.EmbeddingBag(9, w, mode="sum", padding_idx=2), (3,), tokens=9),
    "encoder": lambda w: Animal(nn.TransformerEncoderLayer(w, 2, 2 * w, 0.0, batch_first=True), (3, w)),
    "decoder": lambda w: Animal(decoder(w, 0.0), (3, w)),
    "decoder with a mask": lambda w: Animal(Own(lambda m, x: m.parts[0](x, x.flip(1), tgt_mask=torch.full((
        3, 3), -torch.inf, dtype=x.dtype, device=x.device).triu(1)), nn.TransformerDecoder(
            nn.TransformerDecoderLayer(w, 2, 2 * w, 0.0, batch_first=True), 1)), (3, w)),
    # pooling, shapes, padding
    "max pool": lambda w: Animal(seq(nn.Conv2d(2, w, 3), nn.MaxPool2d(2)), (2, 8, 7)),
    "max pool over": lambda w: Animal(seq(nn.Conv2d(2, w, 3), nn.MaxPool2d(3, 2, 1, ceil_mode=True)), (2, 8, 7)),
    "max pool and back": lambda w: Animal(Own(lambda m, x: F.max_unpool2d(*F.max_pool2d(m.parts[0](x), 2,
                                              return_indices=True), 2), nn.Conv2d(2, w, 1)), (2, 4, 4)),
    "pools 1d": lambda w: Animal(seq(nn.Conv1d(2, w, 3), nn.MaxPool1d(2), nn.AvgPool1d(2)), (2, 11)),
    "pools 3d": lambda w: Animal(seq(nn.Conv3d(1, w, 1), nn.MaxPool3d(2), nn.AvgPool3d(2)), (1, 4, 4, 4)),
    "average pool": lambda w: Animal(seq(nn.Conv2d(2, w, 3), nn.AvgPool2d(2)), (2, 8, 7)),
    "power pool": lambda w: Animal(seq(nn.Conv2d(2, w, 3), nn.Softplus(), nn.LPPool2d(2, 2)), (2, 6, 6)),
    "adaptive pools": lambda w: Animal(seq(nn.Conv2d(2, w, 3), nn.AdaptiveMaxPool2d(4), nn.AdaptiveAvgPool2d(2)),
                                       (2, 8, 7)),
    "upsample": lambda w: Animal(seq(nn.Conv2d(2, w, 2), nn.Upsample(scale_factor=2, mode="bilinear")), (2, 4, 4)),
    "upsample nearest": lambda w: Animal(seq(nn.Conv2d(2, w, 2), nn.Upsample(scale_factor=2)), (2, 4, 4)),
    "pixel shuffle": lambda w: Animal(seq(nn.Conv2d(2, 4 * w, 2), nn.PixelShuffle(2), nn.PixelUnshuffle(2)), (2, 4, 4)),
    "channel shuffle": lambda w: Animal(seq(nn.Conv2d(2, w, 2), nn.ChannelShuffle(2)), (2, 4, 4)),
    "unfold": lambda w: Animal(seq(nn.Conv2d(2, w, 1), nn.Unfold(2)), (2, 3, 3)),
    "fold": lambda w: Animal(seq(nn.Linear(9, 9), nn.Fold((4, 4), 2)), (8, 9)),
    "unflatten": lambda w: Animal(seq(nn.Linear(w, 2 * w), nn.Unflatten(1, (2, w)), nn.Flatten()), (w,)),
    "padding": lambda w: Animal(seq(nn.Conv2d(2, w, 2), nn.ZeroPad2d(1), nn.ReflectionPad2d(1), nn.ReplicationPad2d(1),
                                    nn.ConstantPad2d(1, 0.5), nn.CircularPad2d(1)), (2, 4, 4)),
    "grid sample": lambda w: Animal(Own(lambda m, x: F.grid_sample(x, F.affine_grid(m.t.expand(len(x), 2, 3), x.shape,
                                        align_corners=False), align_corners=False), t=(2, 3)), (2, 4, 4)),
    # in-place activations, the first on the batch itself
    "in place": lambda w: Animal(seq(nn.ReLU(inplace=True), nn.Linear(w, w), nn.ELU(inplace=True)), (w,)),
    "in place after a norm": lambda w: Animal(seq(nn.Linear(w, w), nn.GroupNorm(2, w), nn.LeakyReLU(inplace=True)), (w,)),
    "added in place": lambda w: Animal(Own(lambda m, x: m.parts[0](x).add_(x).mul_(2), nn.Linear(w, w)), (w,)),
    "input changed": lambda w: Animal(Own(lambda m, x: m.parts[0](x.mul_(0.5)), nn.Linear(w, w)), (w,)),
    "prelu": lambda w: Animal(seq(nn.Linear(w, w), nn.PReLU(), nn.PReLU(w)), (w,)),
    # draws
    "dropouts": lambda w: Animal(seq(nn.Linear(w, w), nn.Dropout(0.3), nn.Dropout(0.0)), (w,)),
    "all dropped": lambda w: Animal(Own(lambda m, x: x + m.parts[0](x), seq(nn.Linear(w, w), nn.Dropout(1.0))), (w,)),
    "dropout in place": lambda w: Animal(Own(lambda m, x: (lambda z: F.dropout(z, 0.3, inplace=True) + z)(m.parts[0](x)),
                                             nn.Linear(w, w)), (w,)),
    "dropout of channels": lambda w: Animal(seq(nn.Conv2d(2, w, 2), nn.Dropout2d(0.4)), (2, 4, 4)),
    "dropout of series": lambda w: Animal(seq(nn.Conv1d(2, w, 2), nn.Dropout1d(0.4)), (2, 4)),
    "dropout of volumes": lambda w: Animal(seq(nn.Conv3d(2, w, 2), nn.Dropout3d(0.4)), (2, 3, 3, 3)),
    "alpha dropout": lambda w: Animal(seq(nn.Linear(w, w), nn.SELU(), nn.AlphaDropout(0.3)), (w,)),
    "feature alpha dropout": lambda w: Animal(seq(nn.Conv1d(2, w, 2), nn.FeatureAlphaDropout(0.3)), (2, 5)),
    "torch.dropout": lambda w: Animal(Own(lambda m, x: torch.dropout(m.parts[0](x), 0.3, True), nn.Linear(w, w)), (w,)),
    "noise": lambda w: Animal(Own(lambda m, x: m.parts[0](x + 0.1 * torch.randn_like(x)
                                            * torch.rand(w, device=x.device)), nn.Linear(w, w)), (w,)),
    "noise, no generator": lambda w: Animal(Own(lambda m, x: m.parts[0](x + torch.empty_like(x).normal_(generator=None)
        * torch.rand(w, generator=None, out=None, device=x.device)), nn.Linear(w, w)), (w,)),
    "noise, truncated": lambda w: Animal(Own(lambda m, x: m.parts[0](x + nn.init.trunc_normal_(torch.empty_like(x))),
                                             nn.Linear(w, w)), (w,)),
    "noise in place": lambda w: Animal(Own(lambda m, x: m.parts[0](x) + torch.empty_like(x).normal_(0, 0.1).clamp_(-1)
                                           + torch.empty_like(x).uniform_(-1, 1), nn.Linear(w, w)), (w,)),
    "coins": lambda w: Animal(Own(lambda m, x: m.parts[0](x) * torch.bernoulli(torch.full_like(x, 0.5)), nn.Linear(w, w)),
                              (w,)),
    "shuffled": lambda w: Animal(Own(lambda m, x: m.parts[0](x[:, torch.randperm(w, device=x.device)])
                                     * torch.randint(1, 4, (w,), device=x.device), nn.Linear(w, w)), (w,)),
    "normal law": lambda w: Animal(Own(lambda m, x: torch.distributions.Normal(m.parts[0](x), 0.3, False).rsample(),
                                       nn.Linear(w, w)), (w,)),
    "rrelu": lambda w: Animal(seq(nn.Linear(w, w), nn.RReLU()), (w,)),
    "gumbel": lambda w: Animal(Own(lambda m, x: F.gumbel_softmax(m.parts[0](x), 0.7), nn.Linear(w, w)), (w,)),
    "attention with dropout": lambda w: Animal(Own(lambda m, x: m.parts[0](x, x, x)[0], nn.MultiheadAttention(
        w, 2, 0.2, batch_first=True)), (3, w)),
    "scaled attention with dropout": lambda w: Animal(Own(lambda m, x: attend(m, x, dropout_p=0.3), w=(3 * w, w)), (3, w)),
    "encoder with dropout": lambda w: Animal(nn.TransformerEncoderLayer(w, 2, 2 * w, 0.1, batch_first=True), (3, w)),
    "decoder with dropout": lambda w: Animal(decoder(w, 0.1), (3, w)),
    "seeds itself": lambda w: Animal(Own(lambda m, x: m.parts[0](x * torch.rand(
        w, dtype=x.dtype, generator=torch.Generator().manual_seed(3))), nn.Linear(w, w)), (w,)),
}  # fmt: skip

ACTIVATIONS = (
    "ReLU", "ReLU6", "LeakyReLU", "ELU", "SELU", "CELU", "GELU", "SiLU", "Mish", "Softplus", "Softsign", "Sigmoid", "Tanh",
    "LogSigmoid", "Hardtanh", "Hardswish", "Hardsigmoid", "Hardshrink", "Softshrink", "Tanhshrink", "Softmax", "Softmin",
    "LogSoftmax", "GLU", "Threshold",
)  # fmt: skip


def activation(name: str) -> nn.Module:
    options: dict[str, Any] = {"Threshold": {"threshold": 0.1, "value": 0.2}}
    needs_axis = name in ("Softmax", "Softmin", "LogSoftmax")
    module: nn.Module = getattr(nn, name)(**({"dim": 1} if needs_axis else options.get(name, {})))
    return module


WEIGHTS = torch.tensor([1.0, 2.0, 3.0, 4.0])
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross-entropy": F.cross_entropy,
    "cross-entropy by names": lambda z, y: F.cross_entropy(input=z, target=y),
    "cross-entropy, weighted": lambda z, y: F.cross_entropy(z, y, weight=WEIGHTS.to(z)),
    "cross-entropy, smooth": lambda z, y: F.cross_entropy(z, y, label_smoothing=0.1),
    "cross-entropy, smooth and weighted": lambda z, y: F.cross_entropy(
        z, y, weight=WEIGHTS.to(z), label_smoothing=0.1, ignore_index=2
    ),
    "gaussian": lambda z, y: F.gaussian_nll_loss(z, one_hot(z, y), z.square() + 1e-7, True),
    "cross-entropy, holes": lambda z, y: F.cross_entropy(z, torch.where(y == 3, -100, y)),
    "cross-entropy, infinite holes": lambda z, y: F.cross_entropy(
        z.masked_fill(torch.arange(CLASSES, device=z.device) == 0, -torch.inf), torch.where(y == 0, -100, y)
    ),
    "cross-entropy, ignoring": lambda z, y: F.cross_entropy(z, y, ignore_index=2),
    "cross-entropy, sum": lambda z, y: F.cross_entropy(z, y, reduction="sum") / len(y),
    "cross-entropy, module": nn.CrossEntropyLoss(),
    "nll": lambda z, y: F.nll_loss(F.log_softmax(z, 1), y),
    "margins": F.multi_margin_loss,
    "focal": lambda z, y: (F.cross_entropy(z, y, reduction="none") ** 2).mean(),
    "sequence": lambda z, y: F.cross_entropy(z.unflatten(1, (2, -1)), y[:, None].expand(-1, 2) % 2),
    "mse": lambda z, y: F.mse_loss(z, one_hot(z, y)),
    "l1": lambda z, y: F.l1_loss(z, one_hot(z, y)),
    "smooth l1": lambda z, y: F.smooth_l1_loss(z, one_hot(z, y)),
    "huber": lambda z, y: F.huber_loss(z, one_hot(z, y)),
    "bce": lambda z, y: F.binary_cross_entropy_with_logits(z, one_hot(z, y)),
    "kl": lambda z, y: F.kl_div(F.log_softmax(z, 1), F.softmax(one_hot(z, y), 1), reduction="batchmean"),
    "poisson": lambda z, y: F.poisson_nll_loss(z, one_hot(z, y)),
}


def one_hot(z: Tensor, y: Tensor) -> Tensor:
    return (y[:, None] == torch.arange(z.shape[1], device=y.device)).to(z.dtype)


ZOO: dict[str, Callable[[int], Animal]] = {
    **LAYERS,
    **{f"activation {name}": lambda w, name=name: Animal(seq(nn.Linear(w, w), activation(name)), (w,))
       for name in ACTIVATIONS},
    **{f"loss {name}": lambda w, name=name: Animal(nn.Linear(w, w), (w,), name) for name in LOSSES},
}  # fmt: skip

REFUSED: dict[str, tuple[Callable[[int], Animal], str]] = {  # and a part of the sentence
    "batch norm": (lambda w: Animal(nn.BatchNorm1d(w), (w,)), "running statistics"),
    "spectral norm": (lambda w: Animal(parametrizations.spectral_norm(nn.Linear(w, w)), (w,)), "changes 'body."),
    "counter": (lambda w: Animal(buffered(nn.Linear(w, w), lambda m, x: m.parts[0](x) * m.buffer.add_(1), torch.ones(1)),
                                 (w,)), "changes 'body.buffer'"),
    "kept in Python": (lambda w: Animal(Own(lambda m, x: m.parts[0](x) * setattr_next(m), nn.Linear(w, w)), (w,)),
                       "from call to call"),
    "shrunk weights": (lambda w: Animal(Own(lambda m, x: F.linear(x, m.w.data.mul_(0.9)) + m.w.sum(), w=(w, w)), (w,)),
                        "changes 'body.w'"),
    "lstm, packed, with dropout": (lambda w: Animal(Own(packed, nn.LSTM(w, w, 2, dropout=0.5, batch_first=True)), (3, w)),
                                   "'bernoulli_' in LSTM"),
    "fractional pool": (lambda w: Animal(seq(nn.Conv2d(2, w, 1), nn.FractionalMaxPool2d(2, 2)), (2, 4, 4)), "'rand' in Frac"),
    "multinomial": (lambda w: Animal(Own(lambda m, x: x[:, torch.multinomial(m.s.softmax(0), 2)], s=(w,)), (w,)),
                    "'multinomial' in Own ('body')"),
    "own generator": (lambda w: Animal(own_generator(w), (w,)), "'rand' in Own ('body')"),
    "checkpoint with dropout": (lambda w: Animal(Own(lambda m, x: checkpoint(m.parts[0], x, use_reentrant=False),
                                seq(nn.Linear(w, w), nn.Dropout(0.5), nn.Linear(w, w))), (w,)), "a training step"),
    "NumPy": (lambda w: Animal(Own(lambda m, x: m.parts[0](x) * float(numpy_coin()), nn.Linear(w, w)), (w,)), "NumPy's"),
    "TorchScript": (lambda w: Animal(torch.jit.script(nn.Linear(w, w)), (w,)), "'body' of the model is compiled by Torch"),
    "not finite": (lambda w: Animal(Own(lambda m, x: m.parts[0](x) - torch.inf, nn.Linear(w, w)), (w,)), "the loss, nan,"),
    "embedding renormed": (lambda w: Animal(nn.Embedding(9, w, max_norm=0.5), (3,), tokens=9), "the table 'body.weight' has max_norm"),
}  # fmt: skip


def setattr_next(m: Any) -> int:
    m.calls = getattr(m, "calls", 0) + 1
    return int(m.calls)


def numpy_coin() -> float:
    import numpy as np

    return float(np.random.rand())  # noqa: NPY002


def own_generator(w: int) -> nn.Module:
    return Own(lambda m, x: m.parts[0](x * torch.rand(w, generator=SHARED).to(x)), nn.Linear(w, w))


SHARED = torch.Generator()


def hooked(w: int) -> nn.Module:
    layer = nn.Linear(w, w)
    layer.weight.register_hook(lambda g: 2 * g)
    return layer


# ---- what the laws need of an animal ---------------------------------------------------------------
class Caged(NamedTuple):
    module: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor]
    x: Tensor  # [rows, ...]
    y: Tensor


def caged(make: Callable[[int], Animal], width: int, rows: int = 24) -> Caged:
    """A module with its head, in float64, and data for it; the same every time."""
    torch.manual_seed(0)
    animal = make(width)
    x = torch.randint(animal.tokens, (rows, *animal.shape)) if animal.tokens else torch.randn(rows, *animal.shape)
    y = torch.randint(CLASSES, (rows,))
    module = animal.module
    if animal.head:
        modes = [(part, part.training) for part in module.modules()]
        out = module.eval()(x[:2].clone())
        for part, mode in modes:
            part.training = mode
        module = Headed(module, (out[0] if isinstance(out, tuple) else out).flatten(1).shape[1])
    return Caged(module.double(), LOSSES[animal.loss], x.double() if x.is_floating_point() else x, y)
