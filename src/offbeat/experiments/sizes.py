"""What a run would take of the memory of its device, estimated from below, before it begins."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from offbeat.engines.memory import GIB, free
from offbeat.method import Method
from offbeat.numerics.forked import forked
from offbeat.numerics.forms import called, rows_of
from offbeat.tasks.losses import fitting
from offbeat.tasks.task import Task

VECTORS = 4  # as long as the model that a job has at once, at least: iterate, gradient, start, update


def size_problems(method: Method, task: Task, units: int, item: int, device: torch.device) -> list[str]:
    """The sentences on a job or a commit that cannot fit; `item` is the size of a number in bytes."""
    numbers = task.numbers
    updates = method.when.cohort or units
    width = max(map(task.per_step, range(task.clients)))
    inputs, outputs = sample_numbers(task)
    needs = [
        (
            f"a job of {width:,} samples in a step (batch_size) and a model of {numbers:,} parameters",
            item * (width * (inputs + outputs) + VECTORS * numbers) + 8 * width,
            "take a smaller batch_size or model",
        ),
        (
            f"a commit of {updates:,} updates with {numbers:,} numbers each",
            item * updates * len(method.what.local.sends) * numbers,
            "take fewer updates in a commit (n, size) or a smaller model",
        ),
    ]
    room = free("device", device)
    return [
        f"{what} takes at least {size / GIB:.3g} GiB, and {room / GIB:.3g} GiB are free on {device}; {remedy}"
        for what, size, remedy in needs
        if size > room
    ]


@torch.enable_grad()
def sample_numbers(task: Task) -> tuple[int, int]:
    """How many numbers a sample is, and how many all layers together make of it."""
    x, _ = task.training
    model = task.looked_at
    outputs = 0

    def count(_module: Any, _args: Any, out: Any) -> None:
        nonlocal outputs
        outputs += sum(t.numel() for t in pytree.tree_leaves(out) if isinstance(t, Tensor))

    leaves = [part for part in model.modules() if not list(part.children())]
    hooks = [part.register_forward_hook(count) for part in leaves]
    first = next(p for p in model.parameters() if p.is_floating_point())
    try:
        with forked([first.device]):
            called(model, fitting(rows_of(x, slice(2)), first))
    finally:
        for hook in hooks:
            hook.remove()
    rows = min(2, len(pytree.tree_leaves(x)[0]))
    return sum(leaf[0].numel() for leaf in pytree.tree_leaves(x)), outputs // rows
