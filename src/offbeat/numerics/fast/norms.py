"""Normalisations of samples and of batches, with scales and shifts of each client's own."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from offbeat.numerics.draws import ForOne, compiled, first
from offbeat.numerics.fast.places import HEAVY, Apart, Places


def group_norm(
    places: Places | None, input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:  # fmt: skip
    """Each sample's channels in groups, each group to mean 0 and variance 1; then a scale and a shift per channel."""
    if input.dim() < 2 or input.shape[1] % num_groups or input[0].numel() <= num_groups:
        return NotImplemented  # a mistake: the library says which
    if weight is not None and input.is_cuda and input.dtype == torch.float32 and compiled():
        return GroupNorm.apply(input, num_groups, weight, bias, eps, places)  # type: ignore[no-untyped-call]
    if not input.is_cuda and input.numel() >= HEAVY:
        return Apart.apply(partial(grouped_norm, num_groups, eps), input, weight, bias)  # type: ignore[no-untyped-call]
    grouped = input.reshape(input.shape[0], num_groups, -1)
    variance, mean = torch.var_mean(grouped, dim=-1, correction=0, keepdim=True)
    out = ((grouped - mean) * torch.rsqrt(variance + eps)).reshape(input.shape)
    channels = (input.shape[1],) + (1,) * (input.dim() - 2)
    out = out if weight is None else out * weight.reshape(channels)
    return out if bias is None else out + bias.reshape(channels)


def layer_norm(
    places: Places | None, input: Tensor, normalized_shape: Any, weight: Tensor | None = None,
    bias: Tensor | None = None, eps: float = 1e-5,
) -> Any:  # fmt: skip
    """Each sample's last axis to mean 0 and variance 1; then a scale and a shift of each number."""
    if not input.is_cuda and input.numel() >= HEAVY:
        op = partial(plain_norm, tuple(normalized_shape), eps)
        return Apart.apply(op, input, weight, bias)  # type: ignore[no-untyped-call]
    ours = input.is_cuda and input.dtype == torch.float32 and compiled() and input.dim() >= 2
    if not ours or weight is None or len(normalized_shape) != 1 or input.shape[-1] > WIDEST:
        return NotImplemented
    return LayerNorm.apply(input, weight, bias, eps, places)  # type: ignore[no-untyped-call]


def batch_norm(
    places: Places | None, input: Tensor, running_mean: Tensor | None, running_var: Tensor | None,
    weight: Tensor | None = None, bias: Tensor | None = None, training: bool = False, momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:  # fmt: skip
    """Each channel over its client's batch, or by statistics at rest; `vmap` cannot map the library's on a GPU."""
    if input.dim() < 2 or input.numel() <= input.shape[1]:
        return NotImplemented  # a mistake: the library says which
    if training and running_mean is not None and running_var is not None:
        move_statistics(input, running_mean, running_var, momentum)
        running_mean = running_var = None
        if not input.is_cuda and input.numel() < HEAVY:
            return functional.batch_norm(input, None, None, weight, bias, True, 0.0, eps)
    if not input.is_cuda and running_mean is None and running_var is None and input.numel() >= HEAVY:
        return Apart.apply(partial(batched_norm, eps), input, weight, bias)  # type: ignore[no-untyped-call]
    if not input.is_cuda:
        return NotImplemented
    if running_mean is None or running_var is None:
        return BatchNorm.apply(input, weight, bias, eps)  # type: ignore[no-untyped-call]
    channels = (input.shape[1],) + (1,) * (input.dim() - 2)
    out = (input - running_mean.reshape(channels)) * torch.rsqrt(running_var + eps).reshape(channels)
    out = out if weight is None else out * weight.reshape(channels)
    return out if bias is None else out + bias.reshape(channels)


def move_statistics(x: Tensor, running_mean: Tensor, running_var: Tensor, momentum: float) -> None:
    """Move running statistics towards those of a batch, as PyTorch does."""
    sides = [side for side in range(x.dim()) if side != 1]
    var, mean = torch.var_mean(x.detach().to(running_var.dtype), sides, correction=1)
    for running, statistic in ((running_mean, mean), (running_var, var)):
        running.mul_(1 - momentum).add_(statistic, alpha=momentum)


def grouped_norm(groups: int, eps: float, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return functional.group_norm(x, groups, weight, bias, eps)


def batched_norm(eps: float, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return functional.batch_norm(x, None, None, weight, bias, True, 0.0, eps)


def plain_norm(shape: Any, eps: float, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return functional.layer_norm(x, shape, weight, bias, eps)


WIDEST = 4096  # numbers that one program of our kernel holds


class LayerNorm(ForOne):
    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, places: Places | None) -> Tensor:
        return functional.layer_norm(x, x.shape[-1:], weight, bias, eps)

    @staticmethod
    def vmap(
        info: Any, dims: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, places: Places | None
    ) -> Any:
        from offbeat.numerics.fast import norm_kernels

        n = info.batch_size
        x, weight = first(x, dims[0], n), first(weight, dims[1], n)
        shift = None if bias is None else first(bias, dims[2], n)
        out = norm_kernels.LayerNorm.apply(x.flatten(1, -2), weight, shift, eps, places)  # type: ignore[no-untyped-call]
        return out.reshape(x.shape), 0


class GroupNorm(ForOne):
    @staticmethod
    def forward(
        x: Tensor, groups: int, weight: Tensor, bias: Tensor | None, eps: float, places: Places | None
    ) -> Tensor:
        return functional.group_norm(x, groups, weight, bias, eps)

    @staticmethod
    def vmap(
        info: Any, dims: Any, x: Tensor, groups: int, weight: Tensor, bias: Tensor | None, eps: float, places: Any
    ) -> Any:
        from offbeat.numerics.fast import norm_kernels

        n = info.batch_size
        x, weight = first(x, dims[0], n), first(weight, dims[2], n)
        shift = None if bias is None else first(bias, dims[3], n)
        return norm_kernels.GroupNorm.apply(x, groups, weight, shift, eps, places), 0  # type: ignore[no-untyped-call]


class BatchNorm(ForOne):
    @staticmethod
    def forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        return torch.batch_norm(x, weight, bias, None, None, True, 0.0, eps, False)

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Any:
        """The clients' channels are channels."""
        n = info.batch_size
        scale = None if weight is None else first(weight, dims[1], n).flatten()
        shift = None if bias is None else first(bias, dims[2], n).flatten()
        channels = first(x, dims[0], n).movedim(0, 1).flatten(1, 2)
        out = torch.batch_norm(channels, scale, shift, None, None, True, 0.0, eps, False)
        return out.reshape(len(out), n, -1, *out.shape[2:]).movedim(1, 0), 0
