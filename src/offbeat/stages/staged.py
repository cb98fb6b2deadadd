"""A method whose vectors travel through stages: a wrapper around any method."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from offbeat import keys
from offbeat.config import registry
from offbeat.config.options import extends, option_problems
from offbeat.errors import ConfigError, in_words, unknown
from offbeat.method import Carry, Job, Method, Stage, State, Update, passed
from offbeat.stages.chain import Chain
from offbeat.stages.floats import bfloat16, float16
from offbeat.stages.int8 import int8

STAGES: dict[str, Callable[..., Stage]] = {"bfloat16": bfloat16, "float16": float16, "int8": int8}
Stages: TypeAlias = str | list[Any] | Mapping[str, Any]
FORM = 'it is a name such as "int8", a list of names, or {up = ..., down = ...}'


def staged(method: Method, stages: Any) -> Method:
    """The method, its vectors sent through `stages`: a stage, a name, a table with a name and options, or a list of
    these, for both ways; or `{"up": ..., "down": ...}` for each way.

    Clients start from the broadcast as they decode it, the server commits updates as it decodes them. Its own model
    and what clients remember stay as they are. Numbers beside the vectors do not go through stages.
    """
    ways = stages if isinstance(stages, Mapping) and "name" not in stages else {"up": stages, "down": stages}
    if wrong := [unknown("way in stages", str(way), ("up", "down")) for way in ways if way not in ("up", "down")]:
        raise ConfigError(wrong)
    up, down = (chain(ways.get(way)) for way in ("up", "down"))
    rule = method.what
    if (up or down) and rule.lossless:
        raise ConfigError([f"{method.name}: its server must have updates exactly as they were; leave out stages"])
    local = rule.local if up is None else replace(rule.local, finish=Encoded(rule.local.finish, rule.local.sends, up))
    return replace(method, what=replace(rule, local=local, up=up, down=down))


@dataclass(frozen=True)
class Encoded:
    """What the server has of an update that goes through a stage; `finish` is the rule's own."""

    finish: Callable[[State, Carry, Job], Update]
    sends: tuple[str, ...]
    stage: Stage

    def __call__(self, given: State, carry: Carry, job: Job) -> Update:
        update = self.finish(given, carry, job)
        key = keys.fold(job.key, -1)  # the rule's own words are not negative
        decoded = {name: passed(self.stage, update[name], keys.fold(key, i)) for i, name in enumerate(self.sends)}
        return update | decoded


def received(stage: Stage | None, rows: Tensor, keys: Tensor) -> Tensor:
    """What the server has of clients' vectors `[n, d]`, each sent with its key."""
    if stage is None:
        return rows
    decoded: Tensor = torch.vmap(lambda row, key: passed(stage, row, key))(rows, keys)
    return decoded


def chain(given: Any) -> Stage | None:
    """One stage from what was given for one way; None where nothing was."""
    if given is None or given == [] or given == ():
        return None
    if isinstance(given, list | tuple):
        each = [made for one in given if (made := chain(one)) is not None]
        return each[0] if len(each) == 1 else Chain(tuple(each))
    if all(hasattr(given, name) for name in ("encode", "decode", "bytes")):
        return given  # type: ignore[no-any-return]
    options = {"name": given} if isinstance(given, str) else dict(given) if isinstance(given, Mapping) else {}
    if "name" not in options:
        raise ConfigError([f"stages = {in_words(given)}; {FORM}"])
    name = options.pop("name")
    if not isinstance(name, str):
        raise ConfigError([unknown("stage", str(name), STAGES)])
    if problems := option_problems(f"stage '{name}'", registry.find("stage", name), options):
        raise ConfigError(problems)
    stage: Stage = registry.make("stage", name, **options)
    return stage


def takes_stages(make: Callable[..., Method]) -> Callable[..., Method]:
    """The maker of a method, with one more option: `stages`."""

    @extends(make)
    def make_staged(*given: Any, stages: Stages | None = None, **options: Any) -> Method:
        method = make(*given, **options)
        return method if stages is None else staged(method, stages)

    return make_staged
