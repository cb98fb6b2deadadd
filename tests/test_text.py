"""Texts by speaker and by folder, windows of a stream of tokens, people held out."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offbeat import Experiment, Task, run
from offbeat.errors import ConfigError, OffbeatError
from offbeat.numerics.windows import Stream, Windows, windows
from offbeat.tasks import text
from offbeat.tasks.looks import holding_out
from offbeat.tasks.make import build_task
from offbeat.tasks.sequence_models import gpt
from test_data import root, write_har  # noqa: F401

PLAY = """THE PLAY

by Somebody

Persons Represented.

ACT I.

SCENE I. A street.

[Enter ANN and BOB.]

ANN.
Good morrow, Bob.
Bob.

BOB.
Who calls? [Turns
round.] Nobody.

[Exit.]

Still nobody.

SCENE II.

Bob stands alone.

FIRST GENTLEMAN.
He is alone.
ANN.
Not any more.
"""
TINY = {"name": "gpt", "width": 8, "layers": 1, "heads": 2}


def write_texts(folder: Path, many: int = 6, length: int = 300) -> None:
    """Owners with letters of their own, in lines of JSON."""
    folder.mkdir(parents=True)
    lines = [{"name": f"folder{i}", "text": ("abcdefgh"[i] + "xyz ") * (length // 5)} for i in range(many)]
    with lzma.open(folder / "linux-doc.jsonl.xz", "wt") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))


# ---- windows ------------------------------------------------------------------------------------
def test_windows_are_slices_of_a_mapped_file_and_nothing_is_copied(tmp_path: Path) -> None:
    tokens = np.arange(200, dtype=np.uint8)
    tokens.tofile(tmp_path / "tokens")
    for mode in ("r", "c"):
        mapped = np.memmap(tmp_path / "tokens", np.uint8, mode)
        x, y = windows(mapped, 8)
        assert x.shape == (24, 8)
        rows = torch.tensor([[0, 23], [5, 5]])
        assert torch.equal(x[rows][1, 0], torch.arange(40, 48))
        assert torch.equal(y[rows], x[rows] + 1)
    held = next(iter(x.stream.copies.values()))
    assert held.data_ptr() == mapped.ctypes.data  # the file's own memory
    assert x.to("cpu").stream.on(torch.device("cpu")).data_ptr() == held.data_ptr()
    _, last = windows(mapped, 8, stride=1, predict="last")
    assert last.shape == (192,)
    assert torch.equal(last[:3], torch.tensor([8, 9, 10]))


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.uint32, np.uint64, np.int32])
def test_windows_of_any_whole_numbers(kind: Any) -> None:
    x, _ = windows(np.arange(9).astype(kind), 3)
    assert torch.equal(x[:], torch.tensor([[0, 1, 2], [3, 4, 5]]))
    assert (x.stream.least, x.stream.most) == (0, 8)


@pytest.mark.parametrize(
    ("tokens", "options", "sentence"),
    [
        (np.full(9, 2**63, np.uint64), {"length": 1}, r"uint64 must be below 2\*\*63"),
        (np.zeros((2, 3), np.int64), {"length": 1}, r"one line of whole numbers, and not empty; it is \[2, 3\]"),
        (np.zeros(9), {"length": 1}, "one line of whole numbers"),
        (np.zeros(0, np.int64), {"length": 1}, "not empty"),
        (np.arange(9), {"length": 0}, "windows of length 0 over 9 tokens; give at least 1"),
        (np.arange(9), {"length": 9}, "windows of length 9 over 9 tokens"),
        (np.arange(9), {"length": 3, "starts": [0, 6]}, r"from place 6 on leaves 9 tokens; give 0\.\.5"),
        (np.arange(9), {"length": 3, "predict": "none"}, "predict = 'none'; it is 'all' or 'last'"),
        ("text", {"length": 3}, "must be one array of whole numbers"),
    ],
)
def test_streams_that_make_no_windows(tokens: Any, options: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        windows(tokens, **options)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("mode", ["wave", "reference"])
def test_windows_train_as_the_tensors_do_that_they_stand_for(mode: Any) -> None:
    x, y = windows(np.random.default_rng(0).integers(0, 5, 400, dtype=np.uint8), 6)
    shards = [range(i, len(x), 4) for i in range(4)]

    def trained(data: Any) -> Any:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = gpt((6,), 5, width=8, layers=1, heads=2)
        from offbeat.tasks.losses import sequence_cross_entropy

        task = Task(model, sequence_cross_entropy, data, shards, batch_size=3)
        return run(
            Experiment(method={"name": "fedbuff", "buffer_size": 2, "local_steps": 3}, task=task, mode=mode,
                       until={"commits": 3}, device="cpu", precision="float64")
        )  # fmt: skip

    ours, theirs = trained((x, y)), trained((x[:], y[:]))
    assert ours.loss_final == theirs.loss_final
    assert ours.accuracy_final == theirs.accuracy_final is not None
    assert all(torch.equal(ours.model[name], theirs.model[name]) for name in ours.model)


@pytest.mark.parametrize("stride", [1, 3, 6])
@pytest.mark.parametrize("deal", ["parts", "all over"])
def test_nobody_trains_on_a_token_that_is_held_out(stride: int, deal: str) -> None:
    x, y = windows(np.random.default_rng(0).integers(0, 5, 400, dtype=np.uint8), 6, stride=stride, predict="last")
    many = len(x) // 4
    shards = [range(i, len(x), 4) if deal == "all over" else range(i * many, i * many + many) for i in range(4)]
    task = Task(torch.nn.Linear(6, 5), torch.nn.CrossEntropyLoss(), (x, y), shards)
    held = holding_out(task, 0.25, 0)
    starts = x.start.numpy()
    tokens = [{t for rows in sets for row in rows for t in range(starts[row], starts[row] + 6)} for sets in
              (held.shards, held.held_out or [])]  # fmt: skip
    assert not tokens[0] & tokens[1]
    assert [len(rows) for rows in held.held_out or []] == [round(0.25 * len(shard)) for shard in shards]
    lost = len(x) // 4 * 4 - sum(map(len, (*held.shards, *(held.held_out or []))))
    assert lost <= (6 // stride) * (1 if deal == "all over" else 4) * 2
    for kept, out in zip(held.shards, held.held_out or [], strict=True):
        assert max(kept) < min(out)  # the end of each text judges


# ---- owners -------------------------------------------------------------------------------------
def test_speeches() -> None:
    assert text.speeches(PLAY) == [
        ("ANN", "Good morrow, Bob.\nBob.\n"),
        ("BOB", "Who calls?  Nobody.\nStill nobody.\n"),
        ("FIRST GENTLEMAN", "He is alone.\n"),
        ("ANN", "Not any more.\n"),
    ]
    owners = text.by_speaker([text.Text("play.txt", PLAY), text.Text("poem", "Roses\n\nare red.\n")])
    assert list(owners) == ["play/ANN", "play/BOB", "play/FIRST GENTLEMAN", "poem"]
    assert owners["play/ANN"] == "Good morrow, Bob.\nBob.\nNot any more.\n"
    assert owners["poem"] == "Roses\nare red.\n"


def test_licences_around_a_text_are_cut() -> None:
    assert text.speeches("Free\n*** START OF IT ***\nRoses\n*** END OF IT ***\nNot free") == [("", "Roses\n")]


def test_a_folder_of_text_files_is_by_folder(tmp_path: Path) -> None:
    for name, said in {
        "a/one.txt": "1",
        "a/two.rst": "2",
        "b/c/three.md": "3",
        "four.txt": "4",
        "a/no.bin": "5",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(said)
    assert text.by_folder(text.read_texts("linux-doc", str(tmp_path))) == {"a": "12", "b/c": "3", "four.txt": "4"}


def test_windows_cross_no_owner_and_the_end_of_each_text_is_for_testing() -> None:
    owned = text.owned({"b": "b" * 40, "a": "a" * 60, "short": "c"}, "character", 10, "shakespeare")
    assert (owned.names, owned.vocabulary, owned.size.tolist()) == (["a", "b"], ["a", "b"], [60, 40])
    cut = text.cut(owned, 5, 5, 0, 0.25, 100)
    assert cut.starts.tolist() == [*range(0, 40, 5), *range(60, 85, 5)]
    assert cut.owners.tolist() == [0] * 8 + [1] * 5
    assert cut.test.tolist() == [45, 50, 90]
    x, y = windows(Stream(owned.tokens), 5, np.concatenate([cut.starts, cut.test]))
    assert all(len(set(a.tolist() + b.tolist())) == 1 for a, b in zip(x[:], y[:], strict=True))
    away = text.cut(owned, 5, 5, 1, 0.25, 4)
    assert set(away.owners.tolist()) == {0}
    assert away.test.tolist() == [60, 65, 75, 85]


# ---- tasks --------------------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_text_task_runs_and_repeats(root: Path) -> None:  # noqa: F811
    write_texts(root / "text")
    given = Experiment(
        method={"name": "dlsgd-hetero", "n": 2, "local_steps": 2, "client_lr": 0.5},
        task={"name": "linux-doc", "model": TINY, "context": 8, "minimum": 100, "batch_size": 4},
        until={"commits": 4},
        device="cpu",
    )
    one, two = run(given), run(given)
    assert one.accuracy_final == two.accuracy_final is not None
    assert all(torch.equal(one.model[name], two.model[name]) for name in one.model)
    task = build_task("linux-doc", {"model": TINY, "context": 8, "minimum": 100}, 0)
    assert task.clients == 6
    assert isinstance(task.data[0], Windows)
    assert task.model.table.num_embeddings == 256


def test_shakespeare_by_role_with_the_next_character(root: Path) -> None:  # noqa: F811
    folder = root / "text/shakespeare"
    folder.mkdir(parents=True)
    (folder / "play.txt").write_text(PLAY.replace("Not any more.", "Not any more. " * 20))
    (folder / "poem.txt").write_text("Roses are red.\n" * 20)
    small = {"name": "char-lstm", "width": 2, "hidden": 3}
    task = build_task("shakespeare", {"model": small, "context": 10, "minimum": 200}, 0)
    x, y = task.data
    assert task.clients == 2  # Ann and the poem
    assert task.problems() == []
    assert task.has_accuracy
    assert torch.equal(y[:5], x[10:15][:, 0])  # at every place, the character that follows
    held = build_task("shakespeare", {"model": small, "context": 10, "minimum": 200, "held_out": 1}, 0)
    assert held.clients == 1
    assert len(held.test[0]) == 29


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"minimum": 10**6}, "no text has 1,000,000 bytes, the longest has 300; take a smaller minimum"),
        ({"context": 0}, "context = 0; give at least 1"),
        ({"context": 299, "minimum": 1}, "texts are too short for windows of 299 tokens"),
        ({"test_share": 1.0}, "test_share = 1.0; give a number between 0 and 1"),
        ({"minimum": 1, "held_out": 6}, "held_out = 6 of 6 owners; give fewer"),
        ({"folder": "nowhere"}, "'linux-doc' was not found"),
        ({"model": "mlp", "minimum": 1}, "model 'mlp' does not take 64 tokens: .* such as 'gpt'"),
    ],
)
def test_text_tasks_that_cannot_be(root: Path, options: dict[str, Any], sentence: str) -> None:  # noqa: F811
    write_texts(root / "text")
    with pytest.raises(OffbeatError, match=sentence):
        build_task("linux-doc", {"model": TINY, **options}, 0)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [(b"{", "lines of JSON"), (b'{"name": "a"}\n', "line 1 is no table"), (b"", "it has no text"), (b"\xff\n", "JSON")],
)
def test_damaged_lines(tmp_path: Path, content: bytes, sentence: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    with pytest.raises(OffbeatError, match=sentence):
        text.json_lines(path)


def test_har_by_person_with_people_held_out(root: Path) -> None:  # noqa: F811
    arrays = write_har(root / "uci-har")
    task = build_task("har", {"held_out": 1}, 0)
    assert task.clients == 2
    assert len(task.test[0]) == int((arrays["subject"] == 4).sum())
    assert sorted(len(shard) for shard in task.shards) == [12, 13]
    with pytest.raises(ConfigError, match="held_out = 3 of 3 owners"):
        build_task("har", {"held_out": 3}, 0)
    with pytest.raises(ConfigError, match="held_out"):
        build_task("digits", {"held_out": 3}, 0)
