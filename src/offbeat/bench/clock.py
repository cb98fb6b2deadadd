"""Arrivals per second on the virtual clock: `python -m offbeat.bench.clock POLICY CLIENTS` prints one JSON object."""

from __future__ import annotations

import json
import random
import resource
import sys
import time
from itertools import islice
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
SECONDS, STRETCH = 4.0, 100_000  # rows are timed in stretches


def measure(policy: str, clients: int) -> dict[str, Any]:
    """Let the clock run for some seconds."""
    at_once = min(JOBS, clients // 2)
    policies: dict[str, Policy] = {
        "FedBuff": Buffer(10, 10, at_once),
        "rounds": Rounds(10, at_once),
        "DLSGD-hetero": Sampled(at_once, 10),
    }
    began = time.perf_counter()
    fleet = build("uniform", clients, 0, mbit=400.0)
    durations = fleet.durations(0, 2.2e6, 2.2e6)
    clock = iter(VirtualClock(policies[policy], durations, random.Random(0)))
    next(clock)
    start = time.perf_counter() - began
    rates = []
    finish = time.perf_counter() + SECONDS
    while time.perf_counter() < finish:
        began, arrived = time.perf_counter(), 0
        for _, record in islice(clock, STRETCH):
            if type(record) is Arrived:
                arrived += 1
        taken = time.perf_counter() - began
        rates.append((arrived / taken, STRETCH / taken))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "policy": policy, "clients": clients, "at once": at_once, "arrivals/s": median(rate for rate, _ in rates),
        "at best": max(rate for rate, _ in rates), "rows/s": median(rate for _, rate in rates),
        "start s": start, "peak GB": peak / 1e9,
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
