"""`offbeat bench`: what the speed claims rest on. Every figure is a ratio, or has its counterpart, within one run."""

from __future__ import annotations

from offbeat.bench.measure import ITEMS, Settings, bench

__all__ = ["ITEMS", "Settings", "bench"]
