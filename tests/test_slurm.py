"""benchmark.sh --slurm on a cluster of one node: tasks are told to stop, killed, out of time, and all runs finish once.

The stub of test_benchmark_sh.py stands for the training scripts.
"""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
from conftest import ROOT
from test_benchmark_sh import STUB

CLUSTER = ROOT / "tests" / "slurm_cluster.sh"
missing = [program for program in ("sbatch", "slurmctld", "slurmd", "munged") if not shutil.which(program)]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.slurm,
    pytest.mark.skipif(bool(missing), reason=f"no {', '.join(missing)}: apt-get install slurm-wlm munge"),
    pytest.mark.skipif(os.geteuid() != 0, reason="slurmd starts jobs as root only"),
]


@pytest.fixture(scope="module")
def cluster():
    """The environment variables of a running cluster. Its folder's path is short, as a socket's must be."""
    folder = tempfile.mkdtemp(prefix="slurm")
    try:
        started = subprocess.run([CLUSTER, "start", folder], capture_output=True, text=True, timeout=120)
        assert started.returncode == 0, started.stderr
        name, value = started.stdout.strip().split("=")
        yield {name: value}
    finally:
        subprocess.run([CLUSTER, "stop", folder], timeout=60)
        shutil.rmtree(folder)


class Sweep:
    """benchmark.sh and the stub in a folder, and what the stub's runs have said there."""

    def __init__(self, folder: Path, cluster: dict):
        self.folder = folder
        self.environment = os.environ | cluster | {"PYTHON": str(folder / "stub"), "WAIT": "0"}
        shutil.copy(ROOT / "benchmark.sh", folder)
        (folder / "stub").write_text(STUB)
        (folder / "stub").chmod(0o755)

    def command(self, *words) -> str:
        options = {"cwd": self.folder, "env": self.environment, "timeout": 60, "capture_output": True, "text": True}
        done = subprocess.run(words, **options)
        assert done.returncode in (0, 143), done.stderr
        return done.stdout

    def submit(self, group, *flags) -> str:
        """The array's job id."""
        command = ["./benchmark.sh", group, "--run-dir", "r", "--slurm", *flags]
        return self.command(*command).split("Submitted batch job ")[1].strip()

    def lines(self, name) -> list[str]:
        file = self.folder / name
        return file.read_text().splitlines() if file.exists() else []

    def pids(self, kind) -> set[int]:
        """Of the runs to which it has happened: "begin", "signal" or "end"."""
        return {int(line.split()[1]) for line in self.lines("events.txt") if line.startswith(kind)}

    def running(self, job) -> list[str]:
        return self.command("squeue", "--noheader", "--states=R", "--format=%i", "--array", f"--job={job}").split()

    def finished(self) -> list[Path]:
        return sorted(self.folder.glob("r/*/*/eval.json"))

    def until(self, condition, seconds=60):
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, self.command("scontrol", "show", "job") + "\n".join(self.lines("events.txt"))
            time.sleep(0.2)

    def until_the_queue_is_empty(self):
        self.until(lambda: not self.command("squeue", "--noheader"))


@pytest.fixture
def sweep(tmp_path, cluster):
    sweep = Sweep(tmp_path, cluster)
    yield sweep
    sweep.command("scancel", "--user=root")
    sweep.until_the_queue_is_empty()


def test_every_run_of_an_array_finishes_once_though_tasks_are_told_to_stop_and_killed(sweep):
    job = sweep.submit("table1", "--workers", "2")
    sweep.until(lambda: len(sweep.lines("events.txt")) == 2)
    assert sorted(sweep.running(job)) == [f"{job}_0", f"{job}_1"], "two at a time"
    begun = sweep.pids("begin")
    # As before its time limit: task 0 ends by the signal, and comes again by itself.
    # (Slurm 22.05 signals a task of an array again every five seconds until scancel is ended.)
    sweep.command("timeout", "--preserve-status", "3", "scancel", "--signal=USR1", "--batch", f"{job}_0")
    sweep.until(lambda: len(sweep.pids("signal")) == 1)
    # As when the machine's memory is full: the run of task 1 is gone, and its task does not come again.
    (killed,) = begun - sweep.pids("signal")
    os.kill(killed, signal.SIGKILL)
    sweep.until(lambda: f"{job}_1" not in sweep.running(job))
    (sweep.folder / "go").touch()
    sweep.until_the_queue_is_empty()
    calls = sweep.lines("calls.txt")
    run = "StatelessCartPoleEasy__pqn_frozen_rnn__gru{}__1__1700000000"
    assert [call for call in calls if "--resume" in call] == [f"pqn_frozen_rnn.py --resume r/table1/{run.format('')}"]
    assert len(sweep.pids("signal")) == 1
    assert len(calls) == 9 and len(sweep.finished()) == 7
    assert not (sweep.folder / "r/table1" / run.format("-frozen") / "eval.json").exists()

    sweep.submit("table1")
    sweep.until_the_queue_is_empty()
    again = sweep.lines("calls.txt")[9:]
    assert again == [f"pqn_frozen_rnn.py --resume r/table1/{run.format('-frozen')}"]
    assert len(sweep.finished()) == 8 and len(list(sweep.folder.glob("r/table1/*__*"))) == 8
    assert all(file.read_text().count("SPS") == 1 for file in sweep.finished())


def test_a_task_near_its_time_limit_goes_on_after_it(sweep):
    # The first task alone: it gets its signal 50 seconds before the end of its minute.
    job = sweep.submit("table1", "--", "--array=0", "--time=1", "--signal=B:USR1@50")
    sweep.until(lambda: len(sweep.lines("events.txt")) == 3, seconds=120)
    begun, told, again = (line.split()[0] for line in sweep.lines("events.txt"))
    assert (begun, told, again) == ("begin", "signal", "begin") and "USR1" in sweep.lines("events.txt")[1]
    (sweep.folder / "go").touch()
    sweep.until_the_queue_is_empty()
    assert len(sweep.finished()) == 1 and sweep.finished()[0].read_text().count("SPS") == 1
    (log,) = sweep.folder.glob("r/slurm/*.log")
    assert log.read_text().count("--env") == 1 and log.read_text().count("--resume") == 1, job


def test_a_cancelled_task_gets_one_signal_and_waits_for_its_checkpoint(sweep):
    job = sweep.submit("table1", "--", "--array=0")
    sweep.until(lambda: len(sweep.lines("events.txt")) == 1)
    sweep.command("scancel", job)
    sweep.until_the_queue_is_empty()
    events = [line.split() for line in sweep.lines("events.txt")]
    assert [event[0] for event in events] == ["begin", "signal"] and events[1][1:] == [events[0][1], "TERM"]
    assert sweep.finished() == []
