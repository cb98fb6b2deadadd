"""The loop of a run: commits come, the logbook is kept, something says stop; checkpoints, so that it can go on."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from offbeat.engines.engine import Done
from offbeat.errors import BadNumbers, Interrupted, OffbeatError
from offbeat.records import Row
from offbeat.runs.account import Account
from offbeat.runs.callbacks import Callback, Callbacks
from offbeat.runs.logbook import Logbook
from offbeat.runs.outcome import Outcome, client_rows
from offbeat.runs.rerun import Digest, horizon_state, pass_rows, restore_horizon
from offbeat.runs.roles import Config, Engine, Parts
from offbeat.runs.store import Store
from offbeat.runs.stored import Checkpoint
from offbeat.schedule.horizon import Horizon
from offbeat.schedule.trace import difference


@dataclass(frozen=True)
class History:
    """The part of a run that is already there."""

    point: Checkpoint
    metrics: list[dict[str, Any]]
    recorded: Iterable[Row]  # the trace up to the checkpoint
    again: Callable[[], Iterable[Row]]  # the schedule from its beginning


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
    log = Logbook(config, parts, engine, account, store, watching)
    try:
        with closing(engine):
            return finish(Loop(engine, log), horizon, history)
    except OffbeatError as error:
        if error.outcome is None:
            log.tell("ended", {"ended": f"stopped: {error}"})
        raise
    finally:
        log.close()


def finish(loop: Loop, horizon: Horizon, history: History | None) -> Outcome:
    engine, log, store = loop.engine, loop.log, loop.log.store
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
    result = log.result(ended) | {"refused": dict(horizon.refused)}
    model = engine.model()
    if store is not None:
        loop.save(horizon)
        clients = client_rows(log.account, engine.client_figures())
        store.close(result, model, clients, log.callbacks.kept())
    log.tell("ended", result)
    outcome = Outcome(result, log.metrics, model)
    if failure is not None:
        failure.outcome = outcome
        raise failure
    return outcome


class Loop:
    """Commits, one after the other, and checkpoints between them."""

    def __init__(self, engine: Engine, log: Logbook) -> None:
        self.engine, self.log = engine, log
        self.before_closing: tuple[dict[str, torch.Tensor], dict[str, Any]] | None = None  # callbacks' state then
        self.kept_commit: int | None = None  # that of the last checkpoint
        self.saved = time.perf_counter()
        self.settled = False  # between two commits: account, metrics and engine agree
        self.stop = False  # somebody asked for an end

    @contextmanager
    def listening(self, horizon: Horizon) -> Iterator[None]:
        """A first interrupt ends the run after the commit in hand, or while the schedule looks for one; a second at
        once."""

        def ask(*_: Any) -> None:
            if self.stop:
                raise KeyboardInterrupt
            self.stop = True
            horizon.ask_to_stop()

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
        log, facts, version = self.log, history.point.facts, self.engine.version
        log.began -= facts["wall_seconds"]  # the seconds of the part already run
        log.account.restore(facts["account"])
        until = log.config.until
        if version > until.get("commits", math.inf) or log.account.time > until.get("virtual_seconds", math.inf):
            raise OffbeatError(f"this run has made {version} commits, beyond the limit given; give a further one")
        digest = Digest() if log.store is None else log.store.digest
        if facts["horizon"]:
            pass_rows(horizon, digest, facts["rows"][0], self.heed)
            restore_horizon(horizon, history.point.tensors, facts["horizon"], version)
        else:
            self.pass_steps(horizon, digest, version)
        if digest.value() != facts["rows"]:
            problem = difference(history.recorded, islice(history.again(), facts["rows"][0]))
            raise OffbeatError(f"this run cannot be resumed: its schedule has changed ({problem})")
        log.recall(history.metrics)
        self.kept_commit = version
        log.callbacks.restore(history.point.tensors, facts.get("callbacks", {}))
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

    def farewell(self) -> str:
        """What an interrupt leaves behind."""
        commit = self.log.account.commits
        if self.log.store is None:
            return f"interrupted at commit {commit}; without a run directory (--out) nothing of it is kept"
        if not self.settled:
            commit = self.kept_commit or 0
        where = self.log.store.path
        return f"interrupted; {where} has all up to commit {commit}, and `offbeat resume {where}` goes on from there"

    def run(self, horizon: Horizon) -> str:
        log = self.log
        log.tell("began")
        if not log.metrics:
            log.look()
        log.require_finite(log.metrics[-1])  # of a resumed run, too
        reason = log.end()
        commits = self.engine.commits(horizon)
        while reason is None:
            self.settled = False
            done = next(commits, None)
            if done is None:
                break
            reason = self.take(done, horizon)
        if not log.looked:
            self.before_closing = log.callbacks.state()
            log.look_at_last()
        self.settled = True
        return reason or log.reached() or self.limit_reached(horizon)

    def take(self, done: Done, horizon: Horizon) -> str | None:
        log = self.log
        log.commit(done)
        self.settled = True
        log.tell("committed")
        self.heed()
        reason = log.end()
        late = time.perf_counter() - self.saved > log.config.checkpoint_seconds
        if log.store is not None and late and reason is None:
            self.save(horizon)
        return reason

    def save(self, horizon: Horizon) -> None:
        """Write a checkpoint."""
        log, store = self.log, self.log.store
        assert store is not None
        tensors, facts = self.engine.state()
        ahead, known = horizon_state(horizon)
        watching, states = self.before_closing or log.callbacks.state()
        spent = {"closing": log.closing, "wall_seconds": time.perf_counter() - log.began, "callbacks": states}
        facts |= spent | {"horizon": known, "account": log.account.state()}
        store.checkpoint(tensors | ahead | watching, facts)
        self.kept_commit = log.account.commits
        self.saved = time.perf_counter()

    def limit_reached(self, horizon: Horizon) -> str:
        until, commits = self.log.config.until, self.log.account.commits
        if commits >= until.get("commits", math.inf):
            return f"commits {commits} >= {until['commits']}"
        if horizon.late:
            return f"virtual_seconds: the next commit comes after {until['virtual_seconds']} s"
        return "the schedule ended: no client has anything left to do"
