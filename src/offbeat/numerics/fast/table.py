"""The table of fast paths: what a user's module calls, computed for many clients at once; same results, other means.

The module is written for one client. Inside `ForClients` some functions of PyTorch are replaced: those that `vmap`
cannot map, those it maps slowly, and those that draw random numbers, which are keyed (`numerics/draws.py`). A path is
given the function's own arguments and says NotImplemented to what it is not made for; then `vmap` maps the function
itself. A row here is all that a new path needs: the law over modules (`tests/test_zoo.py`) tries it with every module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from offbeat.numerics.draws import Keyed
from offbeat.numerics.fast import attention, dense, entropy, images, norms, recurrent, reductions, tokens
from offbeat.numerics.fast.places import Places
from offbeat.numerics.transforms import FACTORIES, IN_PLACE, Fresh, Widened, axes_inside, level, writes


class FastPath(NamedTuple):
    functions: tuple[Any, ...]  # of PyTorch
    path: Callable[..., Any]
    when: str  # it applies
    means: str
    tolerance: float = 1e-10  # relative, of gradients in float64, against PyTorch's own for one client


TABLE = (
    FastPath((functional.linear,), dense.linear, "real numbers, inputs of two axes or more",
             "batched products; weight gradients straight into their places"),
    FastPath((functional.conv2d,), images.conv2d, "images, one group, no dilation",
             "by a rule of shape and device: a product of patches, a kernel of our own, the library's for each"),
    FastPath((functional.conv2d,), images.depthwise, "on a GPU, float32, a filter for each channel",
             "kernels of our own"),
    FastPath((functional.conv1d, functional.conv2d, functional.conv3d), images.convolution,
             "on a processor, whatever the form", "the library's, one client after the other"),
    FastPath((functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d),
             images.transposed, "on a processor, whatever the form", "the library's, one client after the other"),
    FastPath((functional.adaptive_avg_pool2d,), images.adaptive_avg_pool2d, "batches of images",
             "clients as a larger batch"),
    FastPath((functional.max_pool2d,), images.max_pool2d, "on a GPU, blocks that do not overlap",
             "a kernel of our own"),
    FastPath((torch.max, Tensor.max), reductions.largest, "of all numbers of a tensor",
             "by amax: ties share the gradient"),
    FastPath((torch.min, Tensor.min), reductions.smallest, "of all numbers of a tensor", "by amin, likewise"),
    FastPath((torch.median, Tensor.median), reductions.median, "of all numbers of a tensor", "ties share the gradient"),
    FastPath((torch.nanmedian, Tensor.nanmedian), reductions.nanmedian, "of all numbers of a tensor", "likewise"),
    FastPath((functional.group_norm, torch.group_norm), norms.group_norm, "any input",
             "a kernel of our own (GPU, float32); the library's for each with enough to do (processor)"),
    FastPath((functional.layer_norm,), norms.layer_norm,
             "on a GPU in float32 over the last axis; on a processor where a client has enough to do",
             "a kernel of our own each way; the library's, one client after the other"),
    FastPath((functional.batch_norm,), norms.batch_norm,
             "on a GPU, statistics of the batch or at rest; on a processor those of a batch with enough to do",
             "clients' channels as channels; at rest, few operations; the library's, one client after the other"),
    FastPath((functional.cross_entropy,), entropy.cross_entropy, "class numbers, the mean over a batch",
             "log-softmax and its slope in few operations, or a kernel of our own"),
    FastPath((functional.cross_entropy,), entropy.smoothed, "class numbers, smoothed and weighted; the mean",
             "PyTorch's formula, which it does not batch itself"),
    FastPath((functional.gaussian_nll_loss,), entropy.gaussian, "variances of the form of the means",
             "PyTorch's formula, which it does not batch itself"),
    FastPath((functional.embedding,), tokens.embedding, "no limit of norms",
             "one long table; gradients by a product (few rows, on a GPU) or by sorting"),
    FastPath((functional.embedding_bag,), tokens.embedding_bag, "bags of one size", "rows, then their sum"),
    FastPath((functional.scaled_dot_product_attention,), attention.attention, "no dropout (else it is drawn by key)",
             "clients as a larger batch: the library's kernels; on a GPU one of our own, or products in a fixed order"),
    FastPath((torch.lstm,), recurrent.lstm, "sequences of one length",
             "one product over all times, then a scan; on a processor the library's for each with enough to do"),
    FastPath((torch.gru,), recurrent.gru, "sequences of one length", "likewise"),
    FastPath((torch.rnn_tanh,), recurrent.rnn_tanh, "sequences of one length", "likewise"),
    FastPath((torch.rnn_relu,), recurrent.rnn_relu, "sequences of one length", "likewise"),
    FastPath((torch.lstm_cell,), recurrent.lstm_cell, "always", "a scan of one time"),
    FastPath((torch.gru_cell,), recurrent.gru_cell, "always", "a scan of one time"),
)  # fmt: skip
PATHS: dict[Any, list[Callable[..., Any]]] = {}
for row in TABLE:
    for function in row.functions:
        PATHS.setdefault(function, []).append(row.path)


class ForClients(Keyed):
    """PyTorch's functions for n clients at once."""

    def __init__(self, key: Tensor | None, places: Places | None = None, wide: set[int] | None = None) -> None:
        super().__init__(key)
        self.places = places
        self.fresh = Fresh(set() if wide is None else wide)

    def other(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        outermost = level() == self.level  # paths do not know the model's own transforms
        for path in PATHS.get(func, ()) if outermost else ():
            result = path(self.places, *args, **kwargs)
            if result is not NotImplemented:
                return result
        if outermost and func in FACTORIES:
            return self.fresh.note(func(*args, **kwargs), axes_inside(self.level - 1)[0])
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            shared = outermost and writes(func) and any(words in str(error) for words in IN_PLACE)
            if shared and self.fresh.widen(args[0]):
                raise Widened(str(error)) from error
            raise
