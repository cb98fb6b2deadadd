"""The one error a user meets: a sentence with what was given, what is allowed and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class OffbeatError(Exception):
    """Bad input or a run that cannot go on. The message is meant to be read by the user."""

    outcome: Any = None  # what a run that broke off had come to


class ConfigError(OffbeatError):
    """A configuration that cannot run; names every problem at once."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


class StorageError(OffbeatError):
    """Files that cannot be written, or that are not what was written there."""


def unknown(kind: str, given: str, known: Iterable[str]) -> str:
    """The sentence for a name that does not exist, with the nearest that does.

    >>> unknown("method", "fedbuf", ["fedbuff", "asysg"])
    "unknown method 'fedbuf': did you mean 'fedbuff'? Known: asysg, fedbuff"
    """
    names = sorted(known)
    near = difflib.get_close_matches(given, names, n=1, cutoff=0.5)
    hint = f"did you mean '{near[0]}'? " if near else ""
    return f"unknown {kind} '{given}': {hint}Known: {', '.join(names)}"
