"""What tests of several rooms share."""

from __future__ import annotations

import os
from pathlib import Path

# One thread a process, and a process a core (pytest-xdist): models as small as the tests' gain nothing from a second
# thread, and lose much where it has to be waited for.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest

# A busy machine is no failure of the code under test.
hypothesis.settings.register_profile("leftward", deadline=None)
hypothesis.settings.load_profile("leftward")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real files that are too large, or not ours, to keep in the repository. CI has them."""
    project = Path(__file__).parents[1]
    data = Path(os.environ.get("LEFTWARD_DATA") or project.parent / "shared" / "data")
    if not data.is_dir():
        pytest.skip(f"real files are absent: {data} (set LEFTWARD_DATA)")
    return data
