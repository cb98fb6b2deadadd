"""A loss is tried once before a run: a few real samples, forward and backward. What cannot be trained is said here."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from offbeat.errors import shortened
from offbeat.numerics.forked import forked
from offbeat.numerics.forms import Tree, called, handed_over, handing_over, rows_of, scores_in
from offbeat.numerics.outputs import detached
from offbeat.numerics.vector import loss_copied, of_type
from offbeat.numerics.windows import Windows

ROWS = (2, 3, 5, 7)  # samples to try with: the first number that no side of outputs or targets has
# Losses of pairs: PyTorch stretches one side to the shape of the other, and the mean is of something else.
PAIRED: dict[Any, str] = {
    functional.binary_cross_entropy: "binary_cross_entropy",
    functional.binary_cross_entropy_with_logits: "binary_cross_entropy_with_logits",
    functional.huber_loss: "huber_loss",
    functional.kl_div: "kl_div",
    functional.l1_loss: "l1_loss",
    functional.mse_loss: "mse_loss",
    functional.poisson_nll_loss: "poisson_nll_loss",
    functional.smooth_l1_loss: "smooth_l1_loss",
    functional.soft_margin_loss: "soft_margin_loss",
}
STRANGE = 16  # labels that are no classes, of different values, that are tried
OUTPUTS, TARGETS = "outputs", "targets"


class Watch(TorchFunctionMode):
    """Notices where a loss meets outputs and targets of different shapes: in a loss of pairs, or in arithmetic between
    the two that spreads both (`[n, 1]` and `[n]` to `[n, n]`). What a loss has reshaped itself is its own business."""

    def __init__(self, outputs: Tensor, targets: Tensor) -> None:
        super().__init__()
        self.kept = [outputs, targets]  # so that no id is used twice
        self.names = {id(outputs): OUTPUTS, id(targets): TARGETS}
        self.problems: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [value for value in (*args, *(kwargs or {}).values()) if isinstance(value, Tensor)]
        if func in PAIRED and len(given) >= 2 and given[0].shape != given[1].shape:
            self.problems.append(f"{PAIRED[func]} takes outputs and targets of one shape")
        named = [value for value in given if id(value) in self.names]
        if not isinstance(result, Tensor) or not named or self.problems:
            return result
        kinds = {self.names[id(value)] for value in named}
        if kinds == {OUTPUTS, TARGETS} and result.numel() > max(value.numel() for value in given):
            self.problems.append("the loss spreads both over all pairs of samples")
        elif len(given) == 1 and result.shape == given[0].shape:  # a cast, a sigmoid: still the same thing
            self.kept.append(result)
            self.names[id(result)] = kinds.pop()
        return result


def loss_problems(
    kind: str, model: nn.Module, loss: Callable[[Any, Any], Any], x: Tree, y: Tree, most: int, whole: bool = False
) -> list[str]:
    """Why a model cannot be trained with a loss on such samples, `most` of them in a batch; empty when it can. `whole`:
    the loss takes records as they are."""
    first = next(p for p in model.parameters() if p.requires_grad)
    said: list[str] = []
    for dtype in dict.fromkeys((first.dtype, torch.float32, torch.float64)):  # own constants may fit only one of them
        with warnings.catch_warnings(), forked([first.device]), torch.enable_grad():
            warnings.simplefilter("ignore")
            own = of_type(copy.deepcopy(model), dtype).train()
            problems = tried(kind, handing_over(own) if whole else own, loss, x, y, most)
        if not problems:
            return []
        said = said or problems
    return [problem + mixed_types(model) for problem in said]


def mixed_types(model: nn.Module) -> str:
    """What to know where a model of several number types fails; empty where it has one."""
    types = sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()})
    if len(types) < 2:
        return ""
    return f". The model has parts of types {' and '.join(types)}, and a run computes all of them in one type"


def tried(kind: str, model: nn.Module, loss: Any, x: Tree, y: Tree, most: int) -> list[str]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    rows, outputs, targets, single = 0, x, y, False
    for rows in ROWS:
        rows = min(rows, most, len(leaves(x)[0]))
        inputs, targets = (fitting(rows_of(t, slice(rows)), parameters[0]) for t in (x, y))
        try:
            outputs = called(model, inputs)
        except Exception as error:  # whatever a model of one's own raises
            said = ", ".join(str(tuple(leaf.shape[1:])) for leaf in leaves(x))
            return [f"the model fails on {rows} {kind} samples of shape {said}: {reason(error)}"]
        single = isinstance(outputs, Tensor) and isinstance(targets, Tensor)
        if not single or rows not in (*outputs.shape[1:], *targets.shape[1:]):
            break
    if not single:
        return of_several(kind, loss, outputs, targets, parameters)
    given = f"outputs of shape {shape(outputs)} and type {outputs.dtype}, {kind} targets of shape {shape(targets)} and "
    given = f"{given}type {targets.dtype}"
    watch = Watch(outputs, targets)
    try:
        with watch:
            value = loss(outputs, targets)
    except Exception as error:  # whatever a loss of one's own raises
        advice = record_refused(model, loss, inputs, targets) or remedy(loss, outputs, targets)
        return [f"the loss fails on {given} ({rows} samples): {reason(error)}. {advice}"]
    if watch.problems:
        return [f"{watch.problems[0]}, but here are {given} (for {rows} samples); reshape the one or the other"]
    return value_problems(value, parameters)


def sum_note(model: nn.Module, loss: Any, x: Tree, y: Tree, whole: bool = False) -> str | None:
    """Return a sentence where a loss grows with the number of samples: where two and three times the same batch have
    two and three times its loss. The model is called once, on a copy."""
    first = next(p for p in model.parameters() if p.requires_grad)
    inputs, targets = (fitting(rows_of(t, slice(2)), first) for t in (x, y))
    with warnings.catch_warnings(), forked([first.device]), torch.enable_grad():
        warnings.simplefilter("ignore")
        try:
            own = copy.deepcopy(model).train()
            outputs = called(handing_over(own) if whole else own, inputs)
            values = [float(loss(*repeated((outputs, targets), times))) for times in (1, 2, 3)]
            grows = values[0] != 0 and np.allclose(values, np.multiply(values[0], (1, 2, 3)), rtol=1e-3, atol=0)
        except Exception:  # whatever a loss of one's own raises; some take only the rows that the model gave
            grows = False
    if not (grows or getattr(loss, "reduction", None) == "sum"):
        return None
    return (
        "the loss gives the sum over the samples of a batch, and rates and weights here assume a mean: with batches "
        "of b samples client_lr acts as b times client_lr, and a client with larger batches counts for more. Take the "
        "mean (reduction = 'mean'), or choose client_lr for the sum"
    )


def repeated(values: Any, times: int) -> Any:
    """The same rows so many times."""
    return pytree.tree_map(lambda t: torch.cat([t] * times) if isinstance(t, Tensor) and t.dim() else t, values)


def of_several(kind: str, loss: Any, outputs: Any, targets: Tree, parameters: Sequence[Tensor]) -> list[str]:
    """The same where outputs or targets are not one tensor: the loss alone knows how to take them."""
    try:
        value = loss(outputs, targets)
    except Exception as error:  # whatever a loss of one's own raises
        if not isinstance(outputs, Tensor):
            return [
                f"the model gives a {type(outputs).__name__}, and the loss does not take it ({reason(error)}); it must "
                "give one tensor, the outputs of a batch, or the loss must know what to do with what it gives"
            ]
        return [f"the loss fails on {kind} targets of several parts: {reason(error)}"]
    return value_problems(value, parameters)


def record_taken(model: nn.Module, loss: Any, x: Tree, y: Tree) -> Any | None:
    """The record that the model gives for two samples, where the loss trains with the whole of it and not with its
    `logits` alone; None otherwise. The model is called."""
    parameter = next(p for p in model.parameters() if p.requires_grad)
    inputs, targets = (fitting(rows_of(t, slice(2)), parameter) for t in (x, y))
    with warnings.catch_warnings(), forked([parameter.device]), torch.enable_grad():
        warnings.simplefilter("ignore")
        record = handed_over(model, inputs)
        scores = scores_in(record)
        if scores is record or trains(loss, scores, targets) or not trains(loss, record, targets):
            return None
    return detached(record)


def trains(loss: Any, outputs: Any, targets: Tree) -> bool:
    """Whether a loss gives one number that gradients go through."""
    try:
        value = loss(outputs, targets)
    except Exception:  # whatever a loss of one's own raises
        return False
    return isinstance(value, Tensor) and not value.dim() and value.requires_grad


def record_refused(model: nn.Module, loss: Any, inputs: Tree, targets: Tree) -> str:
    """What to know where a loss was called with a part of what the model gives; empty where it was not."""
    record = handed_over(model, inputs)
    if scores_in(record) is record:
        return ""
    names = ", ".join(record if isinstance(record, Mapping) else getattr(record, "__dict__", ()))
    try:
        loss(record, targets)
        again = "of which no gradient goes to the model"
    except Exception as error:  # whatever a loss of one's own raises
        again = f"on which it fails, too: {reason(error)}"
    return f"The model gives a record ({names}); the loss was called with its logits, then with the whole, {again}"


def value_problems(value: Any, parameters: Sequence[Tensor]) -> list[str]:
    """What is wrong with the value of a loss."""
    must = "it must give a tensor with one number for a batch, its mean"
    if not isinstance(value, Tensor):
        said = f"{value!r:.40} ({type(value).__name__})" if value is not None else "nothing (None)"
        return [f"the loss gives {said}; {must}"]
    if value.dim():
        return [f"the loss must give one number for a batch, its mean; it gave shape {tuple(value.shape)}"]
    if not value.is_floating_point():
        return [f"the loss gives a number of type {value.dtype}; {must}, of a floating-point type"]
    lost = "no gradient goes from the loss to the model's parameters"
    if not value.requires_grad:
        return [f"{lost}: it must be computed from the outputs by PyTorch, without item(), detach() or argmax()"]
    try:
        slopes = torch.autograd.grad(value, parameters, allow_unused=True)
    except Exception as error:  # whatever a backward of one's own raises
        if "use_reentrant=True" in str(error):
            return [
                "the model uses torch.utils.checkpoint with use_reentrant=True, which knows no gradients of a flat "
                "vector: give use_reentrant=False, or turn checkpointing off (a model of Hugging Face: "
                "model.gradient_checkpointing_disable()); memory is planned by the engine"
            ]
        return [f"the loss cannot be differentiated: {reason(error)}"]
    return [] if any(slope is not None for slope in slopes) else [f"{lost}: it does not depend on them"]


def unfit_label(model: nn.Module, loss: Any, x: Tree, y: Any, classes: int) -> int | None:
    """The first sample whose label is none of the outputs' classes, and fails in the loss where a class does not; None
    where the loss takes all labels. The attempt is on the processor: on a GPU such a label ends the process."""
    labels = y[:].cpu()
    values, first = np.unique(labels.numpy(), return_index=True)
    strange = first[(values < 0) | (values >= classes)][:STRANGE].tolist()
    parameter = next(model.parameters())
    device, own_loss = parameter.device, loss_copied(loss, parameter.dtype)
    if isinstance(own_loss, nn.Module):
        own_loss.cpu()

    def works(rows: list[int], targets: Tensor) -> bool:
        try:
            own_loss(called(model, fitting(rows_of(x, rows), next(model.parameters()))), targets[rows])
        except Exception:  # whatever a model or a loss of one's own raises
            return False
        return True

    def unfit(rows: list[int]) -> bool:
        return not works(rows, labels) and works(rows, labels.clamp(0, classes - 1))

    model.cpu()
    try:
        with warnings.catch_warnings(), forked([device]), torch.enable_grad():
            warnings.simplefilter("ignore")
            if not unfit(strange * 2):
                return None
            return next((row for row in strange if unfit([row, row])), None)
    finally:
        model.to(device)


def remedy(loss: Any, outputs: Tensor, targets: Tensor) -> str:
    """What to do about a loss that does not take its arguments, as far as another attempt can tell."""
    flat = targets.squeeze(1) if targets.dim() == 2 and targets.shape[1] == 1 else None
    attempts = [
        ("It takes them the other way round: a loss here is called as loss(outputs, targets)", (targets, outputs)),
        ("It takes labels of type int64: give y.long()", (outputs, targets.long())),
    ]
    if flat is not None:
        attempts.append(("It takes one target per sample: give y.squeeze(1)", (outputs, flat)))
        attempts.append(("It takes labels [n] of type int64: give y.squeeze(1).long()", (outputs, flat.long())))
    if targets.shape != outputs.shape and targets.numel() == outputs.numel():
        attempts.append(("It takes targets of the shape of the outputs", (outputs, targets.reshape(outputs.shape))))
    if not targets.is_floating_point():
        attempts.append(("It takes targets of a floating-point type: give y.float()", (outputs, targets.float())))
    for sentence, arguments in attempts:
        if trains(loss, *arguments):
            return sentence
    return "A loss here is called as loss(outputs, targets) and gives the mean over the batch"


def sequence_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean over all places of a batch: outputs `[batch, places, classes]`, targets `[batch, places]`."""
    return functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def leaves(values: Tree) -> list[Any]:
    return [values] if isinstance(values, Tensor | Windows) else pytree.tree_leaves(values)


def fitting(values: Tree, like: Tensor) -> Tree:
    """Samples on the device and, if they are real numbers, in the number type of a parameter; copies."""

    def fit(leaf: Tensor) -> Tensor:
        return leaf.to(like.device, like.dtype if leaf.is_floating_point() else leaf.dtype, copy=True)

    return pytree.tree_map(fit, values)


def reason(error: Exception) -> str:
    """The first line of what an error says."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return shortened(lines[0], 200).rstrip(".")


def shape(values: Tensor) -> str:
    return str(list(values.shape))
