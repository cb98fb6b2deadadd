"""Texts by owner: the roles of plays, the folders of a documentation; as one stream of characters or bytes.

A text comes from lines of JSON (`name`, `text`), plain or packed by xz or gzip, or from a folder of text files.
"""

from __future__ import annotations

import gzip
import json
import lzma
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from offbeat.errors import ConfigError, OffbeatError
from offbeat.tasks import files

SUFFIXES = (".txt", ".rst", ".md", ".yaml", ".text")  # of files in a folder that are read
PACKED: dict[str, Callable[..., Any]] = {"": open, ".xz": lzma.open, ".gz": gzip.open}
LARGEST = 2**29  # characters of all texts together
NAME = r"[A-Z0-9][A-Za-z'’]*"
SPEAKER = re.compile(rf"(?!(ACT|SCENE|Act|Scene)\b){NAME}\.?( (and|of|the|{NAME})\.?){{0,4}}\.")
HEADING = re.compile(r"\s*(ACT|SCENE|Act|Scene|EPILOGUE|PROLOGUE)\b")
STAGE = re.compile(r"\[[^\]]*\]")
GUTENBERG = re.compile(r"\*\*\* ?(START|END) OF.*")


class Text(NamedTuple):
    name: str
    text: str


@dataclass(frozen=True)
class Owned:
    """The texts of owners, one behind the other: owner i has `tokens[first[i] : first[i] + size[i]]`."""

    names: list[str]
    tokens: npt.NDArray[Any]
    first: npt.NDArray[np.int64]
    size: npt.NDArray[np.int64]
    vocabulary: list[str]  # what each token stands for


# ---- reading ------------------------------------------------------------------------------------
def read_texts(name: str, folder: str | None) -> list[Text]:
    """The texts of `OFFBEAT_DATA/text/NAME.jsonl` (plain, .xz or .gz) or of the folder `OFFBEAT_DATA/text/NAME`; or of
    another `folder`, found under a root or as a path."""
    looked = []
    places = [root / (folder or f"text/{name}") for root in files.roots()]
    for place in dict.fromkeys([*places, *([Path(folder)] if folder else [])]):
        for suffix in PACKED:
            path = place.parent / f"{place.name}.jsonl{suffix}"
            if path.is_file():
                return json_lines(path)
        if place.is_dir() and (texts := text_files(place)):
            return texts
        looked.append(f"  {place}: " + ("no text file in it" if place.is_dir() else "no such folder, nor .jsonl"))
    wanted = f"a file {name}.jsonl (plain, .xz, .gz; name and text in each line) or a folder of text files"
    raise files.missing(name, wanted, looked, "wherever texts are to be had", folder or f"text/{name}")


def json_lines(path: Path) -> list[Text]:
    """One text for each line of JSON."""
    texts, characters = [], 0
    try:
        with PACKED[path.suffix if path.suffix in PACKED else ""](path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                one = json.loads(line)
                if not (isinstance(one, dict) and all(isinstance(one.get(key), str) for key in ("name", "text"))):
                    raise files.damaged(path, f"line {number} is no table with texts 'name' and 'text'")
                characters += len(one["text"])
                if characters > LARGEST:
                    raise OffbeatError(f"{path} holds more than {LARGEST:,} characters; take a part of it.")
                texts.append(Text(one["name"], one["text"]))
    except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise files.damaged(path, f"it cannot be read as lines of JSON ({error})") from error
    if not texts:
        raise files.damaged(path, "it has no text")
    return texts


def text_files(folder: Path) -> list[Text]:
    """The text files of a folder and its folders, named by their paths in it, in the order of these."""
    texts, size = [], 0
    for path in sorted(p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file()):
        size += path.stat().st_size
        if size > LARGEST:
            raise OffbeatError(f"{folder} holds more than {LARGEST:,} bytes of text; take a part of it.")
        texts.append(Text(path.relative_to(folder).as_posix(), path.read_bytes().decode("utf-8", "replace")))
    return texts


# ---- owners -------------------------------------------------------------------------------------
def by_speaker(texts: Iterable[Text]) -> dict[str, str]:
    """What each role of each play says; a text without roles is one owner's."""
    owners: dict[str, str] = {}
    for name, text in texts:
        work = name.rsplit(".", 1)[0]
        spoken = speeches(text)
        for speaker, said in spoken:
            owner = f"{work}/{speaker}" if speaker else work
            owners[owner] = owners.get(owner, "") + said
    return owners


def speeches(text: str) -> list[tuple[str, str]]:
    """(speaker, what is said) in order; ("", all of it) where nobody speaks.

    A speaker stands on a line alone with a full stop, after a blank line or in capitals; speech follows on the next.
    Headings, stage directions and what stands before the first speaker are left out.
    """
    marks = list(GUTENBERG.finditer(text))
    if len(marks) >= 2:
        text = text[marks[0].end() : marks[-1].start()]
    lines = [line.rstrip() for line in STAGE.sub("", text).split("\n")]
    parts: list[tuple[str, list[str]]] = []
    for i, line in enumerate(lines):
        after = lines[i + 1] if i + 1 < len(lines) else ""
        fresh = i == 0 or not lines[i - 1] or line.isupper()
        if fresh and after and len(line) <= 40 and SPEAKER.fullmatch(line):
            parts.append((line.rstrip(".").upper(), []))
        elif HEADING.match(line):
            if parts:
                parts.append(("", []))  # nobody speaks until someone does
        elif parts and line:
            parts[-1][1].append(line)
    said = [(speaker, "\n".join(spoken) + "\n") for speaker, spoken in parts if speaker and spoken]
    return said if len(said) > 1 else [("", "\n".join(line for line in lines if line) + "\n")]


def by_folder(texts: Iterable[Text]) -> dict[str, str]:
    """The texts of each folder together; a text that lies in none, or a line of JSON, is by its own name."""
    owners: dict[str, str] = {}
    for name, text in texts:
        path = Path(name)
        owner = path.parent.as_posix() if path.suffix.lower() in SUFFIXES and path.parent != Path() else name
        owners[owner] = owners.get(owner, "") + text
    return owners


# ---- tokens -------------------------------------------------------------------------------------
def owned(owners: dict[str, str], unit: str, minimum: int, what: str) -> Owned:
    """One stream of the texts of all owners with at least `minimum` tokens, in the order of their names."""
    coded = {name: text.encode() if unit == "byte" else text for name, text in sorted(owners.items())}
    kept = {name: text for name, text in coded.items() if len(text) >= minimum}
    if not kept:
        most = max(map(len, coded.values()), default=0)
        raise ConfigError(
            [f"task '{what}': no text has {minimum:,} {unit}s, the longest has {most:,}; take a smaller minimum"]
        )
    size = np.array([len(text) for text in kept.values()], np.int64)
    if unit == "byte":
        tokens: npt.NDArray[Any] = np.frombuffer(b"".join(kept.values()), np.uint8)  # type: ignore[arg-type]
        letters = [chr(i) for i in range(256)]
    else:
        points = np.frombuffer("".join(kept.values()).encode("utf-32-le"), np.uint32)  # type: ignore[arg-type]
        known, tokens = np.unique(points, return_inverse=True)
        tokens, letters = tokens.astype(np.uint8 if len(known) <= 256 else np.int32), [chr(i) for i in known]
    return Owned(list(kept), tokens, np.cumsum(size) - size, size, letters)


class Cut(NamedTuple):
    """Where windows begin, for training with their owners, and for testing."""

    starts: npt.NDArray[np.int64]
    owners: npt.NDArray[np.int64]
    test: npt.NDArray[np.int64]


def cut(text: Owned, length: int, stride: int, held_out: int, share: float, most: int) -> Cut:
    """Windows of `length` tokens and the one that follows, none over two owners.

    The last `share` of each owner's text is for testing; or, with `held_out` owners, the texts of these, taken at even
    distances in the order of names. Of the test windows, one behind the other, at most so many are used.
    """
    many = len(text.names)
    away = held_out_of(many, held_out)
    starts, owners, test = [], [], []
    for i, (first, size) in enumerate(zip(text.first, text.size, strict=True)):
        own = size if held_out else size - int(share * size)
        if i in away:
            own = 0
        begins = np.arange(first, first + own - length, stride)
        starts.append(begins)
        owners.append(np.full(len(begins), i))
        if i in away or not held_out:
            test.append(np.arange(first + own, first + size - length, length))
    whole = np.concatenate(test)
    spread = np.arange(min(len(whole), most)) * len(whole) // max(1, min(len(whole), most))
    return Cut(np.concatenate(starts).astype(np.int64), np.concatenate(owners).astype(np.int64), whole[spread])


def held_out_of(many: int, held_out: int) -> set[int]:
    """So many of the owners, at even distances.

    >>> sorted(held_out_of(10, 3))
    [1, 5, 8]
    """
    if not 0 <= held_out < many:
        raise ConfigError([f"held_out = {held_out} of {many} owners; give fewer than there are, or 0"])
    return {(2 * i + 1) * many // (2 * held_out) for i in range(held_out)}


OWNERS: dict[str, tuple[Callable[[Sequence[Text]], dict[str, str]], str]] = {
    "shakespeare": (by_speaker, "character"),
    "linux-doc": (by_folder, "byte"),
}
