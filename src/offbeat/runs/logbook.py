"""The logbook of a run, whoever makes the commits: what was spent, what evaluations gave, what callbacks are told.

Evaluation only looks: it changes neither schedule, nor waves, nor draws.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch

from offbeat.engines.engine import Done
from offbeat.errors import BadNumbers
from offbeat.records import JobName, Row
from offbeat.runs.account import Account
from offbeat.runs.callbacks import Callbacks, View
from offbeat.runs.outcome import reached, row_of, summed_up
from offbeat.runs.roles import Config, Model, Parts
from offbeat.runs.store import Store
from offbeat.runs.target import SMOOTH, stop_reason, target_key, target_list, width_of
from offbeat.schedule.ticks import ticks


@dataclass(frozen=True)
class Evaluate:
    """Look at the model every so many commits, or at the first commit after every so many virtual seconds."""

    every_commits: int | None = None
    every_seconds: float | None = None
    metrics: list[Any] | None = None  # further ones, by name
    on: Literal["test", "train", "held-out"] | None = None  # where the figures come from
    samples: int | None = None  # of that set at most so many, at even distances
    clients: bool | None = None  # single clients, too; left out: where there are sets of them
    training_loss: bool | None = None  # the mean over clients of the loss over their shards
    hold_out: float | None = None  # a share of every shard that is not trained on, but looked at
    unseen: int | None = None  # clients that never train, but are looked at

    def due(self, version: int, before: float, now: float) -> bool:
        if self.every_commits is not None and version % self.every_commits == 0:
            return True
        if self.every_seconds is None:
            return False
        every = ticks(self.every_seconds)  # whole numbers, whose quotients are exact: 0.3 s is three times 0.1 s
        return ticks(now) // every > ticks(before) // every


class Logbook:
    """What is known of one run in progress. `newest` is whoever has the newest model."""

    def __init__(
        self, config: Config, parts: Parts, newest: Model, account: Account, store: Store | None, callbacks: Callbacks
    ) -> None:
        self.config, self.parts, self.newest = config, parts, newest
        self.account, self.store, self.callbacks = account, store, callbacks
        self.evaluate = Evaluate(**config.evaluate)
        self.metrics: list[dict[str, Any]] = []
        self.seen: list[Mapping[str, Any]] = []  # the metrics as callbacks see them
        self.closing: int | None = None  # the commit of a last look that was not due
        self.asked: str | None = None  # why a callback wants an end
        self.began = time.perf_counter()
        self.view = View(
            parts.method.name, parts.task.name, parts.fleet.name, config.seed, config.table(),
            None if store is None else store.path, config.until, newest.figures, self,
        )  # fmt: skip

    def close(self) -> None:
        """The view holds the book: files that are open should not wait for Python to look for circles."""
        self.callbacks.close()
        del self.view

    # ---- what happens ---------------------------------------------------------------------------
    def commit(self, done: Done) -> None:
        """A commit was made; the model is looked at where that is due."""
        before = self.account.time
        self.note(done.step.rows, done.step.commit.jobs, done.staleness)
        if self.evaluate.due(done.version, before, done.step.time):
            self.look()

    def note(self, rows: list[Row], jobs: tuple[JobName, ...], staleness: list[int]) -> None:
        self.account.take(rows, jobs, staleness)
        if self.store is not None:
            self.store.note(rows)

    def look(self) -> None:
        metrics = self.newest.evaluate()
        row = row_of(self.account, metrics)
        self.metrics.append(row)
        if self.store is not None:
            self.store.note_metrics(row)
        self.seen.append(MappingProxyType(dict(row)))
        self.tell("evaluated")
        self.require_finite(metrics)

    @property
    def looked(self) -> bool:
        """Whether the newest version was evaluated."""
        return bool(self.metrics) and self.metrics[-1]["commit"] == self.account.commits

    def look_at_last(self) -> None:
        """A look that is not due, because the run ends."""
        self.closing = self.account.commits
        self.look()

    def recall(self, metrics: Sequence[dict[str, Any]]) -> None:
        """Evaluations of the part of a run that is already there."""
        self.metrics += metrics
        self.seen += [MappingProxyType(dict(row)) for row in metrics]

    # ---- callbacks ------------------------------------------------------------------------------
    def tell(self, moment: str, *facts: Any) -> None:
        reason = self.callbacks.tell(moment, self.view, *facts)
        self.asked = self.asked or reason

    def model(self) -> dict[str, torch.Tensor]:
        """A copy of the newest version, for callbacks."""
        return self.newest.model()

    # ---- the end --------------------------------------------------------------------------------
    def end(self) -> str | None:
        """Why the run is over: a limit on accuracy, loss, samples or bytes, or a callback's reason; or None."""
        return self.reached() or self.asked

    def reached(self) -> str | None:
        for name in ("samples", "bytes_up", "bytes_down", "bytes_d2d"):
            spent = getattr(self.account, name)
            if spent >= self.config.until.get(name, math.inf):
                return f"{name} {spent:.0f} >= {self.config.until[name]}"
        return stop_reason(self.config.until, self.metrics, self.newest.figures) if self.looked else None

    def require_finite(self, metrics: Mapping[str, float | None]) -> None:
        """Stops a run whose model or result is no number any more, though every update that came in was finite."""
        loss = metrics["loss"]
        bad = [] if math.isfinite(loss or 0.0) else [f"its loss is {loss}"]
        if not self.newest.finite():
            bad.append("it holds NaN or infinity")
        if bad:
            raise BadNumbers(
                f"the model after commit {self.account.commits} is of no use: {' and '.join(bad)}. "
                "A lower client or server rate, or clipping, usually helps."
            )

    def result(self, ended: str) -> dict[str, Any]:
        seen = [row["accuracy"] for row in self.metrics if row["accuracy"] is not None]
        figures, parts = self.newest.figures, self.parts
        targets = target_list(self.config.targets, self.config.until, figures)
        summary = self.account.summary()
        computed = self.newest.report()
        return {
            "method": parts.method.name,
            "task": parts.task.name,
            "fleet": parts.fleet.name,
            "seed": self.config.seed,
            "device": computed.pop("device"),
            "precision": computed.pop("precision"),
            "ended": ended,
            **summary,
            "accuracy_final": seen[-1] if seen else None,
            "accuracy_best": max(seen) if seen else None,
            "loss_final": self.metrics[-1]["loss"] if self.metrics else None,
            "metrics": {name: summed_up(self.metrics, name, figure) for name, figure in figures.items()},
            "metric_faults": self.newest.faults(),
            "callback_faults": self.callbacks.faults,
            "diverging": self.callbacks.warning(),
            "reached": {target_key(n, t): reached(self.metrics, n, t, width_of(n), figures) for n, t in targets},
            "reached_smoothed": {
                target_key(n, t): reached(self.metrics, n, t, SMOOTH, figures) for n, t in targets if width_of(n) == 1
            },
            "share_dead": summary["jobs_dead"] / max(1, summary["jobs_started"]),
            **computed,
            "wall_seconds": time.perf_counter() - self.began,
        }
