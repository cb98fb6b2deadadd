"""What a user's module calls, computed for many clients at once: the client axis asks for other means, same results.

The module is written for one client. Inside `ForClients` some functions of PyTorch are replaced: those that `vmap`
cannot map, those it maps slowly, and those that draw random numbers, which here are keyed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from offbeat import keys
from offbeat.errors import ConfigError
from offbeat.numerics.convolution import convolve


class Keyed(TorchFunctionMode):
    """Dropout with masks from a key: (job, local step, which dropout of the model, place)."""

    def __init__(self, key: Tensor | None, places: Places | None = None) -> None:
        super().__init__()
        self.key = key
        self.calls = 0
        self.places = places

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is functional.dropout:
            return self.dropout(*args, **(kwargs or {}))
        if func is functional.dropout2d:
            return self.dropout2d(*args, **(kwargs or {}))
        return self.other(func, args, kwargs or {})

    def other(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)

    def dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0:
            return x
        if self.key is None:
            raise ConfigError(["the model drops out at random, but no key was given for its masks"])
        self.calls += 1
        key = keys.fold(self.key, self.calls)
        result: Tensor = Dropout.apply(x, key, p)  # type: ignore[no-untyped-call]
        return result

    def dropout2d(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """Whole channels of `x [b, c, ...]`: a place is one of a sample's channels."""
        if not training or p == 0:
            return x
        factors = self.dropout(x.new_ones(x.shape[:2]), p)
        return x * factors.reshape(*x.shape[:2], *[1] * (x.dim() - 2))


class ForClients(Keyed):
    """Layers, pooling, group normalisation and cross-entropy of n clients at once."""

    def other(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = INSTEAD.get(func)
        result = NotImplemented if found is None else found(self.places, *args, **kwargs)
        return func(*args, **kwargs) if result is NotImplemented else result


class Places:
    """Where the gradients of the clients' parameters belong: a layer may write its own there, sparing a copy."""

    def __init__(self, parameters: Sequence[Tensor], places: Sequence[Tensor]) -> None:
        self.parameters, self.places = parameters, places
        self.open = {p.data_ptr(): place for p, place in zip(parameters, places, strict=True)}

    def take(self, parameter: Tensor | None) -> Tensor | None:
        """The place of a parameter, once; None for what is no parameter, or was taken by another layer."""
        place = None if parameter is None else self.open.get(parameter.data_ptr())
        if place is None or parameter is None or place.shape != parameter.shape:
            return None
        del self.open[parameter.data_ptr()]
        return place

    def fill(self, gradients: Sequence[Tensor | None]) -> None:
        """Put down the gradients that no layer wrote itself."""
        for p, place, gradient in zip(self.parameters, self.places, gradients, strict=True):
            if p.data_ptr() in self.open:
                place.zero_() if gradient is None else place.copy_(gradient)
            elif gradient is not None:  # of a further use of the parameter
                place.add_(gradient)


def linear(places: Places | None, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Any:
    if x.dim() < 2:
        return NotImplemented
    if torch.is_autocast_enabled(x.device.type):
        x, w, bias = rounded(x, w, bias)
    return Linear.apply(x, w, bias, places)  # type: ignore[no-untyped-call]


def conv2d(
    places: Places | None, x: Tensor, w: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
    dilation: Any = 1, groups: int = 1,
) -> Any:  # fmt: skip
    """What is not a plain convolution of images is left to the library."""
    if groups != 1 or isinstance(padding, str) or x.dim() != 4 or pair(dilation) != (1, 1):
        return NotImplemented
    if torch.is_autocast_enabled(x.device.type):
        x, w, bias = rounded(x, w, bias)
    return Convolution.apply(x, w, bias, pair(stride), pair(padding), places)  # type: ignore[no-untyped-call]


def rounded(x: Tensor, w: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The operands of a product in the number type that autocasting asks for."""
    kind = torch.get_autocast_dtype(x.device.type)
    return x.to(kind), w.to(kind), None if bias is None else bias.to(kind)


def max_pool2d(
    places: Places | None, x: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
    ceil_mode: bool = False, return_indices: bool = False,
) -> Any:  # fmt: skip
    """Blocks that do not overlap, on a GPU; every other pooling is left to the library."""
    kernel, step = pair(kernel_size), pair(kernel_size if stride is None else stride)
    plain = kernel == step and pair(padding) == (0, 0) and pair(dilation) == (1, 1) and not ceil_mode
    if not plain or return_indices or not x.is_cuda or x.dim() != 4 or kernel[0] * kernel[1] > 64 or not compiled():
        return NotImplemented
    return Pool.apply(x, kernel)  # type: ignore[no-untyped-call]


def group_norm(
    places: Places | None, x: Tensor, groups: int, weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """Each sample's channels in groups, each group to mean 0 and variance 1; then a scale and a shift per channel."""
    grouped = x.reshape(x.shape[0], groups, -1)
    variance, mean = torch.var_mean(grouped, dim=-1, correction=0, keepdim=True)
    out = ((grouped - mean) * torch.rsqrt(variance + eps)).reshape(x.shape)
    channels = (x.shape[1],) + (1,) * (x.dim() - 2)
    out = out if weight is None else out * weight.reshape(channels)
    return out if bias is None else out + bias.reshape(channels)


def cross_entropy(places: Places | None, scores: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The mean over a batch against class numbers; weights, smoothing and the like are left to the library."""
    kwargs = {name: value for name, value in kwargs.items() if PLAIN.get(name, NotImplemented) != value}
    if args or kwargs or scores.dim() != 2 or target.dim() != 1 or target.dtype != torch.int64:
        return NotImplemented
    scores = scores.float() if scores.dtype in (torch.bfloat16, torch.float16) else scores
    return Entropy.apply(scores, target)  # type: ignore[no-untyped-call]


IGNORED = -100  # PyTorch's mark of a target that does not count
PLAIN: dict[str, Any] = {
    "weight": None, "size_average": None, "ignore_index": IGNORED, "reduce": None, "reduction": "mean",
    "label_smoothing": 0.0,
}  # fmt: skip
INSTEAD: dict[Any, Callable[..., Any]] = {
    functional.conv2d: conv2d,
    functional.cross_entropy: cross_entropy,
    functional.group_norm: group_norm,
    functional.linear: linear,
    functional.max_pool2d: max_pool2d,
}


# ---- rules for the client axis ------------------------------------------------------------------
# Each function below exists for its `vmap`, which is given the tensors of all clients and may use any differentiable
# means; `forward` is what it computes for one client.
class ForOne(torch.autograd.Function):
    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        pass


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
        place = target.clamp(min=0)[:, :, None]
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


class Dropout(ForOne):
    @staticmethod
    def forward(x: Tensor, key: Tensor, p: float) -> Tensor:
        return x * keep(x[None], key[None], p)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        x, key, ctx.p = inputs
        ctx.save_for_backward(key)
        ctx.shape = x.shape

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (key,) = ctx.saved_tensors
        return g * keep(g[None], key[None], ctx.p)[0], None, None

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor, key: Tensor, p: float) -> Any:
        x, key = first(x, dims[0], info.batch_size), first(key, dims[1], info.batch_size)
        if x.is_cuda and compiled():
            from offbeat.numerics import kernels

            return kernels.Dropout.apply(x, key, limit(p), p), 0  # type: ignore[no-untyped-call]
        return x * keep(x, key, p), 0


def keep(x: Tensor, key: Tensor, p: float) -> Tensor:
    """0 where a client's keyed word for the place is below p, else 1 / (1 - p)."""
    place = torch.arange(x[0].numel(), device=x.device)[None]
    kept = keys.word(key[:, None], place) >= limit(p)
    factors: Tensor = kept.to(x.dtype).div_(1.0 - p).reshape(x.shape)
    return factors


def limit(p: float) -> int:
    """Keyed words below it are dropped."""
    return round(p * 2**32)


@cache
def compiled() -> bool:
    """Whether there are kernels of our own."""
    return find_spec("triton") is not None


def first(t: Tensor, dim: int | None, n: int) -> Tensor:
    """The client axis in front."""
    return t.expand(n, *t.shape) if dim is None else t if dim == 0 else t.movedim(dim, 0)


def pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[1]))
