"""Shared by all tests: the compilation cache, and a way to run a script as its user does."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Most of the suite's time is compilation. Set before jax is imported, and inherited by the scripts the tests start.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".jax_cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")


@pytest.fixture
def script(tmp_path):
    """script("pqn_ffm.py --env …") runs it with runs/ in tmp_path, and returns the finished process.

    With `stop=(signal, ready)` the signal is sent as soon as something is printed in which `ready` occurs, or, if it is
    a function, as soon as it is true. `file_size_limit` is in bytes: writing more to a file fails.
    """

    def run(command: str, stop: tuple | None = None, file_size_limit: int | None = None, **options):
        name, *flags = command.split()
        script = [str(ROOT / name), *flags]
        command = [sys.executable, *script]
        if file_size_limit is not None:
            limit = f"resource.setrlimit(resource.RLIMIT_FSIZE, ({file_size_limit}, {file_size_limit}))"
            code = f"import os, resource, sys; {limit}; os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
            command = [sys.executable, "-c", code, *script]
        options = {"cwd": tmp_path, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
        # Tests in this process run what XLA makes of a script by default. The scripts they start run small settings for
        # seconds, and would spend most of them on optimising.
        options["env"] = {"XLA_FLAGS": "--xla_backend_optimization_level=0"} | options.get("env", os.environ)
        process = subprocess.Popen(command, **options)
        seen = ""
        if stop is not None:
            number, ready = stop
            while not ready() if callable(ready) else ready not in seen:
                if callable(ready):
                    time.sleep(0.01)
                else:
                    seen += process.stdout.readline()
                assert process.poll() is None, f"ended before it was stopped: {seen}{process.stderr.read()}"
            process.send_signal(number)
        stdout, stderr = process.communicate(timeout=600)
        return subprocess.CompletedProcess([sys.executable, *script], process.returncode, seen + stdout, stderr)

    return run
