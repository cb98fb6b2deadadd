"""`offbeat report` and `watch`: a page whole and small, whose script runs; names are text; a run is read as it goes."""

from __future__ import annotations

import io
import itertools
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from offbeat import Experiment, Rounds, compare, run
from offbeat.errors import ConfigError, OffbeatError
from offbeat.fleets.make import build
from offbeat.keys import generator
from offbeat.runs import chronicle, watching
from offbeat.runs.folder import Folder
from offbeat.runs.store import Store
from offbeat.runs.stored import read_trace
from offbeat.schedule.buffer import Buffer
from offbeat.schedule.clock import VirtualClock
from offbeat.studies import webpage

TASK = {"name": "digits", "clients": 12, "model": "logistic"}
NASTY = '</script><img src=x onerror="alert(1)">&'


def experiment(method: Any = "fedbuff", **more: Any) -> Experiment:
    return Experiment(method=method, task=TASK, fleet="straggling", device="cpu",
                      **{"until": {"commits": 8}, "evaluate": {"every_commits": 2}, **more})  # fmt: skip


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two labels, one of them nasty, two seeds, and a fleet with clusters in a folder of its own."""
    folder = tmp_path_factory.mktemp("pages")
    fast = {"name": "fedbuff", "buffer_size": 3}
    given = {"fedbuff": experiment(fast, targets=(0.2, 0.99)), NASTY: experiment({"name": "local-sgd", "n": 4})}
    several = compare(given, (0, 1), folder / "compare")
    several.write(folder / "compare", NASTY)
    clustered = {"name": "hlsgd", "clusters": {"count": 3, "graphs": ["ring", "star", "ring"]}}
    run(Experiment("hl-sgd", TASK, clustered, until={"commits": 3}, device="cpu"), folder / "clusters")
    return folder


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found.group(1))  # type: ignore[no-any-return]


def test_a_comparison_writes_its_page_and_names_are_text(compared: Path) -> None:
    page = (compared / "compare" / "comparison.html").read_text()
    tags = Tags()
    tags.feed(page)
    assert {tag for tag, _ in tags.tags} <= {"html", "head", "meta", "title", "style", "body", "header", "h1", "button",
                                             "p", "noscript", "main", "script"}  # fmt: skip
    assert not any({"src", "href"} & attributes.keys() for _, attributes in tags.tags)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", page)  # but for the name of SVG's elements
    assert "<img" not in page
    data = data_of(page)
    assert len(data["lines"]) == 2
    assert "img" in data["lines"][1]["label"]
    assert [line["seeds"] for line in data["lines"]] == [2, 2]
    assert data["targets"] == [0.2, 0.99]
    assert data["table"]["rows"][0][3].startswith("not reached (best 0.")


def test_the_same_runs_give_the_same_page(compared: Path, tmp_path: Path) -> None:
    one = webpage.report([compared / "compare"], tmp_path / "one.html", "t")
    two = webpage.report([compared / "compare"], tmp_path / "two.html", "t")
    assert one.read_bytes() == two.read_bytes()
    assert one.stat().st_size < 300_000


def test_figures_of_the_page_are_those_of_the_runs(compared: Path) -> None:
    runs = [chronicle.read_run(path, label) for path, label in chronicle.run_folders([compared / "compare"])]
    groups = chronicle.grouped(runs)
    data = webpage.figures(groups, (), 10**6)
    for line, (label, group) in zip(data["lines"], groups.items(), strict=True):
        assert line["label"] == label
        ends = [one.metrics[-1]["accuracy"] for one in group]
        assert line["bands"]["accuracy"]["commits"]["mean"][-1] == pytest.approx(sum(ends) / 2, abs=1e-4)
    for line, group in zip(data["timelines"], groups.values(), strict=True):
        rows = read_trace(group[0].path)
        kinds = [type(record).__name__ for _, record in rows]
        assert len(line["commits"]) == kinds.count("Commit") == group[0].result["commits"]
        assert line["k"].count(1) + line["k"].count(2) >= kinds.count("Finished")
        assert sum(line["s"]) * line["tick"] <= line["end"] == pytest.approx(rows[-1][0])
    stale = data["lines"][0]["staleness"]
    assert stale["share"][-1] == pytest.approx(1.0)
    assert stale["mean"] == pytest.approx(sum(one.result["staleness"]["mean"] for one in runs[:2]) / 2, rel=1e-3)


def test_clusters_and_runs_that_differ_in_options_stand_apart(compared: Path, tmp_path: Path) -> None:
    data = webpage.figures(chronicle.grouped([chronicle.read_run(compared / "clusters")]), (), 10**6)
    assert [len(part["nodes"]) for part in data["clusters"]] == [4, 4]  # two rings are drawn once
    assert data["timelines"][0]["unit"] == "cluster"
    for rate in (0.1, 0.05):
        run(experiment({"name": "fedasync", "client_lr": rate}), tmp_path / str(rate))
    runs = [chronicle.read_run(path, label) for path, label in chronicle.run_folders([tmp_path])]
    assert sorted(chronicle.grouped(runs)) == ["fedasync (client_lr 0.05)", "fedasync (client_lr 0.1)"]


def test_what_is_no_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError) as caught:
        webpage.report([tmp_path / "empty", tmp_path / "nowhere"], tmp_path / "page.html")
    assert [problem.split(";")[0] for problem in caught.value.problems] == [
        f"there is no run in {tmp_path / 'empty'}", f"there is no directory {tmp_path / 'nowhere'}",
    ]  # fmt: skip


def large_run(path: Path, events: int, clients: int = 200) -> Path:
    """A run directory with a long trace of the clock's own, and no numerics."""
    fleet = build("straggling", clients)
    clock = VirtualClock(Buffer(10, 10), fleet.durations(0, 1e5, 1e5), generator(0, "policy"))
    rows = list(itertools.islice(clock, events))
    given = Experiment(task={"name": "digits", "clients": clients}, until={"commits": 10**6})
    metrics = {"commit": 0, "virtual_seconds": 0.0, "accuracy": 0.1, "loss": 2.3, "client_steps": 0, "samples": 0,
               "bytes_up": 0, "bytes_down": 0, "bytes_d2d": 0, "staleness_mean": 0.0}  # fmt: skip
    with Folder(path, "run") as folder:
        store = Store(folder.path, folder.lock, folder.manifest, given.toml(), {"device": "none"})
        store.metrics.append(metrics)
        store.note(rows)
        store.checkpoint({"x": torch.zeros(1)}, {"closing": None})
    return path


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large")
    return webpage.report([large_run(folder / "run", 100_000)], folder / "page.html", "100,000 events")


def test_100_000_events_fit_and_more_are_thinned(large: Path) -> None:
    assert large.stat().st_size < webpage.LARGEST
    line = data_of(large.read_text())["timelines"][0]
    assert len(line["d"]) > 70_000
    assert line["overview"] is None  # all of them one by one
    runs = chronicle.grouped([chronicle.read_run(large.parent / "run")])
    thin = webpage.timeline_columns("a", next(iter(runs.values()))[0], build("straggling", 200), 20_000)
    assert 500 < len(thin["d"]) < 3000
    assert thin["until"] < thin["end"]
    assert len(thin["overview"]["busy"]) == webpage.BINS * webpage.GROUPS
    assert {"8", "9"} & set(thin["overview"]["busy"])  # clients of FedBuff are hardly ever idle


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js to run the page's script")
@pytest.mark.parametrize("which", ["compare", "clusters", "large"])
def test_the_script_draws_zooms_and_changes_its_theme(which: str, compared: Path, large: Path, tmp_path: Path) -> None:
    page = large if which == "large" else webpage.report([compared / which], tmp_path / "page.html")
    script = Path(__file__).with_name("page_dom.js")
    done = subprocess.run(["node", script, page], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["ready"] == "1"
    assert seen["drawn"] > 5
    first, zoomed, whole = ([float(x) for x in seen[key].split()] for key in ("view", "zoomed", "whole"))
    assert first == whole
    assert zoomed[1] - zoomed[0] < 0.1 * (first[1] - first[0])
    assert seen["moved"] != seen["zoomed"]
    assert seen["theme"] == "light"
    if which == "compare":
        assert any("img" in text for text in seen["texts"])  # as text


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium (Debian's) to open the page")
@pytest.mark.soak
def test_a_browser_opens_it_without_an_error(large: Path, tmp_path: Path) -> None:
    act = """<script>
    const canvas = document.querySelector("canvas"), box = canvas.getBoundingClientRect(), before = canvas.dataset.view;
    const place = {clientX: box.left + 300, clientY: box.top + 40, cancelable: true};
    canvas.dispatchEvent(new WheelEvent("wheel", {deltaY: -500, ...place}));
    document.getElementById("theme").click(); document.getElementById("theme").click();
    document.title = JSON.stringify({
      ready: document.documentElement.dataset.ready, zoomed: before !== canvas.dataset.view, ms: performance.now(),
      dark: getComputedStyle(document.body).backgroundColor, drawn: Number(canvas.dataset.drawn), error: window.failed,
    });
    </script>"""
    listen = '<head><script>window.failed = ""; window.onerror = (text) => { window.failed = text; };</script>'
    page = tmp_path / "page.html"
    page.write_text(large.read_text().replace("<head>", listen).replace("</body>", act + "</body>"))
    words = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", page.as_uri()]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60)
    title = re.search("<title>(.*?)</title>", done.stdout)
    assert title is not None
    seen = json.loads(title.group(1))
    assert seen["error"] == ""
    assert seen["ready"] == "1"
    assert seen["zoomed"]
    assert seen["dark"] == "rgb(22, 23, 26)"
    assert seen["drawn"] > 100
    assert seen["ms"] < 10_000  # what was asked of a page with 100,000 events


# ---- watch --------------------------------------------------------------------------------------
def test_a_run_that_goes_on_is_read_from_its_trace(tmp_path: Path, compared: Path) -> None:
    going = large_run(tmp_path / "run", 4000, 30)
    shown = chronicle.read_run(going)
    assert shown.state == "left"  # nobody holds it
    assert shown.clients == 30
    finished = chronicle.read_run(compared / "compare" / "fedbuff-seed0")
    stale, heard = chronicle.derived(read_trace(finished.path))
    assert dict(stale) == dict(finished.staleness)
    assert [heard[client] for client in range(12)] == list(finished.heard)
    with pytest.raises(OffbeatError, match="there is no run in"):
        chronicle.read_run(tmp_path)


def test_watch_shows_where_a_run_stands(compared: Path) -> None:
    from rich.console import Console

    console = Console(width=80, record=True, file=io.StringIO())
    watching.watch(compared / "compare" / "fedbuff-seed0", console=console)
    text = console.export_text()
    assert "fedbuff on digits, fleet straggling, seed 0" in text
    assert "commit 8" in text
    assert "staleness: mean" in text
    assert "never heard" in text
    assert max(map(len, text.splitlines())) <= 80
    assert "#" in text


RUN_THAT_WAITS = """
import sys
from offbeat import Callback, Experiment, run
class Waits(Callback):
    def committed(self, run):
        if run.commit == 3:
            print("three commits", flush=True)
            sys.stdin.readline()
chosen = Experiment("fedbuff", {task}, "straggling", device="cpu", checkpoint_seconds=1e-9, until={{"commits": 6}})
run(chosen, {out!r}, callbacks=[Waits()])
"""


def test_watch_follows_a_run_of_another_process(tmp_path: Path) -> None:
    """Another process runs, writes a checkpoint at every commit, and waits for us once: it is running, then ended."""
    code = RUN_THAT_WAITS.format(task=TASK, out=str(tmp_path / "run"))
    piped = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **piped, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "three commits\n"
        going = watching.state(tmp_path / "run")
        other.communicate("\n")
    assert other.returncode == 0
    assert going["state"] == "running"
    assert going["commits_recorded"] in (2, 3)  # the checkpoint of the third comes before or after the callback
    last = watching.state(tmp_path / "run")
    assert last["state"] == "finished"
    assert last["commit"] == 6
    assert last["limits"] == {"commits": 1.0}


def test_rounds_wait_and_the_timeline_says_so() -> None:
    """In rounds the fast are idle until the slowest is done; no span of a client overlaps another."""
    from offbeat.runs.timeline import timeline_of

    fleet = build("straggling", 10)
    clock = VirtualClock(Rounds(5), fleet.durations(0, 1e4, 1e4), generator(0, "policy"))
    line = timeline_of(list(itertools.islice(clock, 300)))
    for client in range(10):
        mine = sorted(span for span in line.spans if span.client == client)
        assert all(one.end <= other.since + 1e-9 for one, other in itertools.pairwise(mine))


def test_a_file_that_goes_while_it_is_read_is_asked_for_again() -> None:
    """A run that ends joins its parts: the manifest names others, and the parts are gone."""
    asked = []

    def read() -> str:
        asked.append(1)
        if len(asked) < 3:
            raise OffbeatError("parts/trace-000162.parquet cannot be read")
        return "whole"

    assert chronicle.again(read) == "whole"
    with pytest.raises(OffbeatError, match="never there"):
        chronicle.again(lambda: (_ for _ in ()).throw(OffbeatError("never there")))


def test_the_time_to_a_smoothed_limit_is_the_time_of_the_limit(tmp_path: Path) -> None:
    until = {"accuracy_smoothed": 0.3, "commits": 60}
    made = run(experiment(until=until, evaluate={"every_commits": 1}), tmp_path)
    table = webpage.target_table({"it": [chronicle.read_run(tmp_path)]}, [0.3])
    (row,) = table["rows"]
    assert made.ended.startswith("accuracy_smoothed >= 0.3")
    assert dict(zip(table["columns"], row, strict=True))["time to 0.3 (mean of 5)"] == webpage.palette.duration(
        made.virtual_seconds
    )
    assert "when the mean of 5 evaluations does" in table["note"]
