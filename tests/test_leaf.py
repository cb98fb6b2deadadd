"""Sets in LEAF's layout: what is read, who gets it, and what a bad file is told."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbeat.errors import ConfigError, OffbeatError
from offbeat.experiments.experiment import Experiment
from offbeat.experiments.running import run
from offbeat.tasks import files
from offbeat.tasks.data import leaf
from offbeat.tasks.leaf import find_users, read_users
from offbeat.tasks.make import build_task
from offbeat.tasks.splits import natural

Samples = tuple[Any, Any]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory that OFFBEAT_DATA names; the other roots are empty too."""
    monkeypatch.setenv("OFFBEAT_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(files, "DEBIAN", tmp_path / "debian")
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def table(users: Mapping[str, Samples]) -> dict[str, Any]:
    return {
        "users": list(users),
        "num_samples": [len(y) for _, y in users.values()],
        "hierarchies": [],
        "user_data": {user: {"x": x, "y": y} for user, (x, y) in users.items()},
    }


def write(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = (content if isinstance(content, str) else json.dumps(content)).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def drawn(users: Sequence[str], length: int = 16, least: int = 2, classes: int = 3) -> dict[str, Samples]:
    """A user's samples are of two digits, so that float32 is near; the number of them rises along the users."""
    rng = np.random.default_rng(len(users))
    return {
        user: (rng.random((n, length)).round(2).tolist(), [*rng.integers(classes, size=n - 1).tolist(), classes - 1])
        for n, user in enumerate(users, least)
    }


def write_set(folder: Path, length: int = 16) -> tuple[dict[str, Samples], dict[str, Samples]]:
    """Five users in two training files, out of order; two of them and a stranger in the test."""
    train, test = drawn(["d", "b", "e", "a", "c"], length), drawn(["b", "zz", "c"], length)
    write(folder / "train/all_data_1.json", table({user: train[user] for user in ("e", "a", "c")}))
    write(folder / "train/all_data_0.json", table({user: train[user] for user in ("d", "b")}))
    write(folder / "test/all_data_0.json", table(test))
    return train, test


# ---- reading ------------------------------------------------------------------------------------
def test_all_files_are_read_and_owners_are_the_users_by_name(root: Path) -> None:
    train, test = write_set(root / "leaf")
    data = leaf()
    assert (data.x.shape, data.x_test.shape) == ((20, 1, 4, 4), (9, 1, 4, 4))
    assert (data.x.dtype, data.y.dtype, data.classes) == (np.float32, np.int64, 3)
    assert data.owners is not None
    for number, user in enumerate("abcde"):
        mine = data.owners == number
        np.testing.assert_array_equal(data.x[mine].reshape(-1, 16), np.array(train[user][0], np.float32))
        assert data.y[mine].tolist() == train[user][1]
    np.testing.assert_array_equal(
        data.x_test.reshape(-1, 16), np.concatenate([x for x, _ in test.values()], dtype="f4")
    )
    assert data.y_test.tolist() == [label for _, y in test.values() for label in y]
    assert find_users("leaf")[0] == [root / "leaf/train/all_data_0.json", root / "leaf/train/all_data_1.json"]


@pytest.mark.parametrize(
    ("length", "shape"), [(784, (1, 28, 28)), (9, (1, 3, 3)), (1, (1, 1, 1)), (60, (60,)), (2, (2,)), (783, (783,))]
)
def test_square_lengths_are_images(root: Path, length: int, shape: tuple[int, ...]) -> None:
    write_set(root / "leaf", length)
    data = leaf()
    assert (data.x.shape[1:], data.x_test.shape[1:]) == (shape, shape)


def test_a_user_in_two_files_and_gzipped_ones(root: Path) -> None:
    train, _ = write_set(root / "leaf")
    more = {"b": ([[0.5] * 16], [2.0]), "d": ([[1] * 16], [0])}  # whole numbers may be written either way
    write(root / "leaf/train/more.json.gz", table(more))
    write(root / "leaf/train/all_data_0.json.gz", "the same, but the plain one counts")
    paths, _ = find_users("leaf")
    assert [path.name for path in paths] == ["all_data_0.json", "all_data_1.json", "more.json.gz"]
    users = read_users(paths)
    assert users.names == list("abcde")
    assert users.y[users.owners == 1].tolist() == [*train["b"][1], 2]
    np.testing.assert_array_equal(users.x[-2:], [[0.5] * 16, [1] * 16])


def test_the_number_of_classes_is_of_both_parts_or_given(root: Path) -> None:
    write_set(root / "leaf")
    write(root / "leaf/test/more.json", table({"f": ([[0.0] * 16], [6])}))
    assert leaf().classes == 7
    assert leaf(classes=62).classes == 62
    with pytest.raises(
        OffbeatError, match=r"more\.json is damaged: user 'f' has label 6 at sample 0, .* from 0 to 5\."
    ):
        leaf(classes=6)
    with pytest.raises(ConfigError, match="classes is 0; give a whole number of at least 1, or none"):
        leaf(classes=0)


def test_the_folder_is_looked_for_in_every_root_or_anywhere(root: Path, tmp_path: Path) -> None:
    write_set(tmp_path / "cache/offbeat/femnist")
    assert len(leaf("femnist").x) == 20
    write_set(tmp_path / "elsewhere")
    assert len(leaf(str(tmp_path / "elsewhere")).x) == 20


# ---- clients ------------------------------------------------------------------------------------
def shards(**options: Any) -> list[list[int]]:
    return [list(shard) for shard in build_task("leaf", {"model": "logistic"} | options, 0).shards]


def test_each_user_is_a_client_unless_told(root: Path) -> None:
    train, _ = write_set(root / "leaf")
    sizes = [len(train[user][1]) for user in "abcde"]
    assert [len(shard) for shard in shards()] == sizes
    assert [len(shard) for shard in shards(clients=None)] == sizes
    assert [len(shard) for shard in shards(clients=2)] == sizes[:2]
    assert len(shards(split="iid")) == 5
    assert len(shards(split="iid", clients=20)) == 20
    with pytest.raises(ConfigError, match="clients is 6, but the data has 5 owners; ask for 5 at most"):
        shards(clients=6)


def test_users_are_grouped_onto_fewer_clients(root: Path) -> None:
    write_set(root / "leaf")
    owners = leaf().owners
    assert owners is not None
    made = shards(clients=2, split={"name": "natural", "fewer": "grouped"})
    held = [set(owners[shard]) for shard in made]
    assert sorted(map(len, held)) == [2, 3]
    assert not held[0] & held[1]
    assert sorted(made[0] + made[1]) == list(range(20))


OWNERS = np.random.default_rng(0).integers(0, 40, 1000) * 3
LABELS = np.zeros(1000, np.int64)


@pytest.mark.parametrize("fewer", ["first", "drawn", "grouped"])
def test_as_many_clients_as_owners_are_the_owners(fewer: Any) -> None:
    made = natural(LABELS, 40, 5, OWNERS, fewer)
    assert [OWNERS[part].tolist() for part in made] == [[3 * i] * int((3 * i == OWNERS).sum()) for i in range(40)]


def test_drawn_owners_are_whole_and_of_the_seed() -> None:
    chosen = []
    for seed in (0, 0, 1):
        made = natural(LABELS, 7, seed, OWNERS, "drawn")
        who = [int(OWNERS[part[0]]) for part in made]
        assert all(np.array_equal(part, np.flatnonzero(w == OWNERS)) for part, w in zip(made, who, strict=True))
        assert who == sorted(set(who))
        chosen.append(who)
    assert chosen[0] == chosen[1] != chosen[2]
    assert chosen[0] != list(range(0, 21, 3))


@pytest.mark.parametrize("clients", [1, 7, 32, 39])
def test_grouped_owners_are_whole_and_all_there(clients: int) -> None:
    one, same, other = (natural(LABELS, clients, seed, OWNERS, "grouped") for seed in (3, 3, 4))
    held = [set(OWNERS[part]) for part in one]
    assert max(map(len, held)) - min(map(len, held)) <= 1
    assert sum(map(len, held)) == 40
    assert np.array_equal(np.sort(np.concatenate(one)), np.arange(1000))
    assert all(np.array_equal(a, b) for a, b in zip(one, same, strict=True))
    assert clients == 1 or [set(OWNERS[part]) for part in other] != held


def test_an_unknown_way_to_have_fewer_clients(root: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"unknown fewer 'group': did you mean 'grouped'\? Known: drawn, first, group"
    ):
        natural(LABELS, 3, 0, OWNERS, "group")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="split 'natural': fewer = 'group'; it must be one of 'first', 'drawn'"):
        shards(split={"name": "natural", "fewer": "group"})


# ---- runs ---------------------------------------------------------------------------------------
def test_a_run_by_users(root: Path, tmp_path: Path) -> None:
    write_set(root / "femnist")
    experiment = Experiment(
        method={"name": "local-sgd", "local_steps": 2, "n": 2},
        task={"name": "leaf", "folder": "femnist", "classes": 5, "batch_size": 2},
        device="cpu",
        until={"commits": 2},
    )
    outcome = run(experiment, tmp_path / "out")
    assert (outcome.result["task"], outcome.result["commits"]) == ("leaf", 2)
    assert outcome.model["9.bias"].shape == (5,)
    written = (tmp_path / "out/config.toml").read_text()
    assert 'clients = "none"' in written
    assert 'model = "leaf-femnist-cnn"' in written


def test_options_of_the_task(root: Path) -> None:
    for options, sentence in (
        ({"scale": "unit"}, "unknown option of task 'leaf' 'scale'"),
        ({"clients": 0}, "task 'leaf': clients = 0; it must be at least 1"),
        ({"classes": "many"}, "task 'leaf': classes = 'many'; it must be a whole number or none"),
        ({"folder": 3}, "task 'leaf': folder = 3; it must be a text"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            build_task("leaf", options, 0)
    with pytest.raises(ConfigError, match="clients is None; give a whole number of at least 1"):
        build_task("digits", {"clients": None}, 0)


# ---- sentences ----------------------------------------------------------------------------------
def test_missing_folders_are_named(root: Path, tmp_path: Path) -> None:
    with pytest.raises(OffbeatError) as caught:
        leaf()
    message = str(caught.value)
    assert "data set 'leaf' was not found. Looked for train/*.json and test/*.json (plain or .gz) in\n" in message
    assert f"{root / 'leaf'}: no such directory\n  {tmp_path / 'cache/offbeat/leaf'}: no such directory\n" in message
    assert "Get it from the LEAF repository" in message
    assert "put it in a folder 'leaf', and set OFFBEAT_DATA to the directory that holds this folder." in message
    write_set(root / "leaf")
    (root / "leaf/test/all_data_0.json").unlink()
    with pytest.raises(OffbeatError, match=r"leaf: there, but lacks test/\*\.json\n"):
        leaf()
    for path in (root / "leaf/train").iterdir():
        path.rename(path.with_suffix(".txt"))
    with pytest.raises(OffbeatError, match=r"leaf: there, but lacks train/\*\.json, test/\*\.json\n"):
        leaf()


GOOD = table({"a": ([[0, 1], [0.5, 0.5]], [0, 1]), "b": ([[1, 0]], [2])})


def changed(**changes: Any) -> dict[str, Any]:
    return GOOD | changes


def of_a(x: Any, y: Any = (0, 1), said: int = 2) -> dict[str, Any]:
    """The good table, with other samples of user a."""
    return changed(num_samples=[said, 1], user_data=GOOD["user_data"] | {"a": {"x": x, "y": list(y)}})


ROWS = GOOD["user_data"]["a"]["x"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "it is no JSON (Expecting value: line 1 column 1 (char 0))"),
        ('{"users": ["a"', "it is no JSON (Expecting ',' delimiter: line 1 column 15 (char 14))"),
        ("[" * 200_000, "it is no JSON ("),
        ([], "it should hold a table with users, num_samples, user_data"),
        ({"users": [], "num_samples": {}}, "it has no 'user_data'; its 'num_samples' is no list"),
        (changed(user_data=[]), "its 'user_data' is no table"),
        ({}, "it has no 'users'; it has no 'num_samples'; it has no 'user_data'"),
        (changed(users=[], num_samples=[]), "it has no users"),
        (changed(users=["a", 3]), "user 3 is no text"),
        (changed(num_samples=[2]), "it has 2 users, but 1 num_samples"),
        (changed(users=["a", "a"]), "user 'a' is there 2 times; user 'b' has user_data, but is not among users"),
        (changed(users=["a", "c"]), "user 'c' has no user_data; user 'b' has user_data, but is not among users"),
        (
            changed(num_samples=[3, 2]),
            "user 'a' has 2 samples in x and 2 labels in y, but num_samples says 3; "
            "user 'b' has 1 samples in x and 1 labels in y, but num_samples says 2",
        ),
        (of_a(ROWS, [0]), "user 'a' has 2 samples in x and 1 labels in y, but num_samples says 2"),
        (of_a([], [], 0), "user 'a' has no samples; leave it out"),
        (changed(user_data=GOOD["user_data"] | {"a": {"x": ROWS}}), "user 'a' has no lists 'x' and 'y' in user_data"),
        (changed(user_data=GOOD["user_data"] | {"a": 3}), "user 'a' has no lists 'x' and 'y' in user_data"),
        (of_a([[0, 1], [0, 1, 2]]), "user 'a' has a sample 1 of 3 numbers, but sample 0 has 2"),
        (of_a([[0, 1, 2]] * 2), "user 'b' has samples of 2 numbers, but user 'a' of 3 numbers"),
        (of_a([[0, 1], []]), "user 'a' has a sample 1 that is no list of numbers"),
        (of_a([3, 4]), "user 'a' has a sample 0 that is no list of numbers"),
        (of_a(["text", "more"]), "user 'a' has a sample 0 that is no list of numbers"),
        (of_a([[0, 1], [0, "1"]]), "user 'a' has a sample 1 that is no list of numbers"),
        (of_a([[0, True], [0, 1]]), "user 'a' has a sample 0 that is no list of numbers"),
        (of_a([[0, None], [0, 1]]), "user 'a' has a sample 0 that is no list of numbers"),
        (of_a([[[0], [1]], [[0], [1]]]), "user 'a' has a sample 0 that is no list of numbers"),
        (of_a([[0, 1], [0, float("nan")]]), "user 'a' has NaN, infinity or a number too large for float32 in sample 1"),
        (of_a([[0, float("inf")], [0, 1]]), "user 'a' has NaN, infinity or a number too large for float32 in sample 0"),
        (of_a([[0, 1e39], [0, 1]]), "user 'a' has NaN, infinity or a number too large for float32 in sample 0"),
        (of_a([[0, 10**400], [0, 1]]), "user 'a' has NaN, infinity or a number too large for float32 in sample 0"),
        (of_a(ROWS, [0, -1]), "user 'a' has label -1 at sample 1, but labels are whole numbers from 0 to 2147483647"),
        (of_a(ROWS, [0.5, 0]), "user 'a' has label 0.5 at sample 0, but labels are whole numbers from 0 to"),
        (of_a(ROWS, ["1", 0]), "user 'a' has label '1' at sample 0, but labels are whole numbers from 0 to"),
        (of_a(ROWS, [True, 0]), "user 'a' has label True at sample 0, but labels are whole numbers from 0 to"),
        (of_a(ROWS, [0, [1]]), "user 'a' has label [1] at sample 1, but labels are whole numbers from 0 to"),
        (of_a(ROWS, [float("nan"), 0]), "user 'a' has label nan at sample 0, but labels are whole numbers from 0 to"),
        (of_a(ROWS, [float("inf"), 0]), "user 'a' has label inf at sample 0, but labels are whole numbers from 0 to"),
        (of_a(ROWS, [1e300, 0]), "user 'a' has label 1e+300 at sample 0, but labels are whole numbers from 0 to"),
    ],
)
@pytest.mark.parametrize("part", ["train", "test"])
def test_bad_files_are_named_with_user_and_numbers(root: Path, part: str, content: Any, reason: str) -> None:
    for good in ("train", "test"):
        write(root / f"leaf/{good}/one.json", GOOD)
    path = write(root / f"leaf/{part}/two.json", content)
    with pytest.raises(OffbeatError) as caught:
        leaf()
    assert str(caught.value).startswith(f"{path} is damaged: {reason}")
    assert str(caught.value).endswith(". Replace it with a fresh copy.")


def test_many_problems_of_a_file_are_counted(root: Path) -> None:
    write(root / "leaf/test/one.json", GOOD)
    users = {f"u{i}": ([[0, 1]], [-i]) for i in range(9)}
    write(root / "leaf/train/one.json", table(users))
    with pytest.raises(OffbeatError, match=r"user 'u1' has label -1 .*; user 'u5' has label -5 .*; and 3 more\. Repl"):
        leaf()


def test_lengths_of_all_files_agree(root: Path) -> None:
    write(root / "leaf/train/one.json", GOOD)
    write(root / "leaf/test/one.json", table({"a": ([[0, 1, 2]], [0])}))
    with pytest.raises(OffbeatError, match=r"training samples of shape \(2,\) and test samples of shape \(3,\)"):
        leaf()
    path = write(root / "leaf/train/two.json", table({"c": ([[0, 1, 2]], [0])}))
    with pytest.raises(OffbeatError) as caught:
        leaf()
    assert f"{path} is damaged: its samples are 3 numbers long, those of one.json are 2 long" in str(caught.value)


def test_a_file_that_cannot_be_unpacked(root: Path) -> None:
    write(root / "leaf/test/one.json", GOOD)
    write(root / "leaf/train/one.json", GOOD).rename(root / "leaf/train/one.json.gz")
    with pytest.raises(OffbeatError, match=r"one\.json\.gz is damaged: it cannot be read"):
        leaf()
    (root / "leaf/train/one.json").write_bytes(b'{"users": ["\xff"]}')
    with pytest.raises(OffbeatError, match=r"one\.json is damaged: it is no JSON"):
        leaf()
