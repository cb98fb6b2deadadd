"""Recurrent layers of n clients: their products batched, their time steps one after the other.

A layer in one direction is two things: the share of the inputs in the gates, one product over all times, and a scan,
in which the state of each time enters the next. The scans below are written out for all clients with gradients of their
own: `gates [n, b, T, g h]`, states `[n, b, h]`, and `w [n, g h, h]`, for g gates of width h.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from offbeat.numerics.draws import ForOne, compiled, first, packed
from offbeat.numerics.fast.convolution import TINY
from offbeat.numerics.fast.dense import Linear
from offbeat.numerics.fast.places import Apart, Places, into
from offbeat.numerics.fast.plain_recurrence import Layer, layers_of, lstm_time, plain_scan, stacked, times


# ---- PyTorch's functions, with PyTorch's names of arguments; packed sequences are left to the library
def lstm(places: Places | None, *args: Any) -> Any:
    return layers(lstm_layer, torch.lstm, places, *args)


def gru(places: Places | None, *args: Any) -> Any:
    return layers(gru_layer, torch.gru, places, *args)


def rnn_tanh(places: Places | None, *args: Any) -> Any:
    return layers(tanh_layer, torch.rnn_tanh, places, *args)


def rnn_relu(places: Places | None, *args: Any) -> Any:
    return layers(relu_layer, torch.rnn_relu, places, *args)


def layers(run: Any, op: Any, places: Places | None, *args: Any) -> Any:
    if packed(args):
        return NotImplemented
    x, hx, params, has_biases, depth, dropout, train, both, batch_first = args
    if dropout and train and depth > 1:
        return NotImplemented
    with full(x, hx) as (x, states):
        if alone(x, params, batch_first):
            form = (has_biases, depth, 0.0, True, both, batch_first)
            return Apart.apply(partial(library, op, len(states), form), x, *states, *params)  # type: ignore[no-untyped-call]
        parts = layers_of(params, has_biases, states[0].shape[-1] != states[-1].shape[-1])
        return stacked(run, places, x, states, parts, depth, both, batch_first)


def lstm_cell(places: Places | None, input: Tensor, hx: Any, *weights: Tensor | None) -> Any:
    with full(input, hx) as (x, states):
        return lstm_layer(places, x[:, None], states, Layer(*weights), False)[1]  # type: ignore[arg-type]


def gru_cell(places: Places | None, input: Tensor, hx: Tensor, *weights: Tensor | None) -> Any:
    with full(input, hx) as (x, states):
        return gru_layer(places, x[:, None], states, Layer(*weights), False)[1][0]  # type: ignore[arg-type]


@contextmanager
def full(x: Tensor, hx: Any) -> Iterator[tuple[Tensor, tuple[Tensor, ...]]]:
    """Inputs and states for products that are not rounded: what a scan rounds at one time, it carries to all others."""
    states = tuple(hx) if isinstance(hx, tuple | list) else (hx,)
    if not torch.is_autocast_enabled(x.device.type):
        yield x, states
        return
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32  # autocasting leaves doubles alone
    with torch.autocast(x.device.type, enabled=False):
        yield x.to(wide), tuple(state.to(wide) for state in states)


def alone(x: Tensor, params: Sequence[Tensor], batch_first: bool) -> bool:
    """Whether a client has enough to do at each time for a processor to take it by itself."""
    return not x.is_cuda and x.shape[0 if batch_first else 1] * params[1].numel() >= TINY


def library(op: Any, states: int, form: tuple[Any, ...], x: Tensor, *tensors: Tensor) -> Any:
    h, params = tensors[:states], list(tensors[states:])
    return op(x, h if states > 1 else h[0], params, *form)


# ---- one layer in one direction, for one client: x [b, T, i] -------------------------------------
def lstm_layer(places: Places | None, x: Tensor, states: Any, layer: Layer, backwards: bool) -> Any:
    bias = None if layer.b_ih is None or layer.b_hh is None else layer.b_ih + layer.b_hh
    gates = Linear.apply(x, layer.w_ih, bias, places)  # type: ignore[no-untyped-call]
    h, c = states
    if layer.w_hr is not None:
        return plain_scan(lstm_time, gates, states, layer._replace(b_hh=None), backwards)
    out, h, c = Lstm.apply(gates, h, c, layer.w_hh, backwards, places)  # type: ignore[no-untyped-call]
    return out, (h, c)


def gru_layer(places: Places | None, x: Tensor, states: Any, layer: Layer, backwards: bool) -> Any:
    gates = Linear.apply(x, layer.w_ih, layer.b_ih, places)  # type: ignore[no-untyped-call]
    out, h = Gru.apply(gates, states[0], layer.w_hh, layer.b_hh, backwards, places)  # type: ignore[no-untyped-call]
    return out, (h,)


def tanh_layer(places: Places | None, x: Tensor, states: Any, layer: Layer, backwards: bool) -> Any:
    return rnn_layer(places, x, states, layer, backwards, True)


def relu_layer(places: Places | None, x: Tensor, states: Any, layer: Layer, backwards: bool) -> Any:
    return rnn_layer(places, x, states, layer, backwards, False)


def rnn_layer(places: Places | None, x: Tensor, states: Any, layer: Layer, backwards: bool, tanh: bool) -> Any:
    bias = None if layer.b_ih is None or layer.b_hh is None else layer.b_ih + layer.b_hh
    gates = Linear.apply(x, layer.w_ih, bias, places)  # type: ignore[no-untyped-call]
    out, h = Rnn.apply(gates, states[0], layer.w_hh, tanh, backwards, places)  # type: ignore[no-untyped-call]
    return out, (h,)


# ---- scans: for one client plainly, and for all --------------------------------------------------
class Lstm(ForOne):
    @staticmethod
    def forward(gates: Tensor, h: Tensor, c: Tensor, w: Tensor, backwards: bool, places: Places | None) -> Any:
        out, h, c = LstmOfAll.apply(gates[None], h[None], c[None], w[None], backwards, None)  # type: ignore[no-untyped-call]
        return out[0], h[0], c[0]

    @staticmethod
    def vmap(
        info: Any, dims: Any, gates: Tensor, h: Tensor, c: Tensor, w: Tensor, backwards: bool, places: Places | None
    ) -> Any:
        given = (first(t, d, info.batch_size) for t, d in zip((gates, h, c, w), dims, strict=False))
        return LstmOfAll.apply(*given, backwards, places), (0, 0, 0)  # type: ignore[no-untyped-call]


class LstmOfAll(torch.autograd.Function):
    """`gates [n, b, T, 4 h]` before the states' share, in PyTorch's order: in, forget, cell, out. They are overwritten
    by what they become, which is all that the gradient needs."""

    @staticmethod
    def forward(ctx: Any, gates: Tensor, h: Tensor, c: Tensor, w: Tensor, backwards: bool, places: Any) -> Any:
        n, b, count, wide = gates.shape
        gates = gates if gates.is_contiguous() else gates.contiguous()
        cells, out = gates.new_empty(n, b, count, wide // 4), gates.new_empty(n, b, count, wide // 4)
        ctx.backwards, ctx.places = backwards, places
        first_h, first_c, turned = h, c, w.mT
        cell = lstm_forward(gates)
        for t in times(count, backwards):
            now = gates[:, :, t].baddbmm_(h, turned)
            cell(now, c, cells[:, :, t], out[:, :, t])
            h, c = out[:, :, t], cells[:, :, t]
        ctx.save_for_backward(gates, first_h, first_c, w, cells, out)
        return out, h.clone(), c.clone()

    @staticmethod
    def backward(ctx: Any, g_out: Tensor, g_h: Tensor, g_c: Tensor) -> Any:
        gates, first_h, first_c, w, cells, out = ctx.saved_tensors
        slopes, dh, dc = torch.empty_like(gates), g_h, g_c.clone()
        order = times(gates.shape[2], not ctx.backwards)
        cell = lstm_backward(gates)
        for place, t in enumerate(order):
            before = first_c if place + 1 == len(order) else cells[:, :, order[place + 1]]
            cell(gates[:, :, t], before, cells[:, :, t], g_out[:, :, t], dh, dc, slopes[:, :, t])
            dh = torch.bmm(slopes[:, :, t], w)
        gw = state_weights(ctx, 3, w, slopes, first_h, out)
        return slopes, dh, dc, gw, None, None


def state_weights(ctx: Any, which: int, w: Tensor, slopes: Tensor, start: Tensor, out: Tensor) -> Tensor | None:
    """The gradient of the states' weights: one product over all times, of slopes and of the states before them."""
    if not ctx.needs_input_grad[which]:
        return None
    count, before = slopes.shape[2], torch.empty_like(out)
    if ctx.backwards:
        before[:, :, : count - 1], before[:, :, count - 1] = out[:, :, 1:], start
    else:
        before[:, :, 1:], before[:, :, 0] = out[:, :, : count - 1], start
    places = ctx.places or Places((), ())
    return into(places.take(w), lambda at: torch.bmm(slopes.flatten(1, 2).mT, before.flatten(1, 2), out=at))


class Gru(ForOne):
    @staticmethod
    def forward(gates: Tensor, h: Tensor, w: Tensor, bias: Tensor | None, backwards: bool, places: Any) -> Any:
        shift = None if bias is None else bias[None]
        out, h = GruOfAll.apply(gates[None], h[None], w[None], shift, backwards, None)  # type: ignore[no-untyped-call]
        return out[0], h[0]

    @staticmethod
    def vmap(
        info: Any, dims: Any, gates: Tensor, h: Tensor, w: Tensor, bias: Tensor | None, backwards: bool, places: Any
    ) -> Any:
        n = info.batch_size
        gates, h, w = (first(t, d, n) for t, d in zip((gates, h, w), dims, strict=False))
        shift = None if bias is None else first(bias, dims[3], n)
        return GruOfAll.apply(gates, h, w, shift, backwards, places), (0, 0)  # type: ignore[no-untyped-call]


class GruOfAll(torch.autograd.Function):
    """`gates [n, b, T, 3 h]` before the states' share, in PyTorch's order: reset, update, new."""

    @staticmethod
    def forward(
        ctx: Any, gates: Tensor, h: Tensor, w: Tensor, bias: Tensor | None, backwards: bool, places: Any
    ) -> Any:
        n, b, count, wide = gates.shape
        gates = gates if gates.is_contiguous() else gates.contiguous()
        out, shares = gates.new_empty(n, b, count, wide // 3), gates.new_empty(n, b, count, wide // 3)
        ctx.backwards, ctx.places = backwards, places
        start, turned = h, w.mT
        cell = gru_forward(gates)
        for t in times(count, backwards):
            own = torch.bmm(h, turned) if bias is None else torch.baddbmm(bias[:, None], h, turned)
            cell(gates[:, :, t], own, h, shares[:, :, t], out[:, :, t])
            h = out[:, :, t]
        ctx.save_for_backward(gates, shares, start, w, bias, out)
        return out, h.clone()

    @staticmethod
    def backward(ctx: Any, g_out: Tensor, g_h: Tensor) -> Any:
        gates, shares, start, w, bias, out = ctx.saved_tensors
        slopes, own = torch.empty_like(gates), torch.empty_like(gates)  # of the inputs' share and of the states'
        order = times(gates.shape[2], not ctx.backwards)
        dh, cell = g_h.clone(), gru_backward(gates)
        for place, t in enumerate(order):
            before = start if place + 1 == len(order) else out[:, :, order[place + 1]]
            cell(gates[:, :, t], shares[:, :, t], before, g_out[:, :, t], dh, slopes[:, :, t], own[:, :, t])
            dh.baddbmm_(own[:, :, t], w)
        gb = None
        if ctx.needs_input_grad[3]:
            gb = into((ctx.places or Places((), ())).take(bias), lambda at: torch.sum(own.flatten(1, 2), 1, out=at))
        return slopes, dh, state_weights(ctx, 2, w, own, start, out), gb, None, None


class Rnn(ForOne):
    @staticmethod
    def forward(gates: Tensor, h: Tensor, w: Tensor, tanh: bool, backwards: bool, places: Any) -> Any:
        out, h = RnnOfAll.apply(gates[None], h[None], w[None], tanh, backwards, None)  # type: ignore[no-untyped-call]
        return out[0], h[0]

    @staticmethod
    def vmap(
        info: Any, dims: Any, gates: Tensor, h: Tensor, w: Tensor, tanh: bool, backwards: bool, places: Any
    ) -> Any:
        given = (first(t, d, info.batch_size) for t, d in zip((gates, h, w), dims, strict=False))
        return RnnOfAll.apply(*given, tanh, backwards, places), (0, 0)  # type: ignore[no-untyped-call]


class RnnOfAll(torch.autograd.Function):
    """`h <- act(gates + w h)`."""

    @staticmethod
    def forward(ctx: Any, gates: Tensor, h: Tensor, w: Tensor, tanh: bool, backwards: bool, places: Any) -> Any:
        gates = gates if gates.is_contiguous() else gates.contiguous()
        ctx.tanh, ctx.backwards, ctx.places = tanh, backwards, places
        start, turned = h, w.mT
        for t in times(gates.shape[2], backwards):
            h = gates[:, :, t].baddbmm_(h, turned)
            h = h.tanh_() if tanh else h.relu_()
        ctx.save_for_backward(start, w, gates)
        return gates.clone(), h.clone()

    @staticmethod
    def backward(ctx: Any, g_out: Tensor, g_h: Tensor) -> Any:
        start, w, out = ctx.saved_tensors
        slopes, dh = torch.empty_like(out), g_h
        for t in times(out.shape[2], not ctx.backwards):
            h = out[:, :, t]
            bend = 1 - h * h if ctx.tanh else (h > 0).to(h.dtype)
            slopes[:, :, t] = (dh + g_out[:, :, t]) * bend
            dh = torch.bmm(slopes[:, :, t], w)
        return slopes, dh, state_weights(ctx, 2, w, slopes, start, out), None, None, None


# ---- what one time does with its gates, for all clients: by PyTorch's operations, or in one kernel of our own
def ours(like: Tensor) -> bool:
    return like.is_cuda and like.dtype == torch.float32 and compiled()


def lstm_forward(like: Tensor) -> Callable[..., None]:
    if ours(like):
        from offbeat.numerics.fast import recurrent_kernels

        return recurrent_kernels.lstm_forward

    def forward(gates: Tensor, c: Tensor, cell: Tensor, out: Tensor) -> None:
        wide = gates.shape[-1] // 4
        gates[..., : 2 * wide].sigmoid_()
        gates[..., 3 * wide :].sigmoid_()
        i, f, g, o = gates.chunk(4, dim=-1)
        g.tanh_()
        torch.addcmul(f * c, i, g, out=cell)
        torch.mul(o, cell.tanh(), out=out)

    return forward


def lstm_backward(like: Tensor) -> Callable[..., None]:
    """Writes slopes of the gates, and moves dc one time back."""
    if ours(like):
        from offbeat.numerics.fast import recurrent_kernels

        return recurrent_kernels.lstm_backward

    def backward(
        gates: Tensor, before: Tensor, cell: Tensor, g_out: Tensor, dh: Tensor, dc: Tensor, slopes: Tensor
    ) -> None:
        i, f, g, o = gates.chunk(4, dim=-1)
        di, df, dg, do = slopes.chunk(4, dim=-1)
        bent, dh = cell.tanh(), dh + g_out
        dc.add_(dh * o * (1 - bent * bent))
        torch.mul(dc * g, i * (1 - i), out=di)
        torch.mul(dc * before, f * (1 - f), out=df)
        torch.mul(dc * i, 1 - g * g, out=dg)
        torch.mul(dh * bent, o * (1 - o), out=do)
        dc.mul_(f)

    return backward


def gru_forward(like: Tensor) -> Callable[..., None]:
    """The gates become r, z and n; `share` keeps what r is multiplied with."""
    if ours(like):
        from offbeat.numerics.fast import recurrent_kernels

        return recurrent_kernels.gru_forward

    def forward(gates: Tensor, own: Tensor, h: Tensor, share: Tensor, out: Tensor) -> None:
        wide = share.shape[-1]
        gates[..., : 2 * wide].add_(own[..., : 2 * wide]).sigmoid_()
        r, z, n = gates.chunk(3, dim=-1)
        share.copy_(own[..., 2 * wide :])
        n.addcmul_(r, share).tanh_()
        torch.addcmul(n, z, h - n, out=out)

    return forward


def gru_backward(like: Tensor) -> Callable[..., None]:
    """Writes slopes of the inputs' and of the states' share, and leaves in dh what passes by the gates."""
    if ours(like):
        from offbeat.numerics.fast import recurrent_kernels

        return recurrent_kernels.gru_backward

    def backward(
        gates: Tensor, share: Tensor, before: Tensor, g_out: Tensor, dh: Tensor, slopes: Tensor, own: Tensor
    ) -> None:
        r, z, n = gates.chunk(3, dim=-1)
        dr, dz, dn = slopes.chunk(3, dim=-1)
        wide = share.shape[-1]
        dh.add_(g_out)
        torch.mul(dh * (before - n), z * (1 - z), out=dz)
        torch.mul(dh * (1 - z), 1 - n * n, out=dn)
        torch.mul(dn * share, r * (1 - r), out=dr)
        own[..., : 2 * wide] = slopes[..., : 2 * wide]
        torch.mul(dn, r, out=own[..., 2 * wide :])
        dh.mul_(z)

    return backward
