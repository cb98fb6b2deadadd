"""Fleets of recorded phones, on small files that the tests write."""

import itertools
import json
import os

import numpy as np
import pytest

from offbeat.errors import ConfigError
from offbeat.fleets.make import build


def said(call):
    """The problems that a call raises."""
    with pytest.raises(ConfigError) as caught:
        call()
    return caught.value.problems


STEPS = [
    {"ResNet Latency": 100.0},
    {"ResNet Latency": 0.0},
    {"Phone Model": "x"},
    {"ResNet Latency": 300, "Vit Latency": 50},
]
LINKS = [{"tcp_kbps": [8000.0, 8000.0]}, {"tcp_kbps": [1.0, 3.0]}, {"tcp_kbps": [16000]}]
USERS = [{"duration_s": 100, "ready": [[0, 10], [10, 20], [30, 30], [90, 100]]}, {"duration_s": 50, "ready": []}]
SCORES = [{"CPU_F_AI_Score": "1000", "AI_Score": " 500 1,6"}, {"CPU_F_AI_Score": "250", "AI_Score": "1000"}]
SPEEDS = {"a": {"down_u": 8000.0, "down_sigma": 0.0, "up_u": 800.0, "up_sigma": 400.0}}
FILES = {
    "flhetbench/training_latency.json": STEPS,
    "flhetbench/mobiperf_devices_trimmed.json": LINKS,
    "flhetbench/availability_710users_trimmed.json": USERS,
    "flash/raw_ai_benchmark_list.json": SCORES,
    "flash/speed_distri.json": SPEEDS,
}


@pytest.fixture
def traces(tmp_path, monkeypatch):
    """Small trace files in a data folder of their own; returns how to replace one."""
    monkeypatch.setenv("OFFBEAT_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def write(name, content):
        place = tmp_path / "data" / "traces" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(content if isinstance(content, str) else json.dumps(content))

    for name, content in FILES.items():
        write(name, content)
    return write


def test_phones_are_read_from_their_traces(traces):
    fleet = build("phones", 200, 1, step_scale=2.0)
    assert set(fleet.step_seconds.tolist()) == {0.2, 0.6}
    assert set(fleet.down_bandwidth.tolist()) == {1e6, 2e6}
    assert fleet.up_bandwidth is fleet.down_bandwidth
    assert fleet.notes == (
        "step times: 2 of 4 rows have no 'ResNet Latency'; left out",
        "links: 1 of 3 devices are slower than 1000 kbit/s; left out",
    )
    seen = {tuple(itertools.islice(fleet.presence(client), 5)) for client in range(200)}
    assert seen == {((0.0, False),), ((0.0, True), (20.0, False), (90.0, True), (120.0, False), (190.0, True))}
    assert build("phones", 5, column="Vit Latency", availability=False).step_seconds.tolist() == [0.05] * 5
    assert build("phones", 5, availability=False).presence is None
    assert 250.0 in build("phones", 200, min_kbps=0.0).down_bandwidth


def test_flash_phones_are_read_from_their_traces(traces):
    fleet = build("phones-flash", 500, step_seconds=0.1)
    assert set(fleet.step_seconds.tolist()) == {0.0625, 0.25}  # the median score is 625
    assert fleet.down_bandwidth == pytest.approx(np.full(500, 1e6))
    assert fleet.up_bandwidth.min() > 0.0
    assert np.median(fleet.up_bandwidth) == pytest.approx(1e5, rel=0.1)
    assert set(build("phones-flash", 50, score="AI_Score", step_seconds=0.1).step_seconds.tolist()) == {0.15, 0.075}


def test_the_cache_is_searched_too(traces, tmp_path, monkeypatch):
    (tmp_path / "cache").mkdir()
    (tmp_path / "data").rename(tmp_path / "cache" / "offbeat")
    assert build("phones", 3).clients == 3
    monkeypatch.delenv("OFFBEAT_DATA")
    assert build("phones", 3).clients == 3
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "nowhere"))
    [problem] = said(lambda: build("phones", 3))
    assert "training_latency.json" in problem
    assert str(tmp_path / "nowhere" / "offbeat") in problem
    assert "set OFFBEAT_DATA" in problem


@pytest.mark.skipif(not os.environ.get("OFFBEAT_DATA"), reason="OFFBEAT_DATA names no folder with the real traces")
def test_the_real_traces_are_sound():
    phones, flash = build("phones", 2000), build("phones-flash", 2000)
    assert phones.problems() == flash.problems() == []
    assert np.median(phones.step_seconds) == pytest.approx(0.172, rel=0.1)
    assert np.median(flash.step_seconds) == pytest.approx(0.17, rel=0.1)


BAD_TRACES = [
    (
        "phones",
        "flhetbench/training_latency.json",
        [{"ResNet Latency": -3}],
        "training_latency.json: entry 0: field 'ResNet",
    ),
    ("phones", "flhetbench/training_latency.json", [{"Vit Latency": 3}], "training_latency.json: no entry has a field"),
    ("phones", "flhetbench/training_latency.json", "[{]", "training_latency.json is not readable as JSON"),
    ("phones", "flhetbench/training_latency.json", [], "training_latency.json holds no records"),
    ("phones", "flhetbench/training_latency.json", [1.5], "training_latency.json: entry 0 is 1.5, not a record"),
    (
        "phones",
        "flhetbench/mobiperf_devices_trimmed.json",
        [*LINKS, {}],
        "entry 3: field 'tcp_kbps' is missing or empty",
    ),
    (
        "phones",
        "flhetbench/mobiperf_devices_trimmed.json",
        [{"tcp_kbps": [9, -2]}],
        "entry 0: field 'tcp_kbps'[1] = -2; it",
    ),
    (
        "phones",
        "flhetbench/mobiperf_devices_trimmed.json",
        [{"tcp_kbps": [9]}],
        "min_kbps = 1000.0; the fastest of the",
    ),
    (
        "phones",
        "flhetbench/availability_710users_trimmed.json",
        [{"ready": []}],
        "entry 0: field 'duration_s' is missing",
    ),
    (
        "phones",
        "flhetbench/availability_710users_trimmed.json",
        [{"duration_s": 9}],
        "entry 0: field 'ready' is missing",
    ),
    (
        "phones",
        "flhetbench/availability_710users_trimmed.json",
        [{"duration_s": 9, "ready": [[1, None]]}],
        "entry 0: field 'ready'[0] = [1, None]; it must be [start, end]",
    ),
    (
        "phones",
        "flhetbench/availability_710users_trimmed.json",
        [{"duration_s": 9, "ready": [[1, 4], [3, 5]]}],
        "entry 0: field 'ready'[1] = [3, 5] does not lie between 4 and 9 s",
    ),
    ("phones-flash", "flash/raw_ai_benchmark_list.json", [{}], "entry 0: field 'CPU_F_AI_Score' is missing"),
    (
        "phones-flash",
        "flash/raw_ai_benchmark_list.json",
        [{"CPU_F_AI_Score": "n/a"}],
        "field 'CPU_F_AI_Score' = 'n/a'; it",
    ),
    (
        "phones-flash",
        "flash/speed_distri.json",
        {"u7": {"down_u": -1}},
        "speed_distri.json: entry u7: field 'down_u' = -1",
    ),
]


@pytest.mark.parametrize(("fleet", "file", "content", "sentence"), BAD_TRACES)
def test_bad_traces_are_named_by_file_entry_and_field(traces, fleet, file, content, sentence):
    traces(file, content)
    assert any(sentence in problem for problem in said(lambda: build(fleet, 3)))


def test_bad_options_of_phones_are_named(traces):
    [problem] = said(lambda: build("phones", column="ResNet Latencey"))
    assert problem.startswith("fleet 'phones': unknown column 'ResNet Latencey': did you mean 'ResNet Latency'?")
    assert said(lambda: build("phones", availability=1, column=2, step_scale=0.0)) == (
        "fleet 'phones': availability = 1; it must be true or false",
        "fleet 'phones': column = 2; it must be a text",
        "fleet 'phones': step_scale = 0.0; it must be a finite number > 0",
    )
    assert "did you mean 'AI_Score'" in said(lambda: build("phones-flash", score="AIScore"))[0]
