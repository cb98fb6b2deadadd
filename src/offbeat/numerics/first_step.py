"""The first step of a run in the form of a wave, compared with the reference loop: what selects the reference loop.

It also finds models whose waves need one thread. PyTorch factorises a batch of large matrices on several threads with
MKL, which is not safe there: it prints errors, gives wrong numbers or does not end (PyTorch issue 141358).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from offbeat import keys
from offbeat.numerics.buffers import part_name
from offbeat.numerics.replica import Replica
from offbeat.numerics.threads import threads
from offbeat.numerics.trial import seeded, trial_key
from offbeat.numerics.vector import FlatModel

_TOLERANCE = {torch.float64: (1e-6, 1e-6), torch.float32: (1e-2, 1e-3)}  # of a tensor's size; and least size, of all


def why_reference(model: FlatModel, x: Tensor, y: Tensor) -> str | None:
    """Return why jobs of this model must run by the reference loop although a wave would not fail: hooks on gradients,
    which waves do not call, or other numbers than the module's own. None if they need not."""
    for name, p in model.module.named_parameters():
        if p._backward_hooks or p._post_accumulate_grad_hooks:
            return f"parameter '{name}' has a hook on its gradient"
    if torch.nn.modules.module._global_backward_hooks or torch.nn.modules.module._global_backward_pre_hooks:
        return "there is a hook on the gradients of all modules"
    for name, part in model.module.named_modules():
        if part._backward_hooks or part._backward_pre_hooks:
            return f"{part_name(name, part)} has a hook on a gradient"
    hooks, factorisations = _Hooks(), _Factorisations()
    with seeded(1, x.device), hooks, factorisations, threads(1):
        reason = None
        for in_double in (True, False):
            with suppress(Exception):  # a model that is written for one number type, or too large in another
                reason = _difference(*(model.in_double(x, y) if in_double else (model, x, y)))
                break
    model.one_thread = factorisations.used
    if hooks.used:
        return "its forward has a hook on a gradient"
    return reason


@torch.no_grad()
def _difference(model: FlatModel, x: Tensor, y: Tensor) -> str | None:
    """Return what differs between one step of two clients as a wave, and of each by the module itself."""
    replica = Replica(model)
    flat = torch.stack([model.initial(), model.elsewhere()])
    key = keys.fold(trial_key(x.device), torch.arange(2, device=x.device))
    both = [torch.stack([t, t.flip(0)]) for t in (x, y)]
    values = model.initial_values(2)
    single = [
        replica.gradient(flat[i], model.buffers(), both[0][i].clone(), both[1][i].clone(), key[i]) for i in (0, 1)
    ]
    try:
        losses, gradient, values = model.gradient_step(flat, values, both[0], both[1], key)
    except Exception:  # a wave that fails is left for the reference loop when it does
        return None
    for row, (loss, slope, own) in enumerate(single):
        pairs = [("the loss", losses[row], loss)]
        slopes, expected = model.views(gradient[row]), model.views(slope)
        pairs += [(f"the gradient of '{name}'", slopes[name], each) for name, each in expected.items()]
        buffers = {} if model.layout is None else model.layout.tensors(tuple(v[row] for v in values))
        pairs += [(f"buffer '{name}'", value, own[name]) for name, value in buffers.items()]
        if reason := next(_apart(pairs, float(slope.abs().nan_to_num(0, 0, 0).max()), model.dtype), None):
            return reason
    return None


def _apart(pairs: list[tuple[str, Tensor, Tensor]], largest: float, dtype: torch.dtype) -> Iterator[str]:
    """Yield what is further from its reference than rounding explains; `largest` is the largest slope."""
    tolerance, least = _TOLERANCE.get(dtype, _TOLERANCE[torch.float32])
    for name, value, reference in pairs:
        if not bool(reference.isfinite().all()) or not reference.numel():
            continue
        if not (reference.is_floating_point() or reference.is_complex()):
            value, reference = value.double(), reference.double()
        gap = float((value - reference).abs().max())
        size = max(float(reference.abs().max()), least * largest if name.startswith("the gradient") else 1e-30)
        if not gap <= tolerance * size:
            yield f"in a wave {name} differs from that of the module itself by {gap / size:.2g} of its size"


_LU = {
    *("linalg_lu_factor", "linalg_lu_factor_ex", "_linalg_solve_ex", "linalg_inv_ex", "_linalg_det", "_linalg_slogdet"),
    *("linalg_lu", "linalg_lu_solve"),
}
_LARGE = 128  # rows of a matrix; it goes wrong from 151 on


class _Factorisations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notices LU factorisations of large matrices on a processor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.used = False


def _noticing(self: _Factorisations, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    if func.overloadpacket.__name__ in _LU:
        matrix = args[0]
        self.used |= matrix.device.type == "cpu" and matrix.shape[-1] >= _LARGE
    return func(*args, **(kwargs or {}))


# Inside the class PyTorch would wrap it, and import its compiler at the first call: seconds.
_Factorisations.__torch_dispatch__ = _noticing  # type: ignore[method-assign, assignment]


_HISTORY: Any = Tensor.grad_fn
_HOOKING = (Tensor.register_hook, _HISTORY.__get__)


class _Hooks(TorchFunctionMode):
    """Notices when a hook is put on a tensor, or when a model looks for what computed one."""

    def __init__(self) -> None:
        super().__init__()
        self.used = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.used |= func in _HOOKING
        return func(*args, **(kwargs or {}))
