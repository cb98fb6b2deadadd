"""What of a model a run would not see, found by calls before it: parameters that the loss reaches past the layers,
what one call leaves for the next, hooks on gradients and backwards that read parameters.

Clients train copies, as views of a flat vector, and each call finds the model as the run began
(`numerics/attributes.py`).
"""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from offbeat.numerics.attributes import Own, attributes, put_back
from offbeat.numerics.draws import Keyed
from offbeat.numerics.forms import called
from offbeat.numerics.trial import REPEATS, same, seeded, trial_key
from offbeat.numerics.vector import FlatModel


def problems(model: FlatModel, x: Tensor, y: Tensor, caller: nn.Module) -> list[str]:
    """Why this model, a copy of the caller's, would not train as it is written, in sentences."""
    return [*bypasses(model, x, y, caller), *left_overs(model, x, y, caller)]


# ---- parameters ---------------------------------------------------------------------------------
def bypasses(model: FlatModel, x: Tensor, y: Tensor, caller: nn.Module) -> list[str]:
    """Parameters that the loss reaches past the modules of the model, whose own are views of a flat vector: nobody
    would train them."""
    owners = [("the model's ", model.module), ("the model's ", caller), ("the loss's ", model.loss)]
    names = {
        id(p): f"{whose}'{name}'"
        for whose, owner in owners
        if isinstance(owner, nn.Module)
        for name, p in owner.named_parameters()
    }
    with torch.enable_grad(), seeded(1, x.device):
        loss = model.one(model.initial().requires_grad_(), x.clone(), y.clone(), trial_key(x.device))
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
def left_overs(model: FlatModel, x: Tensor, y: Tensor, caller: nn.Module) -> list[str]:
    """What a call leaves in the model that the next call, or the loss, lives on."""
    module = copy.deepcopy(model.module)
    other = torch.zeros(len(x), dtype=torch.long, device=x.device)  # the first sample, again and again

    def loss(x: Tensor, y: Tensor) -> list[Tensor]:
        with torch.enable_grad(), seeded(1, x.device), Keyed(trial_key(x.device)):
            inputs, targets = model.batch(x.clone(), y.clone())
            return [model.loss(called(module, inputs), targets).detach()]

    begun = attributes(module)
    fresh = loss(x[other], y[other])
    put_back(begun)
    loss(x, y)
    once = attributes(module)
    loss(x, y)
    twice = attributes(module)
    lives = not same(fresh, loss(x[other], y[other]))
    left, counted = (
        {name for now, then in zip(*pair, strict=True) for name in changed_names(now, then)}
        for pair in ((once, begun), (twice, once))
    )
    if counted and not lives:  # a counter may come to matter later
        put_back(twice)
        plain = loss(x, y)
        put_back(twice)
        for part in module.modules():
            for name in counted & vars(part).keys():
                setattr(part, name, moved_on(getattr(part, name)))
        lives = not same(plain, loss(x, y))
    if lives:
        return [
            f"the model keeps {', '.join(map(repr, sorted(left))) or 'something'} from call to call, and its loss "
            "depends on that. Jobs run together and in any order, so it would not be the same for all: let rates have "
            "a schedule, or keep it out of the model"
        ]
    asked = left & names_in(model.loss) if refers_to(model.loss, caller) else ()
    return [
        f"the loss reads '{name}' of the model, which forward sets: clients train copies, and the loss would see "
        "another one's. Give it back among the outputs, for instance in a dictionary"
        for name in sorted(asked)
    ]


def changed_names(now: Own, then: Own) -> list[str]:
    """Attributes that have other values."""

    def alike(one: Any, other: Any) -> bool:
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            return same([one.detach()], [other.detach()])
        plain = (bool, int, float, str)
        return one is other or not isinstance(one, (*plain, Tensor)) or (isinstance(other, plain) and one == other)

    absent = object()
    return [name for name, value in now.there.items() if not alike(value, then.there.get(name, absent))]


def moved_on(value: Any) -> Any:
    """What a counter may come to."""
    if isinstance(value, bool | str):
        return value
    return value + 1000 if isinstance(value, int | float) else value * 2 + 1


def refers_to(loss: Any, model: nn.Module) -> bool:
    """Whether a loss holds the model or one of its parts: in a closure, as a global, or as an attribute."""
    parts = {id(part) for part in model.modules()}
    code, space = getattr(loss, "__code__", None), getattr(loss, "__globals__", {})
    held = [cell.cell_contents for cell in getattr(loss, "__closure__", None) or () if filled(cell)]
    held += [space.get(name) for name in (code.co_names if code else ())]
    held += [getattr(loss, "__self__", None), *vars(loss).values()] if hasattr(loss, "__dict__") else []
    return any(id(each) in parts for each in held)


def filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # a name that has no value yet
        return False


def names_in(loss: Any) -> set[str]:
    """Names that the code of a loss uses."""
    code = getattr(loss, "__code__", None) or getattr(getattr(loss, "forward", None), "__code__", None)
    return set() if code is None else set(code.co_names)


# ---- the way back -------------------------------------------------------------------------------
def alone(model: FlatModel, x: Tensor, y: Tensor) -> str | None:
    """Why jobs of this model must be computed one after another, though a wave would not fail: a hook on a gradient,
    which waves would not call, or a backward that reads parameters, which by then are no client's. None: they need
    not."""
    for name, part in model.module.named_modules():
        if part._backward_hooks or part._backward_pre_hooks:
            where = f"{type(part).__name__} ('{name}')" if name else type(part).__name__
            return f"{where} has a hook on a gradient"
    hooks, loss = Hooks(), None
    with suppress(Exception), torch.enable_grad(), seeded(1, x.device), hooks:  # what fails is told elsewhere
        loss = model.one(model.initial().requires_grad_(), x.clone(), y.clone(), trial_key(x.device))
    if hooks.seen:
        return "its forward has a hook on a gradient"
    own = None if loss is None else next(filter(None, map(own_function, nodes_of(loss))), None)
    return f"the backward of {own} reads parameters" if own and reads_parameters(model, x, y) else None


def own_function(node: Any) -> str | None:
    """The name of the `autograd.Function` that a node belongs to, if it is a user's."""
    made_by = getattr(type(node), "_forward_cls", None)
    return made_by.__name__ if made_by is not None and not made_by.__module__.startswith("offbeat.") else None


def reads_parameters(model: FlatModel, x: Tensor, y: Tensor) -> bool:
    """Whether gradients elsewhere than at the module's own parameters are others where it has its own on the way."""
    flat, slopes = model.initial().mul_(0.9).add_(0.01), []
    with suppress(Exception), torch.enable_grad(), seeded(1, x.device):
        at = flat.clone().requires_grad_()
        slopes.append(torch.autograd.grad(model.one(at, x.clone(), y.clone(), trial_key(x.device)), at)[0])
        slopes.append(model.slope(flat, x.clone(), y.clone(), trial_key(x.device))[1])
    return len(slopes) == 2 and not same(slopes[:1], slopes[1:], REPEATS)


class Hooks(TorchFunctionMode):
    """Notices when a hook is put on a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= func is Tensor.register_hook
        return func(*args, **(kwargs or {}))
