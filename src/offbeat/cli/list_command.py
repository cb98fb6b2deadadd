"""`offbeat list`: what a config may name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from inspect import signature
from typing import Annotated, Any

import typer

from offbeat.cli.flags import Json
from offbeat.config import registry, toml
from offbeat.config.options import defaults
from offbeat.errors import ConfigError, unknown

LISTS = {  # and what the registry calls one of each
    "methods": "method", "tasks": "task", "fleets": "fleet", "models": "model", "splits": "split", "graphs": "graph",
    "policies": "policy", "stages": "stage", "metrics": "metric", "callbacks": "callback", "papers": "recipe",
    "theorems": "theorem",    "laws": "law", "fast-paths": "fast path",
}  # fmt: skip
HIDDEN = ("when", "data", "seed", "settings", "y", "owners", "input_shape", "outputs", "nodes")  # not for configs


def list_names(
    what: Annotated[
        str,
        typer.Argument(help=f"{', '.join(list(LISTS)[:-1])} or {list(LISTS)[-1]}."),
    ],
    name: Annotated[str | None, typer.Argument(help="One of them, or module:function: its options.")] = None,
    as_json: Json = False,
) -> None:
    """List what a config may name; with a NAME, the options that it takes.

    Example: offbeat list methods fedbuff
    """
    if what not in LISTS:
        raise ConfigError([unknown("list", what, LISTS)])
    if what == "laws":
        show_laws(name, as_json)
        return
    if what == "fast-paths":
        show_fast_paths(as_json)
        return
    if name is not None:
        show_options(what, name, as_json)
        return
    sources = data_sources() if what == "tasks" else {}
    lines = {known: first_line(sources.get(known, thing)) for known, thing in registry.names(LISTS[what]).items()}
    if as_json:
        print(json.dumps(lines))
        return
    width = max(map(len, lines))
    for known, text in lines.items():
        print(f"{known:<{width}}  {text}")


def show_options(what: str, name: str, as_json: bool) -> None:
    if what == "fleets":
        from offbeat.fleets.make import maker

        thing = maker(name)
    else:
        thing = registry.find(LISTS[what], name)
    hidden = HIDDEN if what in ("methods", "tasks") else (*HIDDEN, "clients")
    options = defaults(thing, hidden) if callable(thing) else {}
    if what == "tasks":
        from offbeat.tasks.make import DEFAULTS

        options |= DEFAULTS.get(name, {})
    if as_json:
        print(json.dumps({key: repr(value) for key, value in options.items()}))
        return
    print(described(thing))
    for key, value in options.items():
        print(f"  {key} = {toml.value(value)}")


def show_laws(name: str | None, as_json: bool) -> None:
    """The laws of a fleet's quantities, and those of local steps, with what each needs."""
    from offbeat.fleets.distributions import LAWS
    from offbeat.fleets.steps import STEP_LAWS

    kinds = {"a quantity, such as step_seconds, latency, mbit, jitter": LAWS, "local_steps": STEP_LAWS}
    if name is not None:
        kinds = {kind: {name: laws[name]} for kind, laws in kinds.items() if name in laws}
        if not kinds:
            raise ConfigError([unknown("law", name, dict.fromkeys([*LAWS, *STEP_LAWS]))])
    if as_json:
        print(json.dumps({kind: {law: first_line(make) for law, make in laws.items()} for kind, laws in kinds.items()}))
        return
    for kind, laws in kinds.items():
        print(f"laws of {kind}:")
        for law, make in laws.items():
            needs = [key for key in signature(make).parameters if key not in ("step_seconds", "seed")]
            written = ", ".join([f'law = "{law}"', *(f"{key} = ..." for key in needs)])
            print(f"  {law:<12} {first_line(make)}\n  {'':<12} {{{written}}}")


def show_fast_paths(as_json: bool) -> None:
    """What PyTorch's functions become inside a wave, when, and how closely they agree."""
    from offbeat.numerics.fast.table import TABLE

    rows: list[dict[str, Any]] = [
        {"functions": [function.__name__ for function in row.functions], "when": row.when, "means": row.means,
         "tolerance": row.tolerance}
        for row in TABLE
    ]  # fmt: skip
    if as_json:
        print(json.dumps(rows))
        return
    for row in rows:
        print(f"{', '.join(row['functions'])}\n    when: {row['when']}\n    by:   {row['means']}")
    print(f"\nGradients agree with PyTorch's own for one client to a relative {TABLE[0].tolerance:g} in float64.")


def described(thing: Any) -> str:
    """What a function says of itself, or a recipe, which may be a value."""
    text: str | None = thing.__doc__ if callable(thing) else thing.about
    return (text or "").strip()


def data_sources() -> Mapping[str, Any]:
    """Tasks whose maker is shared are described by where their data come from."""
    from offbeat.tasks.data import DATA

    return DATA


def first_line(thing: Any) -> str:
    text = f"cannot be loaded: {thing}" if isinstance(thing, ConfigError) else described(thing)
    return text.splitlines()[0] if text else ""
