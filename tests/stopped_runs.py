"""Runs that end early: interrupted as by Ctrl-C, killed in this process or in one of its own; and what to compare."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from offbeat import Experiment, run
from offbeat.runs.loop import Interrupted, Loop
from offbeat.runs.progress import Progress


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def figures(outcome: Any) -> dict[str, Any]:
    """The result without what the host's clock decides."""
    return {name: value for name, value in outcome.result.items() if name != "wall_seconds"}


class InterruptAt(Progress):
    """Somebody presses Ctrl-C after so many commits."""

    def __init__(self, commits: int) -> None:
        super().__init__("test", {})
        self.commits = commits

    def committed(self, run: Any) -> None:
        if run.commit == self.commits:
            raise KeyboardInterrupt


def interrupted(chosen: Experiment, out: Path, commits: int) -> Path:
    with pytest.raises(Interrupted, match="resume"):
        run(chosen, out, InterruptAt(commits))
    return out


class Killed(BaseException):
    """Stands for SIGKILL: nothing is written any more, and nobody cleans up."""


class KillAt(InterruptAt):
    def committed(self, run: Any) -> None:
        if run.commit == self.commits:
            raise Killed


def killed(call: Callable[[], Any]) -> None:
    with pytest.raises(Killed):
        call()


def killed_after(commits: int, experiment: Experiment, out: Path, **options: Any) -> None:
    take = Loop.take

    def dying(self: Loop, done: Any, horizon: Any) -> str | None:
        reason = take(self, done, horizon)
        if done.version >= commits:
            raise Killed
        return reason

    Loop.take = dying  # type: ignore[method-assign]
    try:
        run(experiment, out, **options)
    except Killed:
        pass
    finally:
        Loop.take = take  # type: ignore[method-assign]


PATIENCE = 300  # seconds that a process may take on a busy machine before it counts as stuck

# `offbeat ARGUMENTS`; after so many commits this happens, in the middle of the run.
COMMAND_THAT_STOPS = """
import os, signal, sys
from offbeat.cli import main
from offbeat.runs.loop import Loop
take, commits = Loop.take, int(sys.argv.pop(1))
def take_and_stop(self, done, horizon):
    reason = take(self, done, horizon)
    if done.version == commits:
        {stop}
    return reason
Loop.take = take_and_stop
main()
"""
DIE = "os.kill(os.getpid(), signal.SIGKILL)"


def command_that_stops(commits: int, stop: str, *arguments: Any) -> list[str]:
    return [sys.executable, "-c", COMMAND_THAT_STOPS.format(stop=stop), str(commits), *map(str, arguments)]


def killed_process(commits: int, chosen: Experiment, out: Path) -> None:
    """`offbeat run` in a process of its own, which SIGKILL ends after so many commits."""
    config = out.with_suffix(".toml")
    config.write_text(chosen.toml())
    command = command_that_stops(commits, DIE, "run", config, "--out", out)
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (out / "result.json").exists()
