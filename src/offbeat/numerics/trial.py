"""What a model must not do while it trains, found by one training step before a run, and noticed inside one.

Jobs are computed together, in any order, and again after a crash. So a step may draw nothing but keyed numbers, and may
leave no trace in the model but in the buffers that clients have of their own.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from traceback import walk_stack
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

from offbeat import keys
from offbeat.errors import OffbeatError
from offbeat.numerics.attributes import as_before
from offbeat.numerics.blame import UNCHECKPOINTED
from offbeat.numerics.buffers import BufferKinds, own_buffers, tracking
from offbeat.numerics.draws import Keyed
from offbeat.numerics.forked import ELSEWHERE, forked
from offbeat.numerics.forms import Tree, called
from offbeat.numerics.outputs import parts
from offbeat.numerics.replica import Replica
from offbeat.numerics.vector import FlatModel

Compute = TypeVar("Compute", bound=Callable[..., Any])
KEYED = (
    "Use nn.Dropout, torch.rand_like, torch.randn_like, torch.bernoulli or the like (docs/design.md lists them), or "
    "take it out"
)
REPEATS = 1e-3  # relative difference of two equal steps that a device's rounding explains


class Draw(NamedTuple):
    operation: str
    part: str  # of the model
    values: list[Tensor]
    recomputed: bool  # by torch.utils.checkpoint


class Step(NamedTuple):
    """What one training step was seen to do."""

    result: list[Tensor]  # loss and gradient
    draws: list[Draw]
    changed: list[str]  # buffers and parameters
    replaced: list[str]  # buffers that are other tensors now, with other values
    moved: dict[str, Any]  # generators, and their states afterwards
    seeds: bool  # it seeds PyTorch's generator and draws by functions that are keyed


def problems(model: FlatModel, x: Tensor, y: Tensor) -> list[str]:
    """Why equal jobs of this model would differ, in sentences. The step is tried twice from generators in different
    states: what a model seeds itself comes out equal, and is allowed."""
    if names := changed_parameters(model, x):
        bounded = [name for name in names if name in bounded_tables(model.module)]
        return rescales(bounded) + changes([name for name in names if name not in bounded])
    return reasons(*(step(model, x, y, seed) for seed in (1, 2)))


def trial_key(device: torch.device) -> Tensor:
    """What a model draws by while it is tried."""
    return torch.full((), keys.key(0, "trial"), device=device)


def shared_memory(module: nn.Module, state: Collection[str]) -> list[str]:
    """Return a sentence for each buffer that changes and of which another tensor of the module is a part or a view."""
    buffers = {name: b for name, b in module.named_buffers() if name in state and b.layout is torch.strided}
    memory = {b.untyped_storage().data_ptr(): name for name, b in buffers.items() if b.numel()}
    tensors = dict(module.named_buffers())
    for owner, part in module.named_modules():
        tensors |= {f"{owner}.{n}".lstrip("."): t for n, t in vars(part).items() if isinstance(t, Tensor)}
    return [
        f"the model changes buffer '{memory[place]}', and '{name}' is in the same memory, where it would stay behind: "
        "make it a tensor of its own, or compute it in forward"
        for name, t in tensors.items()
        if t.layout is torch.strided and t.numel() and (place := t.untyped_storage().data_ptr()) in memory
        if t is not buffers[memory[place]]
    ]


def changing_buffer(name: str) -> str:
    """Return the message on a buffer that changes in training, where no rule for it is given."""
    return (
        f"the model changes '{name}' while it trains. Jobs run together and in any order, so it would not be the same "
        "for all: say what becomes of it by batch_norm = 'batch', 'local' or 'averaged'; keep such a thing out of the "
        "model; or put that part in eval mode"
    )


def changes(names: list[str]) -> list[str]:
    return [
        f"the model changes {name} while it trains. Jobs run together and in any order, so it would not be the same "
        "for all: keep such a thing out of the model, or put that part in eval mode"
        for name in names
    ]


def _move(module: nn.Module, scale: float, move: float) -> None:
    """Scale the parameters of a module, and move each number by another part of `move`."""
    for p in module.parameters():
        if p.is_floating_point():
            wave = (1 + torch.arange(p.numel(), device=p.device)).sin().reshape(p.shape)
            p.data.mul_(scale).add_((move * wave).to(p.dtype))


def norm_kinds(module: nn.Module) -> BufferKinds:
    """Return the buffers of normalisations whose running statistics move in training."""
    layers = [name for name, _ in tracking(module)]
    return BufferKinds(own_buffers(module, layers), layers=layers)


class _Called(NamedTuple):
    """What calls of a module made of its buffers."""

    replaced: set[str]
    written: set[str]
    values: dict[str, Tensor]
    outputs: list[Tensor]  # of the last call


def changing_buffers(module: nn.Module, batches: Sequence[Tree], fixed: bool = False) -> BufferKinds | None:
    """Return which buffers of a module, a copy to train, change when it is called with two batches.

    One that is replaced or written counts as changed, whatever its value: another batch may bring another value. A
    cache is replaced by the same value at every call, in eval mode too, whatever the batch and its value before, and no
    output depends on the latter. With `fixed`, one that keeps its shape is state. None if a call fails.
    """
    norms = norm_kinds(module)
    first, second = batches
    try:
        runs = [_called(module, [first]), _called(module, [second]), _called(module, [first, second])]
    except Exception:  # whatever a model of one's own raises is said elsewhere
        return None
    written = set().union(*(run.written for run in runs), norms.state)
    replaced = set().union(*(run.replaced for run in runs)) - written
    initial = dict(module.named_buffers())
    leaves = {name for name, part in module.named_modules() if not list(part.children())}
    real = {
        n for n in written | replaced if n in initial and (initial[n].is_floating_point() or initial[n].is_complex())
    }
    layers = norms.layers | (leaves & {name.rpartition(".")[0] for name in real})
    whole = BufferKinds(written | replaced, layers=layers)
    if not replaced:
        return whole
    try:  # a model may fail on buffers with other values
        runs += [_called(module, [first], shifted=True), _called(copy.deepcopy(module).eval(), [first])]
        runs.append(_called(module, [first], moved=0.02))
    except Exception:
        return whole
    pairs = ((runs[0], runs[3]), (runs[1], runs[2]))
    if not all(same(one.outputs, other.outputs, REPEATS) for one, other in pairs):
        return whole
    kept = runs[0].values
    alike = {n for n in replaced if all(n in run.values and same([run.values[n]], [kept[n]]) for run in runs)}
    alike -= {name for name in alike if fixed and name in initial and initial[name].shape == kept[name].shape}
    return BufferKinds(written | replaced - alike, alike, layers)


def _called(module: nn.Module, batches: Sequence[Tree], shifted: bool = False, moved: float = 0.01) -> _Called:
    """Call a copy of a module with one batch after the other, from parameters that are moved a little; `shifted`, from
    buffers with other values."""
    own = copy.deepcopy(module)
    _move(own, 1.0, moved)
    for _, buffer in own.named_buffers() if shifted else ():
        buffer.data.copy_(~buffer if buffer.dtype == torch.bool else buffer + 1)
    before = {name: (b, b._version, b.detach().clone()) for name, b in own.named_buffers()}
    device = next((b.device for b, _, _ in before.values()), torch.device("cpu"))
    outputs: Any = None
    with torch.enable_grad(), seeded(1, device), Keyed(trial_key(device)), as_before(own):
        for batch in batches:
            outputs = called(own, pytree.tree_map(torch.clone, batch))
    now = dict(own.named_buffers())
    written = {n for n, (b, version, value) in before.items() if b._version != version or not same([b], [value])}
    replaced = {n for n in now.keys() | before.keys() if n not in before or now.get(n) is not before[n][0]}
    values = {name: b.detach() for name, b in now.items()}
    return _Called(replaced, written, values, [t.detach() for t in parts(outputs) if isinstance(t, Tensor)])


def bounded_tables(module: nn.Module) -> set[str]:
    """The tables that PyTorch itself changes in forward."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    parts = [(n, p) for n, p in module.named_modules() if isinstance(p, kinds) and p.max_norm is not None]
    return {f"'{name}.weight'" if name else "'weight'" for name, _ in parts}


def rescales(names: list[str]) -> list[str]:
    return [
        f"the table {name} has max_norm, by which forward changes its rows in place, and no client could train such a "
        "table beside others: leave max_norm out, and bound what the table gives, e = table(tokens), by "
        "e * (max_norm / e.norm(dim=-1, keepdim=True)).clamp(max=1)"
        for name in names
    ]


@torch.enable_grad()
def changed_parameters(model: FlatModel, x: Tensor) -> list[str]:
    """Return the parameters that a call of the model itself changes: as they are, moved, or large enough to be clipped.

    One that is written counts, whatever its value.
    """
    names: dict[str, None] = {}
    for scale, move in ((1.0, 0.0), (1.0, 0.01), (30.0, 0.3)):
        module = copy.deepcopy(model.module)
        _move(module, scale, move)
        before = {name: (p._version, p.detach().clone()) for name, p in module.named_parameters()}
        try:
            with seeded(1, x.device), Keyed(trial_key(x.device)):
                called(module, model.inputs(x.clone()))
        except Exception:  # it may not take such parameters; as they are, what fails is said as a failure
            if not move:
                raise
            continue
        for name, p in module.named_parameters():
            if p._version != before[name][0] or not same([p.detach()], [before[name][1]]):
                names[f"'{name}'"] = None
    return list(names)


def reasons(first: Step, second: Step) -> list[str]:
    repeat = "not keyed by job, so runs would not repeat"
    changed = changes(first.changed)
    if first.seeds:
        changed.append(
            "the model seeds PyTorch's generator (torch.manual_seed) and draws from it, but draws are keyed by job, "
            "so its numbers would be others: give a torch.Generator of its own, or make the numbers once, as a buffer"
        )
    wild = [a for a, b in zip(first.draws, second.draws, strict=False) if not same(a.values, b.values)]
    moved = [name for name, state in first.moved.items() if second.moved.get(name) != state]
    named = {
        f"the model draws at random by {draw.operation}{draw.part}, {repeat}. "
        + (f"It is drawn again: {UNCHECKPOINTED}" if draw.recomputed else KEYED)
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
        changed = changes(first.replaced)
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
    rows = samples.first_rows(samples.per_step(0))
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
    flat, replica = model.initial(), Replica(model)
    of_clients = model.kinds.state | model.kinds.cache
    buffers = {name: b for name, b in replica.module.named_buffers() if name not in of_clients}
    kept = {**buffers, **dict(replica.module.named_parameters())}
    before = {name: t.detach().clone() for name, t in kept.items()}
    with seeded(seed, flat.device), Watch(replica.module) as watch, _noticed_seeds() as seeds:
        states = generators(flat.device)
        loss, gradient, _ = replica.gradient(flat, model.buffers(), x.clone(), y.clone(), trial_key(flat.device))
        after = generators(flat.device)
    changed = [f"'{name}'" for name, t in kept.items() if not same([t.detach()], [before[name]])]
    now = dict(replica.module.named_buffers())
    replaced = [f"'{name}'" for name, t in now.items() if name in kept and not same([t.detach()], [before[name]])]
    moved = {name: after[name] for name in differing(states, after)}
    return Step([loss, gradient], watch.draws, changed, replaced, moved, bool(seeds) and replica.draws > 0)


@contextmanager
def _noticed_seeds() -> Iterator[list[int]]:
    """The seeds that are given to PyTorch's generator meanwhile."""
    seeds: list[int] = []
    original = torch.manual_seed

    def noticing(seed: int) -> Any:
        seeds.append(seed)
        return original(seed)

    torch.manual_seed = torch.random.manual_seed = noticing
    try:
        yield seeds
    finally:
        torch.manual_seed = torch.random.manual_seed = original


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


def noting(self: Watch, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return func(*args, **(kwargs or {}))
    given = [*args, *(kwargs or {}).values()]
    device = next((t.device for t in pytree.tree_leaves(given) if isinstance(t, Tensor)), torch.device("cpu"))
    before = generators(device)
    out = func(*args, **(kwargs or {}))
    if differing(before, generators(device)) or any(isinstance(value, torch.Generator) for value in given):
        values = [t.detach().clone() for t in pytree.tree_leaves(out) if isinstance(t, Tensor)]
        part = f" in {self.inside[-1]}" if self.inside else ""
        recomputed = any(frame.f_code.co_filename == checkpoint.__file__ for frame, _ in walk_stack(None))
        self.draws.append(Draw(f"'{func.overloadpacket.__name__}'", part, values, recomputed))
    return out


# Inside the class PyTorch would wrap it, and import its compiler at the first call: seconds.
Watch.__torch_dispatch__ = noting  # type: ignore[method-assign, assignment]


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
    with forked([device]):
        python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002
