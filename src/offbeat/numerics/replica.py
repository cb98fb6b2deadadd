"""A copy of the user's module that computes gradients as PyTorch does: real parameters, `backward()`, hooks."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from offbeat.errors import OffbeatError
from offbeat.numerics.attributes import as_before
from offbeat.numerics.buffers import changed_buffer, equal_tensors
from offbeat.numerics.draws import Keyed
from offbeat.numerics.forms import called
from offbeat.numerics.snapshot import Snapshot, head

if TYPE_CHECKING:
    from offbeat.numerics.vector import FlatModel


def with_hooks(copy_: nn.Module, module: nn.Module) -> nn.Module:
    """Register the hooks of the module's parameters on its copy, which `deepcopy` leaves out, and return the copy."""
    for own, p in zip(copy_.parameters(), module.parameters(), strict=True):
        for hook in (p._backward_hooks or {}).values():
            own.register_hook(hook)  # type: ignore[no-untyped-call]
        for hook in (p._post_accumulate_grad_hooks or {}).values():
            own.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    return copy_


class Replica:
    """The user's module and loss. A call loads the parameters and buffers of one client."""

    def __init__(self, model: FlatModel) -> None:
        self.model = model
        self.module = with_hooks(copy.deepcopy(model.module), model.module)
        self.parameters = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        self.frozen = {
            name: (p, p.detach().clone()) for name, p in self.module.named_parameters() if not p.requires_grad
        }
        self.usual: set[str] | None = None
        self.draws = 0  # of the last call
        self.constants = {
            name: (buffer, buffer.clone())
            for name, buffer in self.module.named_buffers()
            if name not in model.kinds.state
        }

    def gradient(
        self, flat: Tensor, buffers: dict[str, Tensor], x: Tensor, y: Tensor, key: Tensor | None, keep: bool = False
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the loss on one batch, its gradient `[d]`, and the buffers afterwards, at parameters `[d]`.

        Attributes are as before the call, unless what the call leaves is to be kept.
        """
        model, module = self.model, self.module
        with torch.no_grad():
            for name, view in model.views(flat).items():
                self.parameters[name].copy_(view)
        self.load(buffers)
        module.zero_grad()
        rounding = torch.autocast(flat.device.type, torch.bfloat16, model.rounded, cache_enabled=False)
        with torch.enable_grad(), nullcontext() if keep else as_before(module):
            keyed = Keyed(key)
            with keyed, rounding:
                inputs, targets = model.batch(x, y)
                loss = model.mean_loss(called(module, inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
        self.draws = keyed.calls
        for name, view in model.views(flat).items():
            if not equal_tensors(self.parameters[name].detach(), view):
                raise OffbeatError(_changed_parameter(name))
        slopes = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters.values()]
        gradient = torch.cat([slope.detach().reshape(-1) for slope in slopes])
        named = dict(module.named_buffers(remove_duplicate=False))
        if model.layout is not None:
            model.layout.require_shared(named)
        module.zero_grad()  # the gradient is copied above
        return loss.detach(), gradient, {name: named[name].detach().clone() for name in buffers}

    def attributes(self) -> Snapshot:
        """Return what the module and the loss keep beside parameters and buffers."""
        return Snapshot(self.module, self.model.loss)

    def usual_changes(self, x: Tensor, y: Tensor, key: Tensor) -> set[str]:
        """Return what calls change there that a check before the run has seen to be harmless: on these samples."""
        if self.usual is None:
            before, flat = self.attributes(), self.model.initial()
            try:
                for at in (slice(None), [0] * len(x)):
                    self.gradient(flat, self.model.buffers(), x[at], y[at], key, keep=True)
            except torch.OutOfMemoryError:
                raise
            except Exception:  # what fails is said where it is computed
                pass
            self.usual = {head(path) for path in before.changed(self.attributes())}
            before.restore()
        return self.usual

    def load(self, buffers: dict[str, Tensor]) -> None:
        """Put one client's buffers into the module, and the others back to what they were."""
        for name, value in buffers.items():
            tensor = value.detach().clone()
            for place in self.model.layout.places[name] if self.model.layout is not None else ():
                self.put(place, tensor)
        for name in self.model.kinds.cache & self.constants.keys():
            self.put(name, self.constants[name][0])

    def put(self, place: str, tensor: Tensor) -> None:
        owner, _, own = place.rpartition(".")
        self.module.get_submodule(owner)._buffers[own] = tensor

    def check_constants(self) -> None:
        """Raise an error if a buffer changed that belongs to no client."""
        named = dict(self.module.named_buffers(remove_duplicate=False))
        for name, (buffer, initial) in self.constants.items():
            if name in self.model.kinds.cache:
                continue
            now = named.get(name)
            if now is None or not equal_tensors(now, initial):
                buffer.data.copy_(initial)
                self.put(name, buffer)
                raise OffbeatError(changed_buffer(name))
        for name, (p, initial) in self.frozen.items():
            if not equal_tensors(p.detach(), initial):
                p.data.copy_(initial)
                raise OffbeatError(_changed_parameter(name))


def _changed_parameter(name: str) -> str:
    return (
        f"the model changes parameter '{name}' itself while it trains (in forward or in a hook), so that it would not "
        "be the same for all clients: let the method move parameters, clip by client_options, make it a buffer "
        "(register_buffer) with batch_norm, or freeze it"
    )
