"""Reading and writing the little TOML that configs need."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offbeat.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError([f"cannot read the config {path}: {error.strerror}"]) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError([f"{path} is not valid TOML: {error}"]) from None


def parse_value(text: str) -> Any:
    """A value as TOML would read it, or the text itself.

    >>> [parse_value(v) for v in ("3", "0.5", "true", "[1, 2]", "fedbuff")]
    [3, 0.5, True, [1, 2], 'fedbuff']
    """
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def write(table: Mapping[str, Any]) -> str:
    """A table as TOML; None is left out.

    >>> print(write({"seed": 1, "method": {"name": "asysg", "server_lr": 0.1}}), end="")
    seed = 1
    <BLANKLINE>
    [method]
    name = "asysg"
    server_lr = 0.1
    """
    plain = {k: v for k, v in table.items() if not isinstance(v, Mapping) and v is not None}
    lines = [f"{key(k)} = {value(v)}" for k, v in plain.items()]
    for name, inner in table.items():
        if isinstance(inner, Mapping):
            flat = {k: v for k, v in inner.items() if v is not None}
            lines += ["", f"[{key(name)}]", *(f"{key(k)} = {value(v)}" for k, v in flat.items())]
    return "\n".join(lines) + "\n"


def key(name: str) -> str:
    return name if name.replace("_", "").replace("-", "").isalnum() else json.dumps(name)


def value(given: Any) -> str:
    if isinstance(given, bool):
        return "true" if given else "false"
    if isinstance(given, float) and not math.isfinite(given):
        return "nan" if math.isnan(given) else ("inf" if given > 0 else "-inf")
    if isinstance(given, int | float):
        return repr(given)
    if isinstance(given, str):
        return json.dumps(given)
    if isinstance(given, Mapping):
        return "{" + ", ".join(f"{key(k)} = {value(v)}" for k, v in given.items() if v is not None) + "}"
    if isinstance(given, list | tuple):
        return "[" + ", ".join(value(v) for v in given) + "]"
    raise ConfigError([f"{given!r} ({type(given).__name__}) cannot be written into a config file"])
