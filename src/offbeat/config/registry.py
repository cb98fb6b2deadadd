"""From a name in a config to the function behind it: what ships, `module:function`, and what installed packages add.

The one place that knows where code comes from. A module of one's own is looked for among the installed packages and in
the current directory, never in a run directory: what was handed on as a result is data, and is not executed.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import reduce
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from offbeat.errors import ConfigError, OffbeatError, in_words, unknown

PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
Make = Callable[..., Any]


@dataclass(frozen=True)
class Kind:
    """A kind of thing that a config or a command may name. Its entry points are in the group `offbeat.GROUP`."""

    name: str
    group: str
    shipped: str = ""  # module:table of what ships; imported when it is asked for
    gives: str = ""  # module:class of what its functions give; "": whoever calls them sees to it
    narrower: str = ""  # module:function from such a thing to the class that it must fit, by what it says of itself
    values: bool = False  # a name may also stand for such a thing itself


KINDS = {
    kind.name: kind
    for kind in (
        Kind("method", "methods", "offbeat.methods:METHODS", "offbeat.method:Method"),
        Kind(
            "policy", "policies", "offbeat.schedule.policies:POLICIES", "offbeat.method:Policy",
            "offbeat.method:contract_of",
        ),
        Kind("task", "tasks", "offbeat.tasks.make:TASKS", "offbeat.tasks.task:Task"),
        Kind("model", "models", "offbeat.tasks.models:MODELS", "torch.nn:Module"),
        Kind("split", "splits", "offbeat.tasks.splits:SPLITS"),
        Kind("fleet", "fleets", "offbeat.fleets.make:FLEETS", "offbeat.fleets.fleet:Fleet"),
        Kind("graph", "graphs", "offbeat.fleets.graphs:GRAPHS"),
        Kind("stage", "stages", "offbeat.stages.staged:STAGES", "offbeat.method:Stage"),
        Kind("metric", "metrics", "offbeat.numerics.metrics:METRICS"),
        Kind("callback", "callbacks", "offbeat.runs.watchers:CALLBACKS", "offbeat.runs.callbacks:Callback"),
        Kind("theorem", "theorems", "offbeat.theory.theorems:BOUNDS"),
        Kind("recipe", "recipes", "offbeat.papers:RECIPES", "offbeat.papers.recipe:Recipe", values=True),
    )
}  # fmt: skip
used: ContextVar[dict[str, str] | None] = ContextVar("used", default=None)
outside: dict[str, str] = {}  # what was found that does not ship, and its file


def shipped(kind: str) -> Mapping[str, Any]:
    """The table of what comes with Offbeat."""
    table: Mapping[str, Any] = attribute(KINDS[kind].shipped) if KINDS[kind].shipped else {}
    return table


def find(kind: str, name: str) -> Any:
    """The function of that name, or one sentence on why there is none."""
    table = shipped(kind)
    if name in table:
        return table[name]
    point = name if ":" in name else added(kind).get(name)
    if point is None:
        raise ConfigError([f"{unknown(kind, name, [*table, *added(kind)])}; one of your own is module:function"])
    module, function = load(kind, name, point)
    outside[f"{kind} {name}"] = str(module.__file__)
    if (sources := used.get()) is not None:
        sources[f"{kind} {name}"] = digest(module, function)
    return function


def make(kind: str, name: str, *given: Any, **options: Any) -> Any:
    """What the function of that name gives. A fault of a function of one's own becomes a sentence."""
    function = find(kind, name)
    if KINDS[kind].values and not callable(function):
        return function
    if name in shipped(kind):
        return function(*given, **options)
    thing = called(f"{kind} '{name}'", function, *given, **options)
    if sentence := misfit(kind, thing):
        raise ConfigError([f"{kind} '{name}' gives {in_words(thing)}; {sentence}"])
    return thing


def called(where: str, function: Make, *given: Any, **options: Any) -> Any:
    """What a function of one's own gives; what it raises becomes a sentence."""
    try:
        return function(*given, **options)
    except OffbeatError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError([f"{where} stopped with {fault(error)}"]) from error


def names(kind: str) -> dict[str, Any]:
    """Everything of a kind that has a name: what ships, then what installed packages add. One that cannot be loaded
    stands there as the error that says why."""
    table: dict[str, Any] = dict(shipped(kind))
    for name in added(kind):
        try:
            table.setdefault(name, find(kind, name))
        except ConfigError as error:
            table.setdefault(name, error)
    return table


def name_of(kind: str, thing: Any) -> str:
    """The name by which a config finds this function or class."""
    names = (name for name, known in shipped(kind).items() if known is thing)
    return next(names, f"{thing.__module__}:{thing.__qualname__}")


def added(kind: str) -> dict[str, EntryPoint]:
    """The entry points of installed packages, by name. Two packages with one name are refused when it is asked for."""
    points: dict[str, EntryPoint] = {}
    for point in entry_points(group=f"offbeat.{KINDS[kind].group}"):
        other = points.setdefault(point.name, point)
        if other.value != point.value:
            raise ConfigError(
                [f"two installed packages have a {kind} '{point.name}': {other.value} and {point.value}; name one so"]
            )
    return points


# ---- modules ------------------------------------------------------------------------------------
def load(kind: str, name: str, point: str | EntryPoint) -> tuple[ModuleType, Make]:
    path = point if isinstance(point, str) else f"{point.module}:{point.attr}"
    if not PATH.fullmatch(path):
        raise ConfigError([f"{kind} = '{in_words(path)[1:-1]}'; a {kind} of your own is written module:function"])
    where = f"{kind} '{name}'"
    where = where if path == name else f"{where} ({path})"
    module_name, _, attributes = path.partition(":")
    module = imported(where, module_name)
    try:
        function = attribute(path, module)
    except AttributeError:
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ConfigError([f"{where}: {unknown(f'function of {module.__file__}', attributes, known)}"]) from None
    if not callable(function) and not (KINDS[kind].values and misfit(kind, function) is None):
        makers = f"a function that gives a {kind}, or a class"
        itself = f"a {kind}, or a function that gives one" if KINDS[kind].values else makers
        raise ConfigError([f"{where} is {in_words(function)}; name {itself}"])
    return module, function


def attribute(path: str, module: ModuleType | None = None) -> Any:
    name, _, attributes = path.partition(":")
    return reduce(getattr, attributes.split("."), module or importlib.import_module(name))


def imported(where: str, name: str) -> ModuleType:
    here, top = str(Path.cwd()), name.partition(".")[0]
    add = here not in sys.path and "" not in sys.path and run_directory(Path(here)) is None
    if add:
        sys.path.append(here)  # last: a file here does not take the place of an installed package
    try:
        importlib.invalidate_caches()
        refuse_runs(where, top)
        return importlib.import_module(name)
    except OffbeatError:
        raise
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            looked = f"among the installed packages and in {here}"
            raise ConfigError([f"{where}: there is no module {error.name} {looked}"]) from None
        raise ConfigError([f"{where}: {name} needs a module that is not there: {error.name}"]) from error
    except (Exception, SystemExit) as error:
        raise ConfigError([f"{where}: {name} stopped while it was imported, with {fault(error)}"]) from error
    finally:
        if add and here in sys.path:
            sys.path.remove(here)


def refuse_runs(where: str, top: str) -> None:
    """A package or module that lies in a run directory; looks for it and executes nothing."""
    spec = None if top == "__main__" else find_spec(top)
    if spec is None:
        if top == "__main__":
            raise ConfigError([f"{where}: a script that runs has no name for others; put the function into a module"])
        return
    for place in (spec.origin, *(spec.submodule_search_locations or ())):
        if place is not None and (run := run_directory(Path(place))) is not None:
            raise ConfigError(
                [f"{where}: {place} lies in the run directory {run}, from which no code is taken; move it elsewhere"]
            )


def run_directory(path: Path) -> Path | None:
    """The run directory in which a path lies, if any."""
    for place in (path, *path.parents):
        manifest = place / "manifest.json"
        try:
            if manifest.is_file() and b'"config_digest"' in manifest.read_bytes():
                return place
        except OSError:
            continue
    return None


def fault(error: BaseException) -> str:
    """An error of somebody else's code: its kind, what it says and where, in a file of theirs if it came by one."""
    frames = traceback.extract_tb(error.__traceback__)
    last = [frame for frame in frames if frame.filename in outside.values()][-1:] or frames[-1:]
    at = f" (line {last[0].lineno} of {last[0].filename})" if last else ""
    return f"{type(error).__name__}: {error}{at}"


def misfit(kind: str, thing: Any) -> str | None:
    """The sentence on a thing that is not of the kind."""
    if not KINDS[kind].gives:
        return None
    wanted = attribute(KINDS[kind].gives)
    if KINDS[kind].narrower and not lacking(wanted, thing):
        wanted = attribute(KINDS[kind].narrower)(thing)
    if getattr(wanted, "_is_protocol", False):
        lacks = lacking(wanted, thing)
        return f"a {wanted.__name__} also has {', '.join(lacks)}" if lacks else None
    return None if isinstance(thing, wanted) else f"it must give a {wanted.__name__}"


def lacking(protocol: type, thing: Any) -> list[str]:
    """What a thing would have to have beside what it has, to fit a protocol."""
    return [name for name in members(protocol) if not hasattr(type(thing), name) and not hasattr(thing, name)]


def members(protocol: type) -> list[str]:
    parts = [base for base in reversed(protocol.__mro__) if getattr(base, "_is_protocol", False)]
    return [name for part in parts for name in vars(part) if not name.startswith("_")]


def meant(kind: str, thing: Any) -> bool:
    """Whether a thing is meant to be of a kind that has a protocol: it has half of what that asks, or more."""
    protocol = attribute(KINDS[kind].gives)
    return 2 * len(lacking(protocol, thing)) <= len(members(protocol))


# ---- the digest of the source -------------------------------------------------------------------
@contextmanager
def recording() -> Iterator[dict[str, str]]:
    """Collects the digest of everything of one's own that is found inside."""
    sources: dict[str, str] = {}
    token = used.set(sources)
    try:
        yield sources
    finally:
        used.reset(token)


def digest(module: ModuleType, function: Any) -> str:
    """Of the file of the module that was named and, where the function comes from another one, of that file. What
    these import is not looked at."""
    whole = hashlib.blake2b(digest_size=16)
    defining = sys.modules.get(getattr(function, "__module__", None) or "", module)
    for each in dict.fromkeys((module, defining)):
        if file := inspect.getsourcefile(each) or getattr(each, "__file__", None):
            whole.update(Path(file).read_bytes())
    return whole.hexdigest()


def changed(sources: Mapping[str, str]) -> list[str]:
    """Those of the recorded functions whose source is no longer what it was."""
    with recording() as now:
        for key in sources:
            find(*key.split(" ", 1))
    return [key for key, value in sources.items() if now.get(key) != value]
