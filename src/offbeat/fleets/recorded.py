"""A fleet as it really was: what `offbeat fleet from-run` found in a live run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from offbeat.errors import ConfigError, in_words
from offbeat.fleets.distributions import draws, law
from offbeat.fleets.fleet import Fleet
from offbeat.fleets.presence import Recorded

COLUMNS = ("step_seconds", "down_latency", "up_latency", "down_bandwidth", "up_bandwidth")
LARGEST_FILE = 2**26


def recorded(
    clients: int = 100,
    seed: int = 0,
    *,
    file: str = "fleet.json",
    jitter: bool = True,
    presence: bool = True,
    speed: float = 1.0,
    bandwidth: float = 1.0,
    share: float = 1.0,
) -> Fleet:
    """The clients of a live run, from the file that `offbeat fleet from-run` wrote.

    What if: a `share` of them, drawn by the seed, is `speed` times as fast and has `bandwidth` times its bandwidth.
    Without `jitter` every job takes as long as the median one; without `presence` everyone is always there.
    """
    table = read(file)
    problems = [
        f"recorded: {name} = {value}; {rule}"
        for name, value, rule, good in (
            ("speed", speed, "it must be positive", speed > 0),
            ("bandwidth", bandwidth, "it must be positive", bandwidth > 0),
            ("share", share, "it is between 0 and 1", 0 <= share <= 1),
        )
        if not good
    ]
    if table["clients"] != clients:
        problems.append(f"recorded: {file} has {table['clients']} clients, the task {clients}; they must be the same")
    if problems:
        raise ConfigError(problems)
    # Infinity has no place in JSON: none stands for it.
    columns: dict[str, Any] = {
        name: np.array([np.inf if v is None else v for v in table[name]], dtype=np.float64) for name in COLUMNS
    }
    chosen = np.argsort(draws(clients, seed, "what if"), kind="stable")[: round(share * clients)]
    columns["step_seconds"][chosen] /= speed
    for name in ("down_bandwidth", "up_bandwidth"):
        columns[name][chosen] *= bandwidth
    sigma = float(table["jitter"])
    away = any(len(changes) > 1 or not changes[0][1] for changes in table["presence"])
    there = [[(float(time), bool(now)) for time, now in changes] for changes in table["presence"]]
    return Fleet(
        name="recorded", clients=clients, **columns,
        jitter=law({"law": "lognormal", "median": 1.0, "sigma": sigma}) if jitter and sigma > 0 else None,
        drop_out=float(table["drop_out"]), presence=Recorded(there, [None] * clients) if presence and away else None,
    )  # fmt: skip


def read(file: str) -> dict[str, Any]:
    place = Path(file)
    try:
        if place.stat().st_size > LARGEST_FILE:
            raise ValueError(f"it has more than {LARGEST_FILE:,} bytes")
        table = json.loads(place.read_text(encoding="utf-8"))
        many = table["clients"]
        for name in (*COLUMNS, "presence"):
            if len(table[name]) != many:
                raise ValueError(f"{name} has {len(table[name])} entries for {many} clients")
        float(table["jitter"])
        float(table["drop_out"])
    except FileNotFoundError:
        raise ConfigError(
            [f"fleet 'recorded': there is no {file}; `offbeat fleet from-run RUN --out {file}` makes one"]
        ) from None
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ConfigError(
            [f"fleet 'recorded': {file} is none of `offbeat fleet from-run` ({in_words(error)})"]
        ) from None
    return table  # type: ignore[no-any-return]
