"""Callbacks: what watches a run. Four functions, each told what is there and free to answer with a reason to stop.

They see copies and never the run itself, so they cannot change its bits. One that raises is left out for the rest of
the run, which goes on. `state` goes into every checkpoint, and `restore` gets it when the run is resumed.
"""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from offbeat.config import registry
from offbeat.engines.settings import repeatable_kernels
from offbeat.errors import ConfigError, Diverging, Interrupted, in_words
from offbeat.runs.account import Account
from offbeat.runs.target import Figure

Model = dict[str, torch.Tensor]
SPENT = ("client_steps", "samples", "bytes_up", "bytes_down", "bytes_d2d")


class Source(Protocol):
    """What a view reads of a run that goes on."""

    account: Account
    seen: list[Mapping[str, Any]]
    began: float

    def model(self) -> Model: ...


@dataclass(frozen=True)
class View:
    """A run as a callback sees it. What it reads is as it stands at that moment, and a copy."""

    method: str
    task: str
    fleet: str
    seed: int
    config: Mapping[str, Any]  # the table that reproduces the run
    directory: Path | None
    until: Mapping[str, float]
    figures: Mapping[str, Figure]  # what each metric is
    source: Source = field(repr=False)

    @property
    def commit(self) -> int:
        return self.source.account.commits

    @property
    def virtual_seconds(self) -> float:
        return self.source.account.time

    @property
    def spent(self) -> dict[str, float]:
        """What went by so far: client_steps, samples, bytes_up, bytes_down, bytes_d2d."""
        return {name: getattr(self.source.account, name) for name in SPENT}

    @property
    def wall_seconds(self) -> float:
        """Real time, with that of the part before a resume."""
        return time.perf_counter() - self.source.began

    @property
    def rows(self) -> list[Mapping[str, Any]]:
        """A row for each evaluation so far; none of them can be written to."""
        return list(self.source.seen)

    def model(self) -> Model:
        """A copy of the newest version, by parameter name."""
        return self.source.model()

    @property
    def score(self) -> str:
        """The metric that says most: the accuracy, or the loss where there is none."""
        return "accuracy" if self.source.seen and self.source.seen[-1]["accuracy"] is not None else "loss"


class Callback:
    """Nothing, four times: one of your own says what it wants to hear."""

    def began(self, run: View) -> str | None:
        """Before the first commit, or where a resumed run goes on. Like the others it may give a reason to stop."""
        return None

    def committed(self, run: View) -> str | None:
        """After every commit."""
        return None

    def evaluated(self, run: View) -> str | None:
        """After every look at the model; `run.rows[-1]` has the figures."""
        return None

    def ended(self, run: View, result: Mapping[str, Any]) -> None:
        """At the end, whatever it was."""

    def state(self) -> Mapping[str, Any]:
        """What a resumed run needs: numbers, texts and lists of them, and tensors, by name."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""

    def kept(self) -> Model | None:
        """A model that the run directory shall keep as best.safetensors."""
        return None

    def warning(self) -> str | None:
        """What a result shall say is wrong with the run, if anything."""
        return None

    def close(self) -> None:
        """After everything else, however the run ended: let go of lines and files."""


@dataclass
class Callbacks:
    """All callbacks of a run, and what those said that failed."""

    each: list[Callback]
    faults: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # A checkpoint knows them by the place they had at first, whoever was left out meanwhile.
        self.names = {id(callback): f"{n} {type(callback).__name__}" for n, callback in enumerate(self.each)}

    def tell(self, moment: str, *given: Any) -> str | None:
        """Tell all of them; the first reason to stop that one gives."""
        reason: str | None = None
        for callback in list(self.each):
            with self.guarded(callback):
                answer = getattr(callback, moment)(*given)
                if isinstance(answer, str) and reason is None:
                    reason = answer
        return reason

    @contextmanager
    def guarded(self, callback: Callback) -> Iterator[None]:
        name = type(callback).__name__
        try:
            with unchanged():
                yield
        except (KeyboardInterrupt, Interrupted, Warning):  # a warning is raised where somebody asked for errors
            raise
        except Exception as error:  # whatever a callback of one's own, or a tracker's service, raises
            self.faults[name] = f"{type(error).__name__}: {error}"
            self.each.remove(callback)
            warnings.warn(f"{name} failed and is left out; the run goes on: {registry.fault(error)}", stacklevel=3)

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        tensors: dict[str, torch.Tensor] = {}
        facts: dict[str, Any] = {}
        for callback in list(self.each):
            with self.guarded(callback):
                state, name = callback.state(), self.names[id(callback)]
                plain = {key: value for key, value in state.items() if not isinstance(value, torch.Tensor)}
                json.dumps(plain)  # raises where the checkpoint could not have it
                if state:
                    facts[name] = plain
                for key, value in state.items():
                    if isinstance(value, torch.Tensor):
                        tensors[f"callback/{name}/{key}"] = value.detach().cpu().contiguous().clone()
        return tensors, facts

    def restore(self, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> None:
        for callback in list(self.each):
            name = self.names[id(callback)]
            if name in facts:
                head = f"callback/{name}/"
                own = {key.removeprefix(head): value for key, value in tensors.items() if key.startswith(head)}
                with self.guarded(callback):
                    callback.restore({**facts[name], **own})

    def kept(self) -> Model | None:
        models = [model for callback in self.each if (model := callback.kept()) is not None]
        return models[-1] if models else None

    def warning(self) -> str | None:
        """The first of theirs."""
        return next((text for callback in self.each if (text := callback.warning()) is not None), None)

    def close(self) -> None:
        for callback in list(self.each):
            with self.guarded(callback):
                callback.close()


@contextmanager
def unchanged() -> Iterator[None]:
    """Puts back what decides rounding, whatever is set inside."""
    before = torch.get_num_threads(), torch.get_default_dtype(), torch.get_float32_matmul_precision()
    kernels = torch.get_deterministic_debug_mode()
    tf32, grad = torch.backends.cudnn.allow_tf32, torch.is_grad_enabled()
    try:
        yield
    finally:
        if torch.get_num_threads() != before[0]:
            torch.set_num_threads(before[0])
        torch.set_default_dtype(before[1])
        torch.set_float32_matmul_precision(before[2])
        repeatable_kernels(kernels)
        torch.backends.cudnn.allow_tf32 = tf32
        torch.set_grad_enabled(grad)


# ---- those that ship ----------------------------------------------------------------------------
class EarlyStopping(Callback):
    """Stops when a metric has not become better for `patience` evaluations; None: the accuracy, else the loss."""

    def __init__(self, metric: str | None = None, patience: int = 10, least: float = 0.0) -> None:
        if not patience >= 1:
            raise ConfigError([f"early-stopping: patience = {in_words(patience)}; it must be 1 evaluation or more"])
        self.metric, self.patience, self.least = metric, patience, least
        self.best: float | None = None
        self.waited = 0

    def began(self, run: View) -> str | None:
        name, _ = more(run, self.metric)  # raises where there is none
        return self.reason(name)

    def evaluated(self, run: View) -> str | None:
        name, better = more(run, self.metric)
        value = run.rows[-1].get(name)
        new = value is not None and (self.best is None or (value - self.best) * better > self.least)
        self.best, self.waited = (value, 0) if new else (self.best, self.waited + 1)
        return self.reason(name)

    def reason(self, name: str) -> str | None:
        if self.waited < self.patience:
            return None
        said = "it has no value" if self.best is None else f"the best is {self.best:.4g}"
        return f"early stopping: {name} has not become better for {self.waited} evaluations; {said}"

    def state(self) -> Mapping[str, Any]:
        return {"best": self.best, "waited": self.waited}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.best, self.waited = state["best"], state["waited"]


class KeepBest(Callback):
    """Keeps the model with the best value of a metric: `model`, and best.safetensors in the run directory."""

    def __init__(self, metric: str | None = None) -> None:
        self.metric = metric
        self.model: Model | None = None
        self.best: float | None = None
        self.commit: int | None = None

    def began(self, run: View) -> str | None:
        more(run, self.metric)
        return None

    def evaluated(self, run: View) -> str | None:
        name, better = more(run, self.metric)
        value = run.rows[-1].get(name)
        if value is not None and (self.best is None or (value - self.best) * better > 0):
            self.best, self.commit, self.model = value, run.commit, run.model()
        return None

    def state(self) -> Mapping[str, Any]:
        return {"best": self.best, "commit": self.commit, **(self.model or {})}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.best, self.commit = state["best"], state["commit"]
        self.model = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)} or None

    def kept(self) -> Model | None:
        return self.model


class TimeLimit(Callback):
    """Stops after so many minutes of real time; a run that is resumed has them anew."""

    def __init__(self, minutes: float) -> None:
        if not minutes > 0:
            raise ConfigError([f"time-limit: minutes = {in_words(minutes)}; it must be a positive number"])
        self.minutes = minutes
        self.start = 0.0

    def began(self, run: View) -> str | None:
        self.start = run.wall_seconds
        return None

    def committed(self, run: View) -> str | None:
        seconds = run.wall_seconds - self.start
        return f"time limit: {seconds:.0f} s of {60 * self.minutes:.0f} s" if seconds >= 60 * self.minutes else None


class Divergence(Callback):
    """Says once that a run is diverging, and what helps: its loss has risen well above where it began."""

    LOOKS = 3  # evaluations in a row
    RISE = 1.5  # times the loss of the first one

    def __init__(self) -> None:
        self.above = 0
        self.said: str | None = None

    def evaluated(self, run: View) -> str | None:
        first, loss = run.rows[0]["loss"], run.rows[-1]["loss"]
        rising = loss > first + (self.RISE - 1) * abs(first)
        self.above = self.above + 1 if rising or not math.isfinite(loss) else 0
        if self.above == self.LOOKS and self.said is None:
            self.said = (
                f"this run is diverging: its loss was {first:.4g} at the start and is {loss:.4g} at commit "
                f"{run.commit}. {remedy(run.config)}"
            )
            warnings.warn(self.said, Diverging, stacklevel=2)
        return None

    def state(self) -> Mapping[str, Any]:
        return {"above": self.above, "said": self.said}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.above, self.said = state["above"], state["said"]

    def warning(self) -> str | None:
        return self.said


def remedy(config: Mapping[str, Any]) -> str:
    """What to change about a config whose run diverges."""
    method = config.get("method", {})
    rates = [f"{name} = {method[name]}" for name in ("client_lr", "server_lr", "beta") if number(method.get(name))]
    given = f" (it has {', '.join(rates)})" if rates else ""
    return (
        f"Lower the rates{given}, by a factor of 3 at first, or clip (client_options = {{clip = 1.0}}); "
        "`offbeat tune` looks for rates that hold"
    )


def number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def more(run: View, metric: str | None) -> tuple[str, int]:
    """The metric that is meant, and 1 where more of it is better, -1 where less is."""
    name = metric or run.score
    if name not in run.figures:
        raise ValueError(f"this run has no metric '{name}'; it has {', '.join(run.figures)}")
    better = run.figures[name].more_is_better
    if better is None:
        raise ValueError(f"nobody said whether more of '{name}' is better")
    return name, 1 if better else -1
