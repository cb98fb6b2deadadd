"""One process at a time in a run directory.

The system holds the lock for as long as the file is open, so a process that was killed leaves none behind.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from offbeat.errors import StorageError
from offbeat.runs.disk import reason

LOCK = "offbeat.lock"


class Lock:
    """Holds a directory until `release`. Readers share it, and take none where the disk does not let them."""

    def __init__(self, path: Path, reader: bool = False) -> None:
        self.path = path
        self.handle: int | None = None
        flags = os.O_RDONLY if reader else os.O_RDWR | os.O_CREAT
        try:
            self.handle = os.open(path / LOCK, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
            fcntl.flock(self.handle, (fcntl.LOCK_SH if reader else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            if not reader:
                since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime())
                os.pwrite(self.handle, f"process {os.getpid()} since {since}".ljust(60).encode() + b"\n", 0)
        except BlockingIOError:
            assert self.handle is not None
            holder = os.pread(self.handle, 200, 0).decode(errors="replace").strip() or "another process"
            self.release()
            raise StorageError(f"{path} is in use by {holder}; wait for it, or choose another directory") from None
        except OSError as error:
            self.release()
            if not reader:
                raise StorageError(f"cannot write {path / LOCK}: {reason(error)}") from None

    def check(self) -> None:
        """The directory must still be the one that was locked."""
        assert self.handle is not None
        try:
            there = os.stat(self.path / LOCK, follow_symlinks=False)
        except OSError:
            there = None
        if there is None or not os.path.samestat(there, os.fstat(self.handle)):
            raise StorageError(f"{self.path} was removed or replaced while the run went on; it is left alone now")

    def release(self) -> None:
        if self.handle is not None:
            os.close(self.handle)
        self.handle = None

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
