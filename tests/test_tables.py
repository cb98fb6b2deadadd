"""Tables that fit: in a real terminal of any width no number is cut; progress shows life; in a pipe nothing goes."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from offbeat.runs.tables import laid_out
from stopped_runs import PATIENCE

WIDTHS = (60, 80, 120, 200)
SCRIPT = """
import fcntl, os, struct, sys, termios, warnings
from offbeat import cli
for width in {widths}:
    fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    print(f"== {{width}}")
    sys.argv = ["offbeat", "compare", "fedbuff", "local-sgd", "--until", "commits=4", "--until",
                "accuracy=0.99", "--metric", "f1", "--seeds", "2", "--device", "cpu", "--out", "out", "--overwrite",
                "--set", "task.clients=12", "--set", "task.model=logistic"]
    try:
        cli.main()
    except SystemExit as end:
        assert not end.code, end.code
"""


def in_terminal(words, folder, width=80, until=None):
    """Runs a command in a pseudo-terminal; what it wrote, when it wrote first, and how it ended."""
    main, other = pty.openpty()
    fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    names = {"COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"}
    env = {k: v for k, v in os.environ.items() if k not in names} | {"TERM": "xterm"}
    child = subprocess.Popen(words, cwd=folder, stdin=other, stdout=other, stderr=other, env=env, close_fds=True)
    os.close(other)
    text = b""
    while True:
        ready, _, _ = select.select([main], [], [], PATIENCE)
        try:
            part = os.read(main, 1 << 16) if ready else b""
        except OSError:  # the other end is closed
            part = b""
        if not part:
            break
        text += part
        if until is not None and until(text.decode(errors="replace")):
            child.send_signal(signal.SIGINT)
            until = None
    os.close(main)
    return text.decode(), child.wait()


def plain(text):
    """Without colours and cursor movements; of a line that was written over, the last text."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r\n", "\n")
    return "\n".join(line.rpartition("\r")[2] for line in text.split("\n"))


@pytest.fixture(scope="module")
def screens(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compare")
    text, code = in_terminal([sys.executable, "-c", SCRIPT.format(widths=WIDTHS)], folder)
    assert code == 0, text
    parts = re.split(r"== (\d+)\n", plain(text))
    full = (folder / "out" / "comparison.md").read_text().splitlines()
    cells = {row[0]: row for row in ([c.strip() for c in line.strip("|").split("|")] for line in full if "|" in line)}
    return dict(zip(map(int, parts[1::2]), parts[2::2], strict=True)), cells


@pytest.mark.parametrize("width", WIDTHS)
def test_compare_in_a_real_terminal_has_every_number_whole(screens, width):
    texts, cells = screens
    lines = texts[width].splitlines()
    table = [line for line in lines if line.split("  ")[0].strip() in cells]
    assert all(cell_len(line) <= width for line in table)
    assert "…" not in texts[width]
    rows = {line.split()[0]: re.split(r"\s{2,}", line.strip()) for line in table}
    assert set(rows) >= {"fedbuff", "local-sgd"}
    head = rows["method"]
    assert len(head) >= 4  # not only a name and a figure
    assert head[1].startswith("accuracy (test)")
    for label in ("fedbuff", "local-sgd"):
        whole = dict(zip(cells["method"], cells[label], strict=True))
        assert rows[label] == [whole[name] for name in head]
    gone = re.search(r"without: ([^\n]*(?:\n[^\n:]+)?)", texts[width])
    assert (len(head) == len(cells["method"])) == (gone is None)


def test_wider_terminals_show_more(screens):
    texts, cells = screens
    many = [max(len(re.split(r"\s{2,}", line)) for line in text.splitlines()) for text in texts.values()]
    assert many == sorted(many)
    assert many[-1] == len(cells["method"])


WORDS = st.text(st.sampled_from("abcxyz0123456789.-"), min_size=1, max_size=12)


@given(
    st.integers(2, 7).flatmap(lambda n: st.lists(st.lists(WORDS, min_size=n, max_size=n), min_size=2, max_size=5)),
    st.integers(12, 90),
)
def test_no_word_is_ever_cut(rows, width):
    columns, *rows = rows
    lines = laid_out(columns, rows, width)
    words = {word for cells in (columns, *rows) for word in cells} | {"without:"}
    for line in lines:
        assert cell_len(line) <= max(width, 1 + max(map(cell_len, words)))
        assert all(word.rstrip(",") in words or set(word) == {"─"} for word in line.split())
    wide = laid_out(columns, rows, width, drop=False)
    assert all(any(cell in line for line in wide) for row in rows for cell in row)


def test_columns_go_by_rank_and_a_narrow_table_is_turned():
    columns, row = ["method", "first", "last"], ["fedbuff", "1,234,567.8", "0.123456"]
    assert laid_out(columns, [row], 20, [0, 2, 1])[2:] == ["fedbuff  0.123456", "without: first"]
    assert laid_out(columns, [row], 20, [0, 1, 2])[2:] == ["fedbuff  1,234,567.8", "without: last"]
    assert laid_out(columns, [row], 19, [0, 1, 2]) == ["method  fedbuff", "first   1,234,567.8", "last    0.123456"]
    under = ["method", "fedbuff", "first", "1,234,567.8", "last", "0.123456"]
    assert laid_out(columns, [row], 12, [0, 1, 2])[2:] == under[2:]


def test_sentences_are_broken_between_words():
    said = "the largest of all eigenvalues at the point where the run ended"
    lines = laid_out(["", "value", "says"], [["L", "12.5", said]], 40)
    assert max(map(cell_len, lines)) <= 40
    assert " ".join(line[9:].strip() for line in lines[2:]) == said


# ---- progress -----------------------------------------------------------------------------------


def test_progress_and_an_interrupt_in_a_terminal(tmp_path):
    words = [sys.executable, "-m", "offbeat", "run", "--device", "cpu", "--out", "run", "--until", "commits=1000000"]
    text, code = in_terminal(words, tmp_path, 200, lambda seen: re.search(r"commit [1-9]\d*.*steps/s", seen))
    assert code == 130
    assert text.startswith("run: starting")  # before anything heavy is loaded
    line = r"commit \d+  accuracy [\d.]+ \(best [\d.]+\)  at most [\d,]+ s left  [\d,]+ client-steps/s"
    assert re.search(line, text)
    assert re.search(r"run has all up to commit [1-9]\d*, and `offbeat resume run` goes on from there", text)
