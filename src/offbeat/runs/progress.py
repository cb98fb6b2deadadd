"""Progress on a terminal (standard error), silence in a pipe."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from offbeat.runs.account import Account


class Progress:
    """One line: rate, commits, virtual time, accuracy, time left by the nearest limit."""

    def __init__(self, label: str, until: Mapping[str, float]) -> None:
        self.label = label
        self.until = until
        self.began = time.perf_counter()
        self.shown = 0.0
        self.live: Live | None = None
        self.wanted = sys.stderr.isatty()

    def show(self, account: Account, row: Mapping[str, Any]) -> None:
        now = time.perf_counter()
        if not self.wanted or now - self.shown < 0.2:
            return
        self.shown = now
        self.write(self.line(account, row, now - self.began))

    def write(self, text: str) -> None:
        if self.live is None:
            self.live = Live(Text(""), console=Console(stderr=True), transient=True, auto_refresh=False)
            self.live.start()
        self.live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)

    def passed(self, passes: float, expected: float) -> None:
        """Work that is counted in passes over the data, of which about so many are expected."""
        now = time.perf_counter()
        if not self.wanted or now - self.shown < 0.2:
            return
        self.shown = now
        wall, share = now - self.began, min(1.0, passes / expected)
        left = f"  at most {wall / share - wall:,.0f} s left" if share > 0 else ""
        self.write(f"{self.label}  {passes:.1f} of about {expected:.1f} passes over the data{left}")

    def line(self, account: Account, row: Mapping[str, Any], wall: float) -> str:
        score = f"accuracy {row['accuracy']:.3f}" if row["accuracy"] is not None else f"loss {row['loss']:.4g}"
        parts = [
            self.label,
            f"commit {account.commits}",
            f"{account.time:.1f} virtual s",
            score,
        ]
        done = self.share_done(account)
        if done > 0:
            parts.append(f"at most {wall / done - wall:,.0f} s left")
        parts.append(f"{account.client_steps / max(wall, 1e-9):,.0f} client-steps/s")
        return "  ".join(parts)

    def share_done(self, account: Account) -> float:
        """How much of the nearest countable limit is used up."""
        spent = {name: getattr(account, name) for name in ("commits", "samples", "bytes_up", "bytes_down", "bytes_d2d")}
        spent["virtual_seconds"] = account.time
        return max((spent[name] / limit for name, limit in self.until.items() if name in spent), default=0.0)

    def close(self) -> None:
        if self.live is not None:
            self.live.stop()
