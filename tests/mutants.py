"""Configs as people and accidents write them: sound ones, changed at random in keys, values, types, depth and syntax.

`outcome(number)` tries one and says what came of it; run as a script, it tries a range and prints a line of JSON each.
"""

from __future__ import annotations

import copy
import json
import os
import random
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from offbeat import Experiment, OffbeatError, build, run
from offbeat.cli import merge
from offbeat.config import toml
from offbeat.experiments.assemble import Built
from offbeat.fleets.graphs import GRAPHS
from offbeat.fleets.make import FLEETS
from offbeat.methods import METHODS
from offbeat.tasks.make import TASKS
from offbeat.tasks.models import MODELS
from offbeat.tasks.splits import SPLITS

TASK = {"name": "digits", "clients": 12, "model": "logistic", "batch_size": 4}
CLUSTERS = {"name": "hlsgd", "clusters": {"count": 3, "graph": "ring"}}
BASES: list[dict[str, Any]] = [
    {"method": {"name": "fedbuff", "buffer_size": 3, "local_steps": 2, "client_lr": 0.1, "beta": 0.3}},
    {"method": {"name": "fedbuff", "buffer_size": 2, "staleness": {"law": "hinge", "a": 10, "b": 4}},
     "fleet": {"name": "custom", "step_seconds": {"law": "uniform", "low": 0.01, "high": 0.05}, "mean_on": 1.0,
               "mean_off": 1.0, "latency": {"law": "lognormal", "median": 0.1, "sigma": 0.5}}},
    {"method": {"name": "local-sgd", "n": 4, "local_steps": 2, "over_selection": 1.5, "deadline": 10.0,
                "weights": "size", "server_optimiser": {"name": "sgd", "momentum": 0.9}}},
    {"method": {"name": "dlsgd-hetero", "n": 3, "local_steps": 2}, "fleet": {"name": "uniform", "slowest": 3.0}},
    {"method": {"name": "dlsgd-homo", "n": 3}, "fleet": {"name": "equal", "local_steps": {"law": "linear", "low": 1,
                                                                                       "high": 4}}},
    {"method": {"name": "scaffold", "n": 4, "local_steps": 2, "option": "I"}},
    {"method": {"name": "fedagrac", "n": 4}, "fleet": {"name": "lognormal", "local_steps": {"law": "gaussian",
                                                                                        "mean": 3, "variance": 2.0}}},
    {"method": {"name": "fednova", "n": 4, "client_options": {"momentum": 0.5, "clip": 1.0}}},
    {"method": {"name": "fedlin", "n": 4, "local_steps": 2}},
    {"method": {"name": "hl-sgd", "local_steps": 4, "gossip_every": 2, "p": 0.5}, "fleet": CLUSTERS},
    {"method": {"name": "gossip-sgd", "local_steps": 2}, "fleet": {"name": "hlsgd", "clusters": 1}},
    {"method": {"name": "fedbuff", "experimental": True, "when": {"policy": "sampled", "size": 3, "steps": 2}}},
    {"method": {"name": "local-sgd", "experimental": True, "when": {"policy": "hybrid", "every": 1, "between":
                {"policy": "rounds", "steps": 2}}}, "fleet": CLUSTERS},
    {"method": {"name": "asysg", "client_lr": {"schedule": "step", "value": 0.1, "at": [1, 2]}},
     "task": {"name": "quadratic", "clients": 8, "dimension": 3, "samples": 2, "noise": 0.1}},
    {"method": "fedasync", "task": {"name": "quadratic"}},
    {"method": {"name": "minibatch-sgd"}, "task": TASK | {"split": {"name": "dirichlet", "alpha": 0.3},
                                                           "model": {"name": "mlp", "hidden": 8}}},
    {"method": {"name": "fedprox", "n": 3, "local_steps": 2}, "task": TASK | {"split": {"name": "classes",
                                                                                         "per_client": 2}}},
]  # fmt: skip
MANY = 1000  # local steps
COMMON: dict[str, Any] = {
    "task": TASK, "fleet": {"name": "straggling", "share": 0.2, "mbit": 100.0}, "seed": 0, "device": "cpu",
    "until": {"commits": 2}, "evaluate": {"every_commits": 1}, "targets": [0.5], "checkpoint_seconds": 60.0,
}  # fmt: skip
NUMBERS: list[Any] = [
    0, 1, -1, 2, 3, 7, 10**9, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63), 10**12, 10**30,
    -(10**30), 10**400, 0.0, -0.0, 0.1, 0.5, 1.0, 1.5, -0.5, 1e-9, 1e-30, 1e-308, 5e-324, 1e9, 1e15, 1e30, 1e300,
    float("inf"), float("-inf"), float("nan"),
]  # fmt: skip
WORDS: list[Any] = [
    "", "none", "x", "auto", "cpu", "cuda", "cuda:9", "10s", "5 %", "1_000", "1e3", "0x10", "true", "inf", "nan",
    "\u00e9\U0001f600", "a" * 5000, "../x", "/", "\x00", "[1, 2", "fedbuff", "ring", "iid", "uniform", "name",
    "float64", "bf16", "reference", *METHODS, *TASKS, *FLEETS, *SPLITS, *MODELS, *GRAPHS,
]  # fmt: skip
KEYS = [
    "name", "clients", "seed", "n", "size", "steps", "local_steps", "buffer_size", "batch_size", "dimension",
    "hidden", "samples", "alpha", "minimum", "percent", "per_client", "latency", "mbit", "jitter", "drop_out",
    "clusters", "count", "members", "sizes", "graph", "graphs", "weights", "pace", "law", "low", "high", "value",
    "values", "sigma", "when", "policy", "between", "every", "rounds", "p", "gossip_every", "gossip_rounds",
    "concurrency", "over_selection", "deadline", "replacement", "sampling", "split", "model", "scale", "precision",
    "mode", "memory_gib", "client_memory", "every_seconds", "accuracy", "loss", "virtual_seconds", "experimental",
    "server_lr", "client_lr", "beta", "server_optimiser", "client_options", "staleness", "payload_bytes",
    "mean_on", "mean_off", "filters", "custom", "targets", "", "\u00e9", "a b", "x" * 300,
]  # fmt: skip


def value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.random()
    if kind < 0.5:
        return copy.deepcopy(rng.choice(NUMBERS))
    if kind < 0.75:
        return rng.choice(WORDS)
    if kind < 0.8:
        return rng.choice([True, False, None])
    if kind < 0.83:
        return nested(rng, rng.choice([5, 40, 300, 5000]))
    if kind < 0.92 or depth > 2:
        return [rng.choice(rng.choice([NUMBERS, WORDS])) for _ in range(rng.choice([0, 1, 2, 12, 13, 400]))]
    return {rng.choice(KEYS): value(rng, depth + 1) for _ in range(rng.randint(0, 3))}


def nested(rng: random.Random, depth: int) -> Any:
    whole: Any = rng.choice([1, "x", {}])
    for _ in range(depth):
        whole = [whole] if rng.random() < 0.5 else {"a": whole}
    return whole


def places(table: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if not isinstance(table, dict):
        return []
    return [place for key, inner in table.items() for place in [(*here, key), *places(inner, (*here, key))]]


def mutate(rng: random.Random, table: dict[str, Any]) -> None:
    """One change somewhere."""
    *way, last = rng.choice(places(table))
    home = table
    for key in way:
        home = home[key]
    kind = rng.random()
    if kind < 0.6:
        home[last] = value(rng)
    elif kind < 0.7:
        del home[last]
    elif kind < 0.8:
        home[rng.choice(KEYS)] = value(rng)
    elif kind < 0.85:
        home[rng.choice(KEYS) + last[-1:]] = home.pop(last)
    elif kind < 0.9:
        home[last] = [home[last]]
    elif kind < 0.95:
        home[last] = {"name": home[last]}
    elif isinstance(home[last], int | float):
        home[last] = home[last] * rng.choice([-1, 0.5, 1e3, 10**25])


def written(table: Any) -> str:
    """A value as TOML, of any depth: texts first, then what closes them."""
    parts: list[str] = []
    stack: list[Any] = [table]
    while stack:
        item = stack.pop()
        if isinstance(item, tuple):
            parts.append(item[0])
        elif isinstance(item, dict):
            stack.append(("}",))
            for number, (key, inner) in reversed(list(enumerate(item.items()))):
                stack += [inner, (f"{', ' if number else ''}{toml.value(key)} = ",)]
            stack.append(("{",))
        elif isinstance(item, list):
            stack.append(("]",))
            for inner in reversed(item):
                stack += [(", ",), inner]
            stack.append(("[",))
        elif isinstance(item, int) and abs(item) > 10**300:
            parts.append("9" * 5000)
        else:
            parts.append(toml.value(item))
    return "".join(parts)


def corrupted(rng: random.Random, text: str) -> str:
    """A text with a slip in it."""
    at, kind = rng.randrange(len(text)), rng.random()
    if kind < 0.3:
        return text[:at] + text[at + rng.randint(1, 4) :]
    if kind < 0.6:
        return (
            text[:at] + rng.choice(["[", "]", "{", '"', "=", "\n", ".", "-", "\x01", "9", "e", "[[", "'''"]) + text[at:]
        )
    if kind < 0.8:
        return text + rng.choice(["\n[task]\n", "\na." + "a." * 3000 + "a = 1\n", "\n[" + "a." * 3000 + "a]\n", text])
    return text[:at] + text[at:][::-1]


def case(number: int) -> tuple[str, list[str]]:
    """The text of a config, and what --set says."""
    rng = random.Random(number)
    table = copy.deepcopy(COMMON) | copy.deepcopy(rng.choice(BASES))
    sets: list[str] = []
    changes = rng.choice([0, 1, 1, 1, 2, 3])
    for _ in range(changes):
        if rng.random() < 0.25:
            way = ".".join(rng.choice(places(table) or [("a",)]))
            way = rng.choice([way, way + "." + rng.choice(KEYS), rng.choice(KEYS), "a." * 3000 + "a", "." + way])
            sets.append(f"{way}={rng.choice([written(value(rng)), rng.choice(WORDS), ''])}")
        elif table:
            mutate(rng, table)
        if not table:
            break
    text = "".join(f"{toml.value(key)} = {written(inner)}\n" for key, inner in table.items())
    return (corrupted(rng, text) if text and rng.random() < 0.15 else text), sets


def outcome(number: int, folder: Path) -> str:
    """ "run", or the sentence of a refusal; anything else is raised."""
    text, sets = case(number)
    path = folder / "config.toml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        experiment = Experiment.of(merge(toml.read(path), {}, sets, []))
        if long(build(experiment)):
            return "run"
        run(replace(experiment, until={"commits": 2}, device="cpu"))
    except OffbeatError as error:
        said = str(error)
        if not said.strip():
            raise AssertionError("a refusal without a word") from error
        return said
    return "run"


def long(built: Built) -> bool:
    """Whether a sound config asks for jobs of so many steps that they rightly take more than a moment."""
    plan, ordered = built.fleet.local_steps, getattr(built.method.when, "steps", None) or 0
    drawn = [plan(client, 0) for client in range(built.task.clients)] if plan is not None else [0]
    return max(ordered, *drawn) > MANY


def resident(field: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at most."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return 1024 * int(line.split()[1])


def main() -> None:
    first, last = int(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["OFFBEAT_DATA"] = folder
        run(replace(Experiment.of(COMMON | BASES[0]), until={"commits": 2}))  # what is loaded once is no case's cost
        for number in range(first, last):
            print(json.dumps({"began": number}), flush=True)
            Path("/proc/self/clear_refs").write_text("5")  # the highest mark begins anew
            before, began = resident("VmRSS"), time.process_time()
            try:
                said, failure = outcome(number, Path(folder)), ""
            except BaseException:  # whatever comes is a finding
                said, failure = "", traceback.format_exc()[-1500:]
            print(json.dumps({
                "number": number, "said": said[:300], "failure": failure, "seconds": time.process_time() - began,
                "bytes": resident("VmHWM") - before,
            }), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
