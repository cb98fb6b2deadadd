"""Run directories: damage is noticed, strangers' files are safe, one process at a time, a full disk loses nothing."""

from __future__ import annotations

import errno
import gc
import json
import os
import random
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from command_line import exit_code
from digits_runs import FEDBUFF, experiment
from offbeat import OffbeatError, compare, replay, resume, run
from offbeat.cli import app
from offbeat.config import toml
from offbeat.errors import ReplayDiffers, StorageError
from offbeat.runs import columns, disk, store
from offbeat.runs.folder import file_name
from offbeat.runs.lock import Lock
from offbeat.runs.manifest import read_manifest
from offbeat.runs.rerun import Digest
from offbeat.runs.stored import read_trace
from offbeat.schedule.trace import last_begins
from offbeat.theory.measure import measure
from stopped_runs import InterruptAt, KillAt, figures, interrupted, killed, same_bits

OFTEN = experiment(until={"commits": 12}, checkpoint_seconds=1e-6, evaluate={"every_commits": 3})


def files(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


# ---- damage -------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A finished run, a killed one, and another run of each kind to take files from."""
    place = tmp_path_factory.mktemp("runs")
    other = replace(OFTEN, method=FEDBUFF | {"client_lr": 0.3})
    run(OFTEN, place / "finished")
    run(other, place / "finished-other")
    killed(lambda: run(OFTEN, place / "killed", KillAt(9)))
    killed(lambda: run(other, place / "killed-other", KillAt(9)))
    return {path.name: path for path in place.iterdir()}


STRAIGHT: dict[str, Any] = {}


def straight() -> Any:
    if not STRAIGHT:
        STRAIGHT["outcome"] = run(OFTEN)
    return STRAIGHT["outcome"]


Edit = Callable[[Path, Path, random.Random], None]


def flip(file: Path, other: Path, rng: random.Random) -> None:
    content = bytearray(file.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    file.write_bytes(content)


def cut(file: Path, other: Path, rng: random.Random) -> None:
    os.truncate(file, rng.randrange(file.stat().st_size))


def swap(file: Path, other: Path, rng: random.Random) -> None:
    if other.exists():
        shutil.copyfile(other, file)
    else:
        file.unlink()


def edit(file: Path, other: Path, rng: random.Random) -> None:
    """A change that leaves a text readable: another digit; of a binary file, two places exchanged."""
    content = bytearray(file.read_bytes())
    digits = [i for i, byte in enumerate(content) if chr(byte).isdigit()]
    if file.suffix in (".toml", ".json") and digits:
        place = rng.choice(digits)
        content[place] = ord(str((int(chr(content[place])) + 1 + rng.randrange(8)) % 10))
    else:
        a, b = rng.randrange(len(content)), rng.randrange(len(content))
        content[a], content[b] = content[b], content[a]
    file.write_bytes(content)


EDITS: tuple[Edit, ...] = (flip, cut, swap, edit)


def damaged(source: Path, other: Path, target: Path, change: Edit, number: int) -> str:
    """A copy of a run directory with one file changed; the name of the file."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    rng = random.Random(number)
    names = [name for name in files(source) if name != "offbeat.lock"]
    name = names[number % len(names)]
    change(target / name, other / name, rng)
    return name


def outcome_of(call: Callable[[], Any]) -> Any:
    """What a call comes to: its outcome, or the sentence with which it refuses. A traceback is neither."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return call()
        except OffbeatError as error:
            return str(error) or "no sentence"


def limits_alone_differ(one: Path, other: Path) -> bool:
    """Whether two configs are the same but for what may be edited: a replay goes by what the run had."""
    configs = [toml.parse(file.read_text()) for file in (one, other)]
    for key in ("until", "targets", "checkpoint_seconds"):
        for config in configs:
            config.pop(key, None)
    return configs[0] == configs[1]


def check_damage(runs: dict[str, Path], kind: str, change: Edit, number: int, place: Path) -> str:
    """Resume and replay a damaged copy: refused, or the same as if nothing had been. Says which."""
    source, other = runs[kind], runs[f"{kind}-other"]
    name = damaged(source, other, place, change, number)
    same = (place / name).exists() and (place / name).read_bytes() == (source / name).read_bytes()
    if kind == "finished":
        again = outcome_of(lambda: replay(place))
        refused = isinstance(again, str)
        allowed = refused or same or (name == "config.toml" and limits_alone_differ(place / name, source / name))
        assert allowed, f"replay took a {change.__name__} of {name}"
    resumed = outcome_of(lambda: resume(place))
    if isinstance(resumed, str):
        assert resumed != "no sentence"
        return "refused"
    if name == "config.toml" and not same:  # a limit may be edited: then it is the run with that limit
        edited = read_manifest(place)
        assert edited is not None
        assert {"seed = 0", "client_lr = 0.02"} <= set(edited.config.splitlines())
        return "limits"
    assert same_bits(resumed.model, straight().model), f"resume took a {change.__name__} of {name}"
    assert resumed.metrics == straight().metrics
    assert read_trace(place) == read_trace(runs["finished"])
    return "mended"


@pytest.mark.parametrize("change", EDITS, ids=lambda change: change.__name__)
@pytest.mark.parametrize("kind", ["finished", "killed"])
def test_no_damage_goes_unnoticed(kind: str, change: Edit, runs: dict[str, Path], tmp_path: Path) -> None:
    many = len([name for name in files(runs[kind]) if name != "offbeat.lock"])
    ends = [check_damage(runs, kind, change, number, tmp_path / "copy") for number in range(min(many, 11))]
    assert "refused" in ends


@pytest.mark.soak
def test_five_hundred_damaged_directories(runs: dict[str, Path], tmp_path: Path) -> None:
    ends: dict[str, int] = {}
    for number in range(500):
        kind = ("finished", "killed")[number % 2]
        end = check_damage(runs, kind, EDITS[number // 2 % 4], 31 * number + number // 8, tmp_path / "copy")
        ends[end] = ends.get(end, 0) + 1
    print(f"\n500 damaged run directories: {ends}")
    assert ends["refused"] > 100
    assert sum(ends.values()) == 500


@pytest.mark.parametrize(
    ("key", "value"), [("method.client_lr", "0.06"), ("task.batch_size", "5"), ("task.split", '"shards"')]
)
def test_an_edited_key_is_refused_by_name(key: str, value: str, runs: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(runs["killed"], tmp_path / "copy")
    config = tmp_path / "copy" / "config.toml"
    text, name = config.read_text(), key.split(".")[1]
    line = next(line for line in text.splitlines() if line.startswith(f"{name} = "))
    config.write_text(text.replace(line, f"{name} = {value}"))
    with pytest.raises(OffbeatError, match=rf"was changed since the run began \({key}"):
        resume(tmp_path / "copy")


def test_edited_limits_are_said_and_accepted_by_readers(runs: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "copy"
    shutil.copytree(runs["finished"], path)
    config = path / "config.toml"
    text = config.read_text()
    config.write_text(text.replace("commits = 12", "commits = 99").replace("targets = []", "targets = [0.5]"))
    with pytest.warns(UserWarning, match=r"config\.toml was changed: targets, until\.commits"):
        assert replay(path).commits == 12
    for words in (("explain",), ("plot", "--out", tmp_path / "p.png"), ("report", "--out", tmp_path / "r.html")):
        with pytest.warns(UserWarning, match=r"config\.toml was changed"):
            done = CliRunner().invoke(app, [words[0], str(path), *map(str, words[1:])])
        assert done.exit_code == 0, done.output


def test_a_run_that_broke_before_its_first_checkpoint_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(store, "save_file", full)
    with pytest.raises(OffbeatError):
        run(OFTEN, tmp_path)
    monkeypatch.undo()
    assert (tmp_path / "config.toml").exists()
    with pytest.raises(OffbeatError, match=r"there is no checkpoint in .* it has none yet; begin it anew"):
        resume(tmp_path)


def test_damage_that_two_checkpoints_meet_is_said_once(runs: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(runs["finished"], tmp_path / "copy")
    flip(tmp_path / "copy" / "metrics.parquet", tmp_path, random.Random(3))
    with pytest.raises(StorageError) as caught:
        resume(tmp_path / "copy")
    assert str(caught.value).count("metrics.parquet") == 1


def test_the_checkpoint_before_is_used_and_named_where_the_last_is_damaged(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(runs["killed"], tmp_path / "copy")
    before, last = sorted((tmp_path / "copy").glob("checkpoint-*"))
    flip(last, last, random.Random(0))
    said = rf"{last.name} has another .* going on from the one before, {before.name}, at commit 7"
    with pytest.warns(UserWarning, match=said):
        resumed = resume(tmp_path / "copy")
    assert same_bits(resumed.model, straight().model)
    assert figures(resumed) == figures(straight())


def test_a_directory_of_the_old_format_is_refused_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("seed = 0\n")
    (tmp_path / "checkpoint.safetensors").write_bytes(b"x")
    for call in (resume, replay):
        with pytest.raises(OffbeatError, match="was written by an older Offbeat"):
            call(tmp_path)


def test_measuring_refuses_a_damaged_model(runs: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(runs["finished"], tmp_path / "copy")
    flip(tmp_path / "copy" / "model.safetensors", tmp_path, random.Random(3))
    for path in (tmp_path / "copy", tmp_path / "copy" / "model.safetensors"):
        with pytest.raises(StorageError, match=r"model\.safetensors has another content"):
            measure(OFTEN, path)


def test_equal_runs_have_equal_bytes_killed_or_not(runs: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(runs["killed"], tmp_path / "copy")
    resume(tmp_path / "copy")
    for name in ("trace.parquet", "config.toml", "model.safetensors", "metrics.parquet", "clients.parquet"):
        assert (tmp_path / "copy" / name).read_bytes() == (runs["finished"] / name).read_bytes(), name
    ids = {read_manifest(path).run for path in (tmp_path / "copy", runs["finished"])}  # type: ignore[union-attr]
    assert len(ids) == 2


# ---- killed between two files -------------------------------------------------------------------
class Gone(BaseException):
    """Stands for the end of a process at a given moment."""


@pytest.mark.parametrize("first", range(3))
def test_a_kill_between_any_two_writes_leaves_a_run_that_resumes(
    first: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Every file is put in place by os.replace: the process ends before the nth of them, for each n in turn."""
    real = os.replace
    resumed = 0
    for moment in range(2 + first, 40, 6):
        calls = []

        def move(a: Any, b: Any, calls: list[int] = calls, moment: int = moment) -> None:
            calls.append(0)
            if len(calls) == moment:
                raise Gone
            real(a, b)

        out = tmp_path / str(moment)
        with monkeypatch.context() as patch:
            patch.setattr(disk.os, "replace", move)
            try:
                run(experiment(until={"commits": 4}, checkpoint_seconds=1e-6), out)
                resume(out, {"commits": 5})
            except Gone:
                pass
        if not read_manifest(out).checkpoints:  # type: ignore[union-attr]
            continue
        outcome = outcome_of(lambda out=out: resume(out, {"commits": 5}))
        assert outcome.commits == 5
        assert outcome.metrics == run(experiment(until={"commits": 5})).metrics
        resumed += 1
    assert resumed > 3


# ---- whose directory ----------------------------------------------------------------------------
def test_a_strangers_directory_is_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "mine.txt").write_text("mine")
    (tmp_path / "config.toml").write_text("mine")
    before = files(tmp_path)
    for call in (
        lambda: run(OFTEN, tmp_path),
        lambda: run(OFTEN, tmp_path, overwrite=True),
        lambda: compare({"a": OFTEN}, out=tmp_path, overwrite=True),
        lambda: resume(tmp_path),
    ):
        with pytest.raises(OffbeatError):
            call()
        assert files(tmp_path) == before


def test_overwriting_replaces_a_run_and_nothing_beside_it(tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(experiment(until={"commits": 3}), out)
    (out / "notes.txt").write_text("mine")
    with pytest.raises(OffbeatError, match="holds a run already; choose another directory, or give --overwrite"):
        run(OFTEN, out)
    made = run(OFTEN, out, overwrite=True)
    assert same_bits(made.model, straight().model)
    assert (out / "notes.txt").read_text() == "mine"
    assert len(list(out.glob("checkpoint-*"))) == 2


def test_links_are_not_followed(tmp_path: Path) -> None:
    mine, out = tmp_path / "mine", tmp_path / "out"
    mine.mkdir()
    (mine / "trace-000000.parquet").write_text("mine")
    run(experiment(until={"commits": 3}), out)
    (out / "parts").symlink_to(mine)
    for call in (lambda: run(OFTEN, out, overwrite=True), lambda: resume(out, {"commits": 9})):
        with pytest.raises(StorageError, match="parts is a link, and links are not followed"):
            call()
    (out / "parts").unlink()
    (out / "config.toml.new").symlink_to(mine / "trace-000000.parquet")
    (out / "model.safetensors").unlink()
    (out / "model.safetensors").symlink_to(mine / "trace-000000.parquet")
    run(OFTEN, out, overwrite=True)
    assert files(mine) == {"trace-000000.parquet": b"mine"}
    assert not (out / "model.safetensors").is_symlink()


@pytest.mark.parametrize("label", ["../x", "a/b", "", "x" * 300, "a\nb\x00", "..", "é"])
def test_labels_are_not_paths(label: str) -> None:
    name = file_name(label)
    assert name not in ("", ".", "..")
    assert len(name.encode()) < 100
    assert Path(name).name == name
    assert name.isprintable()


def test_a_comparison_stays_in_its_directory_and_can_be_overwritten(tmp_path: Path) -> None:
    brief = experiment(until={"commits": 2})
    labels = ["../x", "a/b", "a-b", ""]
    compare(dict.fromkeys(labels, brief), out=tmp_path / "in" / "out").write(tmp_path / "in" / "out", "one")
    assert [p.name for p in (tmp_path / "in").iterdir()] == ["out"]
    assert len([p for p in (tmp_path / "in" / "out").iterdir() if p.is_dir()]) == 4
    with pytest.raises(OffbeatError, match="holds a comparison already"):
        compare({"a": brief}, out=tmp_path / "in" / "out")
    again = compare({"a": brief}, out=tmp_path / "in" / "out", overwrite=True)
    assert [p.name for p in (tmp_path / "in" / "out").iterdir() if p.is_dir()] == ["a-seed0"]
    assert not (tmp_path / "in" / "out" / "comparison.png").exists()
    again.write(tmp_path / "in" / "out", "two")
    again.write(tmp_path / "in" / "out", "three")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "comparison.md").write_text("mine")
    with pytest.raises(OffbeatError, match="is not the directory of a comparison"):
        again.write(tmp_path / "theirs", "four")


def test_a_paper_needs_leave_to_overwrite(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    words = ("paper", "fedbuff-fig1", "--scale", "smoke", "--out", tmp_path)
    assert exit_code(monkeypatch, *words, "--only", "zzz") == 2
    assert list(tmp_path.iterdir()) == []
    assert exit_code(monkeypatch, *words) == 0
    assert exit_code(monkeypatch, *words) == 2
    assert exit_code(monkeypatch, *words, "--overwrite") == 0


# ---- one process at a time ----------------------------------------------------------------------
def test_a_directory_in_use_is_named_with_its_process(tmp_path: Path) -> None:
    interrupted(OFTEN, tmp_path, 4)
    with Lock(tmp_path):
        for call in (lambda: resume(tmp_path), lambda: run(OFTEN, tmp_path, overwrite=True), lambda: replay(tmp_path)):
            with pytest.raises(
                StorageError, match=rf"is in use by process {os.getpid()} since \d+-\d+-\d+ \d+:\d+:\d+"
            ):
                call()
    assert same_bits(resume(tmp_path).model, straight().model)


def test_a_killed_process_leaves_no_lock(tmp_path: Path) -> None:
    interrupted(OFTEN, tmp_path, 4)
    code = "import os, sys, pathlib; from offbeat.runs.lock import Lock; Lock(pathlib.Path(sys.argv[1])); os._exit(9)"
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == 9
    assert "process" in (tmp_path / "offbeat.lock").read_text()
    assert same_bits(resume(tmp_path).model, straight().model)


# ---- no room ------------------------------------------------------------------------------------
LIMITED = """
import resource, signal, sys
from offbeat import cli
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv.pop(1)),) * 2)
cli.main()
"""


def limited(limit: int, *words: Any) -> tuple[int, str]:
    alone = os.environ | {"OMP_NUM_THREADS": "1"}
    made = subprocess.run(
        [sys.executable, "-c", LIMITED, str(limit), *map(str, words)],
        capture_output=True,
        text=True,
        env=alone,
        check=False,
    )
    return made.returncode, made.stderr


def test_a_limit_on_file_sizes_ends_with_a_sentence_and_loses_nothing(tmp_path: Path) -> None:
    interrupted(OFTEN, tmp_path / "out", 4)
    before = files(tmp_path / "out")
    code, said = limited(3000, "resume", tmp_path / "out")
    assert code == 4
    assert said.count("\n") == 1
    assert "larger than this process may write" in said
    kept = files(tmp_path / "out")
    assert {k: v for k, v in before.items() if k.startswith("checkpoint")}.items() <= kept.items()
    assert same_bits(resume(tmp_path / "out").model, straight().model)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 200 KiB; only root can make one."""
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", place], capture_output=True, check=False)
    if made.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def test_a_full_disk_and_a_read_only_one(small_disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    interrupted(OFTEN, small_disk / "out", 4)
    with pytest.raises(OSError):
        (small_disk / "filler").write_bytes(b"x" * (1 << 20))
    assert exit_code(monkeypatch, "resume", small_disk / "out") == 4
    assert "no room left on the disk" in capsys.readouterr().err
    gc.collect()  # a file that could not be written is closed with the error that speaks of it
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    assert exit_code(monkeypatch, "resume", small_disk / "out") == 4
    assert "the disk is read-only" in capsys.readouterr().err
    subprocess.run(["mount", "-o", "remount,rw,size=4m", small_disk], check=True)
    assert same_bits(resume(small_disk / "out").model, straight().model)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    assert same_bits(replay(small_disk / "out").model, straight().model)


def test_a_directory_that_goes_away_while_running(tmp_path: Path) -> None:
    class Remove(InterruptAt):
        def committed(self, run: Any) -> None:
            if run.commit == 5:
                shutil.rmtree(tmp_path / "out")

    with pytest.raises(StorageError, match="the directory is gone"):
        run(OFTEN, tmp_path / "out", Remove(99))
    assert not (tmp_path / "out").exists()


def test_what_the_system_says_is_understood_from_every_library() -> None:
    assert disk.reason(OSError(errno.ENOSPC, "x")) == disk.REASONS[errno.ENOSPC]
    assert (
        disk.reason(disk.SafetensorError("I/O error: No space left on device (os error 28)"))
        == disk.REASONS[errno.ENOSPC]
    )


# ---- long runs ----------------------------------------------------------------------------------
def test_parts_are_written_in_between_and_joined_to_the_same_bytes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    chosen = experiment(until={"commits": 40})
    for path, rows in ((tmp_path / "one", 10), (tmp_path / "two", 77)):
        with monkeypatch.context() as patch:
            patch.setattr(store, "PART_ROWS", rows)
            patch.setattr(columns, "GROUP", 64)
            run(chosen, path)
    assert pq.read_metadata(tmp_path / "one" / "trace.parquet").num_row_groups > 5
    assert (tmp_path / "one" / "trace.parquet").read_bytes() == (tmp_path / "two" / "trace.parquet").read_bytes()
    run(chosen, tmp_path / "three")
    rows = read_trace(tmp_path / "three")
    assert rows == read_trace(tmp_path / "one")
    stored = columns.StoredRows([columns.whole(tmp_path / "one" / "trace.parquet")])
    assert stored.last_begins() == last_begins(rows)


def test_the_digest_depends_on_the_rows_and_not_on_their_stretches(runs: dict[str, Path]) -> None:
    rows = read_trace(runs["finished"])
    whole, pieces, other = Digest(), Digest(), Digest()
    whole.add(rows)
    for place in range(0, len(rows), 7):
        pieces.add(rows[place : place + 7])
    other.add([*rows[:-1], (rows[-1][0], type(rows[0][1])(*rows[0][1]))])
    assert whole.value() == pieces.value() != other.value()
    code = """import sys; from pathlib import Path
from offbeat.runs.rerun import Digest; from offbeat.runs.stored import read_trace
digest = Digest(); digest.add(read_trace(Path(sys.argv[1]))); print(digest.value())"""
    command, environment = [sys.executable, "-c", code, str(runs["finished"])], os.environ | {"PYTHONHASHSEED": "1"}
    said = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert json.loads(said.stdout) == whole.value()


# ---- elsewhere ----------------------------------------------------------------------------------
def test_a_replay_elsewhere_says_what_differs_and_has_a_tolerance(
    runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(runs["finished"], out)
    manifest = read_manifest(out)
    assert manifest is not None
    manifest.environments[0] |= {"threads": 99, "instruction set": "ABACUS"}
    model = disk.read_tensors(out / "model.safetensors")[0]
    nudged = {name: value * (1 + 1e-5) for name, value in model.items()}
    manifest.files["model.safetensors"] = disk.write_file(
        out / "model.safetensors", lambda at: store.save_file(nudged, at)
    )
    manifest.write(out)
    assert exit_code(monkeypatch, "replay", out, "--tolerance", "0") == 1
    assert (
        "threads: 99, here 1; " in (said := capsys.readouterr().err).replace("instruction set", "") or "ABACUS" in said
    )
    assert exit_code(monkeypatch, "replay", out) == 0
    assert "model is near: relative distance " in capsys.readouterr().out
    with pytest.raises(ReplayDiffers) as caught:
        replay(out, tolerance=1e-9)
    assert caught.value.outcome.commits == 12
    assert caught.value.distance.relative == pytest.approx(1e-5, rel=1e-2)
    with pytest.warns(UserWarning, match="was run elsewhere .*ABACUS"):
        resume(out, {"commits": 13})
