"""The one error a user meets: a sentence with what was given, what is allowed and what to do."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable
from typing import Any

LONGEST = 1500  # characters of a sentence that are shown
NAMED = 40  # characters of a name that may be a slip of the pen


class OffbeatError(Exception):
    """Bad input or a run that cannot go on. The message is meant to be read by the user."""

    outcome: Any = None  # what a run that broke off had come to


class ConfigError(OffbeatError):
    """A configuration that cannot run; names every problem at once."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(shortened(problem) for problem in problems)
        super().__init__("\n".join(self.problems))


class StorageError(OffbeatError):
    """Files that cannot be written, or that are not what was written there."""


class BadNumbers(OffbeatError):
    """A loss or an update that is not finite was about to be committed. Nothing of it was."""


class Diverging(UserWarning):
    """A run whose loss rises and rises."""


class Interrupted(OffbeatError):
    """Somebody stopped the run."""


class ReplayDiffers(OffbeatError):
    """The model of a replay is not the stored one. `outcome` is the replay's, `distance` how far apart they are."""

    def __init__(self, text: str, outcome: Any, distance: Any) -> None:
        super().__init__(text)
        self.outcome = outcome
        self.distance = distance


def unknown(kind: str, given: Any, known: Iterable[str]) -> str:
    """The sentence for a name that does not exist, with the nearest that does.

    >>> unknown("method", "fedbuf", ["fedbuff", "asysg"])
    "unknown method 'fedbuf': did you mean 'fedbuff'? Known: asysg, fedbuff"
    """
    names, name = sorted(known), given if isinstance(given, str) else in_words(given)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5) if len(name) <= NAMED else []
    hint = f"did you mean '{near[0]}'? " if near else ""
    return f"unknown {kind} '{shortened(name, 2 * NAMED)}': {hint}Known: {', '.join(names)}"


def shortened(text: str, most: int = LONGEST) -> str:
    """A text, or its two ends."""
    return text if len(text) <= most else f"{text[: most * 2 // 3]} ... {text[-most // 4 :]}"


class _Shown(reprlib.Repr):
    """Whatever is given, in a line: of long and deep things the beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 100
        self.maxlist = self.maxtuple = self.maxdict = 6
        self.maxlevel = 4

    def repr_int(self, x: int, level: int) -> str:
        digits = x.bit_length() * 30103 // 100000  # Python writes no number of more than 4300 digits
        return repr(x) if digits < 40 else f"{'-' if x < 0 else ''}1e{digits} or so"


def in_words(value: Any) -> str:
    """A value as sentences name it, however large or deep it is.

    >>> in_words(10**5000), in_words([[[[[[1]]]]]])
    ('1e5000 or so', '[[[[...]]]]')
    """
    return _Shown().repr(value)
