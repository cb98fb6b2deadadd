"""What a user's module calls, computed for many clients at once: the client axis asks for other means, same results.

The module is written for one client. Inside `ForClients` some functions of PyTorch are replaced: those that `vmap`
cannot map, those it maps slowly, and those that draw random numbers, which are keyed (`numerics/draws.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from offbeat.numerics.convolution import convolve
from offbeat.numerics.draws import ForOne, Keyed, compiled, first


class ForClients(Keyed):
    """Layers, pooling, group normalisation and cross-entropy of n clients at once."""

    def __init__(self, key: Tensor | None, places: Places | None = None) -> None:
        super().__init__(key)
        self.places = places

    def other(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        instead = INSTEAD.get(func)
        result = NotImplemented if instead is None else instead(self.places, *args, **kwargs)
        return func(*args, **kwargs) if result is NotImplemented else result


class Places:
    """Where the gradients of the clients' parameters belong: a layer may write its own there, sparing a copy.

    A place belongs to the parameter itself, the very tensor: the gradient of a view of it, even one of the same form
    and memory, still has to pass through what made the view.
    """

    def __init__(self, parameters: Sequence[Tensor], places: Sequence[Tensor]) -> None:
        self.parameters, self.places = parameters, places
        self.open = {id(p): place for p, place in zip(parameters, places, strict=True)}

    def take(self, parameter: Tensor | None) -> Tensor | None:
        """The place of a parameter, once; None for what is no parameter, or was taken by another layer."""
        return self.open.pop(id(parameter), None)

    def fill(self, gradients: Sequence[Tensor | None]) -> None:
        """Put down the gradients that no layer wrote itself."""
        for p, place, gradient in zip(self.parameters, self.places, gradients, strict=True):
            if id(p) in self.open:
                place.zero_() if gradient is None else place.copy_(gradient)
            elif gradient is not None:  # of a further use of the parameter
                place.add_(gradient)


# ---- PyTorch's functions, with PyTorch's names of arguments; what is unusual is left to the library ------------------
def linear(places: Places | None, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    plain = input.dim() >= 2 and weight.dim() == 2 and not (input.is_complex() or weight.is_complex())
    if not plain or (bias is not None and bias.shape != weight.shape[:1]):
        return NotImplemented
    if torch.is_autocast_enabled(input.device.type):
        input, weight, bias = rounded(input, weight, bias)
    return Linear.apply(input, weight, bias, places)  # type: ignore[no-untyped-call]


def conv2d(
    places: Places | None, input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
    dilation: Any = 1, groups: int = 1,
) -> Any:  # fmt: skip
    """A plain convolution of images."""
    unusual = groups != 1 or isinstance(padding, str) or input.dim() != 4 or pair(dilation) != (1, 1)
    if unusual or input.is_complex() or weight.is_complex() or input.shape[1] != weight.shape[1]:
        return NotImplemented
    if torch.is_autocast_enabled(input.device.type):
        input, weight, bias = rounded(input, weight, bias)
    return Convolution.apply(input, weight, bias, pair(stride), pair(padding), places)  # type: ignore[no-untyped-call]


def rounded(x: Tensor, w: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The operands of a product in the number type that autocasting asks for."""
    kind = torch.get_autocast_dtype(x.device.type)
    return x.to(kind), w.to(kind), None if bias is None else bias.to(kind)


def max_pool2d(
    places: Places | None, input: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
    ceil_mode: bool = False, return_indices: bool = False,
) -> Any:  # fmt: skip
    """Blocks that do not overlap, on a GPU."""
    kernel, step = pair(kernel_size), pair(stride or kernel_size)
    plain = kernel == step and pair(padding) == (0, 0) and pair(dilation) == (1, 1) and not ceil_mode
    small = input.dim() == 4 and kernel[0] * kernel[1] <= 64
    if not plain or not small or return_indices or not input.is_cuda or not compiled():
        return NotImplemented
    return Pool.apply(input, kernel)  # type: ignore[no-untyped-call]


def group_norm(
    places: Places | None, input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:  # fmt: skip
    """Each sample's channels in groups, each group to mean 0 and variance 1; then a scale and a shift per channel."""
    if input.dim() < 2 or input.shape[1] % num_groups or input[0].numel() <= num_groups:
        return NotImplemented  # a mistake: the library says which
    grouped = input.reshape(input.shape[0], num_groups, -1)
    variance, mean = torch.var_mean(grouped, dim=-1, correction=0, keepdim=True)
    out = ((grouped - mean) * torch.rsqrt(variance + eps)).reshape(input.shape)
    channels = (input.shape[1],) + (1,) * (input.dim() - 2)
    out = out if weight is None else out * weight.reshape(channels)
    return out if bias is None else out + bias.reshape(channels)


def cross_entropy(places: Places | None, input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The mean over a batch against class numbers."""
    kwargs = {name: value for name, value in kwargs.items() if PLAIN.get(name, NotImplemented) != value}
    if args or kwargs or input.dim() != 2 or target.shape != input.shape[:1] or target.dtype != torch.int64:
        return NotImplemented
    scores = input.float() if input.dtype in (torch.bfloat16, torch.float16) else input
    return Entropy.apply(scores, target)  # type: ignore[no-untyped-call]


def embedding(
    places: Places | None, input: Tensor, weight: Tensor, padding_idx: int | None = None, max_norm: float | None = None,
    norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
) -> Any:  # fmt: skip
    """With a row of padding, whose gradient is zero: `vmap` would forget that."""
    if scale_grad_by_freq:
        raise RuntimeError("the gradient of an embedding scaled by frequency cannot be batched")
    if padding_idx is None or max_norm is not None:
        return NotImplemented
    padding = torch.arange(len(weight), device=weight.device)[:, None] == padding_idx % len(weight)
    return functional.embedding(input, torch.where(padding, weight.detach(), weight))


IGNORED = -100  # PyTorch's mark of a target that does not count
PLAIN: dict[str, Any] = {
    "weight": None, "size_average": None, "ignore_index": IGNORED, "reduce": None, "reduction": "mean",
    "label_smoothing": 0.0,
}  # fmt: skip
INSTEAD: dict[Any, Callable[..., Any]] = {
    functional.conv2d: conv2d,
    functional.cross_entropy: cross_entropy,
    functional.embedding: embedding,
    functional.group_norm: group_norm,
    functional.linear: linear,
    functional.max_pool2d: max_pool2d,
}


# ---- rules for the client axis ------------------------------------------------------------------
class Linear(ForOne):
    @staticmethod
    def forward(x: Tensor, w: Tensor, bias: Tensor | None, places: Places | None) -> Tensor:
        return functional.linear(x, w, bias)

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor, w: Tensor, bias: Tensor | None, places: Places | None) -> Any:
        n = info.batch_size
        x = first(x, dims[0], n)
        if dims[1] is None and (bias is None or dims[2] is None):  # one layer for all clients
            return functional.linear(x, w, bias), 0
        w, bias = first(w, dims[1], n), None if bias is None else first(bias, dims[2], n)
        out: Tensor = LinearOfAll.apply(x.flatten(1, -2), w, bias, places)  # type: ignore[no-untyped-call]
        return out.reshape(*x.shape[:-1], -1), 0


class LinearOfAll(torch.autograd.Function):
    """`x [n, b, i]`, `w [n, o, i]` and `bias [n, o]` to `[n, b, o]`: batched products both ways."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, places: Places | None) -> Tensor:
        ctx.save_for_backward(x, w, bias)
        ctx.places = places
        return torch.bmm(x, w.mT) if bias is None else torch.baddbmm(bias[:, None], x, w.mT)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w, bias = ctx.saved_tensors
        places = ctx.places or Places((), ())
        gx = gw = gb = None
        if ctx.needs_input_grad[0]:
            gx = torch.bmm(g, w)
        if ctx.needs_input_grad[1]:
            small = not w.is_cuda and w[0].numel() < SMALL
            gw = into(None if small else places.take(w), lambda out: torch.bmm(g.mT, x, out=out))
        if ctx.needs_input_grad[2]:
            gb = into(places.take(bias), lambda out: torch.sum(g, 1, out=out))
        return gx, gw, gb, None


SMALL = 1 << 15  # numbers in a matrix below which a CPU makes many together faster than each in its place


def into(place: Tensor | None, make: Callable[[Tensor | None], Tensor]) -> Tensor | None:
    """Make a gradient in its place, and have nothing to hand on; or hand it on."""
    made = make(place)
    return made if place is None else None


class Convolution(ForOne):
    @staticmethod
    def forward(x: Tensor, w: Tensor, bias: Tensor | None, step: Any, padding: Any, places: Places | None) -> Tensor:
        return functional.conv2d(x, w, bias, step, padding)

    @staticmethod
    def vmap(
        info: Any, dims: Any, x: Tensor, w: Tensor, bias: Tensor | None, step: Any, padding: Any, places: Places | None
    ) -> Any:
        n = info.batch_size
        if dims[1] is None and (bias is None or dims[2] is None):  # one kernel for all: the clients are a larger batch
            flat = functional.conv2d(x.movedim(dims[0], 0).flatten(0, 1), w, bias, step, padding)
            return flat.reshape(n, -1, *flat.shape[1:]), 0
        x, w = first(x, dims[0], n), first(w, dims[1], n)
        return convolve(x, w, None if bias is None else first(bias, dims[2], n), step, padding, places), 0


class Pool(ForOne):
    @staticmethod
    def forward(x: Tensor, kernel: tuple[int, int]) -> Tensor:
        return functional.max_pool2d(x, kernel)

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor, kernel: tuple[int, int]) -> Any:
        from offbeat.numerics import kernels

        pooled: Tensor = kernels.Pool.apply(x.movedim(dims[0], 0).flatten(0, 1), kernel)  # type: ignore[no-untyped-call]
        return pooled.reshape(info.batch_size, -1, *pooled.shape[1:]), 0


class Entropy(ForOne):
    @staticmethod
    def forward(scores: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(scores, target)

    @staticmethod
    def vmap(info: Any, dims: Any, scores: Tensor, target: Tensor) -> Any:
        scores, target = (first(t, d, info.batch_size) for t, d in zip((scores, target), dims, strict=True))
        if scores.is_cuda and scores.dtype == torch.float32 and scores[0].numel() <= 8192 and compiled():
            from offbeat.numerics import kernels

            return kernels.Entropy.apply(scores, target, IGNORED), 0  # type: ignore[no-untyped-call]
        return EntropyOfAll.apply(scores, target), 0  # type: ignore[no-untyped-call]


class EntropyOfAll(torch.autograd.Function):
    """Mean cross-entropies `[n]` of `scores [n, b, classes]` against `target [n, b]`, in few operations."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, target: Tensor) -> Tensor:
        logs = torch.log_softmax(scores, dim=2)
        place = torch.where(target == IGNORED, 0, target)[:, :, None]  # a wrong class number is an error
        counted = (target != IGNORED).to(scores.dtype)
        share = (counted / counted.sum(1, keepdim=True))[:, :, None]
        ctx.save_for_backward(logs, place, share)
        return (logs.gather(2, place) * share).sum((1, 2)).neg_()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        logs, place, share = ctx.saved_tensors
        weight = share * g[:, None, None]
        return (logs.exp() * weight).scatter_add_(2, place, weight.neg()), None


class Descend(ForOne):
    """`y - lr (g + c)` with a rate of each client's own; c may be missing."""

    @staticmethod
    def forward(y: Tensor, lr: Tensor, g: Tensor, c: Tensor | None) -> Tensor:
        return torch.addcmul(y, lr, g if c is None else g + c, value=-1)

    @staticmethod
    def vmap(info: Any, dims: Any, y: Tensor, lr: Tensor, g: Tensor, c: Tensor | None) -> Any:
        y, lr, g = (first(t, d, info.batch_size) for t, d in zip((y, lr, g), dims[:3], strict=True))
        c = None if c is None else first(c, dims[3], info.batch_size)
        lines = all(t.stride(-1) == 1 for t in (y, g, c) if t is not None)
        if y.is_cuda and y.dim() == 2 and lines and compiled():
            from offbeat.numerics import kernels

            return kernels.descend(y, lr, g, c), 0
        g = g if c is None else g + c
        return torch.addcmul(y, lr.reshape(-1, *[1] * (y.dim() - 1)), g, value=-1), 0


def pair(value: Any) -> tuple[int, int]:
    """One number for both sides, or one for each."""
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[-1]))
