"""Fleets of real phones, from the traces of two public benchmarks.

The files are looked for under `traces/` in the folder named by OFFBEAT_DATA, then in the cache.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import ndtr, ndtri

from offbeat.errors import ConfigError, unknown
from offbeat.fleets.distributions import Array, LawSpec, Trace, drawn, draws, number_problems, read, shortened
from offbeat.fleets.fleet import Fleet
from offbeat.fleets.presence import Change, Recorded

LARGEST_FILE = 2**26  # bytes; the traces have a few hundred thousand
KBIT = 1e3 / 8  # bytes per second in one kbit/s
STEP_TIMES = "traces/flhetbench/training_latency.json"
LINKS = "traces/flhetbench/mobiperf_devices_trimmed.json"
USERS = "traces/flhetbench/availability_710users_trimmed.json"
SCORES = "traces/flash/raw_ai_benchmark_list.json"
SPEEDS = "traces/flash/speed_distri.json"
COLUMNS = ("ResNet Latency", "Vit Latency")
BENCHMARKS = ("AI_Score", "CPU_F_AI_Score", "CPU_Q_AI_Score", "FP16_Score", "FP32_Score", "FP_PAR_Score", "QUANT_Score")


# ---- files --------------------------------------------------------------------------------------
def folders() -> list[Path]:
    """Where data is looked for, in order."""
    named = os.environ.get("OFFBEAT_DATA")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "offbeat"
    return [Path(named).expanduser(), cache] if named else [cache]


def entries(file: str) -> list[tuple[str, Mapping[str, Any]]]:
    """The records of a trace file with what to call each, such as `('training_latency.json: entry 3', {...})`."""
    places = [folder / file for folder in folders()]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        looked = " and ".join(str(place) for place in places)
        raise ConfigError([f"no trace {file}: looked for {looked}; set OFFBEAT_DATA to the folder that holds it"])
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise ValueError(f"it has more than {LARGEST_FILE:,} bytes, which no trace has")
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise ConfigError([f"{path} is not readable as JSON ({error}); fetch it again"]) from error
    if not isinstance(content, list | dict) or not content:
        raise ConfigError([f"{path} holds no records; it must be a list or an object of them"])
    named: Iterable[tuple[Any, Any]] = content.items() if isinstance(content, dict) else enumerate(content)
    records = [(f"{path.name}: entry {index}", record) for index, record in named]
    refuse([f"{entry} is {record!r}, not a record" for entry, record in records if not isinstance(record, dict)])
    return records


def refuse(problems: list[str]) -> None:
    if problems:
        raise ConfigError(shortened(problems))


def number(entry: str, record: Mapping[str, Any], field: str, problems: list[str], positive: bool = True) -> float:
    """One field as a number > 0 (or >= 0); a missing or impossible one is named in `found`."""
    value = record.get(field)
    if isinstance(value, str):  # the score list holds its numbers as text, some with remarks behind
        with contextlib.suppress(ValueError, IndexError):
            value = float(value.split()[0])
    faults = [f"{entry}: field '{field}' is missing"] if value is None else []
    faults = faults or number_problems(f"{entry}: field '{field}'", value, positive=positive)
    problems += faults
    return 1.0 if faults or value is None else float(value)


# ---- FLHetBench ---------------------------------------------------------------------------------
def step_times(column: str) -> tuple[Trace, str]:
    """Seconds per step of the recorded phones; rows that are zero or without the column were never measured."""
    if column not in COLUMNS:
        raise ConfigError([unknown("column", column, COLUMNS)])
    problems: list[str] = []
    rows = entries(STEP_TIMES)
    measured = [(entry, row) for entry, row in rows if row.get(column) not in (None, 0)]
    seconds = tuple(number(entry, row, column, problems) / 1e3 for entry, row in measured)
    refuse(problems)
    if not seconds:
        raise ConfigError([f"{Path(STEP_TIMES).name}: no entry has a field '{column}' above 0"])
    return Trace(seconds), f"step times: {len(rows) - len(seconds)} of {len(rows)} rows have no '{column}'; left out"


def links(min_kbps: float) -> tuple[Trace, str]:
    """Bytes per second of the recorded devices, each the mean of its measurements."""
    problems: list[str] = []
    speeds = []
    rows = entries(LINKS)
    for entry, row in rows:
        measured = row.get("tcp_kbps")
        if not isinstance(measured, list) or not measured:
            problems.append(f"{entry}: field 'tcp_kbps' is missing or empty; it is a list of kbit/s")
            continue
        for index, value in enumerate(measured):
            problems += number_problems(f"{entry}: field 'tcp_kbps'[{index}]", value, positive=True)
        if not problems:
            speeds.append(float(np.mean(measured)))
    refuse(problems)
    kept = tuple(speed * KBIT for speed in speeds if speed >= min_kbps)
    if not kept:
        raise ConfigError([f"min_kbps = {min_kbps}; the fastest of the recorded links has {max(speeds):g}"])
    return Trace(
        kept
    ), f"links: {len(rows) - len(kept)} of {len(rows)} devices are slower than {min_kbps:g} kbit/s; left out"


def users(clients: int, seed: int) -> Recorded:
    """Each client lives the recorded days of a user drawn for it, over and over."""
    problems: list[str] = []
    changes, periods = [], []
    for entry, row in entries(USERS):
        periods.append(number(entry, row, "duration_s", problems))
        changes.append(days(entry, row.get("ready"), periods[-1], problems))
    refuse(problems)
    chosen = (draws(clients, seed, "user") * len(changes)).astype(np.int64)
    return Recorded(changes, periods, np.minimum(chosen, len(changes) - 1))


def days(entry: str, ready: Any, period: float, problems: list[str]) -> tuple[Change, ...]:
    """Changes of presence from intervals [start, end] in seconds; those of no length are left out."""
    if not isinstance(ready, list):
        problems.append(f"{entry}: field 'ready' is missing; it is a list of intervals [start, end]")
        return ()
    changes: list[Change] = []
    last = 0.0
    for index, interval in enumerate(ready):
        if (
            not isinstance(interval, list)
            or len(interval) != 2
            or any(number_problems("", bound) for bound in interval)
        ):
            problems.append(f"{entry}: field 'ready'[{index}] = {interval!r}; it must be [start, end], seconds >= 0")
        elif not last <= interval[0] <= interval[1] <= period:
            problems.append(
                f"{entry}: field 'ready'[{index}] = {interval!r} does not lie between {last:g} and {period:g} s"
            )
        elif interval[0] < interval[1]:
            last = float(interval[1])
            if changes and changes[-1][0] == interval[0]:
                changes.pop()  # it goes on from the interval before
            else:
                changes.append((float(interval[0]), True))
            if last < period:
                changes.append((last, False))
    return tuple(changes) or ((0.0, False),)


def phones(
    clients: int = 100,
    seed: int = 0,
    *,
    column: str = "ResNet Latency",
    step_scale: float = 1.0,
    min_kbps: float = 1000.0,  # the benchmark's own limit; the slowest record, 1.8 kbit/s, takes 2.5 h for 2 MB
    availability: bool = True,
    jitter: LawSpec | None = None,
    drop_out: float = 0.0,
) -> Fleet:
    """Phones of FLHetBench (Zhang et al., CVPR 2024): step time, link and user are drawn apart from each other.

    Assumed: the recorded latency (ms) is that of one training step of that model, and `step_scale` turns it into
    a step of yours; the TCP speed (kbit/s) serves both ways; its round trips are part of it, so latency is 0.
    """
    problems = number_problems("step_scale", step_scale, positive=True) + number_problems("min_kbps", min_kbps)
    law = None if jitter is None else read(jitter, "jitter", problems)
    refuse(problems)
    (steps, step_note), (speeds, link_note) = step_times(column), links(min_kbps)
    speed = drawn(speeds, clients, seed, "link")
    return Fleet(
        name="phones",
        clients=clients,
        step_seconds=drawn(steps, clients, seed, "phone") * step_scale,
        down_latency=np.zeros(clients),
        up_latency=np.zeros(clients),
        down_bandwidth=speed,
        up_bandwidth=speed,
        jitter=law,
        drop_out=drop_out,
        presence=users(clients, seed) if availability else None,
        notes=(step_note, link_note),
    )


# ---- FLASH --------------------------------------------------------------------------------------
def phones_flash(
    clients: int = 100,
    seed: int = 0,
    *,
    score: str = "CPU_F_AI_Score",
    step_seconds: float = 0.17,  # the median ResNet step of FLHetBench's phones
    jitter: LawSpec | None = None,
    drop_out: float = 0.0,
) -> Fleet:
    """Phones of FLASH (Yang et al., WWW 2021): step time inverse to the AI-Benchmark score, links of 19 users.

    The phone with the median score takes `step_seconds`. The default column is floating point on the CPU, where
    phones train; the total AI_Score mostly tells which phones have an inference chip. A client has the link of a
    user, drawn once from the user's normal distribution, cut off below 1 kbit/s. Assumed: the file's "kb/s" are
    kbit/s, as FLHetBench's corrected times have it (FLASH's own code divides kilobytes by them).
    """
    problems = number_problems("step_seconds", step_seconds)
    if score not in BENCHMARKS:
        problems.append(unknown("score", score, BENCHMARKS))
    law = None if jitter is None else read(jitter, "jitter", problems)
    refuse(problems)
    scores = np.array([number(entry, row, score, problems) for entry, row in entries(SCORES)])
    rows = entries(SPEEDS)
    down, up = (
        [(number(e, r, f"{way}_u", problems), number(e, r, f"{way}_sigma", problems, positive=False)) for e, r in rows]
        for way in ("down", "up")
    )
    refuse(problems)
    return Fleet(
        name="phones-flash",
        clients=clients,
        step_seconds=drawn(Trace(tuple(step_seconds * np.median(scores) / scores)), clients, seed, "phone"),
        down_latency=np.zeros(clients),
        up_latency=np.zeros(clients),
        down_bandwidth=normal(down, clients, seed, "down") * KBIT,
        up_bandwidth=normal(up, clients, seed, "up") * KBIT,
        jitter=law,
        drop_out=drop_out,
    )


def normal(moments: list[tuple[float, float]], clients: int, seed: int, way: str) -> Array:
    """One normal draw per client, with the (mean, sigma) of the client's user, given that it is at least 1."""
    user = np.minimum((draws(clients, seed, "user") * len(moments)).astype(np.int64), len(moments) - 1)
    mean, sigma = np.array(moments)[user].T
    sigma = np.maximum(sigma, 1e-9)  # a user without spread
    below = ndtr((1.0 - mean) / sigma)
    quantile = below + (1.0 - below) * draws(clients, seed, way)
    result: Array = np.maximum(mean + sigma * ndtri(quantile), 1.0)
    return result
