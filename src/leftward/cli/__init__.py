"""The command line: one file a verb. Parses, calls, prints; no logic of its own, and no torch before it is needed."""

import time

STARTED = time.perf_counter()
"""When the command began: before the imports that take time, so that a run's wall_s counts them."""

INTERRUPTED = 130
"""The exit code that a shell expects after Ctrl-C."""
