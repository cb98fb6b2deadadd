"""What a user's module draws at random, keyed: the same job draws the same numbers, whoever computes it, and when.

Inside `Keyed` the functions of PyTorch that draw are replaced. A number follows from (job, local step, which draw of
the model, place). What cannot be keyed is refused before a run (`numerics/trial.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from offbeat import keys
from offbeat.errors import ConfigError
from offbeat.numerics.rewrites import REWRITES
from offbeat.numerics.transforms import axes_inside, level

SELU_FLOOR = 1.7580993408473766  # SELU's limit at minus infinity, negated: what alpha dropout drops to
BITS = {torch.float64: 52, torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}  # of a fraction, without the last


class Keyed(TorchFunctionMode):
    """Draws from a key: of one client, or inside `vmap` of each client's own."""

    def __init__(self, key: Tensor | None) -> None:
        super().__init__()
        self.key = key
        self.calls = 0
        self.level = level()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in REWRITES:
            args, kwargs = REWRITES[func](*args, **kwargs)
        rule = RULES.get(func)
        if rule is not None and kwargs.get("generator") is None and kwargs.get("out") is None:
            given = {name: value for name, value in kwargs.items() if name not in ("generator", "out")}
            result = getattr(self, rule)(*args, **given)
            if result is not NotImplemented:
                return result
        if func in COMPOSED:
            with self:
                return seen_inside(func)(*args, **kwargs)
        if func in RECURRENT and not packed(args):
            result = self.layer_by_layer(func, *args)
            if result is not NotImplemented:
                return result
        return self.other(func, args, kwargs)

    def other(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)

    # ---- numbers --------------------------------------------------------------------------------
    def next_key(self) -> Tensor:
        if self.key is None:
            raise ConfigError(["the model draws at random, but no key was given for its draws"])
        self.calls += 1
        key: Tensor = keys.fold(self.key, self.calls)
        for axis in axes_inside(self.level):
            if axis.randomness == "error":
                raise ConfigError(
                    [
                        "the model draws at random inside a torch.vmap of its own, which does not say how: give it "
                        "randomness='different', for draws of each row's own, or 'same'"
                    ]
                )
            if axis.randomness == "different":
                key = keys.fold(key, axis.rows(torch.arange(axis.size, device=key.device)))
        return key

    def words(self, like: Tensor) -> Tensor:
        """Whole numbers of 52 bits, one for each place."""
        numbers: Tensor = keys.fold(self.next_key(), torch.arange(like.numel(), device=like.device))
        return ((numbers >> 12) & ((1 << 52) - 1)).reshape(like.shape)

    def fractions(self, like: Tensor) -> Tensor:
        """Numbers in (0, 1), never one of the ends; each is exact in its type."""
        bits = BITS.get(like.dtype, 23)
        kind = like.dtype if like.dtype in BITS else torch.float32
        numbers: Tensor = ((self.words(like) >> (52 - bits)).to(kind) + 0.5) / 2**bits
        return numbers

    def normals(self, like: Tensor) -> Tensor:
        radius = (-2 * self.fractions(like).log()).sqrt()
        numbers: Tensor = radius * (2 * math.pi * self.fractions(like)).cos()
        return numbers

    def write(self, input: Tensor, numbers: Tensor) -> Tensor:
        written: Tensor = self.other(Tensor.copy_, (input, numbers), {})
        return written

    # ---- PyTorch's functions, with PyTorch's names of arguments -------------------------------------
    def rand(self, *size: Any, **kwargs: Any) -> Tensor:
        return self.fractions(torch.empty(*size, **kwargs))

    def randn(self, *size: Any, **kwargs: Any) -> Tensor:
        return self.normals(torch.empty(*size, **kwargs))

    def rand_like(self, input: Tensor, **kwargs: Any) -> Tensor:
        return self.fractions(torch.empty_like(input, **kwargs))

    def randn_like(self, input: Tensor, **kwargs: Any) -> Tensor:
        return self.normals(torch.empty_like(input, **kwargs))

    def randint(self, *bounds: Any, **kwargs: Any) -> Any:
        names = ("high", "size") if len(bounds) + len(kwargs.keys() & {"low", "high", "size"}) < 3 else NAMES
        given = {**kwargs, **dict(zip(names, bounds, strict=False))}
        low, high, size = given.pop("low", 0), given.pop("high"), given.pop("size")
        return self.whole(torch.empty(size, **{"dtype": torch.int64, **given}), low, high)

    def randint_like(self, input: Tensor, *bounds: Any, **kwargs: Any) -> Tensor:
        names = ("high",) if len(bounds) + len(kwargs.keys() & {"low", "high"}) < 2 else NAMES
        given = {**kwargs, **dict(zip(names, bounds, strict=False))}
        low, high = given.pop("low", 0), given.pop("high")
        return self.whole(torch.empty_like(input, **given), low, high)

    def whole(self, like: Tensor, low: int, high: int) -> Tensor:
        return (self.words(like) % (high - low) + low).to(like.dtype)

    def randperm(self, n: int, **kwargs: Any) -> Tensor:
        like = torch.empty(n, **{"dtype": torch.int64, **kwargs})
        return self.words(like).argsort(stable=True).to(like.dtype)

    def bernoulli(self, input: Tensor, p: float | None = None) -> Tensor:
        return (self.fractions(input) < (input if p is None else p)).to(input.dtype)

    def normal(self, mean: Any, std: Any = 1.0, size: Any = None, **kwargs: Any) -> Any:
        if size is not None:
            return mean + std * self.normals(torch.empty(size, **kwargs))
        mean, std = (t.detach() if isinstance(t, Tensor) else t for t in (mean, std))  # PyTorch's has no gradient
        return mean + std * self.normals(mean + std)

    def bernoulli_(self, input: Tensor, p: Any = 0.5) -> Tensor:
        return self.write(input, self.fractions(input) < p)

    def uniform_(self, input: Tensor, a: float = 0.0, b: float = 1.0, **kwargs: Any) -> Tensor:
        low, high = kwargs.get("from", a), kwargs.get("to", b)
        return self.write(input, low + (high - low) * self.fractions(input))

    def normal_(self, input: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
        return self.write(input, mean + std * self.normals(input))

    def exponential_(self, input: Tensor, lambd: float = 1.0) -> Tensor:
        return self.write(input, self.fractions(input).log() / -lambd)

    def rrelu(self, input: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False,
              inplace: bool = False) -> Any:  # fmt: skip
        if not training:
            return NotImplemented
        slopes = torch.where(input >= 0, 1.0, lower + (upper - lower) * self.fractions(input)).to(input.dtype)
        return scaled(input, slopes, inplace)

    # ---- dropouts -------------------------------------------------------------------------------
    def dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        if not (training and 0 < p < 1):
            return undrawn(input, p, training, inplace)
        if inplace:
            return scaled(input, self.dropout(torch.ones_like(input), p), inplace)
        return Dropout.apply(input, self.next_key(), p)  # type: ignore[no-untyped-call]

    def channels(self, input: Tensor, p: float, training: bool, inplace: bool, lead: int = 2) -> Any:
        """Whole channels of `input [b, c, ...]` (`[c, ...]`: lead 1): a place is one of a sample's channels."""
        if not (training and 0 < p < 1):
            return undrawn(input, p, training, inplace)
        factors = self.dropout(input.new_ones(input.shape[:lead]), p)
        return scaled(input, factors.reshape(*factors.shape, *[1] * (input.dim() - lead)), inplace)

    def dropout1d(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        return self.channels(input, p, training, inplace, 1 if input.dim() == 2 else 2)

    def dropout2d(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        return self.channels(input, p, training, inplace)

    def dropout3d(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        return self.channels(input, p, training, inplace, 1 if input.dim() == 4 else 2)

    def alpha_dropout(self, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False,
                      lead: int | None = None) -> Any:  # fmt: skip
        """Dropped to SELU's floor, then scaled and shifted so that mean and variance stay."""
        if not (training and 0 < p < 1):
            return undrawn(input, p, training, inplace)
        lead = input.dim() if lead is None else lead
        factors = self.dropout(input.new_ones(input.shape[:lead]), p)
        kept = (factors != 0).to(input.dtype).reshape(*factors.shape, *[1] * (input.dim() - lead))
        scale = ((SELU_FLOOR**2 * p + 1) * (1 - p)) ** -0.5
        shift = SELU_FLOOR * scale * (kept - 1 + p)
        return input.mul_(kept * scale).add_(shift) if inplace else input * (kept * scale) + shift

    def feature_alpha_dropout(
        self, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
    ) -> Any:
        return self.alpha_dropout(input, p, training, inplace, lead=2)

    def torch_dropout(self, input: Tensor, p: float, train: bool) -> Any:
        return self.dropout(input, p, train)

    def torch_dropout_(self, input: Tensor, p: float, train: bool) -> Any:
        return self.dropout(input, p, train, True)

    def torch_alpha_dropout(self, input: Tensor, p: float, train: bool) -> Any:
        return self.alpha_dropout(input, p, train)

    def torch_feature_dropout(self, input: Tensor, p: float, train: bool) -> Any:
        return self.channels(input, p, train, False)

    def torch_feature_alpha_dropout(self, input: Tensor, p: float, train: bool) -> Any:
        return self.feature_alpha_dropout(input, p, train)

    def layer_by_layer(
        self, func: Any, input: Tensor, hx: Any, params: Any, has_biases: bool, num_layers: int, dropout: float,
        train: bool, bidirectional: bool, batch_first: bool,
    ) -> Any:  # fmt: skip
        """Recurrent layers with dropout between them; without that they are left to the library."""
        if not (train and dropout and num_layers > 1):
            return NotImplemented
        states = tuple(hx) if isinstance(hx, tuple | list) else (hx,)
        ways, each = 1 + bidirectional, len(params) // num_layers
        x, ends = input, []
        for layer in range(num_layers):
            own = tuple(s[layer * ways : (layer + 1) * ways] for s in states)
            weights = params[layer * each : (layer + 1) * each]
            with self:
                x, *last = func(
                    x, own if len(own) > 1 else own[0], weights, has_biases, 1, 0.0, train, bidirectional, batch_first
                )
            ends.append(last)
            x = self.dropout(x, dropout) if layer + 1 < num_layers else x
        return (x, *(torch.cat(parts) for parts in zip(*ends, strict=True)))

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Any:  # fmt: skip
        """Attention whose weights are dropped out; without that it is left to the library."""
        if dropout_p == 0:
            return NotImplemented
        if enable_gqa:
            key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
        scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -math.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        hidden = scores.isneginf().all(-1, keepdim=True)  # such a query attends to nothing
        weights = scores.masked_fill(hidden, 0.0).softmax(-1).masked_fill(hidden, 0.0)
        return self.dropout(weights, dropout_p) @ value


NAMES = ("low", "high", "size")
RULES: dict[Any, str] = {
    **{getattr(torch, name): name for name in (
        "rand", "randn", "rand_like", "randn_like", "randint", "randint_like", "randperm", "bernoulli", "normal",
        "rrelu",
    )},
    **{getattr(torch.Tensor, name): name for name in (
        "bernoulli", "bernoulli_", "uniform_", "normal_", "exponential_",
    )},
    **{getattr(functional, name): name for name in (
        "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout", "rrelu",
    )},
    **{getattr(torch, name): f"torch_{name}" for name in (
        "dropout", "dropout_", "alpha_dropout", "feature_dropout", "feature_alpha_dropout",
    )},
    functional.scaled_dot_product_attention: "attention",
}  # fmt: skip
RECURRENT = {torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu}
COMPOSED = {functional.multi_head_attention_forward, functional.gumbel_softmax}  # in Python, of calls that may draw


def packed(args: tuple[Any, ...]) -> bool:
    """Whether a recurrent function is given a packed sequence: the sizes of its batches are its second argument."""
    return isinstance(args[1], Tensor) and not args[1].is_floating_point()


@cache
def seen_inside(func: FunctionType) -> Callable[..., Any]:
    """A function of PyTorch that does not hand itself to the mode, so that the mode meets the calls within it."""
    asks = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    scope = {**func.__globals__, **dict.fromkeys(asks, lambda *_: False)}
    inside = FunctionType(func.__code__, scope, func.__name__, func.__defaults__, func.__closure__)
    inside.__kwdefaults__ = func.__kwdefaults__
    return inside


def undrawn(x: Tensor, p: float, training: bool, inplace: bool) -> Any:
    """A dropout that drops nothing, or all; another p is a mistake that the library names."""
    if not training or p == 0:
        return x
    return scaled(x, x.new_zeros(()), inplace) if p == 1 else NotImplemented


def scaled(x: Tensor, factors: Tensor, inplace: bool) -> Tensor:
    return x.mul_(factors) if inplace else x * factors


# ---- rules for the client axis ------------------------------------------------------------------
class ForOne(torch.autograd.Function):
    """A function that exists for its `vmap`, which is given the tensors of all clients and may use any differentiable
    means; `forward` is what it computes for one client."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        pass


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
        alone = not level()  # no axis is left, as there is inside a `vmap` of the model's own
        if x.is_cuda and x.dtype != torch.float64 and alone and compiled():  # Triton's numbers have 32 bits
            from offbeat.numerics.fast import kernels

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
    return min(round(p * 2**32), 2**32 - 1)


@cache
def compiled() -> bool:
    """Whether there are kernels of our own."""
    return find_spec("triton") is not None


def first(t: Tensor, dim: int | None, n: int) -> Tensor:
    """The client axis in front."""
    return t.expand(n, *t.shape) if dim is None else t if dim == 0 else t.movedim(dim, 0)
