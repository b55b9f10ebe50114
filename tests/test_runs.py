"""Scripts as their users start them: run folders, resume after every kind of end, evaluation, errors.

What is tested here is the part that all scripts share (test_shared_blocks.py keeps it the same), so one script does.
A process costs seconds: most facts are read from what a few of them leave behind.
"""

import ctypes
import errno
import fcntl
import json
import os
import pty
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from conftest import KEEP_CHECKPOINTS, READ_ONLY_CACHE, ROOT, strike
from flax import serialization
from tensorboard.backend.event_processing import event_accumulator

import pqn_ffm

# All tests use these, so that they share compiled programs: the number of steps is a constant in them.
FLAGS = {
    "env": "RepeatPreviousEasy", "hidden-size": 16, "num-blocks": 1, "num-readout-blocks": 1, "trace-size": 4,
    "context-size": 2, "num-envs": 4, "num-steps": 16, "num-minibatches": 2, "update-epochs": 1, "learning-rate": 1e-3,
    "eval-episodes": 3, "total-timesteps": 768,
}  # fmt: skip
SMALL = "pqn_ffm.py --frozen " + " ".join(f"--{name} {value}" for name, value in FLAGS.items())
STEPS, UPDATES = 64, 12  # steps of an update, and updates of such a run
EVENTS = "tensorboardX.event_file_writer:EventsWriter", "write_event"


def logged(update: int) -> str:
    """The moment in which the scalars of an update are logged, those of the first seed."""
    return f"args[1].step == {update * STEPS} and len(args[1].summary.value) > 0"


def checkpoint(run: Path, name: str = "checkpoint.msgpack") -> SimpleNamespace:
    """The update it is from, and every array of the state by its path."""
    notes = serialization.msgpack_restore((run / name).read_bytes())
    return SimpleNamespace(update=int(notes["update"]), state=notes["state"])


def points(run: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows: the step and the value of every point of every curve."""
    accumulator = event_accumulator.EventAccumulator(str(run), size_guidance={event_accumulator.SCALARS: 0})
    accumulator.Reload()
    tags = accumulator.Tags()["scalars"]
    return {tag: [(point.step, point.value) for point in accumulator.Scalars(tag)] for tag in tags}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def assert_same_run(runs: list[Path], others: list[Path]):
    """Equal parameters, optimiser, environments and seeds, bit for bit; the same curves, and the same evaluation."""
    a, b = checkpoint(runs[0]), checkpoint(others[0])
    assert a.update == b.update and a.state.keys() == b.state.keys() and len(a.state) > 20
    for path in a.state:
        np.testing.assert_array_equal(a.state[path], b.state[path], err_msg=path)
    for run, other in zip(runs, others, strict=True):
        a, b = points(run), points(other)
        assert a.keys() == b.keys()
        assert all(a[tag] == b[tag] for tag in a if tag != "charts/SPS")
        a, b = (json.loads((folder / "eval.json").read_text()) for folder in (run, other))
        assert a["returns"] == b["returns"] and a["lengths"] == b["lengths"]


def assert_one_line_error(process, *words: str, code: int = 2):
    assert process.returncode == code, (process.returncode, process.stderr)
    lines = process.stderr.strip().splitlines()
    assert len(lines) == 1 and re.match(r"\w+\.py: error: ", lines[0]), process.stderr
    for word in words:
        assert word in lines[0], (word, lines[0])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One run of two seeds, as it ended: its process, its folders, and all its checkpoints by their update.

    Tests that change something copy it.
    """
    folder = tmp_path_factory.mktemp("finished")
    (folder / "wandb.py").write_text("raise SystemExit('wandb was imported')\n")
    (folder / "sitecustomize.py").write_text(KEEP_CHECKPOINTS)
    (folder / "kept").mkdir()
    command = f"{SMALL} --seed 7 --num-seeds 2 --checkpoint-every 0 --run-dir {folder / 'runs'}".split()
    command = [sys.executable, "-W", "error", str(ROOT / command[0]), *command[1:]]
    env = os.environ | {"PYTHONPATH": str(folder), "KEPT": str(folder / "kept")}
    process = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    runs = sorted((folder / "runs").iterdir())
    return SimpleNamespace(process=process, runs=runs, folder=folder / "runs", kept=folder / "kept")


@pytest.fixture
def copied(finished, tmp_path):
    """The folders of a copy of the finished run."""
    shutil.copytree(finished.folder, tmp_path / "copied")
    return sorted((tmp_path / "copied").iterdir())


def rewind(finished, runs: list[Path], update: int):
    """Makes a copied run one that was killed after this update and did not reach its evaluation."""
    shutil.copy(finished.kept / str(update), runs[0] / "checkpoint.msgpack")
    shutil.copy(finished.kept / str(update - 1), runs[0] / "checkpoint.previous")
    for run in runs:
        (run / "eval.json").unlink()


# ------------------------------------------------------------------------------------------------------ run folders
def test_a_run_leaves_events_config_checkpoints_and_evaluation(finished):
    for seed, run in zip((7, 8), finished.runs, strict=True):
        assert re.fullmatch(rf"RepeatPreviousEasy__pqn_ffm__ffm-frozen__{seed}__\d+\.\d+", run.name)
        files = sorted(file.name for file in run.iterdir())
        of_all = ["checkpoint.msgpack", "checkpoint.previous", "lock"] if seed == 7 else []
        assert re.fullmatch(r"events\.out\.tfevents\.\d+\..*", files.pop(-1 - len(of_all[2:])))
        assert files == sorted(["config.json", "eval.json", *of_all])

        config = json.loads((run / "config.json").read_text())
        assert config["script"] == "pqn_ffm" and config["seed"] == seed
        assert config["args"]["learning_rate"] == 1e-3 and config["args"]["seed"] == 7 and config["args"]["frozen"]
        assert config["parameters"]["memory_0"]["trainable"] == 0 < config["parameters"]["memory_0"]["frozen"]
        assert {"jax", "flax", "optax", "numpy"} <= config["versions"].keys()
        assert re.fullmatch(r"([0-9a-f]{40}(-dirty)?)?", config["git_commit"])

        result = json.loads((run / "eval.json").read_text())
        assert result["lengths"] == [51] * 3 and result["environment_steps"] == STEPS * UPDATES
        assert result["mean_return"] == pytest.approx(np.mean(result["returns"]), rel=1e-5)
        assert result["std_return"] == pytest.approx(np.std(result["returns"]), rel=1e-5)
        # Both seeds train in these seconds.
        assert result["SPS"] == pytest.approx(2 * STEPS * UPDATES / result["train_seconds"])
        assert result["compile_seconds"] > 0

        curves = points(run)
        assert curves.keys() >= {f"charts/{name}" for name in ("episodic_return", "SPS", "learning_rate", "epsilon")}
        assert [step for step, _ in curves["losses/td_loss"]] == list(range(STEPS, STEPS * UPDATES + 1, STEPS))
        # Episode i ends at step 51 i of its environment; an update of 16 steps without an end must be silent.
        ends = [STEPS * -(-51 * i // 16) for i in range(1, 4)]
        assert [step for step, _ in curves["charts/episodic_return"]] == ends
        assert curves["charts/episodic_length"] == [(step, 51) for step in ends]
        assert [step for step, _ in curves["memory_0/trace_durability_max"]] == [
            step for step, _ in curves["losses/td_loss"]
        ]
        assert curves["eval/episodic_return"] == [(STEPS * UPDATES, pytest.approx(result["mean_return"]))]
    assert checkpoint(finished.runs[0]).update == UPDATES
    assert [checkpoint(finished.kept, str(i)).update for i in (1, 5, 12)] == [1, 5, 12], "one after every update"


def test_what_a_run_prints_and_that_it_warns_of_nothing(finished):
    """It was started with -W error: every file that is left open would be a line here."""
    assert finished.process.stderr == ""
    shown = finished.process.stdout
    assert "compile time" in shown and "trainable" in shown and "step 768" in shown and "SPS" in shown
    for run in finished.runs:
        assert run.name in shown and re.search(rf"evaluation .*{run.name}", shown)


def test_a_fork_is_one_file_and_memory_and_a_seed_among_several_is_the_seed_alone(finished, tmp_path):
    """A copy of the script beside memory.py and popjym runs on its own, under its own name."""
    shutil.copy(ROOT / "pqn_ffm.py", tmp_path / "fork.py")
    shutil.copy(ROOT / "memory.py", tmp_path)
    (tmp_path / "popjym").symlink_to(ROOT / "popjym")
    flags = [*SMALL.split()[1:], *"--seed 8 --total-timesteps 7.68e2".split()]
    done = subprocess.run([sys.executable, "fork.py", *flags], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    assert "__fork__" in run.name
    alone, together = checkpoint(run).state, checkpoint(finished.runs[0]).state
    for path in together:
        np.testing.assert_allclose(together[path][1], alone[path][0], rtol=1e-4, atol=1e-5, err_msg=path)
    first, second, fork = (json.loads((r / "eval.json").read_text()) for r in (*finished.runs, run))
    assert second["returns"] == fork["returns"] != first["returns"]


def test_seeds_on_devices_of_their_own_are_those_of_one_device(script, finished, tmp_path):
    """Bit for bit: each device runs the program of one seed, as a CPU does with one seed after the other."""
    env = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    process = script(f"{SMALL} --seed 7 --num-seeds 2 --checkpoint-every 1000 --run-dir two", env=env)
    assert process.returncode == 0 and "2 of 4" in process.stdout, process.stderr
    assert_same_run(sorted((tmp_path / "two").iterdir()), finished.runs)


def test_runs_started_in_the_same_second_have_folders_of_their_own(monkeypatch, capfd):
    first, second = (parse(monkeypatch, capfd, f"{SMALL} --num-seeds 3 --run-dir x").folders for _ in range(2))
    assert [folder.name.split("__")[3] for folder in first] == ["1", "2", "3"] and not set(first) & set(second)
    assert len({folder.name.split("__")[4] for folder in first}) == 1, "the seeds of one program have one time"


@pytest.mark.slow
def test_compiled_programs_are_kept_in_the_users_cache_where_there_can_be_one(script, tmp_path):
    """Without a word, also of what is loaded; where nothing can be kept, JAX warns, and the run is the same."""
    command = f"{SMALL} --num-minibatches 1 --total-timesteps 128 --run-dir"
    (tmp_path / "a_file").write_text("")
    ends = []
    for cache in "cache", "cache", "a_file":
        env = {"JAX_COMPILATION_CACHE_DIR": None, "XDG_CACHE_HOME": str(tmp_path / cache)}
        process = script(f"{command} runs{len(ends)}", env=env)
        assert process.returncode == 0, process.stderr
        assert (process.stderr == "") == (cache == "cache"), process.stderr
        (run,) = (tmp_path / f"runs{len(ends)}").iterdir()
        kept = sorted(file.name for file in tmp_path.glob("cache/jax/jit_*-cache"))
        ends.append((kept, json.loads((run / "eval.json").read_text())["returns"]))
    assert len(ends[0][0]) >= 3 and ends[0] == ends[1] == ends[2], "init, train_iteration and evaluate at least"


# ------------------------------------------------------------------------------------------------ stopped and resumed
def test_a_run_interrupted_in_every_way_ends_as_one_that_never_was(script, finished, tmp_path):
    """Six processes train one run of two seeds. Each but the last is struck at a moment of its own."""
    run_dir = tmp_path / "runs"

    def go(command, number, owner, name, when, code, **options):
        process = script(command, patch=strike(number, owner, name, when), **options)
        assert process.returncode == code, process.stderr
        if number != signal.SIGKILL:
            assert process.stderr == "" and "stopping" in process.stdout and "--resume" in process.stdout
        assert not list(run_dir.glob("*/eval.json"))
        return sorted(run_dir.iterdir())

    # Before the first update.
    command = f"{SMALL} --seed 7 --num-seeds 2 --checkpoint-every 1000"
    runs = go(f"{command} --run-dir {run_dir}", signal.SIGUSR1, *EVENTS, logged(0), 138)
    assert checkpoint(runs[0]).update == 0
    # While an update is logged, the next one is not begun. Either folder stands for the run.
    go(f"pqn_ffm.py --resume {runs[1]}", signal.SIGINT, *EVENTS, logged(3), 130)
    assert checkpoint(runs[0]).update == 3
    go(f"pqn_ffm.py --resume {runs[0]}", signal.SIGTERM, *EVENTS, logged(5), 143)
    assert checkpoint(runs[0]).update == 5
    go(f"pqn_ffm.py --resume {runs[0]}/", signal.SIGHUP, *EVENTS, logged(7), 129)
    assert checkpoint(runs[0]).update == 7 and checkpoint(runs[0], "checkpoint.previous").update == 5
    # In the worst moment: the newest checkpoint has become the previous one, and the new one has no name yet.
    again = f"pqn_ffm.py --resume {runs[1]} --checkpoint-every 0"
    worst = "calls > 9 and str(args[1]).endswith('checkpoint.msgpack')"
    go(again, signal.SIGKILL, "os", "replace", worst, -signal.SIGKILL)
    assert not (runs[0] / "checkpoint.msgpack").exists()
    assert 7 < checkpoint(runs[0], "checkpoint.previous").update < UPDATES - 1
    # And then the disk loses the end of the newest one.
    previous = (runs[0] / "checkpoint.previous").read_bytes()
    (runs[0] / "checkpoint.msgpack").write_bytes(previous[: len(previous) // 2])
    last = script(again)
    assert last.returncode == 0 and "checkpoint.msgpack" in last.stderr and "damaged" in last.stderr, last.stderr
    assert len(last.stderr.splitlines()) == 1
    assert_same_run(runs, finished.runs)
    for run in runs:
        assert len(list(run.glob("events*"))) == 6


@pytest.mark.slow
def test_a_run_killed_at_any_moment_ends_as_one_that_never_was(script, tmp_path):
    """kill -9 at 20 random moments of a run with a checkpoint after every update.

    A moment is a random time, of up to a few updates' length, after a random update has been logged: so moments are
    spread over the run on any machine, and fall into training, into logging and into the writing of checkpoints.
    """
    command = f"{SMALL} --total-timesteps {STEPS * 400} --checkpoint-every 0"
    assert script(f"{command} --run-dir whole").returncode == 0
    (whole,) = (tmp_path / "whole").iterdir()
    rng, updates = random.Random(0), []
    for i in range(20):
        update, seconds = rng.randrange(1, 395), rng.uniform(0, 0.05)
        patch = strike(signal.SIGKILL, *EVENTS, logged(update), seconds)
        assert script(f"{command} --run-dir {i}", patch=patch).returncode == -signal.SIGKILL
        runs = list((tmp_path / str(i)).iterdir())
        updates.append(checkpoint(runs[0], "checkpoint.previous").update)
        assert update - 2 <= updates[-1] < 400
        assert script(f"pqn_ffm.py --resume {runs[0]}").returncode == 0
        assert_same_run(runs, [whole])
    assert len(set(updates)) > 15, updates


def test_a_second_interrupt_ends_at_once(script, tmp_path):
    both = strike(signal.SIGINT, *EVENTS, logged(1)) + strike(signal.SIGINT, *EVENTS, logged(1))
    process = script(f"{SMALL} --checkpoint-every 1000", patch=both)
    assert process.returncode == -signal.SIGINT and process.stderr == ""
    assert "stopping after this update" in process.stdout and "stopped" not in process.stdout
    (run,) = (tmp_path / "runs").iterdir()
    assert checkpoint(run).update == 0 and not (run / "checkpoint.previous").exists()


def test_an_interrupt_before_training_starts_ends_at_once_without_a_traceback(script, tmp_path):
    process = script(SMALL, patch=strike(signal.SIGINT, "fcntl", "flock", "calls == 1"))
    assert process.returncode in (-signal.SIGINT, 130) and process.stderr == ""


def test_an_interrupted_evaluation_ends_at_once(script, copied):
    """At its last moment: when its result is about to be written."""
    before = contents(copied[0].parent)
    process = script(f"pqn_ffm.py --evaluate {copied[0]}", patch=strike(signal.SIGINT, "os", "replace", "calls == 1"))
    assert process.returncode in (-signal.SIGINT, 130) and process.stderr == ""
    assert {name: data for name, data in contents(copied[0].parent).items() if not name.endswith(".new")} == before


@pytest.mark.parametrize("seed", [0, 1])
def test_a_run_killed_before_its_evaluation_is_written_is_evaluated_when_it_is_resumed(script, finished, copied, seed):
    (copied[seed] / "eval.json").unlink()
    process = script(f"pqn_ffm.py --resume {copied[0]}")
    assert process.returncode == 0 and process.stderr == "", process.stderr
    for run, other in zip(copied, finished.runs, strict=True):
        found, expected = (json.loads((folder / "eval.json").read_text()) for folder in (run, other))
        assert found["returns"] == expected["returns"] and found["lengths"] == expected["lengths"]


def test_a_finished_run_resumed_says_so_and_stays_as_it_is(script, copied):
    before = contents(copied[0].parent)
    process = script(f"pqn_ffm.py --resume {copied[1]}")
    assert process.returncode == 0 and process.stderr == "" and "finished" in process.stdout
    assert "compile time" not in process.stdout
    assert contents(copied[0].parent) == before


def test_a_run_is_trained_by_one_process_at_a_time(script, finished, copied):
    rewind(finished, copied, 11)
    run = copied[0]
    first = script(f"pqn_ffm.py --resume {run}", patch=strike(signal.SIGSTOP, *EVENTS, "True"), wait=False)
    while Path(f"/proc/{first.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "T":
        assert first.poll() is None, first.stderr.read()
        time.sleep(0.01)
    with open(run / "lock") as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    second = script(f"pqn_ffm.py --resume {copied[1]} --track", patch="import sys; sys.modules['wandb'] = None")
    assert_one_line_error(second, "--resume", "another process")  # and is not announced to Weights & Biases either
    first.kill()
    first.communicate()
    with open(run / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a killed process holds no lock


def test_a_file_system_without_locks_is_worth_a_line(script, finished, copied):
    rewind(finished, copied, 11)
    error = f"OSError({errno.ENOSYS}, 'Function not implemented')"
    patch = f"import fcntl\ndef flock(*args):\n    raise {error}\nfcntl.flock = flock\n"
    process = script(f"pqn_ffm.py --resume {copied[0]}", patch=patch)
    assert process.returncode == 0 and all((run / "eval.json").exists() for run in copied)
    (line,) = [line for line in (process.stdout + process.stderr).splitlines() if "no lock" in line]
    assert "not implemented" in line


# ----------------------------------------------------------------------------------------------- flags and run folders
def parse(monkeypatch, capfd, command: str):
    """What the script makes of a command line; the words of its error, if it has one."""
    monkeypatch.setattr(sys, "argv", command.split())
    before, columns = jax.config.jax_default_prng_impl, os.environ.get("COLUMNS")
    try:
        args, folders = pqn_ffm.parse_args()
        return SimpleNamespace(args=args, folders=folders, generator=jax.config.jax_default_prng_impl)
    except SystemExit as ended:
        printed = capfd.readouterr()
        assert printed.out == ""
        return SimpleNamespace(returncode=ended.code, stderr=printed.err)
    finally:
        jax.config.update("jax_default_prng_impl", before)
        if columns is None:
            os.environ.pop("COLUMNS", None)
        else:
            os.environ["COLUMNS"] = columns


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--env RepeatPrevios", ["RepeatPrevios", "RepeatPreviousEasy"]),
        ("--env StatelessPendulumEasy", ["--env StatelessPendulumEasy", "continuous"]),
        ("--num-envs 6 --num-minibatches 4", ["--num-envs 6", "4"]),
        ("--num-envs 0", ["--num-envs 0", "positive"]),
        ("--num-steps -3", ["--num-steps -3", "positive"]),
        ("--hidden-size 0", ["--hidden-size 0", "positive"]),
        ("--trace-size 0", ["--trace-size must", "positive", "not 0"]),
        ("--context-size 2147483648", ["--context-size must", "2^31", "not 2147483648"]),
        ("--num-seeds 0", ["--num-seeds 0", "positive"]),
        ("--eval-episodes 0", ["--eval-episodes 0", "positive"]),
        ("--total-timesteps 63", ["--total-timesteps 63", "64"]),
        ("--total-timesteps 3e9", ["--total-timesteps 3000000000", "2^31"]),
        ("--total-timesteps nan", ["--total-timesteps nan"]),
        ("--total-timesteps inf", ["--total-timesteps inf"]),
        ("--total-timesteps 1000.5", ["--total-timesteps 1000.5", "whole"]),
        ("--seed 2147483647 --num-seeds 2", ["--seed 2147483647"]),
        ("--gamma 1.5", ["--gamma 1.5", "0 to 1"]),
        ("--gamma nan", ["--gamma nan"]),
        ("--exploration-fraction -0.1", ["--exploration-fraction -0.1"]),
        ("--learning-rate -1", ["--learning-rate -1.0"]),
        ("--learning-rate inf", ["--learning-rate inf"]),
        ("--max-grad-norm 0", ["--max-grad-norm 0.0", "positive"]),
        ("--checkpoint-every -1", ["--checkpoint-every -1.0"]),
        ("--checkpoint-every nan", ["--checkpoint-every nan"]),
        ("--memory mlp --trace-size 32 --context-size 4", ["--frozen", "mlp"]),
        ("--memory gru", ["gru", "no such part"]),
        ("--exp-name a/b", ["--exp-name a/b"]),
        ("--resume nowhere", ["nowhere"]),
        ("--evaluate nowhere", ["nowhere"]),
        ("--resume=", []),
        ("--run-dir gs://bucket/runs", ["--run-dir gs://bucket/runs"]),
    ],
)
def test_a_bad_flag_is_one_line(tmp_path, monkeypatch, capfd, flags, words):
    monkeypatch.chdir(tmp_path)
    assert_one_line_error(parse(monkeypatch, capfd, f"{SMALL} {flags}"), *words)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--num-envs x", ["--num-envs", "x", "INT"]),
        ("--num-envs", ["--num-envs"]),
        ("--learnin-rate 1", ["--learnin-rate", "--learning-rate"]),
        ("--memory lstm", ["--memory", "lstm", "gru"]),
    ],
)
def test_what_the_parser_refuses_ends_with_its_message(monkeypatch, capfd, flags, words):
    process = parse(monkeypatch, capfd, f"{SMALL} {flags}")
    assert process.returncode == 2 and "Traceback" not in process.stderr
    assert all(word in process.stderr for word in words), process.stderr


def test_numbers_and_paths_as_people_write_them(monkeypatch, capfd):
    args = parse(monkeypatch, capfd, f"{SMALL} --total-timesteps 1e6 --run-dir ~/x").args
    assert args.total_timesteps == 1_000_000 and isinstance(args.total_timesteps, int)


def test_a_tilde_in_quotes_is_the_home(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("HOME", str(tmp_path))
    (folder,) = parse(monkeypatch, capfd, f"{SMALL} --run-dir ~/x").folders
    assert folder.parent == tmp_path / "x"


def test_a_run_is_continued_with_its_own_flags(copied, monkeypatch, capfd):
    run = copied[0]
    config = json.loads((run / "config.json").read_text())
    config["args"]["td_lambda"] = 0.5  # as if this had been the default then
    config["generator"] = "rbg"
    (run / "config.json").write_text(json.dumps(config))
    flags = ["--gamma 0.9", "--seed 3", "--frozen False", "--td-lambda 0.95", "--run-dir other", "--num-seeds 1"]
    for flag in flags:
        if flag.startswith("--frozen"):
            flag = "--no-frozen"
        refused = parse(monkeypatch, capfd, f"pqn_ffm.py --resume {run} {flag}")
        assert_one_line_error(refused, flag.split()[0].replace("--no-", "--"), "keeps it")
    for verb, allowed in (
        ("resume", "--checkpoint-every 7 --track --total-timesteps 1e4 --eval-every 1e3 --keep-best"),
        ("evaluate", "--env RepeatPreviousMedium --forget"),
    ):
        got = parse(monkeypatch, capfd, f"pqn_ffm.py --{verb} {run} --eval-episodes 5 --gamma 0.99 {allowed}")
        assert got.args.td_lambda == 0.5 and got.args.hidden_size == 16 and got.args.seed == 7
        assert got.args.eval_episodes == 5 and got.generator == "rbg"  # whatever this process's default is
        if verb == "resume":
            assert got.args.checkpoint_every == 7 and got.args.track and got.args.total_timesteps == 10_000
        else:
            assert got.args.env == "RepeatPreviousMedium" and got.args.forget
        refused = parse(monkeypatch, capfd, f"pqn_ffm.py --resume {run} --evaluate {run}")
        assert_one_line_error(refused, f"--resume {run}", "--evaluate")
        other = "evaluate" if verb == "resume" else "resume"
        refused = parse(monkeypatch, capfd, f"pqn_ffm.py --{other} {run} {allowed}")
        assert_one_line_error(refused, "keeps it")


def test_a_moved_run_is_continued_where_it_is(copied, monkeypatch, capfd):
    elsewhere = copied[0].parent.rename(copied[0].parent.parent / "else where")
    monkeypatch.chdir(elsewhere)
    for run in copied:
        got = parse(monkeypatch, capfd, f"pqn_ffm.py --resume {run.name}")
        assert got.folders == [elsewhere / run.name for run in copied]


def test_a_link_to_one_of_several_seeds_is_the_run(copied, tmp_path, monkeypatch, capfd):
    """As people make a folder of links to the runs that they compare."""
    (tmp_path / "picked").symlink_to(copied[1])
    monkeypatch.chdir(tmp_path)
    for verb in ("resume", "evaluate"):
        assert parse(monkeypatch, capfd, f"pqn_ffm.py --{verb} picked").folders == copied


def test_a_run_of_one_seed_can_be_renamed(copied, tmp_path, monkeypatch, capfd):
    config = json.loads((copied[0] / "config.json").read_text())
    config["args"]["num_seeds"], config["runs"] = 1, config["runs"][:1]
    (copied[0] / "config.json").write_text(json.dumps(config))
    renamed = copied[0].rename(tmp_path / "best [1]")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["pqn_ffm.py", "--resume", "best [1]"])
    assert pqn_ffm.parse_args()[1] == [renamed]


def test_a_config_that_is_damaged_or_foreign_is_one_line(copied, monkeypatch, capfd):
    run = copied[0]
    text = (run / "config.json").read_text()
    config = json.loads(text)
    damaged = [text[:100], "", "[]", "{}", "null", json.dumps(config | {"args": {"learning_speed": 1}})]
    for content in damaged:
        (run / "config.json").write_text(content)
        assert_one_line_error(parse(monkeypatch, capfd, f"pqn_ffm.py --resume {run}"), str(run))
    (run / "config.json").write_bytes(b"\xff\xfe\x00")
    assert_one_line_error(parse(monkeypatch, capfd, f"pqn_ffm.py --evaluate {run}"), str(run))
    (run / "config.json").unlink()
    assert_one_line_error(parse(monkeypatch, capfd, f"pqn_ffm.py --evaluate {run}"), str(run))


# --------------------------------------------------------------------------------------------------------- checkpoints
@pytest.fixture
def loaded(finished, copied):
    """update(): that of the state which the script reads from a copied run with checkpoints of updates 11 and 10."""
    rewind(finished, copied, 11)
    file = copied[0] / "checkpoint.msgpack"
    args = pqn_ffm.Args(**json.loads((copied[0] / "config.json").read_text())["args"])
    init = jax.vmap(pqn_ffm.make_train(args).init)
    shapes = jax.eval_shape(init, jax.numpy.arange(7, 9, dtype=jax.numpy.int32))
    start = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)

    def update():
        state = pqn_ffm.load(file, start)[0]
        assert all(x.shape == y.shape for x, y in zip(*map(jax.tree.leaves, (state, start)), strict=True))
        assert state.seed.tolist() == [7, 8]
        return int(state.update[0])

    return SimpleNamespace(file=file, previous=file.with_suffix(".previous"), update=update)


def test_a_checkpoint_is_what_was_saved_and_where_the_newest_is_missing_the_one_before_is_used(loaded, capfd):
    assert loaded.update() == 11
    loaded.file.unlink()
    assert loaded.update() == 10
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("damage", ["short", "empty", "noise", "another name", "folder"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(loaded, capfd, damage):
    data = loaded.file.read_bytes()
    changed = {
        "short": data[: len(data) // 2],
        "empty": b"",
        "noise": os.urandom(1000),
        "another name": data.replace(b"episode_return", b"episode_retusn", 1),
    }
    if damage == "folder":
        loaded.file.unlink()
        loaded.file.mkdir()
    else:
        loaded.file.write_bytes(changed[damage])
    assert loaded.update() == 10
    (line,) = capfd.readouterr().err.splitlines()
    assert str(loaded.file) in line and "damaged" in line


def test_a_run_whose_checkpoints_are_both_damaged_is_left_alone(script, copied):
    """To begin again from nothing in its folder would overwrite what a user may still rescue."""
    for file in copied[0].glob("checkpoint.*"):
        file.write_bytes(file.read_bytes()[:1000])
    before = contents(copied[0].parent)
    for verb in ("resume", "evaluate"):
        process = script(f"pqn_ffm.py --{verb} {copied[1]}")
        assert process.returncode in (1, 2) and "Traceback" not in process.stderr, process.stderr
        assert "checkpoint.msgpack" in process.stderr and "checkpoint.previous" in process.stderr
        assert contents(copied[0].parent) == before


def test_a_run_without_a_checkpoint_cannot_be_evaluated(copied, monkeypatch, capfd):
    for file in copied[0].glob("checkpoint.*"):
        file.unlink()
    monkeypatch.setattr(sys, "argv", ["pqn_ffm.py", "--evaluate", str(copied[1])])
    with pytest.raises(SystemExit) as ended:
        pqn_ffm.main()
    process = SimpleNamespace(returncode=ended.value.code, stderr=capfd.readouterr().err)
    assert_one_line_error(process, str(copied[0]), "no whole checkpoint")


# ---------------------------------------------------------------------------------------------------------- evaluation
def test_evaluation_does_not_depend_on_the_environment_it_is_started_in(script, copied):
    """Another default generator, and a terminal that shows nothing but ASCII."""
    before = contents(copied[0].parent)
    env = {"JAX_DEFAULT_PRNG_IMPL": "rbg", "PYTHONIOENCODING": "ascii", "COLUMNS": "1"}
    process = script(f"pqn_ffm.py --evaluate {copied[0]}", env=env)
    assert process.returncode == 0 and process.stderr == ""
    for run in copied:
        result, evaluated = (json.loads((run / name).read_text()) for name in ("eval.json", "evaluate.json"))
        assert evaluated["returns"] == result["returns"] and evaluated["lengths"] == result["lengths"]
        assert f"{result['mean_return']:.3f}" in process.stdout
        (run / "evaluate.json").unlink()
    assert contents(copied[0].parent) == before


def drop_privileges():
    """Root writes where nobody may, unless it gives that up."""
    ctypes.CDLL(None).prctl(24, 1, 0, 0, 0)  # PR_CAPBSET_DROP, CAP_DAC_OVERRIDE


@pytest.mark.parametrize("reason", ["read-only", "full"])
def test_evaluation_prints_what_it_cannot_write(script, copied, reason):
    """It needs no lock, and nothing in the folder of the run."""
    process, before = f"pqn_ffm.py --evaluate {copied[0]}", contents(copied[0].parent)
    if reason == "full":
        done = script(process, file_size_limit=10, env=READ_ONLY_CACHE)
    else:
        for run in copied:
            run.chmod(0o555)
        done = script(process, preexec_fn=drop_privileges)
        for run in copied:
            run.chmod(0o755)
    for run in copied:
        result = json.loads((run / "eval.json").read_text())
        assert f"{result['mean_return']:.3f}" in done.stdout and run.name in done.stdout
    assert "Traceback" not in done.stderr and 0 < len(done.stderr.splitlines()) <= 2, done.stderr
    after = contents(copied[0].parent)
    assert {name: data for name, data in after.items() if not name.endswith(".new")} == before


# ------------------------------------------------------------------------------------------------------------ failures
def test_a_loss_that_is_not_finite_stops_the_run(script, tmp_path):
    process = script(f"{SMALL} --learning-rate 2e9 --checkpoint-every 0")
    (run,) = (tmp_path / "runs").iterdir()
    assert_one_line_error(process, "losses/", "after update", "checkpoint", str(run.name), code=1)
    assert not (run / "eval.json").exists()
    failed = int(re.search(r"after update (\d+)", process.stderr)[1])
    for name in {"checkpoint.msgpack", "checkpoint.previous"} & set(os.listdir(run)):
        kept = checkpoint(run, name)
        assert kept.update < failed
        assert all(np.isfinite(x).all() for x in kept.state.values() if x.dtype.kind == "f")
    assert all(np.isfinite(value) for curve in points(run).values() for _, value in curve)


def test_a_full_disk_keeps_the_last_good_checkpoint(script, finished, copied):
    """A limit on the size of files fails a write as a full disk does."""
    rewind(finished, copied, 11)
    run = copied[0]
    good = (run / "checkpoint.msgpack").read_bytes()
    limit = len(good) // 2
    process = script(f"pqn_ffm.py --resume {run} --checkpoint-every 0", file_size_limit=limit, env=READ_ONLY_CACHE)
    assert_one_line_error(process, "write", code=1)
    assert (run / "checkpoint.msgpack").read_bytes() == good and not list(run.glob("*.new"))
    assert script(f"pqn_ffm.py --resume {run}").returncode == 0
    assert_same_run(copied, finished.runs)


@pytest.mark.parametrize("limit", [500, 4000])
def test_a_disk_that_is_full_from_the_start_or_fills_up_by_the_log(script, tmp_path, limit):
    process = script(SMALL, file_size_limit=limit, env=READ_ONLY_CACHE)
    assert_one_line_error(process, "write", code=1)
    for file in tmp_path.rglob("*.json"):
        json.loads(file.read_text())  # nothing half-written


def test_a_run_dir_that_cannot_be_is_one_line(script, tmp_path):
    (tmp_path / "file").write_text("")
    process = script(f"{SMALL} --run-dir file/runs")
    assert_one_line_error(process, "file/runs", code=1)
    assert process.stdout == "" and os.listdir(tmp_path) == ["file"]


def test_without_jit_nothing_is_started(script, tmp_path):
    process = script(f"{SMALL} --run-dir runs", env={"JAX_DISABLE_JIT": "1"})
    assert_one_line_error(process, "JAX_DISABLE_JIT", "jax.debug.print")
    assert not (tmp_path / "runs").exists()


def test_a_platform_that_is_not_there_is_one_line(script, tmp_path):
    process = script(SMALL, env={"JAX_PLATFORMS": "cuda"})
    assert_one_line_error(process, "cuda", "JAX_PLATFORMS", "cpu")
    assert not any(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------------ where it prints
OUTPUTS = [
    "a pipe closed after one line",
    *(pytest.param(output, marks=pytest.mark.slow) for output in ("a full disk", "closed, under nohup", "ASCII only")),
]


@pytest.mark.parametrize("output", OUTPUTS)
def test_a_run_is_trained_to_its_end_wherever_its_output_goes(script, tmp_path, output):
    if output == "a pipe closed after one line":
        started = script(SMALL, wait=False)
        started.stdout.readline()
        started.stdout.close()
        done = SimpleNamespace(returncode=started.wait(), stderr=started.stderr.read())
        started.stderr.close()
    elif output == "a full disk":
        with open("/dev/full", "w") as full:
            done = script(SMALL, stdout=full)
    elif output == "ASCII only":
        done = script(SMALL, env={"PYTHONIOENCODING": "ascii"})
    else:

        def nohup():
            os.close(1)
            signal.signal(signal.SIGHUP, signal.SIG_IGN)

        done = script(SMALL, patch=strike(signal.SIGHUP, *EVENTS, logged(2)), preexec_fn=nohup)
    assert done.returncode == 0 and "Traceback" not in done.stderr and "Exception" not in done.stderr, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    assert (run / "eval.json").exists() and checkpoint(run).update == UPDATES


def test_a_terminal_gets_a_bar(tmp_path):
    main, side = pty.openpty()
    termios.tcsetwinsize(side, (40, 160))
    command = [sys.executable, str(ROOT / SMALL.split()[0]), *SMALL.split()[1:]]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=side, stderr=subprocess.PIPE)
    os.close(side)
    shown = b""
    try:
        while chunk := os.read(main, 4096):
            shown += chunk
    except OSError:  # the other side is closed
        pass
    os.close(main)
    assert process.wait() == 0 and process.stderr.read() == b""
    process.stderr.close()
    assert shown.count(b"update/s") > 1 and b"SPS" in shown and b"return" in shown and "█".encode() in shown
    assert re.search(rb"step 768[^\r\n]*\r?\n", shown), "the bar's last state stays"


def test_help_has_every_flag_its_default_and_its_source_however_narrow_the_terminal(script):
    """A terminal that reports a width of 1, and shows ASCII only."""
    env = {"COLUMNS": "1", "PYTHONIOENCODING": "ascii"}
    start = time.time()
    process = script("pqn_ffm.py --help", env=env)
    assert process.returncode == 0 and process.stderr == "" and time.time() - start < 60
    for field in pqn_ffm.Args.__dataclass_fields__:
        assert f"--{field.replace('_', '-')}" in process.stdout.replace("\n", ""), field
    assert "FRN" in process.stdout and "0.95" in process.stdout and max(map(len, process.stdout.split("\n"))) >= 50


# ----------------------------------------------------------------------------------------------------- Weights & Biases
def wandb_records(file: Path):
    """The records of a run that is kept offline: a file of blocks in LevelDB's log format."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, record = file.read_bytes(), 7, b""
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # the whole of a record, or its end
            yield Record.FromString(record)
            record = b""


def test_weights_and_biases_gets_every_point_of_every_seed(script, tmp_path):
    env = {"WANDB_MODE": "offline", "HOME": str(tmp_path), "WANDB_ERROR_REPORTING": "false"}
    process = script(f"{SMALL} --track --num-seeds 2", env=env)
    assert process.returncode == 0, process.stderr
    for run in (tmp_path / "runs").iterdir():
        (file,) = (tmp_path / "wandb").glob(f"offline-run-*{run.name}/*.wandb")
        got, config = {}, {}
        for record in wandb_records(file):
            if record.HasField("run"):
                assert record.run.display_name == record.run.run_id == run.name
                config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            for tag in items.keys() - {"_step", "_runtime", "_timestamp"}:
                got.setdefault(tag, []).append((int(items["_step"]), pytest.approx(items[tag])))
        assert points(run) == got
        assert config["learning_rate"] == 1e-3


def test_without_an_account_weights_and_biases_is_one_line_before_anything_is_compiled(script, tmp_path):
    env = {"HOME": str(tmp_path), "WANDB_ERROR_REPORTING": "false", "WANDB_MODE": None, "WANDB_API_KEY": None}
    process = script(f"{SMALL} --track", env=env, stdin=subprocess.DEVNULL)
    assert process.returncode == 2 and "compile time" not in process.stdout
    lines = [line for line in process.stderr.splitlines() if not line.startswith("wandb: ")]
    assert len(lines) == 1 and "WANDB_MODE=offline" in lines[0], process.stderr
