"""The JSON files of LEAF (Caldas et al. 2019): samples by user, in any number of files.

Each file is {"users": [...], "num_samples": [...], "user_data": {user: {"x": [[...], ...], "y": [...]}}}.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from offbeat.config.room import host_memory
from offbeat.tasks import files

Floats: TypeAlias = npt.NDArray[np.float32]
Integers: TypeAlias = npt.NDArray[np.int64]

SHOWN = 5  # problems of a file that are told one by one
LABELS = 2**31  # more than any set has
GROWTH = 20  # bytes of Python objects for a byte of JSON, at most, or nearly so
KINDS = {"users": "list", "num_samples": "list", "user_data": "table"}


class Users(NamedTuple):
    """Samples `x [n, length]` with labels `y [n]`; `owners [n]` are the places of their users in `names`, sorted."""

    names: list[str]
    owners: Integers
    x: Floats
    y: Integers


class Shard(NamedTuple):
    """What one file says of one user."""

    user: str
    x: Floats
    y: Integers


def find_users(folder: str) -> tuple[list[Path], list[Path]]:
    """The training and the test files, sorted by name, in the first root where `folder` holds both."""
    looked = []
    for place in dict.fromkeys(root / folder for root in files.roots()):
        train, test = _files(place / "train"), _files(place / "test")
        if train and test:
            return train, test
        lacks = ", ".join(f"{part}/*.json" for part, paths in (("train", train), ("test", test)) if not paths)
        looked.append(f"  {place}: " + (f"there, but lacks {lacks}" if place.is_dir() else "no such directory"))
    source = "the LEAF repository of S. Caldas et al. (preprocess.sh writes train and test)"
    raise files.missing("leaf", "train/*.json and test/*.json (plain or .gz)", looked, source, folder)


def _files(folder: Path) -> list[Path]:
    plain = {path.name: path for path in folder.glob("*.json") if path.is_file()}
    zipped = {path.stem: path for path in folder.glob("*.json.gz") if path.is_file()}
    return [path for _, path in sorted((zipped | plain).items())]


def read_users(paths: Sequence[Path], classes: int | None = None) -> Users:
    """All samples, in the order of the files. A user may be in several of them; labels are below `classes`."""
    shards: list[Shard] = []
    for path in paths:
        users = read_file(path, classes)
        mine, first = users[0].x.shape[1], (shards or users)[0].x.shape[1]
        if mine != first:
            raise files.damaged(path, f"its samples are {mine} numbers long, those of {paths[0].name} are {first} long")
        shards += users
    names = sorted({shard.user for shard in shards})
    place = {name: number for number, name in enumerate(names)}
    owners = np.repeat(np.array([place[shard.user] for shard in shards]), [len(shard.y) for shard in shards])
    x, y = np.concatenate([shard.x for shard in shards]), np.concatenate([shard.y for shard in shards])
    return Users(names, owners.astype(np.int64), x, y)


def read_file(path: Path, classes: int | None = None) -> list[Shard]:
    """The users of one file, in its order; or all that is wrong with it."""
    try:
        content = json.loads(files.read(path, int(host_memory() / GROWTH)))
    except (ValueError, RecursionError) as error:
        raise files.damaged(path, f"it is no JSON ({error})") from None
    _refuse(path, _structure(content))
    users, numbers, data = (content[key] for key in KINDS)
    _refuse(path, _users(users, numbers, data))
    shards, problems = [], []
    for user, said in zip(users, numbers, strict=True):
        try:
            shards.append(Shard(user, *_samples(data.pop(user), said, classes or LABELS)))
        except ValueError as error:
            problems.append(f"user {user!r} {error}")
    for shard in shards[1:]:
        if (mine := shard.x.shape[1]) != (first := shards[0].x.shape[1]):
            problems.append(
                f"user {shard.user!r} has samples of {mine} numbers, but user {shards[0].user!r} of {first} numbers"
            )
    _refuse(path, problems)
    return shards


def _refuse(path: Path, problems: Sequence[str]) -> None:
    if problems:
        more = [f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
        raise files.damaged(path, "; ".join([*problems[:SHOWN], *more]))


def _structure(content: Any) -> list[str]:
    if not isinstance(content, dict):
        return [f"it should hold a table with {', '.join(KINDS)}"]
    lacks = [f"it has no '{key}'" for key in KINDS if key not in content]
    right = {"list": list, "table": dict}
    wrong = [key for key, kind in KINDS.items() if key in content and not isinstance(content[key], right[kind])]
    return lacks + [f"its '{key}' is no {KINDS[key]}" for key in wrong]


def _users(users: list[Any], numbers: list[Any], data: dict[str, Any]) -> list[str]:
    """How the three tables of a file disagree about who is in it."""
    if not users:
        return ["it has no users"]
    problems = [f"user {user!r:.40} is no text" for user in users if not isinstance(user, str)]
    if problems:
        return problems
    if len(users) != len(numbers):
        problems.append(f"it has {len(users)} users, but {len(numbers)} num_samples")
    problems += [f"user {user!r} is there {times} times" for user, times in Counter(users).items() if times > 1]
    problems += [f"user {user!r} has no user_data" for user in dict.fromkeys(users) if user not in data]
    return problems + [
        f"user {user!r} has user_data, but is not among users" for user in sorted(data.keys() - set(users))
    ]


def _samples(entry: Any, said: Any, classes: int) -> tuple[Floats, Integers]:
    """A user's samples and labels; a ValueError says what is wrong with them."""
    if not isinstance(entry, dict) or not all(isinstance(entry.get(key), list) for key in ("x", "y")):
        raise ValueError("has no lists 'x' and 'y' in user_data")
    rows, labels = entry["x"], entry["y"]
    if not len(rows) == len(labels) == said:
        raise ValueError(f"has {len(rows)} samples in x and {len(labels)} labels in y, but num_samples says {said!r}")
    if not rows:
        raise ValueError("has no samples; leave it out")
    return _rows(rows), _labels(labels, classes)


def _rows(rows: list[Any]) -> Floats:
    for number, row in enumerate(rows):
        if not isinstance(row, list) or not row:
            raise ValueError(f"has a sample {number} that is no list of numbers")
        if len(row) != len(rows[0]):
            raise ValueError(f"has a sample {number} of {len(row)} numbers, but sample 0 has {len(rows[0])}")
    out = np.empty((len(rows), len(rows[0])), np.float32)
    for number, row in enumerate(rows):
        if not set(map(type, row)) <= {int, float}:
            raise ValueError(f"has a sample {number} that is no list of numbers")
        try:
            with np.errstate(over="ignore"):
                out[number] = row
        except OverflowError:  # an integer beyond all floats
            out[number] = np.inf
        if not np.isfinite(out[number]).all():
            raise ValueError(f"has NaN, infinity or a number too large for float32 in sample {number}")
    return out


def _labels(labels: list[Any], classes: int) -> Integers:
    for number, label in enumerate(labels):
        whole = type(label) in (int, float) and label // 1 == label  # 3.0 is whole; NaN and infinity are not
        if not whole or not 0 <= label < classes:
            raise ValueError(
                f"has label {label!r:.40} at sample {number}, but labels are whole numbers from 0 to {classes - 1}"
            )
    return np.array(labels).astype(np.int64)
