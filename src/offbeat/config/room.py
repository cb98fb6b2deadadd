"""Memory: what there is of it, and the sentence on what cannot fit."""

from __future__ import annotations

import os
from pathlib import Path

GIB = 2.0**30
SHARE = 0.9  # of what is free: the rest is for what no estimate counts


def host_memory() -> float:
    """Bytes of memory that this process may still take: what the system has left, and what its control group allows."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        left = 1024.0 * int(lines["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        left = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    group = Path("/sys/fs/cgroup")
    try:
        most, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        left = min(left, max(0.0, float(most - used)))
    except (OSError, ValueError):  # no control group, or one without a limit
        pass
    return left


def too_large(what: str, size: float, remedy: str) -> list[str]:
    """The sentence on something that takes more bytes than this machine has, in a list; empty when it fits.

    >>> too_large("a model of 9 parameters", 36, "take a smaller one")
    []
    """
    free = host_memory()
    if size <= SHARE * free:
        return []
    return [f"{what} takes about {size / GIB:.3g} GiB, and {free / GIB:.3g} GiB of memory are free here; {remedy}"]
