"""Options by signature: a builder's parameters are the schema of its config table, its defaults are the defaults."""

from __future__ import annotations

import inspect
import math
import types
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from functools import update_wrapper
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from offbeat.errors import in_words, shortened, unknown

T = TypeVar("T")
LARGEST = 2**31 - 1  # of the whole numbers that options are: sizes, counts, steps, versions
STEPS = 1_000_000  # local steps in a job, exchanges of models in one, updates in a commit: no more are begun
DEEPEST = 32  # tables and lists inside one another
KEYS = 1000  # of one table
VALUES = 2_000_000  # in all: a few for each of several hundred thousand clients
TEXT = 4096  # characters: the longest path
WHOLE = 2**64  # a seed has 64 bits


def option_problems(
    where: str, make: Callable[..., Any], options: Mapping[str, Any], fixed: tuple[str, ...] = ()
) -> list[str]:
    """What a table of options gets wrong about a builder: unknown names and values of the wrong kind."""
    parameters = {name: p for name, p in inspect.signature(make).parameters.items() if name not in fixed}
    hints = hints_of(make)
    problems = []
    for name, value in options.items():
        if name not in parameters:
            none = f"{where} has no options, but '{name}' was given; leave it out"
            problems.append(unknown(f"option of {where}", name, parameters) if parameters else none)
        elif not fits(value, hints.get(name, Any)):
            problems.append(f"{where}: {name} = {in_words(value)}; it must be {spoken(hints[name])}")
        else:
            problems += [f"{where}: {sentence}" for sentence in extreme(name, value)]
    for name, p in parameters.items():
        needed = p.default is inspect.Parameter.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        if needed and name not in options:
            problems.append(f"{where}: {name} is missing; it has no default")
    return problems


def hints_of(make: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of a builder; none where they name what is not there when it runs."""
    plain = isinstance(make, type) and "__init__" in vars(make) and not is_dataclass(make)
    try:
        return get_type_hints(make.__init__ if plain else make)
    except (NameError, TypeError):
        return {}


def extreme(name: str, value: Any) -> list[str]:
    """The sentence on a number that no option can mean."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return []
    if isinstance(value, float):
        return [] if math.isfinite(value) else [f"{name} = {value}; it must be a finite number"]
    if abs(value) <= LARGEST or name == "seed":  # seeds are looked at by themselves
        return []
    return [f"{name} = {in_words(value)}; whole numbers here lie between -{LARGEST:,} and {LARGEST:,}"]


def count_problems(where: str, name: str, value: int | None, needs: str) -> list[str]:
    """The sentence on a number of steps or updates that nothing can be made of; None leaves it to others.

    >>> count_problems("rounds", "size", 0, "a round needs at least 1 client")
    ['rounds: size = 0; a round needs at least 1 client']
    """
    if value is None or 1 <= value <= STEPS:
        return []
    return [f"{where}: {name} = {in_words(value)}; {needs if value < 1 else f'give {STEPS:,} at most'}"]


def value_problems(where: str, value: Any) -> list[str]:
    """What no config may hold, whatever the key: depth, length and numbers without end. Looks and does not recurse, so
    that it can be asked first of all; objects that are neither tables, lists, texts nor numbers are not looked at.

    >>> value_problems("seed", 2**64)
    ['seed = 18446744073709551616; whole numbers must be smaller than 2^64']
    """
    layer: list[tuple[str, Any]] = [(where, value)]
    values = 0
    for _ in range(DEEPEST + 1):
        inner: list[tuple[str, Any]] = []
        for name, item in layer:
            if isinstance(item, Mapping):
                if len(item) > KEYS:
                    return [f"{name} has {len(item):,} keys; a table has {KEYS:,} at most"]
                for key, each in item.items():
                    if not isinstance(key, str) or len(key) > TEXT:
                        return [f"{name} has the key {in_words(key)}; keys are texts of {TEXT:,} characters at most"]
                    inner.append((f"{name}.{key}" if name else key, each))
            elif isinstance(item, list | tuple):
                inner += [(name, each) for each in item]
            elif isinstance(item, str) and len(item) > TEXT:
                return [f"{name} = {in_words(item)} has {len(item):,} characters; a text has {TEXT:,} at most"]
            elif isinstance(item, int) and abs(item) >= WHOLE:
                return [f"{name} = {in_words(item)}; whole numbers must be smaller than 2^64"]
            values += 1
            if values > VALUES:
                return [f"{where or 'the config'} has more than {VALUES:,} values; that is the most"]
        if not inner:
            return []
        layer = inner
    return [f"{shortened(layer[0][0], 60)}: tables and lists lie more than {DEEPEST} deep in one another; flatten them"]


def defaults(make: Callable[..., Any], fixed: tuple[str, ...] = ()) -> dict[str, Any]:
    """The options of a builder with their defaults; None stays None."""
    parameters = inspect.signature(make).parameters.items()
    return {n: p.default for n, p in parameters if n not in fixed and p.default is not inspect.Parameter.empty}


def extends(make: Callable[..., T]) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """For a builder that calls `make` with `**options`: beside its own options, after `*`, it takes those of `make`."""

    def extended(builder: Callable[..., T]) -> Callable[..., T]:
        own = [p for p in inspect.signature(builder, eval_str=True).parameters.values() if p.kind is p.KEYWORD_ONLY]
        signature = inspect.signature(make)
        whole: Any = update_wrapper(builder, make)
        whole.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *own])
        whole.__annotations__ = {**make.__annotations__, **{p.name: p.annotation for p in own}}
        return builder

    return extended


def fits(value: Any, hint: Any) -> bool:
    """Whether a value from a config file can stand for a parameter with this annotation."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return any(fits(value, part) for part in get_args(hint))
    if origin is Literal:
        return value in get_args(hint)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and value == value  # NaN is no number
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is type(None):
        return value is None
    if hint in (bool, str):
        return isinstance(value, hint)
    if origin is Callable:
        return callable(value)
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        return isinstance(value, Mapping)
    if origin in (list, tuple):
        return isinstance(value, list | tuple)
    if isinstance(hint, type) and issubclass(hint, tuple):  # a record, which only Python code can give
        return isinstance(value, hint)
    return True  # objects from Python code: their makers check them


def spoken(hint: Any) -> str:
    """An annotation in words.

    >>> spoken(int | None)
    'a whole number or none'
    """
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", type(None): "none"}
    if hint in names:
        return names[hint]
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(spoken(part) for part in get_args(hint)))
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(repr(v) for v in get_args(hint))
    if get_origin(hint) in (list, tuple):
        return "a list"
    if get_origin(hint) is Callable or (isinstance(hint, type) and issubclass(hint, tuple)):
        return "a function"
    return "a table" if get_origin(hint) is not None else getattr(hint, "__name__", str(hint))
