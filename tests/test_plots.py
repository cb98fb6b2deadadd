"""Pictures: bands over seeds, units, styles that do not recur, labels that do not collide, spans of a trace."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from matplotlib import pyplot as plt
from scipy import stats

from offbeat.fleets.make import build
from offbeat.papers.fedbuff import trace
from offbeat.records import Arrived, Begun, Commit, Fetch, Finished, Joined, Left, Overwritten, Start
from offbeat.runs import bands, cluster_layout, fleet_plots, palette, plots
from offbeat.runs.timeline import Span, timeline_of


def rows(scores, step=1.0):
    return [
        {"commit": 10 * i, "virtual_seconds": step * i, "samples": 100 * i, "bytes_up": 5e6 * i, "bytes_down": 5e6 * i,
         "bytes_d2d": 0, "accuracy": score, "loss": 1 - score}
        for i, score in enumerate(scores)
    ]  # fmt: skip


def test_a_band_is_the_mean_of_the_seeds_and_its_interval():
    line = bands.band([rows([0.1, 0.5, 0.9]), rows([0.3, 0.5, 0.7]), rows([0.2, 0.5])], "commit", "accuracy")
    assert line.x == [0, 10]  # as far as the shortest
    assert line.mean == pytest.approx([0.2, 0.5])
    half = stats.t.ppf(0.975, 2) * 0.1 / math.sqrt(3)
    assert line.low == pytest.approx([0.2 - half, 0.5])
    assert line.high == pytest.approx([0.2 + half, 0.5])
    alone = bands.band([rows([0.1, 0.5])], "bytes", "accuracy")
    assert alone.x == [0, 1e7]
    assert alone.low is None


def test_rows_without_a_figure_are_left_out():
    some = rows([0.1, math.nan, 0.9])
    some[0]["accuracy"] = None
    assert bands.points(some, "commit", "accuracy") == ([20.0], [0.9])
    assert bands.band([], "commit", "accuracy").x == []


def test_styles_differ_for_64_lines_and_hours_are_hours():
    assert len({palette.style(number) for number in range(64)}) == 64
    assert palette.axis_label("virtual_seconds", palette.unit_of("virtual_seconds", 360_000)) == "virtual time (days)"
    assert palette.axis_label("virtual_seconds", palette.unit_of("virtual_seconds", 36_000)) == "virtual time (h)"
    assert palette.axis_label("bytes", palette.unit_of("bytes", 3e9)) == "bytes up and down (GB)"
    assert palette.axis_label("commits", palette.unit_of("commits", 200)) == "commits"


def test_labels_at_the_ends_do_not_collide():
    figure, axis = plt.subplots()
    curves = {f"method {i}": [rows([0.1, 0.9 + 0.002 * i])] for i in range(5)}
    plots.draw(axis, curves, "virtual_seconds", "accuracy")
    figure.canvas.draw()
    plots.label_ends(axis)
    boxes = [text.get_window_extent() for text in axis.texts]
    heights = sorted((box.y0 + box.y1) / 2 for box in boxes)
    plt.close(figure)
    assert len(boxes) == 5
    assert min(np.diff(heights)) > 10


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_the_same_figures_give_the_same_picture(tmp_path: Path, suffix: str) -> None:
    curves = {"a": [rows([0.1, 0.8]), rows([0.2, 0.9])], "b & <c>": [rows([0.1, 0.4], 4000.0)]}
    first = plots.comparison(curves, tmp_path / f"one.{suffix}", "title", (0.5,))
    again = plots.comparison(curves, tmp_path / f"two.{suffix}", "title", (0.5,))
    assert first.read_bytes() == again.read_bytes()
    assert first.stat().st_size > 5000


def test_a_loss_and_bytes_between_devices_have_their_panels(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(plots, "draw", lambda axis, curves, name, score: drawn.append((name, score)))
    some = rows([0.1, 0.8])
    for row in some:
        row |= {"accuracy": None, "bytes_d2d": 7 * row["commit"]}
    plots.comparison({"a": [some]}, tmp_path / "a.png")
    assert drawn == [(name, "loss") for name in ("virtual_seconds", "commits", "bytes_d2d", "bytes")]


def test_spans_of_a_trace():
    told = [
        (0.0, Start(0, 0, 3)), (1.0, Begun(0, 0, 0, 3)), (4.0, Finished(0, 0)), (5.0, Arrived(0, 0, 0, 3)),
        (5.0, Commit(((0, 0),))),
        (5.0, Begun(1, 0, 0, 3)), (6.0, Finished(1, 0)), (8.0, Fetch(1)), (9.0, Arrived(1, 0, 0, 3)),  # send buffer
        (9.0, Begun(1, 1, 1, 3)), (9.5, Finished(1, 1)), (9.6, Overwritten(1, 1)),  # computed, and never used
        (9.6, Begun(2, 0, 1, 3)), (10.0, Left(2)), (12.0, Joined(2)),
    ]  # fmt: skip
    line = timeline_of(told)
    assert line.commits == [5.0]
    assert line.end == 12.0
    assert line.spans == [
        Span(0, 1, 0, "download", 0), Span(1, 4, 0, "compute", 0), Span(4, 5, 0, "upload", 0),
        Span(5, 6, 1, "compute", 0), Span(6, 8, 1, "wait", 0), Span(8, 9, 1, "upload", 0),
        Span(9, 9.5, 1, "unused", 1), Span(9.6, 10, 2, "lost", 1), Span(10, 12, 2, "away", -1),
    ]  # fmt: skip


def test_clusters_alike_share_a_panel():
    alike = build("hlsgd", 32)
    assert list(cluster_layout.alike(alike.clusters.each, alike).values()) == [[0, 1, 2, 3]]
    fleet = build("hlsgd", 32, clusters={"count": 4, "graphs": ["ring", "star", "ring", "ring"], "pace": [1, 1, 1, 5]})
    assert list(cluster_layout.alike(fleet.clusters.each, fleet).values()) == [[0, 2], [1], [3]]


def test_pictures_of_fleets_and_schedules_are_written(tmp_path):
    assert fleet_plots.fleet(build("straggling", 20), tmp_path / "f.png").stat().st_size > 5000
    assert fleet_plots.fleet(build("equal", 3), tmp_path / "e.png").exists()  # links without a speed
    assert fleet_plots.clusters(build("hlsgd", 16), tmp_path / "c.png").exists()
    assert fleet_plots.timeline({"a": trace("fedbuff")}, tmp_path / "t.png", 12.0, 5).exists()
