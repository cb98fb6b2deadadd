"""Progress on a terminal (standard error) or in a notebook, silence in a pipe. It is a callback like any other."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.live import Live
from rich.text import Text

from offbeat.runs.callbacks import Callback, View

COUNTED = ("commits", "virtual_seconds", "samples", "bytes_up", "bytes_down", "bytes_d2d")  # limits that fill up
SECONDS = 0.2  # between two lines
NOTEBOOK = 1.0  # in a notebook, which keeps what is written


def in_notebook() -> bool:
    """Whether a notebook's kernel runs this."""
    kernel = sys.modules.get("IPython")
    shell = kernel.get_ipython() if kernel is not None else None
    return type(shell).__name__ == "ZMQInteractiveShell"


class Progress(Callback):
    """One line: commits, virtual time, the score and its best so far, time left by the nearest limit, the rate.

    It counts the seconds, so that one sees life in a long wave, too.
    """

    def __init__(self, label: str, until: Mapping[str, float] | None = None) -> None:
        self.label = label
        self.until = dict(until) if isinstance(until, Mapping) else {}  # what is none is refused elsewhere
        self.start = time.perf_counter()
        self.earlier = 0.0  # client-steps and share of the work before this process went on with the run
        self.behind = 0.0
        self.shown = 0.0
        self.text = f"{label}  preparing"
        self.live: Live | None = None
        self.notebook = in_notebook()
        self.wanted = sys.stderr.isatty() or self.notebook
        self.wide = 0

    # ---- a run ----------------------------------------------------------------------------------
    def prepare(self) -> None:
        """Show life while data and model are made ready."""
        self.write(self.text, at_once=True)

    def began(self, run: View) -> None:
        self.until = dict(run.until)
        self.start, self.earlier, self.behind = time.perf_counter(), run.spent["client_steps"], self.share_done(run)
        self.write(self.line(run), at_once=True)

    def committed(self, run: View) -> None:
        if self.wanted and time.perf_counter() - self.shown >= SECONDS:
            self.write(self.line(run))

    def ended(self, run: View, result: Mapping[str, Any]) -> None:
        self.close()

    def line(self, run: View) -> str:
        parts = [self.label, f"commit {run.commit}"]
        if run.rows:
            values = [row[run.score] for row in run.rows if row[run.score] is not None]
            best = max(values) if run.score == "accuracy" else min(values)
            parts.append(f"{run.score} {values[-1]:.4g} (best {best:.4g})")
        wall = max(time.perf_counter() - self.start, 1e-9)
        done = self.share_done(run)
        if done > self.behind:
            parts.append(f"at most {wall * (1 - done) / (done - self.behind):,.0f} s left")
        parts.append(f"{(run.spent['client_steps'] - self.earlier) / wall:,.0f} client-steps/s")
        return "  ".join([*parts, f"{run.virtual_seconds:.1f} virtual s"])

    def share_done(self, run: View) -> float:
        """How much of the nearest countable limit is used up."""
        spent = {**run.spent, "commits": run.commit, "virtual_seconds": run.virtual_seconds}
        return max((min(1.0, spent[name] / self.until[name]) for name in COUNTED if name in self.until), default=0.0)

    # ---- other work -----------------------------------------------------------------------------
    def passed(self, passes: float, expected: float) -> None:
        """Work that is counted in passes over the data, of which about so many are expected."""
        now = time.perf_counter()
        if not self.wanted or now - self.shown < SECONDS:
            return
        wall, share = now - self.start, min(1.0, passes / expected)
        left = f"  at most {wall / share - wall:,.0f} s left" if share > 0 else ""
        self.write(f"{self.label}  {passes:.1f} of about {expected:.1f} passes over the data{left}")

    # ---- the line -------------------------------------------------------------------------------
    def write(self, text: str, at_once: bool = False) -> None:
        if not self.wanted:
            return
        now = time.perf_counter()
        self.text = text
        if self.notebook:
            if at_once or now - self.shown >= NOTEBOOK:
                self.wide = max(self.wide, len(text))
                sys.stderr.write(f"\r{text:<{self.wide}}")
                sys.stderr.flush()
                self.shown = now
            return
        self.shown = now
        if self.live is None:
            console = Console(stderr=True)
            self.live = Live(console=console, transient=True, refresh_per_second=4, get_renderable=self.rendered)
            self.live.start()
        if at_once:
            self.live.refresh()

    def rendered(self) -> Text:
        """The line, without what does not fit: no number is cut."""
        parts = [f"{time.perf_counter() - self.start:.0f} s", *self.text.split("  ")]
        wide = self.live.console.width if self.live is not None else 80
        while len(parts) > 1 and cell_len("  ".join(parts)) > wide:
            parts.pop()
        return Text("  ".join(parts), no_wrap=True, overflow="crop")

    def close(self) -> None:
        if self.live is not None:
            self.live.stop()
            self.live = None
        elif self.notebook and self.wide:
            sys.stderr.write("\n")
            self.wide = 0
