"""Buffers of a module as state of a client, and the rule for what becomes of them at a commit.

A step passes the buffers that change in training, with a client axis, into the user's own module. The module changes
them as PyTorch does, in place or by reassignment, and the step reads them back. `batch_norm` names the rule:

- "averaged": a job starts from the buffers of the common model. A commit takes the weighted mean of real numbers and
  the largest value of whole numbers and booleans. Evaluation uses them.
- "local": a job starts from the buffers of its client, where the client's last job ended.
- "batch": a job starts from the initial buffers, and what it makes of them is dropped.

Under "local" and "batch" the common model has no statistics, so evaluation uses those of its batches.

All changing buffers of a client are two vectors: real numbers [B] in the model's type (complex ones as pairs), and
whole numbers and booleans [C] as int64.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn

from offbeat.errors import ConfigError, OffbeatError, in_words
from offbeat.method import Cohort, Method, Rule, State, Update, Vector, conducts_clusters

BatchNorm: TypeAlias = Literal["batch", "local", "averaged"]
Values: TypeAlias = tuple[Tensor, ...]  # real numbers [..., B] and whole numbers [..., C]; () for a model without any
REAL, WHOLE = "buffers", "counters"  # what is sent and broadcast under "averaged"
OWN = {REAL: "own buffers", WHOLE: "own counters"}  # what clients remember under "local"
_Norm: Any = nn.modules.batchnorm._NormBase


class BufferKinds:
    """Which buffers of a module change in training: `state` matters later, a `cache` is the same after every call."""

    def __init__(self, state: Collection[str] = (), cache: Collection[str] = (), layers: Collection[str] = ()) -> None:
        """`layers` are the names of parts with running statistics."""
        self.state, self.cache, self.layers = frozenset(state), frozenset(cache), frozenset(layers)

    def with_state(self, more: Collection[str]) -> BufferKinds:
        """Return the same kinds with more buffers that are state."""
        return BufferKinds(self.state | set(more), self.cache - set(more), self.layers)


def norm_problems(module: nn.Module, rule: str | None) -> list[str]:
    """Return why the normalisations of a module cannot be trained by this rule, in sentences."""
    if rule is not None and rule not in get_args(BatchNorm):
        return [f"batch_norm = {in_words(rule)}; it is one of {', '.join(map(repr, get_args(BatchNorm)))}, or none"]
    if rule is not None:
        return []
    return [
        f"the model has {part_name(name, part)} with running statistics, and each client has its own: say what becomes "
        "of them by batch_norm = 'batch' (none are kept, evaluation uses those of its batches), 'local' (they stay at "
        "the clients) or 'averaged' (at the server, for evaluation); or use GroupNorm or LayerNorm"
        for name, part in tracking(module)
    ]


def part_name(name: str, part: nn.Module) -> str:
    return f"{type(part).__name__} ('{name}')" if name else type(part).__name__


def tracking(module: nn.Module) -> list[tuple[str, Any]]:
    """Return the normalisations whose running statistics move in training; those in eval mode are constants."""
    return [
        (name, part)
        for name, part in module.named_modules()
        if isinstance(part, _Norm) and part.track_running_stats and part.running_mean is not None
        if part.training or not module.training
    ]


def own_buffers(module: nn.Module, parts: Collection[str]) -> set[str]:
    """Return the names of all buffers that these parts own."""
    named = dict(module.named_modules())
    return {
        f"{part}.{name}" if part else name for part in parts for name, _ in named[part].named_buffers(recurse=False)
    }


class BufferLayout:
    """The changing buffers of a module: their places in the module, and in the two vectors."""

    def __init__(self, module: nn.Module, names: Collection[str], dtype: torch.dtype) -> None:
        self.dtype = dtype
        places: dict[int, list[str]] = {}
        found: dict[int, Tensor] = {}
        for owner, part in module.named_modules():
            for own, tensor in part.named_buffers(recurse=False, remove_duplicate=False):
                places.setdefault(id(tensor), []).append(f"{owner}.{own}" if owner else own)
                found[id(tensor)] = tensor
        self.places = {each[0]: each for each in places.values() if set(each) & set(names)}  # several share a tensor
        tensors = {places[key][0]: tensor for key, tensor in found.items() if places[key][0] in self.places}
        self.dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self.real = [name for name, dtype in self.dtypes.items() if dtype.is_floating_point or dtype.is_complex]
        self.whole = [name for name in self.dtypes if name not in self.real]
        self.initial = self.joined(tensors)

    def to(self, device: torch.device | str) -> BufferLayout:
        self.initial = tuple(t.to(device) for t in self.initial)
        return self

    @property
    def widths(self) -> dict[str, int]:
        """Numbers in each vector."""
        return {name: values.shape[-1] for name, values in zip((REAL, WHOLE), self.initial, strict=True)}

    def joined(self, tensors: Mapping[str, Tensor], clients: int | None = None) -> Values:
        """Return the two vectors of buffers by name; with a client axis, of so many clients."""
        lead = () if clients is None else (clients,)
        vectors = []
        for names, kind in ((self.real, self.dtype), (self.whole, torch.int64)):
            parts = []
            for name in names:
                value = tensors[name].detach()
                if tuple(value.shape[len(lead) :]) != self.shapes[name]:
                    raise OffbeatError(
                        f"the model replaced buffer '{name}' {list(self.shapes[name])} by one of another shape, "
                        f"{list(value.shape[len(lead) :])}; keep its shape, so that clients can be computed together"
                    )
                value = torch.view_as_real(value) if value.is_complex() else value
                parts.append(value.reshape((*lead, -1)).to(kind))
            empty = torch.zeros((*lead, 0), dtype=kind)
            vectors.append(torch.cat(parts, dim=-1) if parts else empty)
        device = next((t.device for t in tensors.values()), None)
        return tuple(vector.to(device) for vector in vectors)

    def require_shared(self, given: Mapping[str, Tensor]) -> None:
        """Raise an error if a call replaced a buffer in one of its places only."""
        for name, places in self.places.items():
            if any(given[place] is not given[name] for place in places):
                raise OffbeatError(
                    f"buffers {', '.join(map(repr, places))} of the model are one tensor, and a call replaced one of "
                    "them: change it in place, or register two tensors"
                )

    def tensors(self, values: Values) -> dict[str, Tensor]:
        """Return the buffers by name, `[..., *shape]`, each in memory of its own: a module may change it in place.

        Rows may be longer than the vectors: what lies behind is left out.
        """
        tensors: dict[str, Tensor] = {}
        for names, vector in zip((self.real, self.whole), values, strict=True):
            begin = 0
            for name in names:
                shape, dtype = self.shapes[name], self.dtypes[name]
                size = math.prod(shape) * (2 if dtype.is_complex else 1)
                part = vector[..., begin : begin + size]
                begin += size
                if dtype.is_complex:
                    pairs = part.reshape((*vector.shape[:-1], *shape, 2)).clone(memory_format=torch.contiguous_format)
                    tensors[name] = torch.view_as_complex(pairs)
                else:
                    tensors[name] = part.to(dtype, copy=True).reshape((*vector.shape[:-1], *shape))
        return tensors

    def everywhere(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the buffers by each of their places in the module."""
        return {place: tensors[name] for name, places in self.places.items() for place in places}


@dataclass(frozen=True)
class BufferRule:
    """The rule of a run for the buffers of its model."""

    layout: BufferLayout
    rule: BatchNorm

    # ---- what one wave does ---------------------------------------------------------------------
    def starts(self, starts: State, jobs: int) -> Values:
        """Return the buffers `[n, ...]` that n jobs start from."""
        initial = tuple(vector.expand(jobs, -1) for vector in self.layout.initial)
        if self.rule == "averaged":
            return starts[REAL], starts[WHOLE]
        if self.rule == "local":
            return tuple(
                torch.where(starts[OWN[name]][:, -1:] > 0, starts[OWN[name]][:, :-1], first)
                for name, first in zip((REAL, WHOLE), initial, strict=True)
            )
        return initial

    def ends(self, values: Values) -> Update:
        """Return what n jobs send or remember of the buffers `[n, ...]` where they ended."""
        if self.rule == "batch":
            return {}
        cut = [value[:, :width] for value, width in zip(values, self.layout.widths.values(), strict=True)]
        if self.rule == "averaged":
            return {REAL: cut[0], WHOLE: cut[1]}
        # The last column says that the client has buffers of its own: memory starts at zero.
        return {
            OWN[name]: torch.cat([value, value.new_ones(len(value), 1)], dim=1)
            for name, value in zip((REAL, WHOLE), cut, strict=True)
        }

    # ---- what a method does with them -----------------------------------------------------------
    def method(self, method: Method) -> Method:
        """Return the method with buffers beside the vectors of its rule, which never sees them."""
        what = method.what
        if self.rule == "batch":
            return method
        if self.rule == "local":
            local = replace(what.local, remembers=(*what.local.remembers, *OWN.values()))
            return replace(method, what=replace(what, local=local))
        local = replace(what.local, sends=(*what.local.sends, REAL), numbers=(*what.local.numbers, WHOLE))
        averaged = replace(
            what, local=local, broadcasts=(*what.broadcasts, REAL, WHOLE), exact=(REAL, WHOLE), init=self._init(what)
        )
        if what.commit is not None:
            averaged = replace(averaged, commit=_commit(what))
        else:
            averaged = replace(averaged, weigh=_weigh(what), apply=_apply(what))
        if what.prime is not None:
            averaged = replace(averaged, prime=_prime(what))
        return replace(method, what=averaged)

    def _init(self, what: Rule) -> Any:
        def init(model: Vector) -> State:
            return {**what.init(model), **dict(zip((REAL, WHOLE), self.layout.initial, strict=True))}

        return init


def client_weights(what: Rule, cohort: Cohort, weights: Mapping[str, Tensor] | None) -> Tensor:
    """Return the weight of each client's buffers in their mean: its share where the rule has shares, else the weight of
    its update. They sum to one."""
    if what.share is not None:
        each = what.share(cohort)
    else:
        each = torch.ones_like(cohort.steps) if weights is None else weights[what.local.sends[0]]
    total = each.sum()
    return torch.where(total > 0, each / total, 1 / len(each))


def _weigh(what: Rule) -> Any:
    def weigh(cohort: Cohort) -> Mapping[str, Tensor]:
        weights = what.weights(cohort)
        return {**weights, REAL: client_weights(what, cohort, weights)}

    return weigh


def _apply(what: Rule) -> Any:
    def apply(state: State, sums: Update, cohort: Cohort) -> State:
        assert what.apply is not None
        sums = dict(sums)
        mean = sums.pop(REAL)
        return what.apply(_without(state), sums, cohort) | {REAL: mean, WHOLE: cohort.numbers[WHOLE].amax(0)}

    return apply


def _commit(what: Rule) -> Any:
    def commit(state: State, updates: Update, cohort: Cohort) -> State:
        assert what.commit is not None
        mean = client_weights(what, cohort, None) @ updates[REAL]
        rest = {name: rows for name, rows in updates.items() if name != REAL}
        return what.commit(_without(state), rest, cohort) | {REAL: mean, WHOLE: cohort.numbers[WHOLE].amax(0)}

    return commit


def _prime(what: Rule) -> Any:
    def prime(state: State, mean: Vector) -> State:
        assert what.prime is not None
        return what.prime(_without(state), mean) | {name: state[name] for name in (REAL, WHOLE)}

    return prime


def _without(state: State) -> State:
    return {name: vector for name, vector in state.items() if name not in (REAL, WHOLE)}


def memory_shapes(
    names: Sequence[str], dimension: int, dtype: torch.dtype, layout: BufferLayout | None
) -> dict[str, Any]:
    """Return the width and the type of the vectors that clients remember, by name."""
    own = {} if layout is None else {
        OWN[name]: (width + 1, values.dtype)
        for (name, width), values in zip(layout.widths.items(), layout.initial, strict=True)
    }  # fmt: skip
    return {name: own.get(name, (dimension, dtype)) for name in names}


def method_problems(method: Method, rule: str | None) -> list[str]:
    """Return why a method cannot have changing buffers by this rule."""
    if rule == "averaged" and conducts_clusters(method.when) and not method.when.server:
        return [
            f"{method.name} has no server that could average running statistics; use batch_norm = 'batch' or 'local'"
        ]
    return []


def equal_tensors(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same numbers, NaN being the same as NaN."""
    one, other = (t if t.layout == torch.strided else t.to_dense() for t in (one, other))
    return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())


def require(ruled: BufferRule | None) -> None:
    """Refuse running statistics where gradients are measured."""
    if ruled is not None and ruled.rule != "batch":
        raise ConfigError(["running statistics are no parameters with gradients; measure with batch_norm = 'batch'"])


class ConstantBuffers:
    """The buffers of a module that do not change in training, and a check after each call that none did."""

    def __init__(self, module: nn.Module, kinds: BufferKinds) -> None:
        self.caches: list[tuple[nn.Module, str, Tensor]] = []
        self.others: list[tuple[nn.Module, str, str, Tensor, int]] = []
        for owner, part in module.named_modules():
            for own, tensor in part.named_buffers(recurse=False, remove_duplicate=False):
                name = f"{owner}.{own}" if owner else own
                if name in kinds.cache:
                    self.caches.append((part, own, tensor))
                elif name not in kinds.state:
                    self.others.append((part, own, name, tensor, tensor._version))

    def check(self) -> None:
        """Put caches back, and raise an error if another buffer was replaced or written."""
        for part, own, tensor in self.caches:
            part._buffers[own] = tensor  # a cache is the same after every call
        for part, own, name, tensor, version in self.others:
            if part._buffers.get(own) is not tensor or tensor._version != version:
                part._buffers[own] = tensor
                raise OffbeatError(changed_buffer(name))


def changed_buffer(name: str) -> str:
    """Return the message on a buffer that changed in training though it did not in the first step."""
    return (
        f"the model changes '{name}' while it trains, though not in its first step, so it would not be the same for "
        "all clients: say what becomes of changing buffers by batch_norm = 'batch', 'local' or 'averaged', with "
        "mode = 'reference'; keep such a thing out of the model; or put that part in eval mode"
    )
