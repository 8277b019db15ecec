"""What a person sees: a live bar on a terminal, plain lines in a pipe, a chart that fits."""

import re
import subprocess
import sys

from leftward.cli.chart import chart
from terminals import shown_on_a_terminal

SHOW = """
from leftward.training.watcher import Watcher
from leftward.training.loss import Evaluation
from leftward.training.progress import Progress

with Watcher() as watcher:
    watcher.preparing("reading", 1_000_000, 2_000_000)
    for step in range(1, 11):
        watcher.stepped(Progress(step, 10, 2.0, 3.0, 1.0, 0.5, step * 100, 1234.0, step * 1.0, 0.0, 10.0 - step))
    watcher.evaluated(10, Evaluation(200.0, 100, 400), True)
"""


def on_a_terminal(columns):
    output, code = shown_on_a_terminal([sys.executable, "-c", SHOW], columns)
    assert code == 0
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output)


def test_a_terminal_gets_a_live_bar():
    output = on_a_terminal(120)
    assert "step 10/10" in output and "1,234 tokens/s" in output and "ETA 0:00" in output
    assert "validation loss 2.0000" in output
    assert "━" in output


def test_a_small_terminal_is_no_obstacle():
    assert "step 10/10" in on_a_terminal(40)


def test_a_pipe_gets_plain_lines():
    done = subprocess.run([sys.executable, "-c", SHOW], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == ""
    assert "\x1b" not in done.stderr and "\r" not in done.stderr
    # 200 nats over 400 bytes are 200 / ln 2 / 400 = 0.7213 bits a byte
    assert "step 10: validation loss 2.0000, 0.7213 bits/byte" in done.stderr


def test_a_reader_that_leaves_does_not_end_the_run():
    script = SHOW.replace("with Watcher() as watcher:", "import os\nos.close(2)\nwith Watcher() as watcher:")
    done = subprocess.run([sys.executable, "-c", script + "print('done')"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "done\n"
    command = [sys.executable, "-c", SHOW + "    for _ in range(10_000): watcher.note('x' * 100)\nprint('done')"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    process.stderr.close()
    assert process.stdout.read() == "done\n" and process.wait() == 0


def test_the_chart_shows_every_point_and_fits(monkeypatch):
    monkeypatch.setenv("COLUMNS", "50")
    lines = chart([(0, 3.0), (500, 2.0), (1000, 1.0)], "loss", "tokens").splitlines()
    assert max(map(len, lines)) <= 50
    assert lines[0] == "loss against tokens"
    rows = [line.split("┤")[1] for line in lines if "┤" in line]
    points = [(row.index("•"), number) for number, row in enumerate(rows) if "•" in row]
    assert points == [(0, 0), (18, 4), (37, 7)]  # 38 columns, 8 rows: the middle falls on row 3.5, rounded to even


def test_a_chart_of_one_point_or_of_equal_ones():
    assert "•" in chart([(10, 1.0)], "loss", "tokens")
    assert "•" in chart([(10, 1.0), (20, 1.0)], "loss", "tokens")
