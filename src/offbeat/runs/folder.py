"""Whose a directory is. Offbeat writes into a new or empty one, or, told to overwrite, into one of its own.

What it deletes are files that it writes itself, by their names, beside a manifest of its own; links are removed or
refused, never followed. (`--out` itself may be a link to a directory: that is the user's choice.)
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

from offbeat.errors import OffbeatError, StorageError
from offbeat.runs.disk import mark_of, reason, storing
from offbeat.runs.lock import LOCK, Lock
from offbeat.runs.manifest import NAME, Manifest, read_manifest

PARTS = "parts"
OWN = re.compile(r"(manifest\.json|config\.toml|(trace|metrics|clients)\.parquet|result\.json|(model|best)\.safetensors"
                 r"|checkpoint-\d+\.safetensors|live\.json|jobs\.safetensors)(\.new)?")  # fmt: skip
OWN_PARTS = re.compile(r"(trace|metrics)-\d+\.parquet(\.new)?")


class Folder:
    """A directory of ours, locked. `manifest` is what it is to hold."""

    def __init__(self, out: str | Path, kind: str, overwrite: bool = False) -> None:
        self.path = Path(out)
        self.fresh = [place for place in (self.path, *self.path.parents) if not place.exists()]  # the innermost first
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            before = entries(self.path)
        except OSError as error:
            raise OffbeatError(f"cannot write the directory {out}: {reason(error)}; choose another --out") from None
        self.check(before, kind, overwrite)  # before anything is written there ...
        self.lock = Lock(self.path)
        try:
            self.check(entries(self.path), kind, overwrite)  # ... and when nobody else can
            self.manifest = Manifest(kind)
            with storing(self.path):
                old = read_manifest(self.path)
                self.manifest.write(self.path)
                if old is not None:
                    clear(self.path, old)
        except BaseException:
            self.lock.release()
            raise

    def check(self, present: set[str], kind: str, overwrite: bool) -> None:
        if not present:
            return
        old = read_manifest(self.path)
        if old is None:
            some = ", ".join(sorted(present)[:3])
            raise OffbeatError(
                f"--out {self.path} holds {some}, which is not of Offbeat's making; choose a new or an empty directory"
            )
        if not overwrite:
            raise OffbeatError(
                f"--out {self.path} holds a {old.kind} already; choose another directory, or give --overwrite "
                "(in Python: overwrite=True) to replace it"
            )
        if old.kind != kind:
            raise OffbeatError(f"--out {self.path} holds a {old.kind}, not a {kind}; choose another directory")
        refuse_links(self.path)

    def add(self, files: Iterable[Path], runs: Iterable[str] = ()) -> None:
        """List files of this directory, and the runs in it."""
        for file in files:
            self.manifest.files[file.relative_to(self.path).as_posix()] = mark_of(file)
        self.manifest.runs += runs
        self.manifest.write(self.path)

    def abandon(self) -> None:
        """Leave no trace of a directory to which nothing came."""
        if entries(self.path) == {NAME}:
            (self.path / NAME).unlink()
            (self.path / LOCK).unlink()
            for place in self.fresh:
                place.rmdir()

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is not None:
                self.abandon()
        except OSError:
            pass  # the error that ended the work says more
        finally:
            self.lock.release()


def reopened(path: Path, kind: str = "comparison") -> Folder:
    """The directory of a comparison (or a tuning), to add to it; where there is none yet, a new one."""
    if not path.exists() or not entries(path):
        return Folder(path, kind)
    manifest = read_manifest(path)
    if manifest is None or manifest.kind != kind:
        raise OffbeatError(f"{path} is not the directory of a {kind}; give that, or a new or empty one")
    files = {"comparison.png", "comparison.md", "comparison.html"} - manifest.files.keys()
    strange = [name for name in sorted(files) if (path / name).exists()]
    if strange:
        raise OffbeatError(f"{path} holds {' and '.join(strange)} of somebody else; move them away")
    folder = object.__new__(Folder)
    folder.path, folder.fresh, folder.lock, folder.manifest = path, [], Lock(path), manifest
    return folder


def entries(path: Path) -> set[str]:
    return {entry.name for entry in path.iterdir()} - {LOCK}


def refuse_links(path: Path) -> None:
    if (path / PARTS).is_symlink():
        raise StorageError(f"{path / PARTS} is a link, and links are not followed; remove it")


def clear(path: Path, old: Manifest) -> None:
    """Delete what a run, a comparison or a paper's recipe of ours left, and nothing else. The manifest stays."""
    if old.kind == "run":
        clear_run(path, set())
    for name in old.files if old.kind != "run" else ():
        if Path(name).name == name and name not in (NAME, LOCK):
            (path / name).unlink(missing_ok=True)
    for name in old.runs:
        inner = path / name
        if Path(name).name != name or inner.is_symlink() or not inner.is_dir():
            continue
        with Lock(inner):
            if (run := read_manifest(inner)) is not None and run.kind == "run":
                refuse_links(inner)
                clear_run(inner, set())
                (inner / NAME).unlink()
                (inner / LOCK).unlink()
        if not any(inner.iterdir()):
            inner.rmdir()


def clear_run(path: Path, keep: set[str]) -> None:
    """Delete the files of a run but these and the manifest."""
    for entry in list(path.iterdir()):
        if OWN.fullmatch(entry.name) and entry.name not in {NAME, *keep} and (entry.is_symlink() or entry.is_file()):
            entry.unlink()
    parts = path / PARTS
    if parts.is_symlink() or not parts.is_dir():
        return
    for entry in list(parts.iterdir()):
        if OWN_PARTS.fullmatch(entry.name) and f"{PARTS}/{entry.name}" not in keep:
            entry.unlink()
    if not any(parts.iterdir()):
        parts.rmdir()


def file_name(label: str) -> str:
    """A label as the name of a file: never a path, never too long, another one for every label.

    >>> file_name("fedbuff"), file_name("../x")
    ('fedbuff', 'x-d42ff05c')
    """
    plain = re.sub(r"[^A-Za-z0-9._=+-]+", "-", label).strip(".-")[:60]
    if plain and plain == label:
        return plain
    return f"{plain or 'label'}-{hashlib.blake2b(label.encode(errors='surrogatepass'), digest_size=4).hexdigest()}"
