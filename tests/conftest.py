"""Settings for the whole suite."""

import os

from hypothesis import settings

# Timings vary between machines, and a run on CI should be the same every time.
settings.register_profile("proxprop", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("proxprop")

collect_ignore = ["distributed"]  # run by torchrun, see test_distributed.py
