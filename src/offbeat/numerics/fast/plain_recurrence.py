"""Recurrent layers by plain operations: what can be differentiated twice, and how layers stand upon one another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from offbeat.numerics.draws import Keyed, packed


class Layer(NamedTuple):
    """The weights of one layer in one direction; those it lacks are None."""

    w_ih: Tensor
    w_hh: Tensor
    b_ih: Tensor | None = None
    b_hh: Tensor | None = None
    w_hr: Tensor | None = None  # an LSTM's projection


def layers_of(params: Sequence[Tensor], has_biases: bool, projected: bool) -> list[Layer]:
    """PyTorch's flat list of weights, cut up: each layer's, and within it each direction's."""
    each = 2 + 2 * has_biases + projected
    cut = [tuple(params[i : i + each]) for i in range(0, len(params), each)]
    return [Layer(*w[: each - projected])._replace(w_hr=w[-1] if projected else None) for w in cut]


def stacked(
    run: Any, places: Any, x: Tensor, states: tuple[Tensor, ...], layers: list[Layer], depth: int, both: bool,
    batch_first: bool,
) -> Any:  # fmt: skip
    """Layers upon one another, each in one direction or both. States are `[layers, b, h]`, as PyTorch has them."""
    x = x if batch_first else x.transpose(0, 1)
    lasts: list[tuple[Tensor, ...]] = []
    ways = 2 if both else 1
    for level in range(depth):
        outs = []
        for way in range(ways):
            place = level * ways + way
            out, last = run(places, x, tuple(s[place] for s in states), layers[place], way == 1)
            outs.append(out)
            lasts.append(last)
        x = torch.cat(outs, dim=-1) if both else outs[0]
    ends = tuple(torch.stack(parts) for parts in zip(*lasts, strict=True))
    out = x if batch_first else x.transpose(0, 1)
    return (out, *ends)


def times(count: int, backwards: bool) -> Sequence[int]:
    return range(count - 1, -1, -1) if backwards else range(count)


Time = Callable[[Tensor, tuple[Tensor, ...], Layer], tuple[Tensor, ...]]


def plainly(time: Time) -> Any:
    """A layer that takes one time after the other in this way."""

    def layer(places: Any, x: Tensor, states: Any, weights: Layer, backwards: bool) -> Any:
        return plain_scan(time, functional.linear(x, weights.w_ih, weights.b_ih), states, weights, backwards)

    return layer


def plain_scan(time: Time, gates: Tensor, states: tuple[Tensor, ...], layer: Layer, backwards: bool) -> Any:
    outs: list[Tensor] = []
    for t in times(gates.shape[1], backwards):
        states = time(gates[:, t], states, layer)
        outs.append(states[0])
    return torch.stack(outs[::-1] if backwards else outs, dim=1), states


def lstm_time(gates: Tensor, states: tuple[Tensor, ...], layer: Layer) -> tuple[Tensor, ...]:
    i, f, g, o = (gates + functional.linear(states[0], layer.w_hh, layer.b_hh)).chunk(4, dim=-1)
    c = f.sigmoid() * states[1] + i.sigmoid() * g.tanh()
    h = o.sigmoid() * c.tanh()
    return h if layer.w_hr is None else functional.linear(h, layer.w_hr), c


def gru_time(gates: Tensor, states: tuple[Tensor, ...], layer: Layer) -> tuple[Tensor, ...]:
    (h,) = states
    own = functional.linear(h, layer.w_hh, layer.b_hh)
    (r, z, n), (to_r, to_z, to_n) = gates.chunk(3, dim=-1), own.chunk(3, dim=-1)
    n = (n + (r + to_r).sigmoid() * to_n).tanh()
    return (n + (z + to_z).sigmoid() * (h - n),)


def tanh_time(gates: Tensor, states: tuple[Tensor, ...], layer: Layer) -> tuple[Tensor, ...]:
    return ((gates + functional.linear(states[0], layer.w_hh, layer.b_hh)).tanh(),)


def relu_time(gates: Tensor, states: tuple[Tensor, ...], layer: Layer) -> tuple[Tensor, ...]:
    return ((gates + functional.linear(states[0], layer.w_hh, layer.b_hh)).relu(),)


TIMES: dict[Any, Time] = {
    torch.lstm: lstm_time, torch.gru: gru_time, torch.rnn_tanh: tanh_time, torch.rnn_relu: relu_time,
    torch.lstm_cell: lstm_time, torch.gru_cell: gru_time, torch.rnn_tanh_cell: tanh_time,
    torch.rnn_relu_cell: relu_time,
}  # fmt: skip


class TwiceDifferentiable(Keyed):
    """PyTorch's functions for one client, but recurrence by plain operations."""

    def other(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func not in TIMES or packed(args):
            return func(*args, **kwargs)
        x, hx, third, *rest = args
        states = tuple(hx) if isinstance(hx, tuple | list) else (hx,)
        if isinstance(third, tuple | list):  # the weights of all layers
            has_biases, depth, _, _, both, batch_first = rest  # dropout is taken care of by `Keyed`
            layers = layers_of(third, has_biases, states[0].shape[-1] != states[-1].shape[-1])
            return stacked(plainly(TIMES[func]), None, x, states, layers, depth, both, batch_first)
        _, ends = plainly(TIMES[func])(None, x[:, None], states, Layer(third, *rest), False)
        return ends if len(ends) > 1 else ends[0]
