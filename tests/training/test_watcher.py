"""What a person sees: how far, how fast, and how long still."""

import pytest

from leftward.training import watcher
from leftward.training.watcher import Watcher


@pytest.fixture
def shown(monkeypatch, capsys):
    """A function from (seconds, arguments of preparing) … to the lines that are shown."""
    now = [100.0]
    monkeypatch.setattr(watcher.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(watcher, "_LINE_SECONDS", -1.0)

    def show(*moments):
        with Watcher() as one:
            for seconds, *arguments in moments:
                now[0] = 100.0 + seconds
                one.preparing(*arguments)
        return capsys.readouterr().err.splitlines()

    return show


def test_encoding_tells_its_rate_and_how_long_it_will_take(shown):
    M = 10**6
    lines = shown(
        (0, "reading", 0, None),
        (4, "reading", 20 * M, None),
        # An encoding that goes on where it was interrupted: what was there already was not done now.
        (5, "encoding", 10 * M, 100 * M),
        (5.5, "encoding", 11 * M, 100 * M),
        (15, "encoding", 30 * M, 100 * M),
        (45, "encoding", 90 * M, 100 * M),
        (3700, "encoding", 100 * M, 99 * M),  # the total was an estimate
    )
    assert lines == [
        "reading text: 0.0 MB",
        "reading text: 20.0 MB  5.0 MB/s",
        "encoding text: 10.0 of 100.0 MB",
        "encoding text: 11.0 of 100.0 MB",  # too early to say
        "encoding text: 30.0 of 100.0 MB  2.0 MB/s  ETA 0:35",
        "encoding text: 90.0 of 100.0 MB  2.0 MB/s  ETA 0:05",
        "encoding text: 100.0 of 99.0 MB  0.0 MB/s  ETA 0:00",
    ]
