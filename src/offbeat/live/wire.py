"""The wire: records to bytes and back. No I/O; whatever bytes come in, out comes a record or a `WireError`.

A frame is `OB`, the protocol's version, the kind of record, the length of its head, the head (JSON with exactly the
record's fields), and, for a chunk alone, raw bytes. Models and updates are raw buffers: an opening record that says how
many bytes come (`Order`, `Offer`, `Update`, `Primed`, `Neighbour`), chunks that say where each belongs, and an `End`
with the digest of the whole. Nothing is ever unpickled, and no name in a frame is looked up as code.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple, get_type_hints

from offbeat.errors import OffbeatError

PROTOCOL = 2
MAGIC = b"OB"
HEAD = struct.Struct(">2sBBI")  # magic, version, kind, bytes of the head
HEAD_BYTES = 1 << 20  # of a head at most: the config of an experiment travels in one
CHUNK_BYTES = 1 << 18  # of a chunk
FRAME_BYTES = HEAD.size + HEAD_BYTES + CHUNK_BYTES  # of any frame
TEXT = 4096  # characters of a text, but for a config
WHOLE = 2**53  # whole numbers stay below it, as in JSON everywhere


class WireError(OffbeatError):
    """Bytes that are no frame of this protocol."""


# ---- who is who ---------------------------------------------------------------------------------
class Hello(NamedTuple):
    """A client's first word. `client` counts only where there are no certificates, on a loopback; else it is -1.
    `process` tells two processes apart that come as one client."""

    protocol: int
    client: int
    process: str


class Welcome(NamedTuple):
    """What the client is to do, in names, options and numbers; `finished` is its last finished job that the server
    has on record, `number` its next one, `steps_before` the local steps of all its finished jobs, `held` those that the
    server still waits for."""

    run: str
    epoch: int
    client: int
    clients: int
    config: dict[str, Any]
    facts: dict[str, Any]  # shape of inputs, outputs, batch size, sampling, precision
    model: str  # digest of the parameters' names and shapes
    finished: int
    number: int
    steps_before: int
    held: list[int]
    heartbeat: float
    lease: float


class Ready(NamedTuple):
    """The client can run it: its shard, the jobs that it has in hand, the job that its memory has seen."""

    model: str
    samples: int
    shard: str  # digest
    held: list[Any]  # [job, version, steps, steps_before, whether it is finished]
    memory: int
    address: str  # where its neighbours find it; "" where nobody needs to


class Refused(NamedTuple):
    """The other side goes no further; `final`: and it is of no use to come again."""

    reason: str
    final: bool


class Leave(NamedTuple):
    """The client goes, and gives back what it has in hand."""

    reason: str


class Over(NamedTuple):
    """The run has ended."""

    reason: str


class Ping(NamedTuple):
    """A heartbeat: how many seconds the last one took to be answered, and the jobs that the client has in hand."""

    number: int
    seconds: float
    held: list[int]


class Pong(NamedTuple):
    number: int


# ---- commands -----------------------------------------------------------------------------------
class Order(NamedTuple):
    """Start from this version, whose bytes follow."""

    version: int
    steps: int
    size: int


class Offer(NamedTuple):
    """A version for the receive buffer; its bytes follow."""

    version: int
    steps: int
    size: int


class Fetch(NamedTuple):
    """The send buffer is asked for."""


class Drop(NamedTuple):
    """Give up what is in hand; `finished`, `number` and `steps_before` as in `Welcome`."""

    finished: int
    number: int
    steps_before: int


class Void(NamedTuple):
    """A job that the client began does not count: it was ordered otherwise in the meantime."""

    job: int
    version: int
    finished: int
    number: int
    steps_before: int


class Prime(NamedTuple):
    """Send the gradient over the whole shard at the version whose bytes follow."""

    size: int


class Gossip(NamedTuple):
    """A job of a whole cluster: who stands where, and how often models are exchanged."""

    cluster: int
    job: int
    steps_before: int
    place: int
    every: int
    rounds: int
    reports: bool
    neighbours: list[Any]  # [place, certificate's name, address] of all whose models it needs, or who need its own
    turns: list[Any]  # one row of each mixing matrix, used in turn: [[place, weight], ...]


# ---- events -------------------------------------------------------------------------------------
class Began(NamedTuple):
    """The client begins; the model has lain in its receive buffer for `waited` seconds."""

    job: int
    version: int
    steps: int
    steps_before: int
    waited: float


class Done(NamedTuple):
    """The local steps are taken."""

    job: int


class Replaced(NamedTuple):
    """A newer update lies in its place, or the job was given up: it will not come."""

    job: int


class Update(NamedTuple):
    """An update, whose bytes follow; `run` and `epoch` are those under which its job began."""

    run: str
    epoch: int
    job: int
    version: int
    steps: int
    size: int


class Primed(NamedTuple):
    """The gradient over the whole shard, whose bytes follow."""

    run: str
    size: int


class Accepted(NamedTuple):
    """The update is on the server's disk."""

    job: int


class Rejected(NamedTuple):
    """It is not taken; `again`: send it later."""

    job: int
    reason: str
    again: bool


# ---- buffers ------------------------------------------------------------------------------------
class Chunk(NamedTuple):
    """Bytes of a buffer from `offset` on."""

    offset: int
    data: bytes | memoryview


class End(NamedTuple):
    """The buffer is whole if this is its digest."""

    digest: str


class Neighbour(NamedTuple):
    """A device's model after so many exchanges, whose bytes follow."""

    run: str
    cluster: int
    job: int
    turn: int
    place: int
    size: int


KINDS: tuple[Any, ...] = (
    Hello, Welcome, Ready, Refused, Leave, Over, Ping, Pong, Order, Offer, Fetch, Drop, Void, Prime, Gossip, Began,
    Done, Replaced, Update, Primed, Accepted, Rejected, Chunk, End, Neighbour,
)  # fmt: skip
NUMBERS = {kind: number for number, kind in enumerate(KINDS)}
HINTS: dict[Any, dict[str, Any]] = {kind: get_type_hints(kind) for kind in KINDS}


def encode(record: Any) -> bytes:
    """One frame."""
    kind = type(record)
    if kind is Chunk:
        head, data = b'{"offset":%d}' % record.offset, record.data
        return b"".join((HEAD.pack(MAGIC, PROTOCOL, NUMBERS[Chunk], len(head)), head, data))
    head = json.dumps(record._asdict(), separators=(",", ":"), allow_nan=False).encode()
    if len(head) > HEAD_BYTES:
        raise WireError(f"a {kind.__name__} takes {len(head):,} bytes; {HEAD_BYTES:,} is the most")
    return HEAD.pack(MAGIC, PROTOCOL, NUMBERS[kind], len(head)) + head


def decode(frame: bytes | memoryview) -> Any:
    """The record of a frame, or a `WireError`."""
    if len(frame) > FRAME_BYTES:
        raise WireError(f"a frame of {len(frame):,} bytes; {FRAME_BYTES:,} is the most")
    if len(frame) < HEAD.size:
        raise WireError(f"a frame of {len(frame)} bytes; its head alone has {HEAD.size}")
    magic, version, number, size = HEAD.unpack_from(frame)
    if magic != MAGIC:
        raise WireError("no frame of Offbeat")
    if version != PROTOCOL:
        raise WireError(f"protocol {version}; this Offbeat speaks {PROTOCOL}")
    if number >= len(KINDS):
        raise WireError(f"a record of unknown kind {number}")
    kind = KINDS[number]
    if size > HEAD_BYTES or HEAD.size + size > len(frame):
        raise WireError(f"a {kind.__name__} whose head of {size:,} bytes is not all there")
    head, data = bytes(frame[HEAD.size : HEAD.size + size]), frame[HEAD.size + size :]
    if kind is not Chunk and len(data):
        raise WireError(f"a {kind.__name__} with {len(data)} bytes behind it")
    if kind is Chunk and not 0 < len(data) <= CHUNK_BYTES:
        raise WireError(f"a chunk of {len(data):,} bytes; it has between 1 and {CHUNK_BYTES:,}")
    try:
        fields = json.loads(head, parse_constant=refuse)
    except (ValueError, RecursionError):
        raise WireError(f"the head of a {kind.__name__} is no JSON") from None
    return message_of(kind, fields, data)


def refuse(name: str) -> Any:
    raise ValueError(name)


def message_of(kind: Any, fields: Any, data: bytes | memoryview) -> Any:
    hints = HINTS[kind]
    wanted = hints.keys() - {"data"} if kind is Chunk else hints.keys()
    if not isinstance(fields, dict) or fields.keys() != wanted:
        raise WireError(f"a {kind.__name__} has the fields {', '.join(hints)}, and no others")
    for name, value in fields.items():
        if not fits(hints[name], value):
            raise WireError(f"{name} of a {kind.__name__} is not what it should be")
    return kind(**fields, data=data) if kind is Chunk else kind(**fields)


def fits(hint: Any, value: Any) -> bool:
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool) and -1 <= value < WHOLE
    if hint is float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and math.isfinite(value) and abs(value) < WHOLE
    if hint is str:
        return isinstance(value, str) and len(value) <= TEXT
    if hint is bool:
        return isinstance(value, bool)
    if hint == list[int]:
        return isinstance(value, list) and all(fits(int, each) for each in value)
    return isinstance(value, list if hint == list[Any] else dict)


# ---- buffers in pieces --------------------------------------------------------------------------
def digest(buffer: bytes | bytearray | memoryview) -> str:
    return hashlib.sha256(buffer).hexdigest()


def chunks(buffer: memoryview) -> Iterator[Chunk]:
    """A buffer in pieces; none of it is copied."""
    for offset in range(0, len(buffer), CHUNK_BYTES):
        yield Chunk(offset, buffer[offset : offset + CHUNK_BYTES])


class Incoming:
    """A buffer that comes in pieces: hands each one on, and says whether the whole is what it should be."""

    def __init__(self, size: int) -> None:
        self.size, self.got = size, 0
        self.hash = hashlib.sha256()

    def add(self, chunk: Chunk) -> bytes | memoryview:
        if chunk.offset != self.got or self.got + len(chunk.data) > self.size:
            raise WireError(
                f"bytes {chunk.offset:,} to {chunk.offset + len(chunk.data):,} of a buffer of {self.size:,}, of which "
                f"{self.got:,} are there"
            )
        self.got += len(chunk.data)
        self.hash.update(chunk.data)
        return chunk.data

    def problem(self, end: End) -> str | None:
        """What is wrong with the whole, or None."""
        if self.got != self.size:
            return f"{self.got:,} of {self.size:,} bytes came"
        return None if self.hash.hexdigest() == end.digest else "its digest is another one: it was damaged on its way"
