"""Layers of images: convolution and pooling with a kernel of each client's own."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from offbeat.numerics.draws import ForOne, compiled, first
from offbeat.numerics.fast.convolution import convolve
from offbeat.numerics.fast.places import Apart, Places, pair, rounded


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


def convolution(
    places: Places | None, input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
    dilation: Any = 1, groups: int = 1,
) -> Any:  # fmt: skip
    """Along one, two or three axes, in groups, dilated."""
    op = CONVOLUTIONS[weight.dim() - 3]
    return one_by_one(op, input, weight, bias, (stride, padding, dilation, groups))


def transposed(
    places: Places | None, input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
    output_padding: Any = 0, groups: int = 1, dilation: Any = 1,
) -> Any:  # fmt: skip
    op = TRANSPOSED[weight.dim() - 3]
    return one_by_one(op, input, weight, bias, (stride, padding, output_padding, groups, dilation))


def depthwise(
    places: Places | None, input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
    dilation: Any = 1, groups: int = 1,
) -> Any:  # fmt: skip
    """A filter for each channel of images."""
    plain = input.is_cuda and input.dtype == torch.float32 and compiled() and not isinstance(padding, str)
    single = input.dim() == 4 and groups == input.shape[1] == weight.shape[0] and weight.shape[2:].numel() <= 49
    if not plain or not single or pair(dilation) != (1, 1) or torch.is_autocast_enabled("cuda"):
        return NotImplemented
    return Depthwise.apply(input, weight, bias, pair(stride), pair(padding), places)  # type: ignore[no-untyped-call]


class Depthwise(ForOne):
    @staticmethod
    def forward(x: Tensor, w: Tensor, bias: Tensor | None, step: Any, padding: Any, places: Places | None) -> Tensor:
        return functional.conv2d(x, w, bias, step, padding, groups=x.shape[1])

    @staticmethod
    def vmap(
        info: Any, dims: Any, x: Tensor, w: Tensor, bias: Tensor | None, step: Any, padding: Any, places: Places | None
    ) -> Any:
        from offbeat.numerics.fast import depthwise_kernels

        n = info.batch_size
        x, w = first(x, dims[0], n), first(w, dims[1], n)
        shift = None if bias is None else first(bias, dims[2], n)
        return depthwise_kernels.Depthwise.apply(x, w, shift, step, padding, places), 0  # type: ignore[no-untyped-call]


CONVOLUTIONS = (functional.conv1d, functional.conv2d, functional.conv3d)
TRANSPOSED = (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)


def one_by_one(op: Any, input: Tensor, weight: Tensor, bias: Tensor | None, options: tuple[Any, ...]) -> Any:
    """On a processor the library's own kernels, of each client alone, are quicker than what `vmap` makes of them."""
    if input.is_cuda or input.dim() != weight.dim():
        return NotImplemented
    if torch.is_autocast_enabled(input.device.type):
        input, weight, bias = rounded(input, weight, bias)
    return Apart.apply(partial(convolved, op, options), input, weight, bias)  # type: ignore[no-untyped-call]


def convolved(op: Any, options: tuple[Any, ...], x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = op(x, w, bias, *options)
    return out


def adaptive_avg_pool2d(places: Places | None, input: Tensor, output_size: Any) -> Any:
    """Without weights: the clients are a larger batch."""
    if input.dim() != 4:
        return NotImplemented
    return Averages.apply(input, output_size)  # type: ignore[no-untyped-call]


class Averages(ForOne):
    @staticmethod
    def forward(x: Tensor, size: Any) -> Tensor:
        return functional.adaptive_avg_pool2d(x, size)

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor, size: Any) -> Any:
        flat = functional.adaptive_avg_pool2d(x.movedim(dims[0], 0).flatten(0, 1), size)
        return flat.reshape(info.batch_size, -1, *flat.shape[1:]), 0


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


class Pool(ForOne):
    @staticmethod
    def forward(x: Tensor, kernel: tuple[int, int]) -> Tensor:
        return functional.max_pool2d(x, kernel)

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor, kernel: tuple[int, int]) -> Any:
        from offbeat.numerics.fast import kernels

        pooled: Tensor = kernels.Pool.apply(x.movedim(dims[0], 0).flatten(0, 1), kernel)  # type: ignore[no-untyped-call]
        return pooled.reshape(info.batch_size, -1, *pooled.shape[1:]), 0
