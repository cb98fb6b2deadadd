"""`offbeat bench`: what the speed claims rest on. Every figure is a ratio, or has its counterpart, within one run."""

from __future__ import annotations

# Here for the help, without PyTorch.
NAMES = ("waves", "unequal", "asynchronous", "schedule", "attainable", "protocol", "models")
RAY = ("ray-actors", "ray-messages", "ray-bytes", "ray-cluster", "ray-sweep")  # only by name, or all of them by `ray`
