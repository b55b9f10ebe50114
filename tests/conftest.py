"""Shared by all tests: how programs are compiled, and a way to run a script as its user does."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Most of the suite's time is compilation, so every program is compiled once and kept. Set before jax is imported, and
# inherited by the scripts that the tests start. XLA prints a line for each program that it loads from such a folder,
# as if it came from another machine; level 3 silences that.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".pytest_cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Small programs run for milliseconds and compile for seconds. What the tests start is not optimised at all.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

import jax  # noqa: E402

# What XLA makes of a program in a real run is the very fact of these.
OPTIMISED = {"test_compiler", "test_losses_256", "test_memory_width"}


@pytest.fixture(autouse=True, scope="module")
def optimisation(request):
    jax.config.update("jax_disable_most_optimizations", request.module.__name__ not in OPTIMISED)


def strike(number: int, owner: str, name: str, when: str, after: float = 0) -> str:
    """A patch for `script`: the process sends itself the signal `number` before a call of owner.name.

    It is the first call for which the expression `when` holds, in which `args` are the call's and `calls` counts them
    from 1. The signal is a real one, and its moment is the same on every machine, however slow it is; unless it comes
    `after` so many seconds, while the program goes on.
    """
    return f"""
def strike():
    import os, pkgutil, threading
    owner, calls, struck = pkgutil.resolve_name({owner!r}), 0, False
    function = getattr(owner, {name!r})
    def watched(*args, **kwargs):
        nonlocal calls, struck
        calls += 1
        if not struck and ({when}):
            struck = True
            if {after}:
                threading.Timer({after}, os.kill, (os.getpid(), {int(number)})).start()
            else:
                os.kill(os.getpid(), {int(number)})
        return function(*args, **kwargs)
    setattr(owner, {name!r}, watched)
strike()
"""


# A patch that keeps every checkpoint in the folder that KEPT names, each by the number of its update.
KEEP_CHECKPOINTS = """
def keep_checkpoints():
    import os, shutil
    replace = os.replace
    def replace_and_keep(source, target):
        replace(source, target)
        if str(target).endswith("checkpoint.msgpack"):
            from flax.serialization import msgpack_restore
            with open(target, "rb") as file:
                shutil.copy(target, os.environ["KEPT"] + f"/{int(msgpack_restore(file.read())['update'])}")
    os.replace = replace_and_keep
keep_checkpoints()
"""
# A limit on the size of files holds for the compilation cache too: programs are read from it, and none is written.
READ_ONLY_CACHE = {"JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "1000000000"}


@pytest.fixture
def script(tmp_path, tmp_path_factory):
    """script("pqn_ffm.py --env …") runs it with runs/ in tmp_path, and returns the finished process.

    With `stop=(signal, ready)` the signal is sent as soon as something is printed in which `ready` occurs, or, if it is
    a function, as soon as it is true. `file_size_limit` is in bytes: writing more to a file fails. `patch` is Python
    code that the process executes before the script. `python` are flags of the interpreter. `env` is added to the
    environment, or taken from it where it is None. With `wait=False` the started process is returned.
    """

    def run(
        command: str,
        stop: tuple | None = None,
        file_size_limit: int | None = None,
        patch: str | None = None,
        python: tuple[str, ...] = (),
        wait: bool = True,
        **options,
    ):
        name, *flags = command.split()
        script = [sys.executable, *python, str(ROOT / name), *flags]
        command = script
        if file_size_limit is not None:
            limit = f"resource.setrlimit(resource.RLIMIT_FSIZE, ({file_size_limit}, {file_size_limit}))"
            code = f"import os, resource, sys; {limit}; os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
            command = [sys.executable, "-c", code, *script[1:]]
        env = {name: x for name, x in (os.environ | options.pop("env", {})).items() if x is not None}
        if patch is not None:
            folder = tmp_path_factory.mktemp("patch")
            (folder / "sitecustomize.py").write_text(patch)
            env["PYTHONPATH"] = f"{folder}:{env.get('PYTHONPATH', '')}"
        options = {"cwd": tmp_path, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
        process = subprocess.Popen(command, env=env, **options)
        if not wait:
            return process
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
        return subprocess.CompletedProcess(script, process.returncode, seen + (stdout or ""), stderr or "")

    return run
