"""Who is kept out, and what is refused: connections, updates, and experiments that cannot run live."""

from __future__ import annotations

import json
import random
import re
import sys
import urllib.request
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch

from live_world import World, digits, free_port, world
from offbeat import Experiment, build, cli
from offbeat.errors import ConfigError, OffbeatError
from offbeat.live import certificates, transport, wire
from offbeat.live.admissible import require_live
from offbeat.live.checks import Checks, Limits
from offbeat.live.jobs import Worker, foreign_code, read_shard, task_facts
from offbeat.live.join import join
from offbeat.live.serve import Options, serve
from test_live_wire import RECORDS, changed

TABLE = digits({"name": "fedbuff", "buffer_size": 2, "local_steps": 2, "client_lr": 0.1}, until={"commits": 500})


class Wanderer:
    """Somebody who says to a server what he likes."""

    def __init__(self, live: World, folder: Path | None, name: str = "", chain: bool = True) -> None:
        keys = None if folder is None else transport.Keys(folder, name)
        ca = (live.keys / "ca.pem").read_bytes()
        pair = (keys.secret, keys.chain) if keys is not None and chain else (None, None)
        self.channel = grpc.secure_channel(live.address, grpc.ssl_channel_credentials(ca, *pair))

    def say(self, *frames: bytes, answers: int = 1) -> list[Any]:
        """The records that come back; an error of the connection gets out."""
        stream = self.channel.stream_stream(f"/{transport.SERVICE}/{transport.SESSION}")(iter(frames), timeout=20)
        got = []
        for frame in stream:
            got.append(wire.decode(frame))
            if len(got) == answers:
                break
        stream.cancel()
        return got


def hello(client: int = -1, process: str = "") -> bytes:
    return wire.encode(wire.Hello(wire.PROTOCOL, client, process))


def health(port: int) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10) as page:
        return json.loads(page.read())  # type: ignore[no-any-return]


def test_who_has_no_good_certificate_is_kept_out(tmp_path: Path) -> None:
    port = free_port()
    with world(tmp_path, TABLE, metrics=f"127.0.0.1:{port}") as live:
        certificates.make(live.keys, ["stranger"])
        certificates.make(live.keys, ["late"], days=1e-9)
        certificates.make(tmp_path / "foreign", ["client-0"])
        certificates.revoke(live.keys, "client-2")
        live.serve()
        for folder, name in ((None, ""), (tmp_path / "foreign", "client-0"), (live.keys, "late")):
            with pytest.raises(grpc.RpcError) as error:
                Wanderer(live, folder, name).say(hello())
            assert error.value.code() == grpc.StatusCode.UNAVAILABLE
        for name, said in (("stranger", "unknown client"), ("client-2", "revoked")):
            (refused,) = Wanderer(live, live.keys, name).say(hello())
            assert isinstance(refused, wire.Refused)
            assert said in refused.reason
            assert refused.final
        (welcome,) = Wanderer(live, live.keys, "client-1").say(hello(0))  # another's number is not looked at
        assert welcome.client == 1
        one = Wanderer(live, live.keys, "client-0")
        with pytest.raises(grpc.RpcError) as error:
            one.say(hello(), bytes(wire.FRAME_BYTES + 1), answers=3)
        assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        for frame in (b"noise", hello()[:-1], wire.encode(wire.Fetch()), wire.encode(wire.Chunk(0, b"x"))):
            answers = one.say(hello(), frame, answers=2)
            assert isinstance(answers[-1], wire.Refused)
            assert "malformed" in answers[-1].reason
        rng = random.Random(0)
        for _ in range(100):
            frames = [changed(rng, wire.encode(rng.choice(RECORDS))) for _ in range(5)]
            try:
                one.say(hello(), *frames, answers=2)
            except grpc.RpcError as error_:
                assert error_.code() in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.CANCELLED)  # noqa: PT017
        seen = health(port)
        assert seen["state"] == "waiting"
        assert seen["turned_away"]["unknown client"] == 1
        assert seen["malformed"] > 4
        assert "shut out" in one.say(hello())[0].reason  # it went too far
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
            text = page.read().decode()
        assert f"offbeat_malformed_total {float(seen['malformed'])}" in text
        assert 'offbeat_turned_away_total{reason="unknown client"} 1.0' in text


def worker(table: dict[str, Any], client: int = 0) -> Worker:
    built = build(Experiment.of(table))
    config = built.experiment.table()
    return Worker(client, built.task.clients, config, task_facts(built.task, config), None, "cpu")


class Cheat:
    """A client that is one in name only: it answers orders as it is told."""

    def __init__(self, live: World, client: int) -> None:
        import queue

        self.live, self.client = live, client
        self.orders: list[wire.Order] = []
        self.accepted: set[int] = set()  # jobs
        keys = transport.Keys(live.keys, f"client-{client}")
        credentials = grpc.ssl_channel_credentials(keys.ca, keys.secret, keys.chain)
        self.channel = grpc.secure_channel(live.address, credentials)
        self.out: Any = queue.Queue()
        self.stream = self.channel.stream_stream(f"/{transport.SERVICE}/{transport.SESSION}")(iter(self.out.get, None))
        self.say(wire.Hello(wire.PROTOCOL, -1, ""))
        self.welcome = self.hear(wire.Welcome)
        self.say(wire.Ready(self.welcome.model, 10, "", [], -1, ""))

    def say(self, record: Any) -> None:
        self.out.put(wire.encode(record))

    def hear(self, *kinds: Any) -> Any:
        """The next record of these kinds; orders that come before it are kept for later."""
        if wire.Order in kinds and self.orders:
            return self.orders.pop(0)
        for frame in self.stream:
            record = wire.decode(frame)
            if isinstance(record, kinds):
                return record
            if isinstance(record, wire.Order):
                self.orders.append(record)
        raise AssertionError("the server ended the connection")

    def update(self, job: int, version: int, buffer: bytes, **changed_: Any) -> Any:
        opening = wire.Update(self.welcome.run, self.welcome.epoch, job, version, 2, len(buffer))._replace(**changed_)
        self.say(opening)
        for piece in wire.chunks(memoryview(buffer)):
            self.say(piece)
        self.say(wire.End(changed_.get("digest", wire.digest(buffer))))
        answer = self.hear(wire.Accepted, wire.Rejected, wire.Refused)
        if isinstance(answer, wire.Accepted):
            self.accepted.add(answer.job)
        return answer

    def begin(self, job: int) -> wire.Order:
        order: wire.Order = self.hear(wire.Order)
        self.say(wire.Began(job, order.version, order.steps, 2 * len(self.accepted), 0.0))
        return order


def test_what_is_wrong_with_an_update_is_refused_and_counted(tmp_path: Path) -> None:
    size = worker(TABLE).up.size
    good = np.zeros(size // 4, dtype=np.float32)
    bad, huge = good.copy(), good + 1e9
    bad[7] = np.nan
    with world(tmp_path, TABLE, limits={"offences": 5}, start_with=2) as live:
        live.serve()
        cheat, other = Cheat(live, 0), Cheat(live, 1)
        order = cheat.begin(0)
        assert "another run" in cheat.update(0, order.version, good.tobytes(), run="x").reason
        assert "epoch" in cheat.update(0, order.version, good.tobytes(), epoch=0).reason
        order = cheat.begin(1)  # the job was given back, and another one came
        assert cheat.update(0, order.version, good.tobytes()).reason == "late"
        assert cheat.update(5, order.version, good.tobytes()).reason == "unknown"
        assert isinstance(cheat.update(1, order.version, good.tobytes()), wire.Accepted)
        assert isinstance(cheat.update(1, order.version, good.tobytes()), wire.Accepted)  # repeated: taken once
        order = cheat.begin(2)
        assert "NaN" in cheat.update(2, order.version, bad.tobytes()).reason
        order = cheat.begin(3)
        assert "norm" in cheat.update(3, order.version, huge.tobytes()).reason
        order = cheat.begin(4)
        last = cheat.update(4, order.version, good[:-1].tobytes())
        assert isinstance(last, wire.Refused | wire.Rejected)
        with pytest.raises((AssertionError, grpc.RpcError)):
            cheat.hear(wire.Order)
        assert "shut out" in Wanderer(live, live.keys, "client-0").say(hello())[0].reason
        assert isinstance(other.update(0, other.begin(0).version, good.tobytes()), wire.Accepted)
        live.server.terminate()
        assert live.result()["kind"] == "Interrupted"
        told = Counter(line.get("kind") for line in live.log() if line["event"] == "refused")
        assert told == {"foreign": 2, "not finite": 1, "norm": 1, "size": 1}


def test_who_comes_again_is_the_same_or_is_kept_out(tmp_path: Path) -> None:
    """Two processes with one certificate, a shard that has changed, a certificate that is revoked meanwhile."""
    with world(tmp_path, TABLE, start_with=2) as live:
        live.serve()
        one, other = Cheat(live, 0), Cheat(live, 1)
        (refused,) = Wanderer(live, live.keys, "client-0").say(hello(process="another"))
        assert "another process of this client is connected" in refused.reason
        assert not refused.final
        assert isinstance(one.begin(0), wire.Order)  # the first one keeps its place
        ready = wire.Ready(one.welcome.model, 10, "other samples", [], -1, "")
        answers = Wanderer(live, live.keys, "client-0").say(hello(), wire.encode(ready), answers=2)
        assert "the shard has changed: 10 samples as before" in answers[1].reason
        assert answers[1].final
        for held, said in (([["x"]], "not what it should be"), ([[0, 0, 2, 0, False]] * 300, "256 is the most")):
            ready = wire.Ready(one.welcome.model, 10, "", held, -1, "")
            answers = Wanderer(live, live.keys, "client-2").say(hello(), wire.encode(ready), answers=2)
            assert said in answers[1].reason
        assert not any(line["event"] == "joined" and line["client"] == 2 for line in live.log())
        certificates.revoke(live.keys, "client-1")
        assert other.hear(wire.Refused).reason == "this certificate was revoked"


def test_a_full_disk_takes_no_updates_and_loses_nothing(tmp_path: Path) -> None:
    table = digits({"name": "fedbuff", "buffer_size": 2, "local_steps": 2, "client_lr": 0.1}, until={"commits": 3})
    with world(tmp_path, table, limits={"reserve_mib": 1e12}) as live:
        live.serve()
        live.join_all()
        live.until(lambda: any(line["event"] == "the disk is full" for line in live.log()))
        assert live.commits() == 0
        live.server.terminate()
        live.result()
        live.serve(limits={})
        assert live.result()["ok"]["commits"] == 3


# ---- without a network --------------------------------------------------------------------------
def test_a_shard_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    built = build(Experiment.of(TABLE))
    config, facts = built.experiment.table(), task_facts(built.task, built.experiment.table())

    def refusal(x: Any, y: Any) -> str:
        np.savez(tmp_path / "shard.npz", x=x, y=y)
        with pytest.raises(ConfigError) as error:
            Worker(0, 3, config, facts, read_shard(str(tmp_path / "shard.npz")), "cpu")
        return str(error.value)

    x = np.zeros((5, 1, 8, 8), dtype=np.float32)
    assert "shape" in refusal(x[:, :, :4], np.zeros(5, dtype=np.int64))
    assert "whole numbers" in refusal(x, np.zeros(5, dtype=np.float32))
    assert "labels run" in refusal(x, np.full(5, 10))
    assert "NaN" in refusal(np.full_like(x, np.nan), np.zeros(5, dtype=np.int64))
    assert "inputs and" in refusal(x, np.zeros(4, dtype=np.int64))
    for given, said in (("nowhere.npz", "no such file"), (str(tmp_path), "no npz"), ("nowhere:f", "no module")):
        with pytest.raises(ConfigError, match=said):
            read_shard(given)
    assert "Python objects, which are never loaded" in refusal(np.array([{}] * 5, dtype=object), np.arange(5))
    assert "has whole numbers; the task has floats there; scale them" in refusal(x.astype(np.uint8), np.arange(5))
    for kind in (np.uint8, np.int32, np.uint64):
        np.savez(tmp_path / "shard.npz", x=x, y=np.arange(5, dtype=kind))
        fits = Worker(0, 3, config, facts, read_shard(str(tmp_path / "shard.npz")), "cpu")
        assert fits.shard.y.dtype == torch.int64
        fits.rehearse()
    whole = (tmp_path / "shard.npz").read_bytes()
    (tmp_path / "shard.npz").write_bytes(whole[:200])
    with pytest.raises(ConfigError, match="no npz with x and y"):
        read_shard(str(tmp_path / "shard.npz"))
    np.savez(tmp_path / "other.npz", z=x)
    with pytest.raises(ConfigError, match="must have the arrays x and y"):
        read_shard(str(tmp_path / "other.npz"))


def test_nothing_that_a_server_names_is_executed() -> None:
    config = {"method": {"name": "os:system", "stages": ["a.b:c"]}, "task": "digits"}
    assert foreign_code(config, frozenset()) == ["os:system", "a.b:c"]
    assert foreign_code(config, frozenset({"os:system", "a.b:c"})) == []
    with pytest.raises(OffbeatError, match="--code os:system"):
        Worker(0, 1, config, {}, None)


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ({"name": "fedagrac", "saving": True}, "saving needs every finished update"),
        ({"name": "fedagrac", "reference": "equation-4"}, "reference = 'equation-4' needs every finished update"),
        ({"name": "hierarchical-local-sgd", "local_steps": 2}, "edge server"),
        ({"name": "gossip-sgd", "local_steps": 2}, "no server at all"),
    ],
)
def test_an_experiment_that_cannot_run_live_says_which_part(method: dict[str, Any], said: str) -> None:
    table = digits(method, 4, fleet={"name": "hlsgd", "clusters": 1} if "sgd" in method["name"] else "equal")
    with pytest.raises(OffbeatError, match=f"cannot run live: .*{said}"):
        require_live(build(Experiment.of(table)))


def test_bad_options_are_sentences(tmp_path: Path) -> None:
    experiment = Experiment.of(TABLE)
    for options, said in (
        (Options(address="0.0.0.0:7070"), "plain text is for a loopback"),
        (Options(address="nowhere"), "write host:port"),
        (Options(start_with=4), "start_with = 4"),
        (Options(heartbeat=5, lease=1), "a lease is longer"),
        (Options(allow=("a", "b")), "2 names of clients for a task of 3"),
        (Options(allow=("a", "b", "a")), "given twice"),
    ):
        with pytest.raises(ConfigError, match=said):
            serve(experiment, tmp_path / "out", options)
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match="unknown limit 'nrom'"):
        Limits.of({"nrom": 1})
    with pytest.raises(ConfigError, match="positive number"):
        Limits.of({"norm": -1})
    with pytest.raises(ConfigError, match="plain text is for a loopback"):
        join("server.example:7070", "task", client=0)


def test_the_checks_on_numbers_and_rates() -> None:
    now = [0.0]
    checks = Checks(Limits(norm=10.0, rate=60.0, burst=2, offences=2), lambda: now[0])
    model = torch.ones(4)
    assert checks.problem({"delta": torch.ones(4), "n": torch.tensor(3.0)}, model) is None
    assert checks.problem({"delta": torch.tensor([1.0, float("inf")])}, model)[0] == "not finite"  # type: ignore[index]
    assert checks.problem({"n": torch.tensor(float("nan"))}, model)[0] == "not finite"  # type: ignore[index]
    assert checks.problem({"delta": torch.full((4,), 11.0)}, model)[0] == "norm"  # type: ignore[index]
    assert [checks.within_rate(0) for _ in range(3)] == [True, True, False]
    now[0] = 1.0
    assert [checks.within_rate(0) for _ in range(2)] == [True, False]
    assert [checks.refuse(0, kind) for kind in ("late", "norm", "norm")] == [False, False, True]
    assert "2 times norm" in checks.of(0).shut_out


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (("serve", "x.toml", "--out", "run"), "x.toml"),
        (("join", "127.0.0.1:1", "--data", "task"), "give --keys FOLDER"),
        (("join", "127.0.0.1:1", "--data", "task", "--plain"), "give --client"),
        (("join", "127.0.0.1:1", "--data", "task", "--keys", "keys"), "give --name"),
        (("join", "a.example:1", "--data", "task", "--plain", "--client", "0"), "plain text is for a loopback"),
        (("keys", "list", "nowhere"), "there are no certificates"),
        (("keys", "revoke", "nowhere"), "give the names"),
        (("fleet", "from-run", "nowhere", "--out", "fleet.json"), "there is no run"),
        (("fleet", "from-run", "nowhere", "--out", "fleet.txt"), "ending in .json"),
    ],
)
def test_slips_on_the_command_line(
    line: tuple[str, ...],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["offbeat", *line])
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    monkeypatch.setattr(cli.signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    assert re.search(said, capsys.readouterr().err)
