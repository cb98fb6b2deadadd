"""Flat vectors over any `nn.Module`: parameters of n clients are one `[n, d]` matrix with a view per layer.

The module is written for one client and called through `torch.func`; the client axis is added by `vmap`, and
gradients are taken with respect to the flat matrix itself (the sum of the clients' losses separates).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate, groupby, pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd import graph as autograd_graph
from torch.backends import cudnn
from torch.func import functional_call
from torch.nn import parameter
from torch.nn.attention import SDPBackend, sdpa_kernel

from offbeat import keys
from offbeat.errors import ConfigError
from offbeat.numerics import buffers
from offbeat.numerics.attributes import as_before
from offbeat.numerics.buffers import BufferKinds, BufferLayout, BufferRule, ConstantBuffers, Values
from offbeat.numerics.draws import Keyed
from offbeat.numerics.fast.dense import move
from offbeat.numerics.fast.places import Places
from offbeat.numerics.fast.plain_recurrence import TwiceDifferentiable
from offbeat.numerics.fast.table import ForClients
from offbeat.numerics.forms import Forms, Tree, arguments, double, scores_in, unpacked, wider
from offbeat.numerics.outputs import detached
from offbeat.numerics.replica import Replica, with_hooks
from offbeat.numerics.transforms import Widened

Loss: TypeAlias = Callable[[Any, Any], Tensor]  # (outputs, targets) of a batch -> mean loss


def lazy(p: Tensor) -> bool:
    """Whether a parameter gets its shape at the first call only."""
    return bool(parameter.is_lazy(p))


def module_problems(module: nn.Module, rule: str | None = None) -> list[str]:
    """Why a module cannot be trained here, its batch normalisations by this rule, in sentences; empty when it can. What
    shows only when it computes is found by `numerics/trial.py`."""
    problems = buffers.norm_problems(module, rule)
    for name, p in module.named_parameters():
        if lazy(p):
            problems.append(f"parameter '{name}' has no shape yet: call the model once on some inputs before")
        elif p.is_complex():
            problems.append(
                f"parameter '{name}' is complex, and models are flat vectors of real numbers: keep its real and "
                "imaginary parts, and join them by torch.view_as_complex in forward"
            )
    problems += overlaps(module) + scripted(module)
    if not any(p.requires_grad for p in module.parameters()):
        problems.append("the model has no parameters to train")
    return problems


def scripted(module: nn.Module) -> list[str]:
    """Parts that TorchScript compiled: neither their parameters nor their draws can be replaced."""
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            which = f"part '{name}' of the model" if name else "the model"
            return [
                f"{which} is compiled by TorchScript, so that its parameters and draws cannot be those of each client: "
                "give the module that it was made of"
            ]
    return []


def overlaps(module: nn.Module) -> list[str]:
    """Different parameters in the same memory: here each would move on its own."""
    spans = []
    for name, p in module.named_parameters():
        if p.requires_grad and not lazy(p) and p.numel() and p.device.type != "meta":
            last = sum((side - 1) * abs(step) for side, step in zip(p.shape, p.stride(), strict=True))
            spans.append((str(p.device), p.data_ptr(), p.data_ptr() + last * p.element_size(), name))
    spans.sort()
    return [
        f"parameters '{one[3]}' and '{other[3]}' lie in the same memory, but are two: use one parameter in both "
        "places, or make each a tensor of its own"
        for one, other in pairwise(spans)
        if one[0] == other[0] and other[1] <= one[2]
    ]


def copied(module: nn.Module) -> nn.Module:
    """Return a copy to train, with the hooks of its parameters: the caller's own stays as it is.

    A part that is in eval mode within a model in train mode stays so; a model in eval mode is put to train as a whole.
    """
    try:
        copy_ = with_hooks(copy.deepcopy(module), module)
    except (RuntimeError, TypeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            [
                f"the model cannot be copied: {reason}. A tensor that was computed from parameters may be kept in it; "
                "weight_norm and spectral_norm of torch.nn.utils.parametrizations keep none"
            ]
        ) from None
    for part in copy_.modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag):
            part.sparse = False  # a gradient is a flat vector; the numbers are the same
        if isinstance(part, nn.RNNBase):
            part.flatten_parameters = partial(laid_out, part)  # type: ignore[method-assign]
    return copy_ if copy_.training else copy_.train()


def of_type(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The module itself, with all that is real in this type, and complex buffers in the complex one that fits it."""
    turning = [(part, name, b) for part in module.modules() for name, b in part.named_buffers(recurse=False)
               if b.is_complex()]  # fmt: skip
    for part, name, _ in turning:
        setattr(part, name, None)
    module.to(dtype)
    for part, name, b in turning:
        setattr(part, name, b.to(torch.promote_types(dtype, torch.complex32)))
    return module


def loss_copied(loss: Loss, dtype: torch.dtype) -> Loss:
    """A loss that is a module, such as one with weights of classes, as a copy whose real numbers are of this type."""
    return of_type(copy.deepcopy(loss), dtype) if isinstance(loss, nn.Module) else loss


def uses(module: nn.Module) -> dict[str, str]:
    """Every place of a parameter that is trained, and the parameter's name: one may lie in several parts. A part that
    has several names counts once: PyTorch's own ties would put a view back in the parameter's place."""
    names = {id(p): name for name, p in module.named_parameters() if p.requires_grad}
    return {
        f"{name}.{own}" if name else own: names[id(p)]
        for name, part in module.named_modules()
        for own, p in part.named_parameters(recurse=False, remove_duplicate=False)
        if id(p) in names
    }


def laid_out(part: nn.RNNBase) -> None:
    """What cuDNN asks for, where the weights are those of one client; weights of many lie nowhere."""
    with suppress(RuntimeError):
        nn.RNNBase.flatten_parameters(part)


def gradients(losses: Tensor, parameters: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """Of each client's loss; None of a parameter that no loss depends on.

    It is `torch.autograd.grad`, which would import symbolic shapes to look at the ones: two seconds of every process.
    """
    slopes: tuple[Tensor | None, ...] = autograd_graph._engine_run_backward(
        (losses,), (torch.ones_like(losses),), False, False, tuple(parameters), True, accumulate_grad=False
    )
    return slopes


class FlatModel:
    """A module as a function of one flat vector (or, with a client axis, of a matrix of them).

    Batches come as tensors; those of several parts as bytes, which `forms` reads.
    """

    def __init__(
        self, module: nn.Module, loss: Loss, dtype: torch.dtype = torch.float32, rounded: bool = False,
        forms: Forms = Forms(), rule: Any = None, kinds: BufferKinds | None = None,
    ) -> None:  # fmt: skip
        """`kinds` says which buffers change in training; by default those of normalisations with running statistics."""
        problems = module_problems(module, rule)
        if problems:
            raise ConfigError(problems)
        self.module = of_type(copied(module), dtype)
        norms = [name for name, _ in buffers.tracking(self.module)] if rule else []
        state = buffers.own_buffers(self.module, norms)
        self.kinds = BufferKinds(state, layers=norms) if kinds is None else kinds
        layout = BufferLayout(self.module, self.kinds.state, dtype) if rule and self.kinds.state else None
        self.ruled = None if layout is None else BufferRule(layout, rule)
        self.evaluated: list[Values] = []  # the buffers that evaluation uses; one entry, or none for the initial ones
        self.constants = ConstantBuffers(self.module, self.kinds)
        self.one_thread = False  # several would compute wrong numbers (`numerics/first_step.py`)
        self.loss = loss_copied(loss, dtype)
        self.dtype = dtype
        self.forms = forms
        self.rounded = rounded  # in waves the operands of products are rounded to bfloat16, sums are not
        parameters = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        self.names, self.uses = list(parameters), uses(self.module)
        self.shapes = [tuple(p.shape) for p in parameters.values()]
        self.sizes = [math.prod(shape) for shape in self.shapes]
        self.dimension = sum(self.sizes)
        self.wide: set[int] = set()  # of the tensors that it makes: those with a row for each client
        self.called = False  # for clients together; then that is known
        self._replica: Replica | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_replica": None, "constants": None}  # both are made of the module

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.constants = ConstantBuffers(self.module, self.kinds)

    def to(self, device: torch.device | str) -> FlatModel:
        self.module.to(device)
        if isinstance(self.loss, nn.Module):
            self.loss.to(device)
        if self.layout is not None:
            self.layout.to(device)
        self.constants = ConstantBuffers(self.module, self.kinds)
        self._replica = None
        return self

    @property
    def layout(self) -> BufferLayout | None:
        """The places of the buffers that belong to clients; None for a model without any."""
        return None if self.ruled is None else self.ruled.layout

    @property
    def evaluates_by_batch(self) -> bool:
        """Whether the common model has no statistics of its own, so that evaluation uses those of its batches."""
        return self.ruled is not None and self.ruled.rule != "averaged" and bool(self.kinds.layers)

    @property
    def replica(self) -> Replica:
        """A copy of the module that trains as PyTorch trains it, for the reference loop."""
        if self._replica is None:
            self._replica = Replica(self)
        return self._replica

    def buffers(self, values: Values = ()) -> dict[str, Tensor]:
        """Return buffers by name from these values, or the initial ones."""
        return {} if self.layout is None else self.layout.tensors(values or self.layout.initial)

    def initial_values(self, clients: int) -> Values:
        """Return the initial buffers of n clients."""
        return () if self.layout is None else tuple(vector.expand(clients, -1) for vector in self.layout.initial)

    def use_buffers(self, vectors: Mapping[str, Tensor]) -> None:
        """Evaluate with the buffers among these vectors, those of a version."""
        if buffers.REAL in vectors:
            self.evaluated[:] = [(vectors[buffers.REAL], vectors[buffers.WHOLE])]

    def reading(self, forms: Forms) -> FlatModel:
        """The same model for samples of other forms."""
        other = copy.copy(self)
        other.forms = forms
        return other

    def in_double(self, x: Tensor, y: Tensor) -> tuple[FlatModel, Tensor, Tensor]:
        """Return the model and a batch in float64, nothing of which is rounded further."""
        if self.dtype == torch.float64:
            return self, x, y
        forms, rule = (
            Forms(*(wider(form, torch.float64) for form in self.forms)),
            None if self.ruled is None else self.ruled.rule,
        )
        model = FlatModel(self.module, self.loss, torch.float64, False, forms, rule, self.kinds).to(x.device)
        both: Any = zip(forms, self.batch(x, y), strict=True)
        inputs, targets = (double(tree) if form is None else form.pack(double(tree)) for form, tree in both)
        return model, inputs, targets

    def initial(self) -> Tensor:
        """The module's own trainable parameters: version 0. Frozen ones stay as they are."""
        return torch.cat([p.detach().reshape(-1) for p in self.module.parameters() if p.requires_grad]).clone()

    def elsewhere(self) -> Tensor:
        """Parameters near the initial ones, all of them others: what agrees at both hardly agrees by chance."""
        start = self.initial()
        return 0.97 * start + 0.003 * (1 + torch.arange(len(start), device=start.device)).sin().to(start.dtype)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Named parameters of `[..., d]` as views `[..., *shape]`; one split, so that its gradient is one copy.

        Rows may be longer than d: what lies behind is left alone.
        """
        lead, behind = flat.shape[:-1], flat.shape[-1] - self.dimension
        parts = torch.split(flat, [*self.sizes, behind] if behind else self.sizes, dim=-1)
        return {
            name: part.reshape((*lead, *shape))
            for name, part, shape in zip(self.names, parts, self.shapes, strict=False)
        }

    def outputs(self, flat: Tensor, x: Tensor) -> Any:
        """The trained model's outputs for one vector: nothing is dropped out, and what it draws in eval mode too is the
        same every time."""
        modes = [(part, part.training) for part in self.module.modules()]
        self.module.eval()
        for name in self.kinds.layers if self.evaluates_by_batch else ():
            self.module.get_submodule(name).training = True
        try:
            return self.keyed_outputs(flat, x)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            with torch.enable_grad():  # it may ask for gradients inside itself, or hook into them
                return detached(self.keyed_outputs(flat.detach().requires_grad_(), x))
        finally:
            for part, mode in modes:
                part.training = mode

    def keyed_outputs(self, flat: Tensor, x: Tensor) -> Any:
        with Keyed(torch.full((), keys.key(0, "outputs"), device=flat.device)):
            own = self.buffers(*self.evaluated)
            return self.call(self.views(flat), self.inputs(x.clone()), own)  # it may change its input

    def one(self, flat: Tensor, x: Tensor, y: Tensor, key: Tensor | None = None) -> Tensor:
        """The loss of one client on one batch; `key` is for what the model draws at random."""
        with Keyed(key):
            inputs, targets = self.batch(x, y)
            return self.mean_loss(self.call(self.views(flat), inputs), targets)

    def slope(self, flat: Tensor, x: Tensor, y: Tensor, key: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the loss of one client on one batch, and its gradient `[d]`, by the module itself and `backward()`."""
        return self.replica.gradient(flat, self.buffers(), x, y, key)[:2]

    def gradient(self, flat: Tensor, x: Tensor, y: Tensor, key: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the losses `[n]` and gradients `[n, d]` of n clients at `flat [n, d]`, on batches `x [n, b, ...]`.

        Buffers are the initial ones.
        """
        return self.gradient_step(flat, (), x, y, key)[:2]

    def gradient_step(
        self, flat: Tensor, values: Values, x: Tensor, y: Tensor, key: Tensor | None
    ) -> tuple[Tensor, Tensor, Values]:
        """Return the losses `[n]` and gradients `[n, d]` of n clients, and what becomes of their buffers."""
        gradient = torch.empty_like(flat)
        if flat.shape[1] > self.dimension:
            gradient[:, self.dimension :].zero_()
        losses, _, values = self.slopes(flat, gradient, values, x, y, key, False)
        return losses, gradient, values

    def slopes(
        self, flat: Tensor, gradient: Tensor, values: Values, x: Tensor, y: Tensor, key: Tensor | None, steps: bool
    ) -> tuple[Tensor, Places, Values]:
        """The losses `[n]`, and gradients in their places, or, with `steps`, those of large matrices as factors; and
        what becomes of the buffers."""
        with torch.enable_grad():
            views = {name: view.detach().requires_grad_() for name, view in self.views(flat).items()}
            places = Places(list(views.values()), list(self.views(gradient).values()), steps)
            losses, values = self.losses_and_buffers(views, values, x, y, key, places)
            unwritten = gradients(losses, places.parameters)
        places.fill(unwritten)
        return losses.detach(), places, values

    def descend(
        self, flat: Tensor, values: Values, lr: Tensor, correction: Tensor | None, x: Tensor, y: Tensor,
        key: Tensor | None,
    ) -> tuple[Tensor, Values]:  # fmt: skip
        """Move `flat [n, d]` in its place by -lr (gradient + correction); return the losses, and what becomes of the
        buffers. The gradient of a large matrix is never written: its product goes straight into the model; nor is
        another large one copied."""
        gradient = torch.empty_like(flat)
        losses, places, values = self.slopes(flat, gradient, values, x, y, key, True)
        ends = list(accumulate(self.sizes))
        elsewhere = [id(p) in places.factors or id(p) in places.kept for p in places.parameters]
        for is_elsewhere, stretch in groupby(range(len(ends)), key=elsewhere.__getitem__):
            among = list(stretch)
            own = slice(ends[among[0]] - self.sizes[among[0]], ends[among[-1]])
            shift = None if correction is None else correction[:, own]
            if not is_elsewhere:
                move(flat[:, own], lr, gradient[:, own], shift)
                continue
            if shift is not None:
                move(flat[:, own], lr, shift)
            for i in among:
                name, rate = id(places.parameters[i]), lr.reshape(-1, *[1] * len(self.shapes[i]))
                part = flat[:, ends[i] - self.sizes[i] : ends[i]].view(len(flat), *self.shapes[i])
                if name in places.kept:
                    part.addcmul_(rate, places.kept[name], value=-1)
                else:
                    g, inputs = places.factors[name]
                    part.baddbmm_((g * -rate).mT, inputs)
        return losses, values

    def hessian_product(self, flat: Tensor, v: Tensor, x: Tensor, y: Tensor, key: Tensor) -> Tensor:
        """H v `[n, d]` of n clients at `flat [n, d]`: plain functions throughout, because it differentiates twice."""

        def loss(flat: Tensor, own: dict[str, Tensor], x: Tree, y: Tree, key: Tensor) -> Tensor:
            with TwiceDifferentiable(key):
                return self.mean_loss(self.call(self.views(flat), x, own), y)

        # other means of attention and of cuDNN can be differentiated once only
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH), cudnn.flags(enabled=False):
            at = flat.detach().requires_grad_()
            total = torch.vmap(loss)(at, self.buffers(self.initial_values(len(flat))), *self.batch(x, y), key).sum()
            (slope,) = torch.autograd.grad(total, at, create_graph=True)
            if not slope.requires_grad:  # a loss without curvature
                return torch.zeros_like(flat)
            (product,) = torch.autograd.grad((slope * v).sum(), at)
        return product.detach()

    def losses(
        self, views: dict[str, Tensor], x: Tensor, y: Tensor, key: Tensor | None = None, places: Places | None = None
    ) -> Tensor:
        """The losses `[n]` of n clients from views of their parameters, with the initial buffers."""
        return self.losses_and_buffers(views, (), x, y, key, places)[0]

    def losses_and_buffers(
        self, views: dict[str, Tensor], values: Values, x: Tensor, y: Tensor, key: Tensor | None = None,
        places: Places | None = None,
    ) -> tuple[Tensor, Values]:  # fmt: skip
        """The losses `[n]` of n clients from views of their parameters and the values of their buffers, and what
        becomes of these."""
        first = next(iter(views.values()))
        device, clients = first.device.type, len(first)
        values = values or self.initial_values(clients)

        def loss(
            views: dict[str, Tensor], own: dict[str, Tensor], x: Tree, y: Tree, key: Tensor | None
        ) -> tuple[Tensor, dict[str, Tensor]]:
            rounding = torch.autocast(device, torch.bfloat16, self.rounded, cache_enabled=False)
            with ForClients(key, places, self.wide), rounding:
                value = self.mean_loss(self.call(views, x, own), y)
            return value, {name: buffer.detach() for name, buffer in own.items()}

        of_each = torch.vmap(loss, in_dims=(0, 0, 0, 0, None if key is None else 0))
        while not self.called:
            with suppress(Widened):
                batch = self.batch(x.clone(), y.clone())  # it may change its input
                losses, own = of_each(views, self.buffers(values), *batch, key)
                self.called = True
                return losses, self.joined(own, clients)
        losses, own = of_each(views, self.buffers(values), *self.batch(x, y), key)
        return losses, self.joined(own, clients)

    def joined(self, own: dict[str, Tensor], clients: int | None = None) -> Values:
        """Return the values of buffers by name."""
        return () if self.layout is None else self.layout.joined(own, clients)

    def batch(self, x: Tensor, y: Tensor) -> tuple[Tree, Tree]:
        """Inputs and targets as the model and the loss take them."""
        return self.inputs(x), self.targets(y)

    def inputs(self, x: Tensor) -> Tree:
        return unpacked(self.forms.inputs, x)

    def targets(self, y: Tensor) -> Tree:
        return unpacked(self.forms.targets, y)

    def everywhere(self, views: dict[str, Tensor]) -> dict[str, Tensor]:
        """Views in every place of their parameter."""
        return {place: views[name] for place, name in self.uses.items()}

    def call(self, views: dict[str, Tensor], inputs: Tree, own: dict[str, Tensor] | None = None) -> Any:
        """The module's outputs, or their `logits`. What the call makes of the client's `own` buffers takes their
        place in the dictionary; all else in the module is as before."""
        own = self.buffers() if own is None else own
        given = self.everywhere(views) | (self.layout.everywhere(own) if self.layout is not None else {})
        with as_before(self.module):
            outputs = scores_in(functional_call(self.module, given, *arguments(inputs), tie_weights=False))
        self.constants.check()
        own.update((name, given[name]) for name in own)
        if self.layout is not None:
            self.layout.require_shared(given)
        return outputs

    def mean_loss(self, outputs: Any, targets: Tree) -> Tensor:
        value = self.loss(outputs, targets)
        if value.dim():
            shape = tuple(value.shape)
            raise ConfigError([f"the loss must give one number for a batch, its mean; it gave shape {shape}"])
        return value
