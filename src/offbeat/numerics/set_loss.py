"""Loss of a set of samples: the user's loss of all samples at once, although their outputs are computed in parts.

A loss need not be the mean of the losses of its samples: weights of classes, ignored labels and logits that are centred
over the batch give it another denominator, or none. So outputs are kept, and the loss is called once for each set.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from offbeat.numerics.outputs import cut, has_rows, in_rows, joined, mapped, parts

KEPT = 1 << 26  # numbers of a set's outputs that are kept, so that its loss is called once
TOGETHER = 1 << 22  # numbers of outputs of clients whose losses are computed together
FEW = 8  # sets of one size, fewer of which are faster one by one
PROBES = 16  # rows of scores from which a loss shows the axis of its classes
Loss: TypeAlias = Callable[[Any, Any], Tensor]
MEANS: dict[Any, inspect.Signature] = {
    of: inspect.signature(of) for of in (functional.cross_entropy, functional.nll_loss)
}


class Mean(NamedTuple):
    """One mean cross-entropy."""

    value: Tensor
    below: Tensor | float  # its denominator
    ignored: int  # the label that it leaves out


class Denominators(TorchFunctionMode):
    """The mean cross-entropies that are computed inside, by model or loss."""

    def __init__(self) -> None:
        super().__init__()
        self.means: list[Mean] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in MEANS:
            bound = MEANS[func].bind(*args, **(kwargs or {}))
            bound.apply_defaults()
            given = bound.arguments
            if (given["reduction"], given["reduce"], given["size_average"]) == ("mean", None, None):
                self.means.append(Mean(result, denominator(**given), given["ignore_index"]))
        return result

    def of(self, value: Tensor) -> Mean | None:
        """Return the mean that is the loss, or None where the loss is no cross-entropy as it was computed."""
        return next((mean for mean in self.means if mean.value is value), None)


def denominator(
    input: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, **_: Any
) -> Tensor | float:  # fmt: skip
    """Return what `cross_entropy` and `nll_loss` divide by: the weights of the labels that are not ignored."""
    if target.is_floating_point():
        return input.numel() / input.shape[min(1, input.dim() - 1)]
    there = target != ignore_index
    if weight is None:
        return there.sum()
    return (weight[target.masked_fill(~there, 0)] * there).double().sum()


class Piece(NamedTuple):
    """Outputs and targets of some samples of a set, and their loss."""

    outputs: Any
    targets: Any
    size: int
    loss: Tensor
    below: Tensor | float | None  # the denominator of the loss, where it is a cross-entropy

    @property
    def weight(self) -> Tensor:
        return torch.as_tensor(self.size if self.below is None else self.below, device=self.loss.device).double()


class SetLoss:
    """Loss of one set whose outputs arrive in parts of `sizes` samples.

    The loss is called once where outputs have rows and at most KEPT numbers. Elsewhere it is called for each part, and
    parts are weighted by the denominators of a cross-entropy, or by samples. `caveat` then says where pieces show that
    the mean over parts is not the loss of all samples.
    """

    def __init__(self, loss: Loss, sizes: Sequence[int]) -> None:
        self.loss, self.sizes = loss, sizes
        self.kept: list[Any] = []
        self.whole = len(sizes) == 1
        self.done = 0
        self.sums: list[Tensor] = []  # loss times weight, and weight, of each part
        self.before: Piece | None = None  # the second half of the part before
        self.caveat: str | None = None

    def add(self, outputs: Any, targets: Any, seen: Denominators) -> None:
        """Take the next part; `seen` has watched the model compute it."""
        size = self.sizes[self.done]
        if not self.done:
            self.whole = self.whole or (in_rows(outputs, size) and count(outputs) * len(self.sizes) <= KEPT)
        self.done += 1
        if self.whole:
            self.kept.append(outputs)
            return
        part = self.piece(outputs, targets, size, seen)
        self.sums.append(torch.stack(summed([part])))
        if self.caveat is None and (part.below is None or self.done == 1) and not self.adds_up(part):
            self.caveat = (
                f"it is the mean over {len(self.sizes)} batches of at most {max(self.sizes):,} samples, and not the "
                "loss of all samples at once: outputs are too large to keep, or have parts without a row for each "
                "sample, and the loss of a batch is not the mean of the losses of its samples; give fewer samples "
                "(evaluate.samples, or smaller sets), or torch's cross_entropy of the outputs as the loss"
            )

    def piece(self, outputs: Any, targets: Any, size: int, seen: Denominators | None = None) -> Piece:
        seen = seen or Denominators()
        with seen:
            value = self.loss(outputs, targets)
        mean = seen.of(value)
        return Piece(outputs, targets, size, value, None if mean is None else mean.below)

    def adds_up(self, part: Piece) -> bool:
        """Return whether the loss of a part is the weighted mean of those of its halves, and the same for the first
        half behind the second half of the part before."""
        half = part.size // 2
        if not half or not in_rows(part.outputs, part.size):
            return part.below is not None and not in_rows(part.outputs, part.size)
        halves = []
        for begin, end in ((0, half), (half, part.size)):
            outputs, targets = cut((part.outputs, part.targets), begin, end, part.size)
            halves.append(self.piece(outputs, targets, end - begin))
        before, self.before = self.before, halves[1] if part.below is None else None
        return same(part, halves) and (before is None or same(self.bridge(before, halves[0]), [before, halves[0]]))

    def bridge(self, one: Piece, two: Piece) -> Piece:
        sizes = [one.size, two.size]
        outputs, targets = joined([one[:2], two[:2]], sizes)
        return self.piece(outputs, targets, sum(sizes))

    def value(self, targets: Callable[[], Any]) -> Tensor:
        """Return the loss; `targets` gives those of the whole set."""
        if self.whole:
            return self.loss(joined(self.kept, self.sizes), targets())
        total, below = torch.stack(self.sums).sum(0).unbind()
        return total / below


def summed(pieces: Sequence[Piece]) -> tuple[Tensor, Tensor]:
    """Return the sum of losses times weights, and that of weights."""
    weighted = [torch.where(each.weight > 0, each.loss.double() * each.weight, 0.0) for each in pieces]
    return torch.stack(weighted).sum(), torch.stack([each.weight for each in pieces]).sum()


def same(whole: Piece, pieces: Sequence[Piece]) -> bool:
    """Return whether a loss is the weighted mean of those of its pieces, but for rounding."""
    tolerance = 100 * torch.finfo(whole.loss.dtype).eps
    return torch.allclose(summed([whole])[0], summed(pieces)[0], rtol=tolerance, atol=tolerance)


def count(outputs: Any) -> int:
    return sum(part.numel() for part in parts(outputs) if isinstance(part, Tensor))


def losses_of_sets(loss: Loss, outputs: Any, targets: Any, sizes: Sequence[int]) -> Tensor:
    """Return the losses `[sets]` of sets that follow one another in outputs and targets; sets of one size are computed
    together."""
    both, rows, places = (outputs, targets), sum(sizes), dict[int, list[int]]()
    for place, size in enumerate(sizes):
        places.setdefault(size, []).append(place)
    begins = [0, *accumulate(sizes)]
    losses, together = torch.zeros(len(sizes), dtype=torch.float64), True
    for size, own in places.items():
        first = [begins[place] for place in own]
        some = several(loss, both, first, size, rows) if together and len(own) >= FEW else None
        if some is None:
            together = together and len(own) < FEW
            own_sets = [(begin, begin + size, rows) for begin in first]
            some = torch.stack([loss(cut(outputs, *ends), cut(targets, *ends)) for ends in own_sets])
        losses = losses.to(some.device)
        losses[own] = some.double()
    return losses


def several(loss: Loss, both: Any, begins: Sequence[int], size: int, rows: int) -> Tensor | None:
    """Return the losses of sets of one size, or None where vmap does not take the loss."""
    rowed = [part for part in parts(both) if has_rows(part, rows)]
    index = (torch.tensor(begins)[:, None] + torch.arange(size)).to(rowed[0].device)

    def one(*own: Tensor) -> Tensor:
        left = iter(own)
        return loss(*mapped(lambda part: next(left) if has_rows(part, rows) else part, both))

    try:
        return torch.vmap(one)(*(part[index] for part in rowed))
    except torch.OutOfMemoryError:
        raise
    except Exception:  # a loss of one's own that vmap does not take
        return None


def class_axis(loss: Loss, outputs: Tensor, targets: Tensor) -> int | None:
    """Return the axis of the classes (-1 or 1) in scores of this shape: the one on which the loss is smaller when the
    class of each target has the largest score. None where the loss does not tell."""
    many = outputs.shape[1]
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(0, many, (PROBES, *targets.shape[1:]), generator=generator)
    hot = functional.one_hot(drawn, many).to(outputs.device, outputs.dtype) * 0.8 + 0.1
    labels = drawn.to(targets)
    try:
        last, first = float(loss(hot, labels)), float(loss(hot.movedim(-1, 1), labels))
    except Exception:  # a loss of one's own that takes more than scores
        return None
    return -1 if last < first else 1 if first < last else None


def ignored_label(loss: Loss, outputs: Any, targets: Any) -> int | None:
    """Return the label that a loss leaves out, where it is a cross-entropy of PyTorch; None elsewhere."""
    with Denominators() as seen:
        mean = seen.of(loss(outputs, targets))
    return None if mean is None else mean.ignored
