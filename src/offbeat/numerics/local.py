"""Local rules: what one client does with its gradients, on one flat vector; the engine adds the client axis."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offbeat.config.options import fits
from offbeat.errors import ConfigError
from offbeat.method import Job, Local, State, Update
from offbeat.numerics.client_optimisers import ClientOptimiser, Slots, client_options
from offbeat.numerics.fast.dense import Descend
from offbeat.numerics.rates import Rate, client_rate


class Path(NamedTuple):
    """Where a client stands: its iterate, its optimiser's slots, and, where they are used, where it began and how many
    steps it took in earlier jobs (else empty)."""

    y: Tensor
    slots: Slots
    start: Tensor | tuple[()]
    earlier: Tensor | tuple[()]


def sgd(client_lr: Rate, options: Mapping[str, Any] | None = None, proximal: float = 0.0) -> Local:
    """`y <- y - lr d`, d being what the client's optimiser makes of its gradient: `options` name it (SGD, AdamW,
    RMSProp) and what it takes, and `clip` (norm of the gradient); with a proximal pull.

    g <- g min(1, clip / |g|) + proximal (y - x0);   y <- y - lr d(g). Sends delta = x0 - y. With `state = "kept"` the
    client remembers the optimiser's slots from job to job.
    """
    optimiser, clip, kept = client_options(options)
    if not fits(proximal, float) or not 0 <= proximal < math.inf:
        raise ConfigError([f"proximal = {proximal!r}; it must be a number that is not negative"])

    def begin(server: State, job: Job) -> Path:
        x = server["model"]
        slots, earlier = opened(optimiser, kept, server)
        return Path(x, slots, x if proximal else (), earlier)

    def step(path: Path, g: Tensor, job: Job) -> Path:
        g = clipped(g, clip)
        if isinstance(path.start, Tensor):
            g = g + proximal * (path.y - path.start)
        d, slots = optimiser.direction(g, path.y, path.slots, number(path.earlier, job))
        return path._replace(y=descend(path.y, job.lr, d), slots=slots)

    def finish(server: State, path: Path, job: Job) -> Update:
        return {"delta": server["model"] - path.y, **closed(kept, path.slots, path.earlier, path.y, job)}

    taken = step if options or proximal else Descent()
    return Local(begin, taken, finish, {"lr": client_rate(client_lr)}, remembers=memory(optimiser, kept))


def clipped(g: Tensor, clip: float | None) -> Tensor:
    """The gradient, its norm at most `clip`."""
    return g if clip is None else g * torch.clamp(clip / (g.norm() + 1e-12), max=1.0)


def optimised(rule: Local, options: Mapping[str, Any]) -> Local:
    """Any local rule, given an optimiser's direction in the place of each gradient: what it corrects, averages and
    sends as gradients are then such directions."""
    optimiser, clip, kept = client_options(options)

    class Optimised(NamedTuple):
        y: Tensor
        inner: Any  # the rule's own carry, without its iterate
        slots: Slots
        earlier: Tensor | tuple[()]

    def parted(carry: Any, slots: Slots, earlier: Tensor | tuple[()]) -> Optimised:
        return Optimised(carry[0], carry._replace(**{carry._fields[0]: ()}), slots, earlier)

    def whole(path: Optimised) -> Any:
        return path.inner._replace(**{path.inner._fields[0]: path.y})

    def begin(server: State, job: Job) -> Optimised:
        return parted(rule.begin(server, job), *opened(optimiser, kept, server))

    def step(path: Optimised, g: Tensor, job: Job) -> Optimised:
        d, slots = optimiser.direction(clipped(g, clip), path.y, path.slots, number(path.earlier, job))
        return parted(rule.step(whole(path), d, job), slots, path.earlier)

    def finish(server: State, path: Optimised, job: Job) -> Update:
        return rule.finish(server, whole(path), job) | closed(kept, path.slots, path.earlier, path.y, job)

    remembers = (*rule.remembers, *memory(optimiser, kept))
    return replace(rule, begin=begin, step=step, finish=finish, remembers=remembers)


# ---- what an optimiser has beside the iterate ---------------------------------------------------
def memory(optimiser: ClientOptimiser, kept: bool) -> tuple[str, ...]:
    """The names under which a client remembers its optimiser's slots, and the steps it has taken."""
    return (*(f"own {name}" for name in optimiser.slots), "own steps") if kept else ()


def opened(optimiser: ClientOptimiser, kept: bool, server: State) -> tuple[Slots, Tensor | tuple[()]]:
    """The slots at the beginning of a job, and the number of the steps before it."""
    if kept:
        return {name: server[f"own {name}"] for name in optimiser.slots}, server["own steps"][0]
    return {name: torch.zeros_like(server["model"]) for name in optimiser.slots}, ()


def number(earlier: Tensor | tuple[()], job: Job) -> Tensor:
    """The number of a step since the slots were zero, from 1."""
    own = (job.step + 1).to(job.steps.dtype)
    return own + earlier if isinstance(earlier, Tensor) else own


def closed(kept: bool, slots: Slots, earlier: Tensor | tuple[()], y: Tensor, job: Job) -> Update:
    """What a client remembers of its slots at the end of a job."""
    if not kept or not isinstance(earlier, Tensor):
        return {}
    return {
        **{f"own {name}": slot for name, slot in slots.items()},
        "own steps": torch.zeros_like(y) + earlier + job.steps,
    }


def remembered(rule: Local, server: State, path: Path, job: Job) -> Update:
    """What the client of a rule remembers, for one that sends something else."""
    return {name: vector for name, vector in rule.finish(server, path, job).items() if name in rule.remembers}


def descend(y: Tensor, lr: Tensor, g: Tensor, correction: Tensor | None = None) -> Tensor:
    """`y - lr (g + correction)`, in one pass over memory."""
    moved: Tensor = Descend.apply(y, lr, g, correction)  # type: ignore[no-untyped-call]
    return moved


@dataclass(frozen=True)
class Descent:
    """The step `y <- y - lr (g + c)` on the first field of a carry, all else left alone; `correction` gives c.

    A rule that takes its steps by it lets the engine move the model while the gradient is made.
    """

    correction: Callable[[Any], Tensor | None] = lambda carry: None

    def __call__(self, carry: Any, g: Tensor, job: Job) -> Any:
        return self.moved(carry, descend(carry[0], job.lr, g, self.correction(carry)))

    def moved(self, carry: Any, y: Tensor) -> Any:
        return carry._replace(**{carry._fields[0]: y})


class Corrected(NamedTuple):
    """A client whose every gradient is corrected by the same vector."""

    y: Tensor
    c: Tensor


corrected_step = Descent(lambda path: path.c)


def gradient() -> Local:
    """The client does not move: it sends the mean of its stochastic gradients at the model it was given."""

    class Sum(NamedTuple):
        y: Tensor
        total: Tensor

    def begin(server: State, job: Job) -> Sum:
        return Sum(server["model"], torch.zeros_like(server["model"]))

    def step(carry: Sum, g: Tensor, job: Job) -> Sum:
        return Sum(carry.y, carry.total + g)

    def finish(server: State, carry: Sum, job: Job) -> Update:
        return {"gradient": carry.total / job.steps}

    return Local(begin, step, finish, {"lr": client_rate(1.0)}, sends=("gradient",))
