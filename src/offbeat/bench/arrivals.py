"""Arrivals a second on the virtual clock: `python -m offbeat.bench.arrivals POLICY CLIENTS` prints a JSON object."""

from __future__ import annotations

import json
import random
import resource
import sys
import time
from collections import deque
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from offbeat.fleets.make import build
from offbeat.method import Policy
from offbeat.records import Arrived
from offbeat.schedule.buffer import Buffer
from offbeat.schedule.clock import VirtualClock
from offbeat.schedule.rounds import Rounds
from offbeat.schedule.sampled import Sampled

JOBS = 1000  # at once, or in a round
SECONDS, STRETCH = 6.0, 100_000  # every other stretch of rows is timed


def measure(policy: str, clients: int) -> dict[str, Any]:
    """Let the clock run for some seconds."""
    at_once = min(JOBS, clients // 2)
    policies: dict[str, Policy] = {
        "FedBuff": Buffer(max(1, at_once // 10), 10, at_once),
        "rounds": Rounds(10, at_once),
        "DLSGD-hetero": Sampled(at_once, 10),
    }
    began = time.perf_counter()
    fleet = build("uniform", clients, 0, mbit=400.0)
    durations = fleet.durations(0, 2.2e6, 2.2e6)
    clock = iter(VirtualClock(policies[policy], durations, random.Random(0)))
    next(clock)
    start = time.perf_counter() - began
    rates = []  # of arrivals and of rows
    finish = time.perf_counter() + SECONDS
    while time.perf_counter() < finish:
        share = sum(type(record) is Arrived for _, record in islice(clock, STRETCH)) / STRETCH
        began = time.perf_counter()
        deque(islice(clock, STRETCH), maxlen=0)  # handed out and dropped: the reader costs nothing
        seconds = time.perf_counter() - began
        rates.append((share * STRETCH / seconds, STRETCH / seconds))
    return {
        "policy": policy, "clients": clients, "at once": at_once, "arrivals/s": median(rate for rate, _ in rates),
        "at best": max(rate for rate, _ in rates), "rows/s": median(rate for _, rate in rates),
        "start s": start, "peak GB": peak() / 1e9,
    }  # fmt: skip


def peak() -> int:
    """Bytes that this process has held at most. Linux counts them anew for a new program; `getrusage` does not."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    peaks = [int(line.split()[1]) for line in lines if line.startswith("VmHWM")]
    return 1024 * (peaks[0] if peaks else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
