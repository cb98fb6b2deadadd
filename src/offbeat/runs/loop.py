"""The loop of a run: commits come, the account is kept, the model is looked at now and then, something says stop.

Evaluation only looks: it changes neither schedule, nor waves, nor draws.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import Any, Literal

import torch

from offbeat.engines.engine import Done
from offbeat.errors import BadNumbers, Interrupted, OffbeatError
from offbeat.records import Row
from offbeat.runs.account import Account
from offbeat.runs.callbacks import Callback, Callbacks, Divergence, View
from offbeat.runs.outcome import Outcome, client_rows, reached, row_of, summed_up
from offbeat.runs.progress import Progress
from offbeat.runs.rerun import Digest, horizon_state, pass_rows, restore_horizon
from offbeat.runs.roles import Config, Engine, Parts
from offbeat.runs.store import Store
from offbeat.runs.stored import Checkpoint
from offbeat.runs.target import SMOOTH, stop_reason, target_key, target_list
from offbeat.schedule.horizon import Horizon
from offbeat.schedule.trace import difference


@dataclass(frozen=True)
class History:
    """The part of a run that is already there."""

    point: Checkpoint
    metrics: list[dict[str, Any]]
    recorded: Iterable[Row]  # the trace up to the checkpoint
    again: Callable[[], Iterable[Row]]  # the schedule from its beginning


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
        every = self.every_seconds
        return every is not None and math.floor(now / every) > math.floor(before / every)


def go(
    config: Config,
    parts: Parts,
    engine: Engine,
    horizon: Horizon,
    account: Account,
    store: Store | None,
    progress: Callback | None,
    history: History | None = None,
    callbacks: Sequence[Callback] = (),
) -> Outcome:
    """Run to the end, whatever it is, and leave the directory so that it can be read and taken up again."""
    watching = Callbacks([*callbacks, *([] if progress is None else [progress])])
    loop = Loop(config, engine, account, store, watching)
    loop.view = view_of(config, parts, loop)
    try:
        with closing(engine):
            return finished(loop, parts, horizon, history)
    except OffbeatError as error:
        if error.outcome is None:
            watching.tell("ended", loop.view, {"ended": f"stopped: {error}"})
        raise
    finally:
        if isinstance(progress, Progress):
            progress.close()
        del loop.view  # it holds the loop: files that are open should not wait for Python to look for circles


def view_of(config: Config, parts: Parts, loop: Loop) -> View:
    """What callbacks see of a run."""
    return View(
        parts.method.name, parts.task.name, parts.fleet.name, config.seed, config.table(),
        None if loop.store is None else loop.store.path, config.until, loop.engine.figures, loop,
    )  # fmt: skip


def finished(loop: Loop, parts: Parts, horizon: Horizon, history: History | None) -> Outcome:
    engine, account, store = loop.engine, loop.account, loop.store
    failure: OffbeatError | None = None
    try:
        with engine.settings, loop.listening(horizon):
            if history is not None:
                loop.skip(horizon, history)
            elif store is not None:
                loop.save(horizon)
            ended = loop.run(horizon)
    except BadNumbers as error:
        ended, failure = f"stopped: {error}", error
    except (KeyboardInterrupt, Interrupted):
        ended, failure = "interrupted", Interrupted(loop.farewell())
        if not loop.settled:  # in the midst of a step: the directory stays as the last checkpoint left it
            raise failure from None
    result = loop.result(parts, ended) | {"refused": dict(horizon.driver.refused)}
    model = engine.model()
    if store is not None:
        counts = account.participation
        loop.save(horizon)
        best = loop.callbacks.kept()
        store.close(result, model, client_rows(account.clients, counts, engine.client_figures()), best)
    loop.callbacks.tell("ended", loop.view, result)
    outcome = Outcome(result, loop.metrics, model)
    if failure is not None:
        failure.outcome = outcome
        raise failure
    return outcome


class Loop:
    """The state of one run in progress."""

    def __init__(
        self, config: Config, engine: Engine, account: Account, store: Store | None, callbacks: Callbacks
    ) -> None:
        self.config = config
        self.engine = engine
        self.account = account
        self.store = store
        self.callbacks = callbacks
        self.view: View
        self.seen: list[Mapping[str, Any]] = []  # the metrics as callbacks see them
        self.asked: str | None = None  # why a callback wants an end
        self.before_closing: tuple[dict[str, torch.Tensor], dict[str, Any]] | None = None  # callbacks' state then
        self.kept_commit: int | None = None  # that of the last checkpoint
        self.evaluate = Evaluate(**config.evaluate)
        self.metrics: list[dict[str, Any]] = []
        self.saved = time.perf_counter()
        self.began = time.perf_counter()
        self.closing: int | None = None  # the commit of a last look that was not due
        self.settled = False  # between two commits: account, metrics and engine agree
        self.stop = False  # somebody asked for an end

    @contextmanager
    def listening(self, horizon: Horizon) -> Iterator[None]:
        """A first interrupt ends the run after the commit in hand, or while the schedule looks for one; a second at
        once."""

        def ask(*_: Any) -> None:
            if self.stop:
                raise KeyboardInterrupt
            self.stop = horizon.stop = True

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def skip(self, horizon: Horizon, history: History) -> None:
        """Run the schedule, without numerics, up to the checkpoint; it must be the schedule that was recorded."""
        facts, version = history.point.facts, self.engine.version
        self.began -= facts["wall_seconds"]  # the seconds of the part already run
        self.account.restore(facts["account"])
        until = self.config.until
        if version > until.get("commits", math.inf) or self.account.time > until.get("virtual_seconds", math.inf):
            raise OffbeatError(f"this run has made {version} commits, beyond the limit given; give a further one")
        digest = Digest() if self.store is None else self.store.digest
        if facts["horizon"]:
            restore_horizon(
                horizon, history.point.tensors, facts["horizon"], version,
                lambda: pass_rows(horizon, digest, facts["rows"][0], self.heed),
            )  # fmt: skip
        else:
            self.pass_steps(horizon, digest, version)
        if digest.value() != facts["rows"]:
            problem = difference(history.recorded, islice(history.again(), facts["rows"][0]))
            raise OffbeatError(f"this run cannot be resumed: its schedule has changed ({problem})")
        self.metrics += history.metrics
        self.seen += [MappingProxyType(dict(row)) for row in history.metrics]
        self.kept_commit = version
        self.callbacks.restore(history.point.tensors, facts.get("callbacks", {}))
        self.saved = time.perf_counter()

    def pass_steps(self, horizon: Horizon, digest: Digest, version: int) -> None:
        """The same with a horizon that looks at every row."""
        for step in islice(horizon, version):
            horizon.skipped(step.commit)
            digest.add(step.rows)
            self.heed()
        horizon.fill()
        self.engine.settle(horizon)

    def heed(self) -> None:
        if self.stop:
            raise Interrupted

    def model(self) -> dict[str, torch.Tensor]:
        """A copy of the newest version, for callbacks."""
        return self.engine.model()

    def ask(self, reason: str | None) -> None:
        self.asked = self.asked or reason

    def farewell(self) -> str:
        """What an interrupt leaves behind."""
        commit = self.account.commits
        if self.store is None:
            return f"interrupted at commit {commit}; without a run directory (--out) nothing of it is kept"
        if not self.settled:
            commit = self.kept_commit or 0
        where = self.store.path
        return f"interrupted; {where} has all up to commit {commit}, and `offbeat resume {where}` goes on from there"

    def run(self, horizon: Horizon) -> str:
        self.ask(self.callbacks.tell("began", self.view))
        if not self.metrics:
            self.look()
        self.require_finite(self.metrics[-1])  # of a resumed run, too
        reason = self.reached() or self.asked
        commits = self.engine.commits(horizon)
        while reason is None:
            self.settled = False
            done = next(commits, None)
            if done is None:
                break
            reason = self.take(done, horizon)
        if self.metrics[-1]["commit"] != self.account.commits:
            self.closing = self.account.commits
            self.before_closing = self.callbacks.state()
            self.look()
        self.settled = True
        return reason or self.reached() or self.limit_reached(horizon)

    def note_look(self, row: Mapping[str, Any]) -> None:
        """Tell everyone of an evaluation."""
        self.seen.append(MappingProxyType(dict(row)))
        self.ask(self.callbacks.tell("evaluated", self.view))

    def take(self, done: Done, horizon: Horizon) -> str | None:
        before = self.account.time
        self.note(done.step.rows, done.step.commit.jobs, done.staleness)
        if self.evaluate.due(done.version, before, done.step.time):
            self.look()
        self.settled = True
        self.ask(self.callbacks.tell("committed", self.view))
        self.heed()
        reason = self.reached() or self.asked
        late = time.perf_counter() - self.saved > self.config.checkpoint_seconds
        if self.store is not None and late and reason is None:
            self.save(horizon)
        return reason

    def save(self, horizon: Horizon) -> None:
        """Write a checkpoint."""
        assert self.store is not None
        tensors, facts = self.engine.state()
        ahead, known = horizon_state(horizon, self.account.commits)
        watching, states = self.before_closing or self.callbacks.state()
        spent = {"closing": self.closing, "wall_seconds": time.perf_counter() - self.began, "callbacks": states}
        facts |= spent | {"horizon": known, "account": self.account.state()}
        self.store.checkpoint(tensors | ahead | watching, facts)
        self.kept_commit = self.account.commits
        self.saved = time.perf_counter()

    def reached(self) -> str | None:
        """The limit on accuracy, loss or samples that is reached, or None."""
        for name in ("samples", "bytes_up", "bytes_down", "bytes_d2d"):
            spent = getattr(self.account, name)
            if spent >= self.config.until.get(name, math.inf):
                return f"{name} {spent:.0f} >= {self.config.until[name]}"
        looked = self.metrics[-1]["commit"] == self.account.commits
        return stop_reason(self.config.until, self.metrics, self.engine.figures) if looked else None

    def note(self, rows: list[Row], jobs: tuple[tuple[int, int], ...], staleness: list[int]) -> None:
        self.account.take(rows, jobs, staleness)
        if self.store is not None:
            self.store.note(rows)

    def look(self) -> None:
        metrics = self.engine.evaluate()
        row = row_of(self.account, metrics)
        self.metrics.append(row)
        if self.store is not None:
            self.store.metrics.append(row)
        self.note_look(row)
        self.require_finite(metrics)

    def require_finite(self, metrics: Mapping[str, float | None]) -> None:
        """Stops a run whose model or result is no number any more, though every update that came in was finite."""
        loss = metrics["loss"]
        bad = [] if math.isfinite(loss or 0.0) else [f"its loss is {loss}"]
        if not self.engine.finite():
            bad.append("it holds NaN or infinity")
        if bad:
            raise BadNumbers(
                f"the model after commit {self.account.commits} is of no use: {' and '.join(bad)}. "
                "A lower client or server rate, or clipping, usually helps."
            )

    def limit_reached(self, horizon: Horizon) -> str:
        until = self.config.until
        if self.account.commits >= until.get("commits", math.inf):
            return f"commits {self.account.commits} >= {until['commits']}"
        if horizon.late:
            return f"virtual_seconds: the next commit comes after {until['virtual_seconds']} s"
        return "the schedule ended: no client has anything left to do"

    def result(self, parts: Parts, ended: str) -> dict[str, Any]:
        seen = [row["accuracy"] for row in self.metrics if row["accuracy"] is not None]
        figures = self.engine.figures
        targets = target_list(self.config.targets, self.config.until, figures)
        summary = self.account.summary()
        computed = self.engine.report()
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
            "metric_faults": self.engine.faults(),
            "callback_faults": self.callbacks.faults,
            "diverging": next((c.said for c in self.callbacks.each if isinstance(c, Divergence)), None),
            "reached": {target_key(n, t): reached(self.metrics, n, t, 1, figures) for n, t in targets},
            "reached_smoothed": {target_key(n, t): reached(self.metrics, n, t, SMOOTH, figures) for n, t in targets},
            "share_dead": summary["jobs_dead"] / max(1, summary["jobs_started"]),
            **computed,
            "wall_seconds": time.perf_counter() - self.began,
        }
