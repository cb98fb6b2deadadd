"""Flat vectors over any `nn.Module`: parameters of n clients are one `[n, d]` matrix with a view per layer.

The module is written for one client and called through `torch.func`; the client axis is added by `vmap`, and
gradients are taken with respect to the flat matrix itself (the sum of the clients' losses separates).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from offbeat.errors import ConfigError

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]  # (outputs, targets) of a batch -> mean loss


def refusals(module: nn.Module) -> list[str]:
    """Why a module cannot be trained here, in sentences; empty when it can."""
    found = []
    for name, part in module.named_modules():
        where = f"{type(part).__name__} ('{name}')" if name else type(part).__name__
        if isinstance(part, nn.modules.batchnorm._NormBase) and part.track_running_stats:
            found.append(
                f"the model has {where} with running statistics: clients would have to average them, and integer "
                "counters with them. Use GroupNorm or LayerNorm, or set track_running_stats=False"
            )
        elif isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0:
            found.append(
                f"the model has {where} with p = {part.p}: its masks would not be keyed by job, so runs would not "
                "repeat. Take it out or set p = 0"
            )
    if not any(p.requires_grad for p in module.parameters()):
        found.append("the model has no parameters to train")
    return found


class FlatModel:
    """A module as a function of one flat vector (or, with a client axis, of a matrix of them)."""

    def __init__(self, module: nn.Module, loss: Loss, dtype: torch.dtype = torch.float32) -> None:
        problems = refusals(module)
        if problems:
            raise ConfigError(problems)
        self.module = copy.deepcopy(module).to(dtype)  # the caller's own stays as it is
        self.loss = loss
        self.dtype = dtype
        parameters = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        self.names = list(parameters)
        self.shapes = [tuple(p.shape) for p in parameters.values()]
        self.sizes = [math.prod(shape) for shape in self.shapes]
        self.dimension = sum(self.sizes)

    def to(self, device: torch.device | str) -> FlatModel:
        self.module.to(device)
        return self

    def initial(self) -> Tensor:
        """The module's own trainable parameters: version 0. Frozen ones stay as they are."""
        return torch.cat([p.detach().reshape(-1) for p in self.module.parameters() if p.requires_grad]).clone()

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Named parameters of `[..., d]` as views `[..., *shape]`; one split, so that its gradient is one copy."""
        lead = flat.shape[:-1]
        parts = torch.split(flat, self.sizes, dim=-1)
        return {
            name: part.reshape(*lead, *shape) for name, part, shape in zip(self.names, parts, self.shapes, strict=True)
        }

    def outputs(self, flat: Tensor, x: Tensor) -> Tensor:
        """The model's outputs for one vector."""
        result: Tensor = functional_call(self.module, self.views(flat), (x,))
        return result

    def one(self, flat: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """The loss of one client on one batch."""
        return self.batch_loss(self.views(flat), x, y)

    def losses(self, flat: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """The losses `[n]` of n clients: `flat` is `[n, d]`, `x` is `[n, b, ...]`."""
        with ForClients():
            return torch.vmap(self.batch_loss)(self.views(flat), x, y)

    def batch_loss(self, views: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return self.mean_loss(functional_call(self.module, views, (x,)), y)

    def mean_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        value = self.loss(outputs, targets)
        if value.dim():
            shape = tuple(value.shape)
            raise ConfigError([f"the loss must give one number for a batch, its mean; it gave shape {shape}"])
        return value


class ForClients(TorchFunctionMode):
    """Inside, two functions are computed in another way, to the same result, because the client axis asks for it.

    A convolution becomes unfold + matrix product: each client has its own kernel, `vmap` would make a grouped
    convolution of that, which libraries run slowly, while the product is one batched product over clients.
    Group normalisation is spelt out, because `vmap` cannot map PyTorch's own.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is functional.conv2d or func is torch.conv2d:
            return convolve(func, *args, **(kwargs or {}))
        if func is functional.group_norm:
            return group_norm(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def convolve(
    func: Any, x: Tensor, w: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
    dilation: Any = 1, groups: int = 1,
) -> Tensor:  # fmt: skip
    """`conv2d` of one client as a product; what is not a plain convolution goes to `func`, the library's own."""
    if groups != 1 or isinstance(padding, str) or x.dim() != 4 or pair(dilation) != (1, 1):
        result: Tensor = func(x, w, bias, stride, padding, dilation, groups)
        return result
    if pair(padding) != (0, 0):
        high, wide = pair(padding)
        x = functional.pad(x, (wide, wide, high, high))
    kernel, step = (int(w.shape[2]), int(w.shape[3])), pair(stride)
    size = [(n - k) // s + 1 for n, k, s in zip(x.shape[2:], kernel, step, strict=True)]
    columns: Tensor = Unfold.apply(x, kernel, step)  # type: ignore[no-untyped-call]
    out = columns.reshape(-1, columns.shape[-1]) @ w.permute(0, 2, 3, 1).reshape(w.shape[0], -1).T
    if bias is not None:
        out = out + bias
    return out.reshape(x.shape[0], *size, w.shape[0]).permute(0, 3, 1, 2)


def group_norm(
    x: Tensor, groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Each sample's channels in groups, each group to mean 0 and variance 1; then a scale and a shift per channel."""
    grouped = x.reshape(x.shape[0], groups, -1)
    variance, mean = torch.var_mean(grouped, dim=-1, correction=0, keepdim=True)
    out = ((grouped - mean) * torch.rsqrt(variance + eps)).reshape(x.shape)
    channels = (x.shape[1],) + (1,) * (x.dim() - 2)
    out = out if weight is None else out * weight.reshape(channels)
    return out if bias is None else out + bias.reshape(channels)


class Unfold(torch.autograd.Function):
    """Patches of `[b, c, h, w]` as rows `[b, L, kh * kw * c]`, and their gradient as sums of shifted slices.

    Channels lie innermost, so that both are runs of whole lines of memory. The client axis is folded into the batch.
    """

    @staticmethod
    def forward(x: Tensor, kernel: tuple[int, int], step: tuple[int, int]) -> Tensor:
        patches = x.permute(0, 2, 3, 1).unfold(1, kernel[0], step[0]).unfold(2, kernel[1], step[1])
        b, high, wide, *_ = patches.shape  # [b, oh, ow, c, kh, kw]
        return patches.permute(0, 1, 2, 4, 5, 3).reshape(b, high * wide, -1)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        x, ctx.kernel, ctx.step = inputs
        ctx.shape = x.shape

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        b, c, h, w = ctx.shape
        (kh, kw), (sh, sw) = ctx.kernel, ctx.step
        oh, ow = (h - kh) // sh + 1, (w - kw) // sw + 1
        grad = grad.reshape(b, oh, ow, kh, kw, c)
        total = grad.new_zeros(b, h, w, c)
        for i in range(kh):
            for j in range(kw):
                total[:, i : i + sh * (oh - 1) + 1 : sh, j : j + sw * (ow - 1) + 1 : sw] += grad[:, :, :, i, j]
        return total.permute(0, 3, 1, 2), None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, kernel: tuple[int, int], step: tuple[int, int]) -> tuple[Tensor, int]:
        x = x.movedim(in_dims[0], 0)
        rows: Tensor = Unfold.apply(x.flatten(0, 1), kernel, step)  # type: ignore[no-untyped-call]
        return rows.reshape(*x.shape[:2], *rows.shape[1:]), 0


def pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[1]))
