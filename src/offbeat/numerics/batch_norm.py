"""Batch normalisation by a stated rule: what becomes of running statistics when many clients train one model.

In training a batch is normalised by its own mean and variance, whatever the rule. "batch": so it is in evaluation, and
there are no running statistics. "averaged": they are numbers of the model, which clients move as PyTorch does and the
server averages; evaluation uses them. "local": they stay with each client; evaluation of the common model uses batches.

Running statistics are columns of the flat vector. What autograd gives there is no gradient but how far the batch's
statistics are from them, and a rule of local steps never sees it: after its step they are r <- r + momentum (statistic
of the batch - r). A layer that a step calls twice moves them twice, one that it does not call leaves them. Where they
are averaged, a client says where they ended and not how far they moved: the start of an update that comes late is not
the model of today.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from offbeat.errors import ConfigError, in_words
from offbeat.method import Cohort, Job, Local, Method, Rule, State, Update

BatchNorm: TypeAlias = Literal["batch", "local", "averaged"]
Kind: Any = nn.modules.batchnorm._NormBase
RUNNING = ("running_mean", "running_var")
OWN = "own statistics"


def norm_problems(module: nn.Module, rule: str | None) -> list[str]:
    """Why the normalisations of a module cannot be trained by this rule, in sentences."""
    if rule is not None and rule not in get_args(BatchNorm):
        return [f"batch_norm = {in_words(rule)}; it is one of {', '.join(map(repr, get_args(BatchNorm)))}, or none"]
    problems = []
    for name, part in tracking(module):
        where = f"{type(part).__name__} ('{name}')" if name else type(part).__name__
        if rule is None:
            problems.append(
                f"the model has {where} with running statistics, and each client has its own: say what becomes of them "
                "by batch_norm = 'batch' (none are kept, evaluation uses those of its batches), 'local' (they stay at "
                "the clients) or 'averaged' (at the server, for evaluation); or use GroupNorm or LayerNorm"
            )
        elif rule != "batch" and not isinstance(part, nn.modules.batchnorm._BatchNorm):
            problems.append(f"{where}: running statistics of single images are neither averaged nor kept; use 'batch'")
        elif rule != "batch" and part.momentum is None:
            problems.append(f"{where}: a momentum of None counts batches, which clients do not share; give a number")
    return problems


def tracking(module: nn.Module) -> list[tuple[str, Any]]:
    """The parts with running statistics that move in training and are under no rule yet; those in eval mode are
    constants."""
    return [
        (name, part)
        for name, part in module.named_modules()
        if isinstance(part, Kind) and part.track_running_stats and not isinstance(part, Running)
        if part.training or not module.training
    ]


def ruled(module: nn.Module, rule: str | None) -> None:
    """Put a copy of a model under the rule."""
    for _, part in tracking(module) if rule else []:
        if rule == "batch":
            part.track_running_stats = False
            part.running_mean = part.running_var = part.num_batches_tracked = None
            continue
        for name in RUNNING:
            value = getattr(part, name)
            delattr(part, name)
            part.register_parameter(name, nn.Parameter(value.clone()))
        part.__class__ = type(type(part).__name__, (Running, type(part)), {"averaged": rule == "averaged"})


class Running(nn.Module):
    """A batch normalisation whose running statistics are parameters."""

    averaged: bool
    moved: tuple[Tensor, Tensor] | None = None  # where an earlier call of the same step has brought them

    def forward(self, x: Tensor) -> Tensor:
        part: Any = self
        if not part.training and self.averaged:
            mean, var = part.running_mean.detach(), part.running_var.detach()
            return functional.batch_norm(x, mean, var, part.weight, part.bias, False, 0.0, part.eps)
        if part.training:
            x = self.noted(x)
        return functional.batch_norm(x, None, None, part.weight, part.bias, True, 0.0, part.eps)

    def noted(self, x: Tensor) -> Tensor:
        """The inputs as they are; on the way back the running statistics hear how far those of the batch are."""
        part: Any = self
        sides = [side for side in range(x.dim()) if side != 1]
        var, mean = torch.var_mean(x.detach().to(part.running_var.dtype), sides, correction=1)
        before = self.moved or (part.running_mean.detach(), part.running_var.detach())
        gaps = mean - before[0], var - before[1]
        self.moved = before[0] + part.momentum * gaps[0], before[1] + part.momentum * gaps[1]
        noted: Tensor = Told.apply(x, part.running_mean, part.running_var, *gaps)  # type: ignore[no-untyped-call]
        return noted


class Told(torch.autograd.Function):
    """A batch as it is; what comes back to the running statistics is how far those of the batch are."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, running_mean: Tensor, running_var: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[3:])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        mean, var = ctx.saved_tensors
        return g, mean, var, None, None


# ---- columns ------------------------------------------------------------------------------------
class Columns(NamedTuple):
    """Which numbers of a flat vector are running statistics, and how fast each moves; all that is needed of a model."""

    momentum: Tensor  # [d]: 0 where a number is none

    @property
    def many(self) -> int:
        return int((self.momentum > 0).sum())

    def at(self, like: Tensor) -> Tensor:
        """For a vector that may have a tail behind it."""
        return functional.pad(self.momentum.to(like.dtype), (0, like.shape[-1] - self.momentum.shape[-1]))


def columns(module: nn.Module) -> Columns | None:
    """Of a model under a rule that has running statistics; None where there are none."""
    speed: dict[str, Any] = {
        f"{name}.{running}" if name else running: part.momentum
        for name, part in module.named_modules()
        if isinstance(part, Running)
        for running in RUNNING
    }
    if not speed:
        return None
    parts = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    return Columns(torch.cat([torch.full_like(p.detach().flatten(), speed.get(name, 0.0)) for name, p in parts]))


class Carried(NamedTuple):
    y: Tensor
    inner: Any  # the rule's own carry, without its iterate


def normalised(method: Method, held: Columns | None, rule: str | None) -> Method:
    """The method, whose rule never sees running statistics."""
    if held is None:
        return method
    what = replace(method.what, local=moving(method.what.local, held, rule == "local"))
    if what.apply is not None and rule == "averaged":
        what = replace(what, apply=averaging(method, held))
    elif rule == "averaged" and what.share is not None and "delta" in what.local.sends:
        what = replace(what, commit=averaging_rows(what, held))
    return replace(method, what=what)


def moving(local: Local, held: Columns, kept: bool) -> Local:
    """Local steps that move running statistics as PyTorch does; `kept`, they are the client's own."""

    def parted(carry: Any, y: Tensor) -> Carried:
        return Carried(y, carry._replace(**{carry._fields[0]: ()}))

    def whole(path: Carried) -> Any:
        return path.inner._replace(**{path.inner._fields[0]: path.y})

    def begin(server: State, job: Job) -> Carried:
        carry = local.begin(server, job)
        return parted(carry, carry[0] + server[OWN] if kept else carry[0])

    def step(path: Carried, g: Tensor, job: Job) -> Carried:
        speed = held.at(path.y)
        running = speed > 0
        moved = local.step(whole(path), torch.where(running, 0.0, g), job)
        return parted(moved, torch.where(running, path.y + speed * g, moved[0]))

    def finish(server: State, path: Carried, job: Job) -> Update:
        running = held.at(path.y) > 0
        if not kept:
            update = local.finish(server, whole(path), job)
            ends = {"delta": torch.where(running, -path.y, update["delta"])} if "delta" in update else {}
            return update | ends
        own = torch.where(running, path.y - server["model"], 0.0)
        return local.finish(server, whole(path._replace(y=path.y - own)), job) | {OWN: own}

    remembers = (*local.remembers, *((OWN,) if kept else ()))
    return replace(local, begin=begin, step=step, finish=finish, remembers=remembers)


def averaging(method: Method, held: Columns) -> Any:
    """The commit, after which running statistics are the mean of those that came, whatever the server's optimiser."""
    rule = method.what

    def apply(w: State, sums: Update, cohort: Cohort) -> State:
        assert rule.weigh is not None
        assert rule.apply is not None
        weights = rule.weigh(cohort)
        each = weights["delta"] if isinstance(weights, Mapping) else weights
        mean = -sums["delta"] / each.sum()
        state = rule.apply(w, sums, cohort)
        return state | {"model": torch.where(held.at(mean) > 0, mean, state["model"])}

    return apply


def averaging_rows(rule: Rule, held: Columns) -> Any:
    """The same for a rule that takes updates one by one: the mean by `share`."""

    def commit(w: State, updates: Update, cohort: Cohort) -> State:
        assert rule.commit is not None
        assert rule.share is not None
        mean = -(rule.share(cohort) @ updates["delta"])
        state = rule.commit(w, updates, cohort)
        return state | {"model": torch.where(held.at(mean) > 0, mean, state["model"])}

    return commit


def method_problems(method: Method, rule: str | None) -> list[str]:
    """Why a method cannot have running statistics by this rule."""
    sends = method.what.local.sends
    if rule == "averaged" and "delta" not in sends and "model" not in sends:
        return [
            f"{method.name} sends {', '.join(sends)}, not where clients end, so running statistics cannot be averaged; "
            "use batch_norm = 'batch'"
        ]
    if rule == "averaged" and method.what.apply is None and method.what.share is None and "model" not in sends:
        return [f"{method.name} takes updates one by one, so statistics cannot be averaged; use batch_norm = 'batch'"]
    if rule == "local" and (method.what.prime is not None or "delta" not in sends):
        return [f"{method.name} cannot keep running statistics at its clients; use batch_norm = 'batch'"]
    if rule == "local" and method.when.speaks_of == "clusters":
        return [
            f"{method.name} mixes models of neighbours, and their statistics; use batch_norm = 'batch' or 'averaged'"
        ]
    return []


def require(held: Columns | None) -> None:
    """Refuse running statistics where gradients are measured."""
    if held is not None:
        raise ConfigError(["running statistics are no parameters with gradients; measure with batch_norm = 'batch'"])
