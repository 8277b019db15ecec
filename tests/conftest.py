"""What tests of several rooms share."""

from __future__ import annotations

import os
import signal
from pathlib import Path

# One thread a process, and a process a core (pytest-xdist): models as small as the tests' gain nothing from a second
# thread, and lose much where it has to be waited for.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest

# A busy machine is no failure of the code under test.
hypothesis.settings.register_profile("leftward", deadline=None)
hypothesis.settings.load_profile("leftward")


# A shell starts what runs in its background with Ctrl-C ignored, and children would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real files that are too large, or not ours, to keep in the repository. CI has them."""
    project = Path(__file__).parents[1]
    data = Path(os.environ.get("LEFTWARD_DATA") or project.parent / "shared" / "data")
    if not data.is_dir():
        pytest.skip(f"real files are absent: {data} (set LEFTWARD_DATA)")
    return data
