"""Shared by all tests: a persistent compilation cache, since most of the suite's time is compilation."""

import os
from pathlib import Path

# Set before jax is imported, and inherited by the scripts that the tests start.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).resolve().parent.parent / ".jax_cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
