"""A buffer on its way in, in pieces. It takes the memory of what has come, whatever its opening record declares."""

from __future__ import annotations

import os
from mmap import ACCESS_COPY, mmap
from pathlib import Path
from typing import Any

from offbeat.errors import StorageError
from offbeat.live.journal import write_payload
from offbeat.live.wire import Chunk, End, Incoming, WireError
from offbeat.runs.disk import reason

SPOOLED = 4 << 20  # bytes of a buffer above which it goes to the disk as it comes


class Arriving:
    """A buffer of exactly `size` bytes, with the record that opened it. Where it is to lie in a file `part`, a large
    one is written as it comes, and a small one when it is stored."""

    def __init__(self, opening: Any, size: int, part: Path | None = None) -> None:
        if opening.size != size:
            raise WireError(f"a {type(opening).__name__} of {opening.size:,} bytes instead of {size:,}")
        self.opening, self.part = opening, part
        self.incoming = Incoming(size)
        self.memory = bytearray()
        self.file = None
        if part is not None and size > SPOOLED:
            try:
                self.file = part.open("w+b", buffering=0)
            except OSError as error:
                raise StorageError(f"cannot write {part}: {reason(error)}") from None

    def add(self, chunk: Chunk) -> None:
        data = self.incoming.add(chunk)
        if self.file is None:
            self.memory += data
            return
        try:
            written = self.file.write(data)
        except OSError as error:
            raise StorageError(f"cannot write {self.part}: {reason(error)}") from None
        if written != len(data):
            raise StorageError(f"cannot write {self.part}: no room")

    def problem(self, end: End) -> str | None:
        """What is wrong with the whole, or None."""
        return self.incoming.problem(end)

    @property
    def buffer(self) -> bytearray | mmap:
        """The whole, when it is there."""
        return self.memory if self.file is None else mmap(self.file.fileno(), self.incoming.size, access=ACCESS_COPY)

    def store(self) -> Path:
        """Be on the disk when this returns, but for the file's name in its folder."""
        assert self.part is not None
        if self.file is None:
            write_payload(self.part, self.memory)
            return self.part
        try:
            os.fsync(self.file.fileno())
            self.file.close()
        except OSError as error:
            raise StorageError(f"cannot write {self.part}: {reason(error)}") from None
        return self.part

    def discard(self) -> None:
        """Leave nothing behind; what was stored and moved away stays there."""
        if self.file is not None:
            self.file.close()
        if self.part is not None:
            self.part.unlink(missing_ok=True)
