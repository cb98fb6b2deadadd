"""What a model must not do while it trains, found by one training step before a run, and noticed inside one.

Jobs are computed together, in any order, and again after a crash. So a step may draw nothing but keyed numbers, and may
leave no trace in the model: no statistics, no counters, no changed parameters.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from offbeat import keys
from offbeat.errors import OffbeatError
from offbeat.numerics.attributes import Own, attributes, put_back
from offbeat.numerics.draws import Keyed
from offbeat.numerics.forked import ELSEWHERE, forked
from offbeat.numerics.forms import called
from offbeat.numerics.vector import FlatModel

Compute = TypeVar("Compute", bound=Callable[..., Any])
REPEATS = 1e-3  # relative difference of two equal steps that a device's rounding explains


class Draw(NamedTuple):
    operation: str
    part: str  # of the model
    values: list[Tensor]


class Step(NamedTuple):
    """What one training step was seen to do."""

    result: list[Tensor]  # loss and gradient
    draws: list[Draw]
    changed: list[str]  # buffers and parameters
    moved: dict[str, Any]  # generators, and their states afterwards


def problems(model: FlatModel, x: Tensor, y: Tensor, caller: nn.Module | None = None) -> list[str]:
    """Why equal jobs of this model, a copy of the caller's, would differ, or would not train all of it, in sentences.
    The step is tried twice from generators in different states: what a model seeds itself comes out equal, and is
    allowed."""
    if names := changed_parameters(model, x):
        return changes(names)
    found = reasons(*(step(model, x, y, seed) for seed in (1, 2)))
    return found or [*bypasses(model, x, y, caller), *left_overs(model, x, y, caller)]


def changes(names: list[str]) -> list[str]:
    return [
        f"the model changes {name} while it trains. Jobs run together and in any order, so it would not be the same "
        "for all: keep such a thing out of the model, or put that part in eval mode"
        for name in names
    ]


@torch.enable_grad()
def changed_parameters(model: FlatModel, x: Tensor) -> list[str]:
    """The parameters that a call of the model itself leaves changed."""
    module = copy.deepcopy(model.module)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    key = torch.full((), keys.key(0, "trial"), device=x.device)
    with seeded(1, x.device), Keyed(key):
        called(module, model.inputs(x.clone()))
    return [f"'{name}'" for name, p in module.named_parameters() if not same([p.detach()], [before[name]])]


def bypasses(model: FlatModel, x: Tensor, y: Tensor, caller: nn.Module | None) -> list[str]:
    """Parameters that the loss reaches past the modules of the model, whose own are views of a flat vector: nobody
    would train them."""
    owners = [("the model's ", model.module), ("the model's ", caller), ("the loss's ", model.loss)]
    names = {
        id(p): f"{whose}'{name}'"
        for whose, owner in owners
        if isinstance(owner, nn.Module)
        for name, p in owner.named_parameters()
    }
    key = torch.full((), keys.key(0, "trial"), device=x.device)
    with torch.enable_grad(), seeded(1, x.device):
        loss = model.one(model.initial().requires_grad_(), x.clone(), y.clone(), key)
    found = dict.fromkeys(names[id(leaf)] for leaf in leaves_of(loss) if id(leaf) in names)
    return [
        f"the loss depends on {name} by a way that training does not see, so it would stay as it is: a loss that "
        "refers to the model or has parameters of its own, or a list, a lambda or the like that the model made of its "
        "parameters. Let forward compute what the loss needs from its layers, and give it back among the outputs; "
        "freeze what shall stay as it is by requires_grad_(False)"
        for name in found
    ]


def leaves_of(value: Tensor) -> list[Tensor]:
    """The tensors with gradients that a value was computed from."""
    found, seen, ahead = [], set(), [value.grad_fn]
    while ahead:
        node: Any = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        ahead += [before for before, _ in node.next_functions]
    return found


def left_overs(model: FlatModel, x: Tensor, y: Tensor, caller: nn.Module | None) -> list[str]:
    """What a call leaves in the model that the next call, or the loss, lives on: each call finds the model as the run
    began (`numerics/attributes.py`)."""
    module = copy.deepcopy(model.module)
    key = torch.full((), keys.key(0, "trial"), device=x.device)
    other = torch.zeros(len(x), dtype=torch.long, device=x.device)  # the first sample, again and again

    def loss(x: Tensor, y: Tensor) -> list[Tensor]:
        with torch.enable_grad(), seeded(1, x.device), Keyed(key):
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
    asked = left & names_in(model.loss) if caller is not None and refers_to(model.loss, caller) else ()
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


def gradient_hook(model: FlatModel, x: Tensor, y: Tensor) -> str | None:
    """The part that has a hook on a gradient, which waves would not call; None where none has."""
    for name, part in model.module.named_modules():
        if part._backward_hooks or part._backward_pre_hooks:
            return f"{type(part).__name__} ('{name}')" if name else type(part).__name__
    key = torch.full((), keys.key(0, "trial"), device=x.device)
    with (
        suppress(Exception),
        torch.enable_grad(),
        seeded(1, x.device),
        Hooks() as hooks,
    ):  # what fails is told elsewhere
        model.one(model.initial().requires_grad_(), x.clone(), y.clone(), key)
    return "its forward" if hooks.seen else None


class Hooks(TorchFunctionMode):
    """Notices when a hook is put on a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= func is Tensor.register_hook
        return func(*args, **(kwargs or {}))


def reasons(first: Step, second: Step) -> list[str]:
    repeat = "not keyed by job, so runs would not repeat"
    changed = changes(first.changed)
    wild = [a for a, b in zip(first.draws, second.draws, strict=False) if not same(a.values, b.values)]
    moved = [name for name, state in first.moved.items() if second.moved.get(name) != state]
    named = {
        f"the model draws at random by {draw.operation}{draw.part}, {repeat}. Use nn.Dropout, torch.rand_like, "
        "torch.randn_like, torch.bernoulli or the like (docs/design.md lists them), or take it out"
        for draw in wild or (first.draws if moved else [])
    }
    if moved and not named:
        named = {f"the model draws from {' and '.join(moved)}, {repeat}. Draw by torch.rand or the like, or not at all"}
    if not named and not changed and not all(bool(part.isfinite().all()) for part in first.result):
        loss = float(first.result[0])
        what = "the gradient of the loss" if math.isfinite(loss) else f"the loss, {loss},"
        named = {
            f"{what} on the first client's batch is not finite, so nothing can be trained: look at the model's first "
            "outputs, and at logarithms, roots and quotients in the loss"
        }
    if not named and not changed and not same(first.result, second.result, REPEATS):
        named = {
            "the model gives another loss or gradient when the same step is taken twice: it draws at random or keeps a "
            "state of its own from call to call, so runs would not repeat"
        }
    return [*sorted(named), *changed]


def unmoved(compute: Compute) -> Compute:
    """A computation of a problem's jobs, and an error when a generator was used meanwhile: all draws are keyed."""

    @wraps(compute)
    def watched(problem: Any, *args: Any, **kwargs: Any) -> Any:
        device = problem.samples.x.device
        before = generators(device)
        outcome = compute(problem, *args, **kwargs)
        if moved := differing(before, generators(device)):
            complain(problem, moved)
        return outcome

    return cast(Compute, watched)


def complain(problem: Any, moved: list[str]) -> None:
    """Say which operation used a generator; a model that seeds it itself is let through."""
    samples = problem.samples
    rows = samples.order[int(samples.first[0]) :][: samples.per_step(0)]
    first, second = (step(problem.model, samples.x[rows], samples.y[rows], seed) for seed in (1, 2))
    sentences = reasons(first, second)
    if sentences:
        raise OffbeatError("; ".join(sentences))
    if any(first.moved.get(name) != second.moved.get(name) or name not in first.moved for name in moved):
        raise OffbeatError(
            f"something drew from {' and '.join(moved)} while jobs were computed. All that a job draws must be keyed, "
            "so that runs repeat: draw by torch.rand, torch.randn or the like in the model's forward"
        )


def step(model: FlatModel, x: Tensor, y: Tensor, seed: int) -> Step:
    """One training step of one client, watched."""
    flat = model.initial().requires_grad_()
    kept = {**dict(model.module.named_buffers()), **dict(model.module.named_parameters())}
    before = {name: t.detach().clone() for name, t in kept.items()}
    start = flat.detach().clone()
    key = torch.full((), keys.key(0, "trial"), device=flat.device)
    with torch.enable_grad(), seeded(seed, flat.device), Watch(model.module) as watch:
        states = generators(flat.device)
        loss = model.one(flat, x.clone(), y.clone(), key)
        (gradient,) = torch.autograd.grad(loss, flat)
        after = generators(flat.device)
    changed = [f"'{name}'" for name, t in kept.items() if not same([t.detach()], [before[name]])]
    if not same([flat.detach()], [start]):
        changed.append("its own parameters")
    moved = {name: after[name] for name in differing(states, after)}
    return Step([loss.detach(), gradient], watch.draws, changed, moved)


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operations that draw from a generator, and in which part of the model."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.module = module
        self.draws: list[Draw] = []
        self.inside: list[str] = []

    def __enter__(self) -> Watch:
        self.hooks: list[Any] = []
        for name, part in self.module.named_modules():
            where = f"{type(part).__name__} ('{name}')" if name else type(part).__name__
            self.hooks.append(part.register_forward_pre_hook(lambda *_, where=where: self.inside.append(where)))
            self.hooks.append(part.register_forward_hook(lambda *_: self.inside.pop() and None, always_call=True))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for hook in self.hooks:
            hook.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        given = [*args, *(kwargs or {}).values()]
        device = next((t.device for t in pytree.tree_leaves(given) if isinstance(t, Tensor)), torch.device("cpu"))
        before = generators(device)
        out = func(*args, **(kwargs or {}))
        if differing(before, generators(device)) or any(isinstance(value, torch.Generator) for value in given):
            values = [t.detach().clone() for t in pytree.tree_leaves(out) if isinstance(t, Tensor)]
            part = f" in {self.inside[-1]}" if self.inside else ""
            self.draws.append(Draw(f"'{func.overloadpacket.__name__}'", part, values))
        return out


def same(one: list[Tensor], other: list[Tensor], tolerance: float = 0.0) -> bool:
    def near(a: Tensor, b: Tensor) -> bool:
        a, b = (t if t.layout == torch.strided else t.to_dense() for t in (a, b))
        if a.shape != b.shape or not (tolerance and a.is_floating_point()):
            return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
        largest = float(b.abs().nan_to_num(0.0, 0.0).max())
        return bool(torch.allclose(a, b, tolerance, tolerance * largest, equal_nan=True))

    return len(one) == len(other) and all(map(near, one, other))


# ---- generators ---------------------------------------------------------------------------------
def generators(device: torch.device) -> dict[str, Any]:
    """The states of all generators that a model could draw from unseen."""
    with ELSEWHERE:
        _, words, *rest = np.random.get_state(legacy=True)  # noqa: NPY002
        states: dict[str, Any] = {
            "PyTorch's generator": torch.get_rng_state().numpy().tobytes(),
            "Python's generator": random.getstate(),
            "NumPy's generator": (np.asarray(words).tobytes(), *rest),
        }
        if device.type == "cuda":
            states["PyTorch's generator on the GPU"] = torch.cuda.get_rng_state(device).numpy().tobytes()
        return states


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return [name for name, state in one.items() if other[name] != state]


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """All generators in another state, and put back afterwards."""
    with forked([device] if device.type == "cuda" else []):
        python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002
