"""The manifest of a directory: whose it is, and what every other file in it must be.

It is written last. So at any moment the files that it lists are there, whole, and fit each other; what it does not list
is on its way in or out and does not count.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from offbeat.errors import OffbeatError, StorageError
from offbeat.runs.disk import mark_of, sync, text_digest, write_file

FORMAT = 4
READS = (3, FORMAT)  # in format 3 the trace does not have the steps of a client's earlier jobs
NAME = "manifest.json"
Part = list[Any]  # the name of a Parquet file, and how many of its rows count


@dataclass
class Manifest:
    """`files` has the size and digest of each file by name; the rest says what they are for."""

    kind: str = "run"  # or comparison, paper
    run: str = field(default_factory=lambda: uuid.uuid4().hex)  # what tells this run from every other
    config: str = ""  # the text of config.toml, so that a changed key can be named
    config_digest: str = ""  # of the config without its limits
    finished: bool = False
    checkpoints: list[str] = field(default_factory=list)  # the last good ones, the newest last
    trace: list[Part] = field(default_factory=list)
    metrics: list[Part] = field(default_factory=list)
    environments: list[dict[str, Any]] = field(default_factory=list)  # what the bits rest on; several if it moved
    sources: dict[str, str] = field(default_factory=dict)  # digests of code of one's own, by kind and name
    files: dict[str, list[Any]] = field(default_factory=dict)
    runs: list[str] = field(default_factory=list)  # directories of a comparison's runs
    live: list[str] = field(default_factory=list)  # files that only a live run has
    format: int = FORMAT

    def write(self, path: Path) -> None:
        body = asdict(self)
        text = json.dumps(body | {"digest": text_digest(canonical(body))}, indent=1)
        sync(path)  # the names of what is listed come first
        write_file(path / NAME, lambda at: at.write_text(text + "\n"))
        sync(path)

    def damage(self, path: Path, name: str) -> str | None:
        """What is wrong with a listed file, or None."""
        if name not in self.files:
            return f"{name} is not listed in {NAME}"
        try:
            mark = mark_of(path / name)
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        size, digest = self.files[name]
        if mark[0] != size:
            return f"{name} has {mark[0]} bytes instead of {size}"
        return None if mark[1] == digest else f"{name} has another content than was written"


def canonical(body: dict[str, Any]) -> str:
    return json.dumps(body, sort_keys=True, separators=(",", ":"))


def read_manifest(path: Path) -> Manifest | None:
    """The manifest of a directory, None where it has none; a damaged one is refused."""
    file = path / NAME
    if not file.is_file():
        return None
    try:
        body = json.loads(file.read_bytes())
        if not isinstance(body, dict) or not isinstance(body.get("format"), int):
            raise ValueError
        if body["format"] not in READS:
            known = " and ".join(map(str, READS))
            raise OffbeatError(f"{path} has format {body['format']}; this Offbeat reads formats {known}")
        digest = body.pop("digest", None)
        if {*body, "sources", "live"} != {f.name for f in fields(Manifest)} or digest != text_digest(canonical(body)):
            raise ValueError
    except OSError as error:
        raise StorageError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise StorageError(f"{file} is damaged or was edited, so nothing in {path} can be trusted") from None
    return Manifest(**body)
