"""An experiment: a frozen config, built in Python or read from TOML. What it names is made by `assemble`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from offbeat.config import registry, toml
from offbeat.config.choices import Choice, Engines, Mode, Precision
from offbeat.config.options import defaults, value_problems
from offbeat.errors import ConfigError, in_words, unknown
from offbeat.fleets.make import maker
from offbeat.method import inner_policies, policy_options
from offbeat.tasks.make import DEFAULTS


@dataclass(frozen=True)
class Experiment:
    """All that decides a run. `method`, `task` and `fleet` are names, tables with a `name`, or your own objects."""

    method: Any = "fedbuff"
    task: Any = "digits"
    fleet: Any = "straggling"
    seed: int = 0
    device: str = "auto"
    precision: Precision = "float32"
    mode: Mode = "wave"
    engine: Engines = "local"
    workers: int | None = None
    address: str | None = None
    memory_gib: float | None = None
    client_memory: Choice = "auto"
    checkpoint_seconds: float = 60.0
    until: Mapping[str, float] = field(default_factory=lambda: {"commits": 200})
    evaluate: Mapping[str, Any] = field(default_factory=lambda: {"every_commits": 10})
    targets: tuple[float, ...] | Mapping[str, Sequence[float]] = ()
    callbacks: Sequence[Any] = ()  # names, or tables with a name: what watches the run, and may end it

    def __post_init__(self) -> None:
        mode: str = self.mode
        if mode == "twin":
            warnings.warn("mode = 'twin' is now called 'reference'", FutureWarning, stacklevel=3)
            object.__setattr__(self, "mode", "reference")

    @staticmethod
    def of(table: Mapping[str, Any]) -> Experiment:
        """From a table (a TOML file); unknown keys are named."""
        if problems := value_problems("", table):
            raise ConfigError(problems)
        known = [f.name for f in fields(Experiment)]
        problems = [unknown("key", name, known) for name in table if name not in known]
        if problems:
            raise ConfigError(problems)
        targets = table.get("targets", ())
        return Experiment(**{**table, "targets": tuple(targets) if isinstance(targets, list) else targets})

    def table(self) -> dict[str, Any]:
        """The resolved config, every default spelt out; objects of your own appear by name only."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        fixed = {"method": ("when",), "task": ("data", "seed"), "fleet": ("clients", "seed")}
        for kind, hidden in fixed.items():
            given = plain[kind]
            if not isinstance(given, str | Mapping):
                plain[kind] = {"name": given.name, "custom": True}
                continue
            name, options = split_name(kind, given)
            make = maker(name) if kind == "fleet" else registry.find(kind, name)
            own = defaults(make, hidden) | (DEFAULTS.get(name, {}) if kind == "task" else {})
            if options.get("when") is not None:
                idle = policy_options(make)
                own = {key: value for key, value in own.items() if key not in idle}
                options["when"] = written_policy(options["when"])
            plain[kind] = {"name": name, **own, **options}
        if not plain["callbacks"]:
            del plain["callbacks"]
        return plain

    def toml(self) -> str:
        return toml.write(self.table())


def split_name(kind: str, given: Any) -> tuple[str, dict[str, Any]]:
    if not isinstance(given, str | Mapping):
        raise ConfigError([f"{kind} = {in_words(given)}; it must be a name, or a table with a name"])
    options = {"name": given} if isinstance(given, str) else dict(given)
    if "name" not in options:
        raise ConfigError([f'{kind} has no name; write {kind} = "..." or [{kind}] with name = "..."'])
    if options.pop("custom", False):
        raise ConfigError(
            [f"{kind} '{options['name']}' was given as an object; pass the object again to run this config"]
        )
    return str(options.pop("name")), options


def written_policy(when: Any) -> dict[str, Any]:
    """A policy as a config would name it, every default spelt out."""
    given = {"policy": when} if isinstance(when, str) else when
    if isinstance(given, Mapping):
        options = {"policy": given["policy"], **defaults(registry.find("policy", given["policy"])), **given}
    elif is_dataclass(given) and not isinstance(given, type):
        options = {f.name: getattr(given, f.name) for f in fields(given)}
        options = {"policy": registry.name_of("policy", type(given)), **options}
    else:
        return {"policy": in_words(given), "custom": True}
    inner = [name for name in inner_policies(registry.find("policy", options["policy"])) if options.get(name)]
    return options | {name: written_policy(options[name]) for name in inner}
