"""Flat vectors over any `nn.Module`: parameters of n clients are one `[n, d]` matrix with a view per layer.

The module is written for one client and called through `torch.func`; the client axis is added by `vmap`, and
gradients are taken with respect to the flat matrix itself (the sum of the clients' losses separates).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
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
from offbeat.numerics import batch_norm
from offbeat.numerics.attributes import as_before
from offbeat.numerics.draws import Keyed
from offbeat.numerics.fast.dense import move
from offbeat.numerics.fast.places import Places
from offbeat.numerics.fast.plain_recurrence import TwiceDifferentiable
from offbeat.numerics.fast.table import ForClients
from offbeat.numerics.forms import Forms, Tree, arguments, called, scores_in, unpacked
from offbeat.numerics.outputs import detached
from offbeat.numerics.transforms import Widened

Loss: TypeAlias = Callable[[Any, Any], Tensor]  # (outputs, targets) of a batch -> mean loss


def lazy(p: Tensor) -> bool:
    """Whether a parameter gets its shape at the first call only."""
    return bool(parameter.is_lazy(p))


def module_problems(module: nn.Module, rule: str | None = None) -> list[str]:
    """Why a module cannot be trained here, its batch normalisations by this rule, in sentences; empty when it can. What
    shows only when it computes is found by `numerics/trial.py`."""
    problems = batch_norm.norm_problems(module, rule)
    for name, p in module.named_parameters():
        if lazy(p):
            problems.append(f"parameter '{name}' has no shape yet: call the model once on some inputs before")
        elif p.is_complex():
            problems.append(
                f"parameter '{name}' is complex, and models are flat vectors of real numbers: keep its real and "
                "imaginary parts, and join them by torch.view_as_complex in forward"
            )
        if p._backward_hooks:
            problems.append(
                f"parameter '{name}' has a hook on its gradient, which would not be called: take it off, and use "
                "client options or a method of your own"
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


def copied(module: nn.Module, rule: str | None = None) -> nn.Module:
    """A copy to train, its batch normalisations by this rule: the caller's own stays as it is.

    A part that is in eval mode within a model in train mode stays so; a model in eval mode is put to train as a whole.
    """
    try:
        copy_ = copy.deepcopy(module)
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
    copy_ = copy_ if copy_.training else copy_.train()
    batch_norm.ruled(copy_, rule)
    return copy_


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


class Held(nn.Module):
    """A model that keeps the parameters it is given for as long as something is computed."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, compute: Callable[[], Any]) -> Any:
        return compute()


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
        forms: Forms = Forms(), rule: str | None = None,
    ) -> None:  # fmt: skip
        problems = module_problems(module, rule)
        if problems:
            raise ConfigError(problems)
        self.module = of_type(copied(module, rule), dtype)
        self.rule, self.statistics = rule, batch_norm.columns(self.module)
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

    def to(self, device: torch.device | str) -> FlatModel:
        self.module.to(device)
        if isinstance(self.loss, nn.Module):
            self.loss.to(device)
        self.statistics = batch_norm.columns(self.module)  # there, too
        return self

    def reading(self, forms: Forms) -> FlatModel:
        """The same model for samples of other forms."""
        other = copy.copy(self)
        other.forms = forms
        return other

    def initial(self) -> Tensor:
        """The module's own trainable parameters: version 0. Frozen ones stay as they are."""
        return torch.cat([p.detach().reshape(-1) for p in self.module.parameters() if p.requires_grad]).clone()

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
            return self.call(self.views(flat), self.inputs(x.clone()))  # it may change its input

    def one(self, flat: Tensor, x: Tensor, y: Tensor, key: Tensor | None = None) -> Tensor:
        """The loss of one client on one batch; `key` is for what the model draws at random."""
        with Keyed(key):
            return self.batch_loss(self.views(flat), *self.batch(x, y))

    def slope(self, flat: Tensor, x: Tensor, y: Tensor, key: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The loss of one client on one batch, and its gradient `[d]`. The module has the client's parameters until the
        gradient is there: parts of it may be computed once more on the way back (`torch.utils.checkpoint`)."""

        def compute() -> tuple[Tensor, Tensor]:
            with Keyed(key):
                inputs, targets = self.batch(x, y)
                loss = self.mean_loss(called(self.module, inputs), targets)
            return loss.detach(), torch.autograd.grad(loss, at)[0]

        with torch.enable_grad(), as_before(self.module):
            at = flat.detach().requires_grad_()
            held = {f"module.{place}": view for place, view in self.everywhere(self.views(at)).items()}
            both: tuple[Tensor, Tensor] = functional_call(Held(self.module), held, (compute,), tie_weights=False)
        return both

    def gradient(self, flat: Tensor, x: Tensor, y: Tensor, key: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The losses `[n]` and gradients `[n, d]` of n clients at `flat [n, d]`, on batches `x [n, b, ...]`."""
        gradient = torch.empty_like(flat)
        if flat.shape[1] > self.dimension:
            gradient[:, self.dimension :].zero_()
        return self.slopes(flat, gradient, x, y, key, False)[0], gradient

    def slopes(
        self, flat: Tensor, gradient: Tensor, x: Tensor, y: Tensor, key: Tensor | None, steps: bool
    ) -> tuple[Tensor, Places]:
        """The losses `[n]`, and gradients in their places, or, with `steps`, those of large matrices as factors."""
        with torch.enable_grad():
            views = {name: view.detach().requires_grad_() for name, view in self.views(flat).items()}
            places = Places(list(views.values()), list(self.views(gradient).values()), steps)
            losses = self.losses(views, x, y, key, places)
            unwritten = gradients(losses, places.parameters)
        places.fill(unwritten)
        return losses.detach(), places

    def descend(
        self, flat: Tensor, lr: Tensor, correction: Tensor | None, x: Tensor, y: Tensor, key: Tensor | None
    ) -> Tensor:
        """Move `flat [n, d]` in its place by -lr (gradient + correction); gives the losses. The gradient of a large
        matrix is never written: its product goes straight into the model; nor is another large one copied."""
        gradient = torch.empty_like(flat)
        losses, places = self.slopes(flat, gradient, x, y, key, True)
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
        return losses

    def hessian_product(self, flat: Tensor, v: Tensor, x: Tensor, y: Tensor, key: Tensor) -> Tensor:
        """H v `[n, d]` of n clients at `flat [n, d]`: plain functions throughout, because it differentiates twice."""

        def loss(flat: Tensor, x: Tree, y: Tree, key: Tensor) -> Tensor:
            with TwiceDifferentiable(key):
                return self.batch_loss(self.views(flat), x, y)

        # other means of attention and of cuDNN can be differentiated once only
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH), cudnn.flags(enabled=False):
            at = flat.detach().requires_grad_()
            total = torch.vmap(loss)(at, *self.batch(x, y), key).sum()
            (slope,) = torch.autograd.grad(total, at, create_graph=True)
            if not slope.requires_grad:  # a loss without curvature
                return torch.zeros_like(flat)
            (product,) = torch.autograd.grad((slope * v).sum(), at)
        return product.detach()

    def losses(
        self, views: dict[str, Tensor], x: Tensor, y: Tensor, key: Tensor | None = None, places: Places | None = None
    ) -> Tensor:
        """The losses `[n]` of n clients from views of their parameters."""

        device = next(iter(views.values())).device.type

        def loss(views: dict[str, Tensor], x: Tree, y: Tree, key: Tensor | None) -> Tensor:
            rounding = torch.autocast(device, torch.bfloat16, self.rounded, cache_enabled=False)
            with ForClients(key, places, self.wide), rounding:
                return self.batch_loss(views, x, y)

        of_each = torch.vmap(loss, in_dims=(0, 0, 0, None if key is None else 0))
        while not self.called:
            with suppress(Widened):
                losses = of_each(views, *self.batch(x.clone(), y.clone()), key)  # it may change its input
                self.called = True
                return losses
        return of_each(views, *self.batch(x, y), key)

    def batch(self, x: Tensor, y: Tensor) -> tuple[Tree, Tree]:
        """Inputs and targets as the model and the loss take them."""
        return self.inputs(x), self.targets(y)

    def inputs(self, x: Tensor) -> Tree:
        return unpacked(self.forms.inputs, x)

    def targets(self, y: Tensor) -> Tree:
        return unpacked(self.forms.targets, y)

    def batch_loss(self, views: dict[str, Tensor], inputs: Tree, targets: Tree) -> Tensor:
        return self.mean_loss(self.call(views, inputs), targets)

    def everywhere(self, views: dict[str, Tensor]) -> dict[str, Tensor]:
        """Views in every place of their parameter."""
        return {place: views[name] for place, name in self.uses.items()}

    def call(self, views: dict[str, Tensor], inputs: Tree) -> Any:
        """The module's outputs, or their `logits`."""
        given = self.everywhere(views)
        with as_before(self.module):
            return scores_in(functional_call(self.module, given, *arguments(inputs), tie_weights=False))

    def mean_loss(self, outputs: Any, targets: Tree) -> Tensor:
        value = self.loss(outputs, targets)
        if value.dim():
            shape = tuple(value.shape)
            raise ConfigError([f"the loss must give one number for a batch, its mean; it gave shape {shape}"])
        return value
