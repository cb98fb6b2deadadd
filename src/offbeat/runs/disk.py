"""Files that appear whole or not at all, that are on the disk before they count, and whose content can be checked."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from safetensors import SafetensorError, safe_open

from offbeat.errors import OffbeatError, StorageError

REASONS = {
    errno.ENOSPC: "there is no room left on the disk",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file would be larger than this process may write (ulimit -f)",
    errno.EROFS: "the disk is read-only",
    errno.EACCES: "this user may not write there",
    errno.EPERM: "this user may not write there",
    errno.ENOENT: "the directory is gone",
    errno.ENOTDIR: "a file stands where a directory should be",
    errno.ELOOP: "it is a link, and links are not followed",
    errno.EIO: "the disk reports an error",
}


@contextmanager
def storing(path: Path) -> Iterator[None]:
    """Turns whatever the system says while a run directory is written into one sentence."""
    try:
        yield
    except (OSError, pa.ArrowException, SafetensorError) as error:
        file = getattr(error, "filename", None)
        if file is not None and not str(file).startswith(str(path)):
            raise  # it is about another file
        raise StorageError(
            f"cannot write {path}: {reason(error)}. What the last checkpoint holds is kept; "
            "when that is put right, `offbeat resume` goes on from there"
        ) from None


def reason(error: BaseException) -> str:
    """What the system said. Libraries that write in another language put the number into the text."""
    number = getattr(error, "errno", None)
    if number is None and (text := re.search(r"(?:os error|errno) (\d+)", str(error), re.IGNORECASE)):
        number = int(text.group(1))
    return REASONS.get(number or 0, str(error).strip().splitlines()[0] if str(error).strip() else repr(error))


def write_file(target: Path, write: Callable[[Path], object]) -> list[Any]:
    """Write beside the target, then move there: a file is old or new, never half. Returns its `mark`."""
    beside = target.with_name(target.name + ".new")
    try:
        beside.unlink(missing_ok=True)  # a link that stands there is removed, not followed
        write(beside)
        sync(beside)
        mark = mark_of(beside)
        os.replace(beside, target)
    except BaseException:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise
    return mark


def sync(path: Path) -> None:
    """Wait until a file's content, or a directory's names, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def mark_of(path: Path) -> list[Any]:
    """The size of a file and a digest of its content."""
    digest, size = hashlib.blake2b(digest_size=20), 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
            size += len(block)
    return [size, digest.hexdigest()]


def text_digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=20).hexdigest()


def read_tensors(file: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors of a file, and the facts in its head where it has some."""
    try:
        with safe_open(file, framework="pt") as content:
            facts = json.loads((content.metadata() or {}).get("facts", "{}"))
            return {name: content.get_tensor(name) for name in content.keys()}, facts  # noqa: SIM118
    except (OSError, SafetensorError, ValueError) as error:
        raise (OffbeatError if not file.exists() else StorageError)(f"{file} cannot be read: {error}") from None
