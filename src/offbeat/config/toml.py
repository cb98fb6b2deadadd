"""Reading and writing the little TOML that configs need. TOML has no null: "none" stands for it, both ways."""

from __future__ import annotations

import json
import numbers
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offbeat.config.options import DEEPEST, value_problems
from offbeat.errors import ConfigError, in_words, shortened

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

tomli_w: Any
try:
    import tomli_w
except ModuleNotFoundError:  # where nothing can be installed
    tomli_w = None

LARGEST = 2**24  # bytes of a config: some numbers for each of a million clients
DEEP = f"tables and lists lie more than {DEEPEST} deep in one another; flatten them"


def read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise ConfigError([f"the config {path} has more than {LARGEST:,} bytes, the most that is read of one"])
        return parse(content.decode(), str(path))
    except OSError as error:
        raise ConfigError([f"cannot read the config {path}: {error.strerror}"]) from None
    except UnicodeDecodeError:
        raise ConfigError([f"{path} is not a text in UTF-8, as TOML must be"]) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError([f"{path} is not valid TOML: {error}"]) from None
    except RecursionError:
        raise ConfigError([f"{path}: {DEEP}"]) from None
    except ValueError as error:  # a number of thousands of digits, a day that does not exist
        raise ConfigError([f"{path} holds a value that cannot be read: {error}"]) from None


def plain(table: dict[str, Any], where: str) -> dict[str, Any]:
    """A table that was read, with every "none" as None; a sentence where it has no end."""
    if problems := value_problems("", table):
        raise ConfigError([f"{where}: {problem}" for problem in problems])
    read: dict[str, Any] = nones(table)
    return read


def parse(text: str, where: str = "config.toml") -> dict[str, Any]:
    return plain(tomllib.loads(text), where)


def parse_value(text: str) -> Any:
    """A value as TOML would read it, or the text itself.

    >>> [parse_value(v) for v in ("3", "0.5", "true", "[1, 2]", "fedbuff", "none")]
    [3, 0.5, True, [1, 2], 'fedbuff', None]
    """
    try:
        table = tomllib.loads(f"value = {text}")
    except RecursionError:
        raise ConfigError([f"{shortened(text, 80)}: {DEEP}"]) from None
    except ValueError:  # no TOML, or a number that is too long: a text
        table = {"value": text}
    if set(table) != {"value"}:  # a line break began another key
        table = {"value": text}
    return plain(table, shortened(text, 80))["value"]


def nones(value: Any) -> Any:
    """The same with every "none" as None."""
    if isinstance(value, dict):
        return {k: nones(v) for k, v in value.items()}
    if isinstance(value, list):
        return [nones(v) for v in value]
    return None if value == "none" else value


def write(table: Mapping[str, Any]) -> str:
    """A table as TOML; the same text for the same table.

    >>> print(write({"seed": 1, "method": {"name": "asysg", "server_lr": 0.1, "when": None}}), end="")
    seed = 1
    <BLANKLINE>
    [method]
    name = "asysg"
    server_lr = 0.1
    when = "none"
    """
    given = writable(table)
    if tomli_w is None:
        return "".join(f"{inline(name)} = {inline(each)}\n" for name, each in given.items())
    text: str = tomli_w.dumps(given)
    return text


def value(given: Any) -> str:
    """A value as TOML, in one line.

    >>> value((1, 2.0, None, {"a": ["b"]}))
    '[1, 2.0, "none", { a = ["b"] }]'
    """
    if tomli_w is None:
        return inline(writable(given))
    text: str = tomli_w.dumps({"value": [[writable(given)]]}, indent=0)  # in lists no table gets a heading
    line = text.replace("[\n", "[").replace(",\n]", "]").replace(",\n", ", ")  # all breaks: those of texts are escaped
    return line.removeprefix("value = [[").removesuffix("]]\n")


def inline(given: Any) -> str:
    """A value in one line, without the library. JSON's numbers are TOML's, but for the infinite, and its texts, but for
    pairs of surrogates and the character DEL."""
    if isinstance(given, dict):
        return "{" + ", ".join(f"{inline(name)} = {inline(each)}" for name, each in given.items()) + "}"
    if isinstance(given, list):
        return f"[{', '.join(map(inline, given))}]"
    return repr(given) if isinstance(given, float) else json.dumps(given, ensure_ascii=False).replace("\x7f", r"\u007f")


def writable(given: Any) -> Any:
    """The same in the types that TOML has; "none" for None."""
    if given is None:
        return "none"
    if isinstance(given, bool | str):
        return given
    if isinstance(given, numbers.Integral):
        return int(given)
    if isinstance(given, numbers.Real):
        return float(given)
    if isinstance(given, Mapping):
        if strange := [name for name in given if not isinstance(name, str)]:
            raise ConfigError([f"{in_words(strange[0])} is the key of a table; keys in a config file are texts"])
        return {name: writable(each) for name, each in given.items()}
    if isinstance(given, list | tuple):
        return [writable(each) for each in given]
    raise ConfigError([f"{in_words(given)} ({type(given).__name__}) cannot be written into a config file"])
