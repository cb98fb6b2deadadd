"""Options by signature: a builder's parameters are the schema of its config table, its defaults are the defaults."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from offbeat.errors import unknown


def option_problems(
    where: str, make: Callable[..., Any], options: Mapping[str, Any], fixed: tuple[str, ...] = ()
) -> list[str]:
    """What a table of options gets wrong about a builder: unknown names and values of the wrong kind."""
    parameters = {name: p for name, p in inspect.signature(make).parameters.items() if name not in fixed}
    hints = get_type_hints(make)
    found = []
    for name, value in options.items():
        if name not in parameters:
            none = f"{where} has no options, but '{name}' was given; leave it out"
            found.append(unknown(f"option of {where}", name, parameters) if parameters else none)
        elif not fits(value, hints.get(name, Any)):
            found.append(f"{where}: {name} = {value!r}; it must be {spoken(hints[name])}")
    for name, p in parameters.items():
        if p.default is inspect.Parameter.empty and p.kind is not p.VAR_KEYWORD and name not in options:
            found.append(f"{where}: {name} is missing; it has no default")
    return found


def defaults(make: Callable[..., Any], fixed: tuple[str, ...] = ()) -> dict[str, Any]:
    """The options of a builder with their defaults; None stays None."""
    parameters = inspect.signature(make).parameters.items()
    return {n: p.default for n, p in parameters if n not in fixed and p.default is not inspect.Parameter.empty}


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
    if get_origin(hint) is Callable:
        return "a function"
    return "a table" if get_origin(hint) is not None else getattr(hint, "__name__", str(hint))
