"""The wire without a network: every record there and back, and whatever else comes is refused."""

from __future__ import annotations

import mmap
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat import keys
from offbeat.live import wire
from offbeat.live.arriving import Arriving
from offbeat.live.packets import Layout
from offbeat.stages import STAGES

EXAMPLES = {
    int: 3,
    float: 0.5,
    str: "text",
    bool: True,
    list[int]: [1, 2],
    list[Any]: [[1, "a"]],
    dict[str, Any]: {"a": 1},
}


def example(kind: Any) -> Any:
    fields = {name: EXAMPLES.get(hint, b"bytes") for name, hint in wire.HINTS[kind].items()}
    return kind(**fields)


RECORDS = [example(kind) for kind in wire.KINDS]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_every_record_goes_there_and_back(record: Any) -> None:
    again = wire.decode(wire.encode(record))
    assert again == record
    assert type(again) is type(record)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_what_is_cut_off_or_goes_on_is_refused(record: Any) -> None:
    frame = wire.encode(record)
    for end in range(len(frame) - (len(record.data) if isinstance(record, wire.Chunk) else 0)):
        with pytest.raises(wire.WireError):
            wire.decode(frame[:end])
    if not isinstance(record, wire.Chunk):
        with pytest.raises(wire.WireError, match="behind it"):
            wire.decode(frame + b"x")


def pong(size: int) -> bytes:
    return wire.HEAD.pack(b"OB", wire.PROTOCOL, wire.NUMBERS[wire.Pong], size)


@pytest.mark.parametrize(
    ("frame", "said"),
    [
        (b"", "0 bytes"),
        (b"GET / HTTP/1.1\r\n\r\n", "no frame"),
        (wire.HEAD.pack(b"OB", 1, 0, 0), "protocol 1"),
        (wire.HEAD.pack(b"OB", wire.PROTOCOL, 250, 0), "unknown kind"),
        (wire.HEAD.pack(b"OB", wire.PROTOCOL, 0, 2**31), "not all there"),
        (bytes(wire.FRAME_BYTES + 1), "is the most"),
        (wire.encode(wire.Chunk(0, b"x" * (wire.CHUNK_BYTES + 1))), "between 1 and"),
        (pong(9) + b"not JSON!", "no JSON"),
        (pong(10000) + b"[" * 10000, "no JSON"),
        (pong(14) + b'{"number":NaN}', "no JSON"),
        (pong(15) + b'{"number":true}', "number of a Pong"),
        (
            pong(22) + b'{"number":1e999999999}',
            "number of a Pong",
        ),
        (pong(17) + b'{"number":0,"x":}', "no JSON"),
        (pong(18) + b'{"number":0,"x":1}', "no others"),
    ],
)
def test_what_is_no_frame_is_refused(frame: bytes, said: str) -> None:
    with pytest.raises(wire.WireError, match=said):
        wire.decode(frame)


def changed(rng: random.Random, frame: bytes) -> bytes:
    """A frame that something happened to."""
    data = bytearray(frame)
    for _ in range(rng.randrange(1, 4)):
        kind = rng.randrange(5)
        at = rng.randrange(len(data) + 1)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at:at] = rng.randbytes(rng.randrange(8))
        elif kind == 2:
            del data[at : at + rng.randrange(8)]
        elif kind == 3:
            data[at:at] = rng.choice((b"{", b"[", b'"', b"\\u0000", b"1e400", b"-", b"null", b'{"a":'))
        else:
            data[at : at + 4] = rng.randbytes(4)
    return bytes(data)


def fuzz(many: int, seed: int) -> int:
    """How many of so many changed frames were refused; any other error than a refusal gets out."""
    rng, frames, refused = random.Random(seed), [wire.encode(record) for record in RECORDS], 0
    for _ in range(many):
        try:
            wire.decode(changed(rng, rng.choice(frames)))
        except wire.WireError:
            refused += 1
    return refused


def test_five_thousand_changed_frames() -> None:
    assert 2500 < fuzz(5000, 0) < 5000


@pytest.mark.soak
def test_a_hundred_thousand_changed_frames() -> None:
    refused = fuzz(100_000, 1)
    print(f"{refused} of 100,000 changed frames refused")
    assert refused > 50_000


@given(st.binary(max_size=200))
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(wire.WireError):
        wire.decode(noise)


def test_a_buffer_in_pieces() -> None:
    data = random.Random(0).randbytes(2 * wire.CHUNK_BYTES + 17)
    incoming, back = wire.Incoming(len(data)), b""
    for piece in wire.chunks(memoryview(data)):
        back += incoming.add(wire.decode(wire.encode(piece)))
    assert back == data
    assert incoming.problem(wire.End(wire.digest(data))) is None
    assert "digest" in str(incoming.problem(wire.End(wire.digest(b"other"))))


def test_pieces_that_do_not_fit_are_refused() -> None:
    for size in (0, 9, 11, 1 << 52):
        with pytest.raises(wire.WireError, match="instead of 10"):
            Arriving(wire.Prime(size), 10)
    incoming = wire.Incoming(10)
    incoming.add(wire.Chunk(0, b"12345"))
    for offset, data in ((0, b"1"), (6, b"1"), (5, b"123456")):
        with pytest.raises(wire.WireError, match="of which 5"):
            incoming.add(wire.Chunk(offset, data))
    assert incoming.problem(wire.End("")) == "5 of 10 bytes came"


@pytest.mark.parametrize("stage", [None, *STAGES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_vectors_travel_as_their_stage_says(stage: str | None, dtype: torch.dtype) -> None:
    made = None if stage is None else STAGES[stage]()
    layout = Layout(("a", "b"), ("n",), made, 5000, dtype)
    generator = torch.Generator().manual_seed(0)
    sent = {name: torch.randn(5000, dtype=dtype, generator=generator) for name in "ab"}
    buffer = layout.pack(sent | {"n": torch.tensor(2.5)}, lambda place: keys.fold(7, place))
    each = 5000 * dtype.itemsize if made is None else made.bytes(5000)
    assert len(buffer) == layout.size == 2 * each + 8
    got = layout.unpack(buffer, torch.device("cpu"))
    for place, name in enumerate("ab"):
        want = sent[name] if made is None else made.decode(made.encode(sent[name], keys.fold(7, place))).to(dtype)
        assert torch.equal(got[name], want)
    assert got["n"] == 2.5
    with pytest.raises(ValueError, match="bytes instead of"):
        layout.unpack(buffer[:-1], torch.device("cpu"))


@pytest.mark.soak
def test_a_gigabyte_passes_in_bounded_memory(tmp_path: Path) -> None:
    """From a file over the wire's frames into a file, with the digest of the whole."""
    size = 1 << 30
    with (tmp_path / "sent").open("w+b") as file:
        file.truncate(size)
        file.seek(size // 2)
        file.write(random.Random(0).randbytes(1 << 20))
        file.flush()
        sent = mmap.mmap(file.fileno(), size)
    opening = wire.Update("run", 1, 0, 0, 1, size)
    tracemalloc.start()
    arriving = Arriving(opening, size, tmp_path / "got.part")
    for piece in wire.chunks(memoryview(sent)):
        arriving.add(wire.decode(wire.encode(piece)))
    assert arriving.problem(wire.End(wire.digest(sent))) is None
    arriving.store().rename(tmp_path / "kept")
    arriving.discard()
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    print(f"1 GiB with {most / 2**20:.1f} MiB of Python's memory at most")
    assert most < 8 << 20
    assert (tmp_path / "kept").stat().st_size == size
