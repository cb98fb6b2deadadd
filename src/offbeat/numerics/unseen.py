"""Model behaviour that a run would miss: parameters that the loss reaches past the layers, and state between calls.

Clients train copies, as views of a flat vector, and each call of a wave finds the model as the run began
(`numerics/attributes.py`). A few calls before the run show what would be missed.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.numerics.replica import Replica
from offbeat.numerics.snapshot import Snapshot, attribute, attribute_name, filled
from offbeat.numerics.trial import REPEATS, same, seeded, trial_key
from offbeat.numerics.vector import FlatModel


def problems(model: FlatModel, x: Tensor, y: Tensor, caller: nn.Module, others: tuple[Any, Any]) -> list[str]:
    """Return why this model, a copy of the caller's, would not train as it is written, in sentences."""
    left = left_overs(model, x, y, caller, others)  # before another call changes what the loss keeps
    return [*bypasses(model, x, y, caller), *left]


# ---- parameters ---------------------------------------------------------------------------------
def bypasses(model: FlatModel, x: Tensor, y: Tensor, caller: nn.Module) -> list[str]:
    """Return a sentence for each parameter that the loss reaches past the modules of the model: it would not train."""
    owners = [("the model's ", model.module), ("the model's ", caller), ("the loss's ", model.loss)]
    names = {
        id(p): f"{whose}'{name}'"
        for whose, owner in owners
        if isinstance(owner, nn.Module)
        for name, p in owner.named_parameters()
    }
    try:
        with torch.enable_grad(), seeded(1, x.device):
            loss = model.one(model.initial().requires_grad_(), x.clone(), y.clone(), trial_key(x.device))
    except torch.OutOfMemoryError:
        raise
    except Exception:  # it takes no views in the place of its parameters, so it runs by the reference loop
        return []
    problems = dict.fromkeys(names[id(leaf)] for leaf in leaves_of(loss) if id(leaf) in names)
    return [
        f"the loss depends on {name} by a way that training does not see, so it would stay as it is: a loss that "
        "refers to the model or has parameters of its own, or a list, a lambda or the like that the model made of its "
        "parameters. Let forward compute what the loss needs from its layers, and give it back among the outputs; "
        "freeze what shall stay as it is by requires_grad_(False)"
        for name in problems
    ]


def leaves_of(value: Tensor) -> list[Tensor]:
    """The tensors with gradients that a value was computed from."""
    return [node.variable for node in nodes_of(value) if hasattr(node, "variable")]


def nodes_of(value: Tensor) -> list[Any]:
    """What autograd keeps of how a value was computed, from its end on."""
    nodes, seen, ahead = [], set(), [value.grad_fn]
    while ahead:
        node: Any = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes.append(node)
        ahead += [before for before, _ in node.next_functions]
    return nodes


# ---- what calls leave behind --------------------------------------------------------------------
CALLS = 24  # in a row, of a model that counts
AHEAD = (*range(1, 17), 25, 40, 50, 99, 100, 199, 500, 999, 1000, 10_000)  # to which counters are moved on


def left_overs(model: FlatModel, x: Tensor, y: Tensor, caller: nn.Module, others: tuple[Any, Any]) -> list[str]:
    """Return what a call leaves in the model or the loss that the next call, or the loss, depends on.

    `others` is a batch of another client.
    """
    replica = Replica(model)

    def step(x: Tensor, y: Tensor, flat: Tensor) -> list[Tensor]:
        """Loss and gradient, with all buffers as they were; attributes stay as the call leaves them."""
        with seeded(1, x.device):
            return list(replica.gradient(flat, model.buffers(), x.clone(), y.clone(), key, keep=True)[:2])

    flat, far, key = model.initial(), model.elsewhere(), trial_key(x.device)
    begun = Snapshot(replica.module, model.loss)
    try:
        with suppress(Exception):  # a model may not take other parameters
            if not all(bool(part.isfinite().all()) for part in step(*others, far)):
                far = flat
        begun.restore()
        fresh = step(*others, far)
        begun.restore()
        first = step(x, y, flat)
        once = Snapshot(replica.module, model.loss)
        step(x, y, flat)
        twice = Snapshot(replica.module, model.loss)
        left, counted = begun.changed(once), once.changed(twice)
        lives = not same(fresh, step(*others, far), REPEATS)
        if counted and not lives:  # what changes at every call may come to matter later
            twice.restore()
            lives = any(not same(first, step(x, y, flat), REPEATS) for _ in range(CALLS))
            for by in () if lives else AHEAD:
                twice.restore()
                twice.moved_on(counted, by)
                if lives := not same(first, step(x, y, flat), REPEATS):
                    break
    finally:
        begun.restore()
    if lives:
        names = dict.fromkeys(map(attribute, sorted(counted or left)))
        return [
            f"the model keeps {', '.join(names) or 'something'} from call to call, and its loss depends on that. Jobs "
            "run together and in any order, so it would not be the same for all: let rates have a schedule, keep it "
            "out of the model and the loss, or make it a buffer (register_buffer) and give batch_norm"
        ]
    asked = {attribute_name(path) for path in left} & names_in(model.loss) if refers_to(model.loss, caller) else set()
    return [
        f"the loss reads '{name}' of the model, which forward sets: clients train copies, and the loss would see "
        "another one's. Give it back among the outputs, for instance in a dictionary"
        for name in sorted(asked)
    ]


def refers_to(loss: Any, model: nn.Module) -> bool:
    """Whether a loss holds the model or one of its parts: in a closure, as a global, or as an attribute."""
    parts = {id(part) for part in model.modules()}
    code, space = getattr(loss, "__code__", None), getattr(loss, "__globals__", {})
    held = [cell.cell_contents for cell in getattr(loss, "__closure__", None) or () if filled(cell)]
    held += [space.get(name) for name in (code.co_names if code else ())]
    held += [getattr(loss, "__self__", None), *vars(loss).values()] if hasattr(loss, "__dict__") else []
    return any(id(each) in parts for each in held)


def names_in(loss: Any) -> set[str]:
    """Names that the code of a loss uses."""
    code = getattr(loss, "__code__", None) or getattr(getattr(loss, "forward", None), "__code__", None)
    return set() if code is None else set(code.co_names)
