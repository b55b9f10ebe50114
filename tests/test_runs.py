"""Scripts as their users start them: run folders, resume after every kind of end, evaluation, errors."""

import filecmp
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import termios
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest
from conftest import ROOT
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event

import pqn_ffm

# Every script with the shared blocks, and flags that make it small: 4 environments × 16 steps an update.
SCRIPTS = {
    "pqn_ffm": "pqn_ffm.py --env RepeatPrevious --hidden-size 16 --trace-size 4 --context-size 2 --num-envs 4 "
    "--num-steps 16 --num-minibatches 2 --update-epochs 1 --learning-rate 1e-3 --eval-episodes 3",
    "pqn_frozen_rnn": "pqn_frozen_rnn.py --env RepeatPrevious --memory lru --hidden-size 16 --num-envs 4 "
    "--num-steps 16 --num-minibatches 2 --update-epochs 1 --learning-rate 1e-3 --eval-episodes 3",
    "ppo_memorychain": "ppo_memorychain.py --delay 50 --memory gru --hidden-size 16 --num-envs 4 "
    "--num-steps 16 --num-minibatches 2 --update-epochs 1 --learning-rate 1e-3 --eval-episodes 3",
}
STEPS = 64


@pytest.fixture(params=SCRIPTS)
def each(request):
    """Every script, where it matters what the state of a run consists of."""
    return SCRIPTS[request.param]


@pytest.fixture
def small():
    """One script, where only the shared blocks matter: they are identical (test_shared_blocks.py)."""
    return SCRIPTS["pqn_ffm"]


def only(folder: Path) -> Path:
    (run,) = folder.iterdir()
    return run


def raw_state(run: Path, update: int) -> list[np.ndarray]:
    """Every array of a checkpoint, in a fixed order."""
    with ocp.CheckpointManager(run.absolute() / "checkpoints") as manager:
        restored = manager.restore(update, args=ocp.args.Composite(state=ocp.args.StandardRestore()))
    leaves = []

    def walk(tree):
        if isinstance(tree, dict):
            for name in sorted(tree):
                walk(tree[name])
        elif isinstance(tree, (list, tuple)):
            for x in tree:
                walk(x)
        elif tree is not None:
            leaves.append(np.asarray(tree))

    walk(restored.state)
    return leaves


def raw_points(run: Path) -> list[tuple[str, int, float]]:
    """Every scalar in every event file, without TensorBoard's own removal of doubles."""
    points = []
    for file in sorted(run.glob("events.out.tfevents.*")):
        for record in RawEventFileLoader(str(file)).Load():
            event = Event.FromString(record)
            points += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
    return points


def assert_same_run(run: Path, other: Path, update: int):
    """Equal parameters, optimiser, environments and keys, bit for bit; and the same points in the log."""
    a, b = raw_state(run, update), raw_state(other, update)
    assert len(a) == len(b) > 20
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(x, y)
    a, b = ([x for x in raw_points(r) if x[0] != "charts/SPS"] for r in (run, other))
    assert a == b
    steps = [step for tag, step, _ in raw_points(run) if tag == "losses/grad_norm"]
    assert steps == list(range(STEPS, STEPS * update + 1, STEPS))


def test_a_run_leaves_events_config_checkpoints_and_eval(script, small, tmp_path):
    done = script(f"{small} --frozen --total-timesteps {STEPS * 30} --seed 7")
    assert done.returncode == 0, done.stderr
    run = only(tmp_path / "runs")
    name = small.split(".py")[0]
    assert re.fullmatch(rf"RepeatPreviousEasy__{name}__ffm-frozen__7__\d+", run.name)
    files = sorted(p.name for p in run.iterdir())
    assert files[:3] == ["checkpoints", "config.json", "eval.json"] and files[3].startswith("events.out.tfevents.")
    assert files[4:] == ["lock"]

    config = json.loads((run / "config.json").read_text())
    assert config["args"]["learning_rate"] == 1e-3 and config["args"]["seed"] == 7 and config["args"]["frozen"]
    assert config["parameters"]["memory_0"]["trainable"] == 0 < config["parameters"]["memory_0"]["frozen"]
    assert {"jax", "flax", "optax", "numpy", "python"} <= config["versions"].keys()

    result = json.loads((run / "eval.json").read_text())
    assert result["lengths"] == [51] * 3 and result["environment_steps"] == STEPS * 30
    assert result["mean_return"] == pytest.approx(np.mean(result["returns"]), rel=1e-5)
    assert result["std_return"] == pytest.approx(np.std(result["returns"]), rel=1e-5)
    assert result["SPS"] == pytest.approx(STEPS * 30 / result["train_seconds"])

    points = raw_points(run)
    tags = {tag for tag, _, _ in points}
    assert tags >= {"charts/episodic_return", "charts/episodic_length", "charts/SPS", "charts/learning_rate"}
    assert tags >= {"charts/epsilon", "losses/td_loss", "losses/q_values", "losses/grad_norm", "eval/episodic_return"}
    returns = {step: value for tag, step, value in points if tag == "charts/episodic_return"}
    # Episode i ends at step 51 i of its environment; an update of 16 steps without an end must be silent.
    assert sorted(returns) == [STEPS * -(-51 * i // 16) for i in range(1, 10)]
    assert [s for tag, s, _ in points if tag == "memory_0/trace_durability_max"] == [0, STEPS * 30]
    assert dict((tag, v) for tag, s, v in points if s)["eval/episodic_return"] == pytest.approx(result["mean_return"])

    assert "compile time" in done.stdout and str(run.name) in done.stdout and "trainable" in done.stdout
    assert "step 1,920" in done.stdout and done.stderr == ""


def test_the_same_seed_gives_the_same_evaluation_and_another_seed_another(script, small, tmp_path):
    results = []
    for i, seed in enumerate((1, 1, 2)):
        assert script(f"{small} --total-timesteps {STEPS * 4} --seed {seed} --run-dir {i}").returncode == 0
        result = json.loads((only(tmp_path / str(i)) / "eval.json").read_text())
        timing = ("train_seconds", "compile_seconds", "SPS")
        results.append({name: result[name] for name in result if name not in timing})
    assert results[0] == results[1] != results[2]


def test_seeds_side_by_side_are_the_runs_one_by_one(script, each, tmp_path):
    updates = 3
    command = f"{each} --total-timesteps {STEPS * updates}"
    assert script(f"{command} --seed 5 --num-seeds 2 --run-dir all").returncode == 0
    runs = sorted((tmp_path / "all").iterdir())
    assert [run.name.split("__")[3] for run in runs] == ["5", "6"]
    together = raw_state(runs[0], updates)
    for i, run in enumerate(runs):
        assert json.loads((run / "config.json").read_text())["seed"] == 5 + i
        assert script(f"{command} --seed {5 + i} --run-dir {i}").returncode == 0
        alone = only(tmp_path / str(i))
        for x, y in zip(together, raw_state(alone, updates), strict=True):
            np.testing.assert_allclose(x[i], y[0], rtol=1e-4, atol=1e-5)
        one, other = (json.loads((folder / "eval.json").read_text()) for folder in (run, alone))
        assert one["returns"] == other["returns"]
    evaluated = script(f"{each.split()[0]} --evaluate {runs[1]}")
    assert evaluated.returncode == 0, evaluated.stderr
    assert json.loads((runs[1] / "evaluate.json").read_text())["returns"] == one["returns"]


@pytest.mark.parametrize(
    "name, number, num_seeds",
    [*[(name, signal.SIGKILL, 2) for name in SCRIPTS], ("pqn_ffm", signal.SIGINT, 1), ("pqn_ffm", signal.SIGTERM, 2)],
)
def test_a_stopped_run_resumes_bit_for_bit(script, tmp_path, name, number, num_seeds):
    updates, small = 1000, SCRIPTS[name]
    command = f"{small} --total-timesteps {STEPS * updates} --num-seeds {num_seeds}"
    assert script(f"{command} --run-dir whole").returncode == 0
    wholes = sorted((tmp_path / "whole").iterdir())
    # A kill gives no warning: its checkpoints are those written on the way.
    every, ready = 600, "step"
    if number == signal.SIGKILL:
        every, ready = 0.1, lambda: any((tmp_path / "parts").glob("*/checkpoints/[1-9]*[0-9]"))
    stopped = script(f"{command} --run-dir parts --checkpoint-every {every}", stop=(number, ready))
    runs = sorted((tmp_path / "parts").iterdir())
    kept = sorted(int(p.name) for p in (runs[0] / "checkpoints").iterdir() if p.name.isdigit())
    assert not (runs[0] / "eval.json").exists() and 0 < kept[-1] < updates, "stopped too early or too late"
    if number == signal.SIGKILL:
        assert stopped.returncode == -number
    else:
        assert stopped.returncode == 128 + number and "--resume" in stopped.stdout and stopped.stderr == ""
    assert len(kept) <= 2 or number == signal.SIGKILL  # which can come between a new one and the deletion of an old one
    resumed = script(f"{small.split()[0]} --resume {runs[-1]} --checkpoint-every 600")
    assert resumed.returncode == 0, resumed.stderr
    assert len(list((runs[0] / "checkpoints").iterdir())) <= 2
    for run, whole in zip(runs, wholes, strict=True):
        assert_same_run(run, whole, updates)
        one, other = (json.loads((r / "eval.json").read_text()) for r in (run, whole))
        assert one["returns"] == other["returns"] and one["lengths"] == other["lengths"]


def test_a_run_killed_before_its_first_checkpoint_starts_again(script, small, tmp_path):
    command = f"{small} --total-timesteps {STEPS * 1000}"
    assert script(f"{command} --run-dir whole").returncode == 0
    script(f"{command} --run-dir parts", stop=(signal.SIGKILL, "step"))
    run = only(tmp_path / "parts")
    assert not list((run / "checkpoints").glob("[0-9]*"))
    refused = script(f"{small.split()[0]} --evaluate {run}")
    assert refused.returncode == 2 and "no checkpoint yet" in refused.stderr
    assert script(f"{small.split()[0]} --resume {run}").returncode == 0
    assert_same_run(run, only(tmp_path / "whole"), 1000)


def test_a_run_stopped_before_its_first_update_resumes(script, small, tmp_path):
    command = f"{small} --total-timesteps {STEPS * 8}"
    stopped = script(f"{command} --run-dir parts", stop=(signal.SIGTERM, "run folder"))
    assert stopped.returncode == 143 and stopped.stderr == ""
    run = only(tmp_path / "parts")
    assert script(f"{small.split()[0]} --resume {run}").returncode == 0
    assert script(f"{command} --run-dir whole").returncode == 0
    assert_same_run(run, only(tmp_path / "whole"), 8)


def test_two_runs_started_in_the_same_second_have_two_folders(script, small, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import time; time.time = lambda: 1700000000.0")
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    for _ in range(2):
        assert script(f"{small} --total-timesteps {STEPS * 4}", env=env).returncode == 0
    first, second = sorted((tmp_path / "runs").iterdir())
    assert (first.name[-10:], second.name[-10:]) == ("1700000000", "1700000001")
    assert (first / "eval.json").exists() and (second / "eval.json").exists()


def test_another_run_takes_the_name_at_the_same_moment(script, small, tmp_path):
    """What another process made between two lines of this one stays, and this one takes the next second."""
    (tmp_path / "sitecustomize.py").write_text(
        "import pathlib, time\n"
        "time.time, mkdir = lambda: 1700000000.0, pathlib.Path.mkdir\n"
        "def late(folder, *args, **kwargs):\n"
        "    if folder.name.endswith('__2__1700000000'):\n"
        "        mkdir(folder, parents=True)\n"
        "    mkdir(folder, *args, **kwargs)\n"
        "pathlib.Path.mkdir = late\n"
    )
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    assert script(f"{small} --total-timesteps {STEPS * 4} --num-seeds 2", env=env).returncode == 0
    names = sorted(run.name.split("__", 3)[-1] for run in (tmp_path / "runs").iterdir())
    assert names == ["1__1700000001", "2__1700000000", "2__1700000001"]
    assert not list((tmp_path / "runs").glob("*__2__1700000000/*"))


def test_a_finished_run_resumed_stays_as_it_is(script, small, tmp_path):
    assert script(f"{small} --total-timesteps {STEPS * 4}").returncode == 0
    run = only(tmp_path / "runs")
    before = json.loads((run / "eval.json").read_text())
    shutil.copytree(run, tmp_path / "copy")
    assert script(f"{small.split()[0]} --resume {run}").returncode == 0
    after = json.loads((run / "eval.json").read_text())
    assert after["returns"] == before["returns"] and after["environment_steps"] == before["environment_steps"]
    assert_same_run(run, tmp_path / "copy", 4)


def test_resume_and_evaluate_keep_the_flags_of_the_run(script, small, tmp_path):
    assert script(f"{small} --total-timesteps {STEPS * 4} --gamma 0.9").returncode == 0
    run, name = only(tmp_path / "runs"), small.split()[0]
    for flags, word in (("--gamma 0.99", "--gamma 0.99"), ("--seed 3", "--seed 3"), ("--eval-episodes 5", "--eval-ep")):
        refused = script(f"{name} --resume {run} {flags}")
        assert_one_line_error(refused, word)
    assert script(f"{name} --resume {run} --gamma 0.9").returncode == 0
    before = (run / "eval.json").read_bytes()
    more = script(f"{name} --evaluate {run} --eval-episodes 5 --env RepeatPreviousEasy")  # which is what it has
    assert more.returncode == 0, more.stderr
    assert len(json.loads((run / "evaluate.json").read_text())["returns"]) == 5
    assert (run / "eval.json").read_bytes() == before


def test_a_moved_run_folder_resumes_where_it_is(script, small, tmp_path):
    command = f"{small} --total-timesteps {STEPS * 1000} --num-seeds 2"
    script(command, stop=(signal.SIGTERM, "step"))
    (tmp_path / "runs").rename(tmp_path / "elsewhere")
    run = sorted((tmp_path / "elsewhere").iterdir())[0]
    assert script(f"{small.split()[0]} --resume {run}").returncode == 0
    assert all((r / "eval.json").exists() for r in (tmp_path / "elsewhere").iterdir())
    assert not (tmp_path / "runs").exists()


def test_a_renamed_copy_resumes_in_its_own_folder(script, small, tmp_path):
    assert script(f"{small} --total-timesteps {STEPS * 4}").returncode == 0
    run = only(tmp_path / "runs")
    shutil.copytree(run, tmp_path / "best")
    before = {p.name: p.stat().st_mtime_ns for p in run.iterdir()}
    (tmp_path / "best" / "eval.json").unlink()
    assert script(f"{small.split()[0]} --resume best").returncode == 0
    assert (tmp_path / "best" / "eval.json").exists()
    assert {p.name: p.stat().st_mtime_ns for p in run.iterdir()} == before


def test_a_resumed_run_keeps_its_settings_when_the_defaults_change(script, small, tmp_path):
    assert script(f"{small} --total-timesteps {STEPS * 4}").returncode == 0
    run = only(tmp_path / "runs")
    config = json.loads((run / "config.json").read_text())
    config["args"]["learning_rate"] = 0.5  # as if this had been the default then
    (run / "config.json").write_text(json.dumps(config))
    refused = script(f"{small.split()[0]} --resume {run} --learning-rate 0.1")
    assert_one_line_error(refused, "--learning-rate 0.1", "0.5")
    resumed = script(f"{small.split()[0]} --resume {run}")
    assert resumed.returncode == 0 and "learning rate  0.5 ->" in resumed.stdout


def test_a_run_is_trained_by_one_process_at_a_time(script, small, tmp_path):
    command = [sys.executable, str(ROOT / small.split()[0]), *small.split()[1:]]
    first = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while "compile time" not in first.stdout.readline():
        pass
    run = only(tmp_path / "runs")
    assert_one_line_error(script(f"{small.split()[0]} --resume {run}"), "--resume", "another process")
    first.kill()
    first.communicate()
    resumed = script(f"{small.split()[0]} --resume {run}", stop=(signal.SIGTERM, "compile time"))
    assert resumed.returncode == 143, "a killed process holds no lock"


# ---------------------------------------------------------------------------------------------------------- failures
def assert_one_line_error(process, *words: str, code: int = 2):
    assert process.returncode == code, (process.returncode, process.stderr)
    lines = process.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith(f"{Path(process.args[1]).name}: error: "), process.stderr
    for word in words:
        assert word in lines[0], (word, lines[0])


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--env StatelessPendulum", ["--env StatelessPendulumEasy", "continuous"]),
        ("--num-envs 6 --num-minibatches 4", ["--num-envs 6", "4"]),
        ("--num-envs 0", ["--num-envs 0", "positive"]),
        ("--num-steps -3", ["--num-steps -3", "positive"]),
        ("--hidden-size 0", ["--hidden-size 0", "positive"]),
        ("--trace-size 0", ["--trace-size 0", "positive"]),
        ("--num-seeds 0", ["--num-seeds 0", "positive"]),
        ("--eval-episodes 0", ["--eval-episodes 0", "positive"]),
        ("--total-timesteps 63", ["--total-timesteps 63", "64"]),
        ("--total-timesteps 3000000000", ["--total-timesteps 3000000000", "2^31"]),
        ("--seed -1", ["--seed -1"]),
        ("--seed 2147483647 --num-seeds 2", ["--seed 2147483647"]),
        ("--gamma 1.5", ["--gamma 1.5", "0 to 1"]),
        ("--gamma nan", ["--gamma nan", "0 to 1"]),
        ("--exploration-fraction -0.1", ["--exploration-fraction -0.1"]),
        ("--learning-rate -1", ["--learning-rate -1.0", "negative"]),
        ("--learning-rate inf", ["--learning-rate inf"]),
        ("--learning-rate 1e300", ["--learning-rate 1e+300", "below 2^127"]),
        ("--max-grad-norm 0", ["--max-grad-norm 0.0", "above 0"]),
        ("--checkpoint-every -1", ["--checkpoint-every -1.0"]),
        ("--memory mlp --frozen --trace-size 32 --context-size 4", ["--frozen", "mlp"]),
        ("--memory gru", ["--trace-size 4", "gru"]),
        ("--exp-name a/b", ["--exp-name a/b"]),
        ("--resume nowhere", ["--resume nowhere", "no run there"]),
        ("--evaluate nowhere", ["--evaluate nowhere", "no run there"]),
        ("--resume a --evaluate b", ["--resume a", "--evaluate b"]),
        ("--resume=", ["--resume"]),
        ("--run-dir x[y]", ["--run-dir x[y]"]),
        ("--total-timesteps 2000000000 --update-epochs 90", ["--total-timesteps 2000000000", "gradient steps"]),
        ("--track", ["--track", "pip install wandb"]),
    ],
)
def test_a_bad_flag_is_one_line(small, tmp_path, monkeypatch, capfd, flags, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [*small.split(), *flags.split()])
    with pytest.raises(SystemExit) as ended:
        pqn_ffm.check_args(pqn_ffm.parse_args()[0])
    printed = capfd.readouterr()
    process = subprocess.CompletedProcess([sys.executable, "pqn_ffm.py"], ended.value.code, printed.out, printed.err)
    assert_one_line_error(process, *words)
    assert process.stdout == "" and not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--env RepeatPrevios", ["--env RepeatPrevios", "RepeatPreviousEasy"]),
        ("--resume nowhere", ["--resume nowhere", "no run there"]),
        ("--run-dir file/runs", ["--run-dir file/runs"]),
    ],
)
def test_a_bad_flag_ends_the_program_before_anything_is_written(script, small, tmp_path, flags, words):
    (tmp_path / "file").write_text("")
    process = script(f"{small} {flags}", env=os.environ | {"PYTHONPATH": ""})
    assert_one_line_error(process, *words)
    assert process.stdout == "" and sorted(p.name for p in tmp_path.iterdir()) == ["file"]


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--num-envs x", ["--num-envs", "'x'", "INT"]),
        ("--num-envs", ["--num-envs"]),
        ("--learnin-rate 1", ["--learnin-rate", "--learning-rate"]),
        ("--memory lstm", ["--memory", "lstm", "'gru'"]),
    ],
)
@pytest.mark.parametrize("terminal", [False, True])
def test_what_the_parser_refuses_is_one_line_too(small, monkeypatch, capfd, flags, words, terminal):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr(sys, "argv", [*small.split(), *flags.split()])
    with pytest.raises(SystemExit) as ended:
        pqn_ffm.parse_args()
    printed = capfd.readouterr()
    process = subprocess.CompletedProcess([sys.executable, "pqn_ffm.py"], ended.value.code, printed.out, printed.err)
    assert_one_line_error(process, *words)
    assert process.stdout == "" and not re.search("[─│\x1b]", process.stderr)


def test_runs_that_cannot_be_continued(script, small, tmp_path):
    name = small.split()[0]
    assert script(f"{small} --total-timesteps {STEPS * 4} --checkpoint-every 0").returncode == 0
    run = only(tmp_path / "runs")
    config = (run / "config.json").read_text()

    (run / "config.json").write_text(config.replace(f'"script": "{name[:-3]}"', '"script": "other"'))
    assert_one_line_error(script(f"{name} --resume {run}"), "--resume", "other.py")
    (run / "config.json").write_text(config[:100])
    assert_one_line_error(script(f"{name} --resume {run}"), "--resume", "damaged")
    for damage in ("[]", config.replace('"command_line": [', '"command_line": 5, "x": ['), "{}"):
        (run / "config.json").write_text(damage)
        assert_one_line_error(script(f"{name} --evaluate {run}"), "--evaluate", "damaged")
    (run / "config.json").write_text(config)

    last = run / "checkpoints" / "4"
    for file in last.rglob("*"):
        if file.is_file() and file.stat().st_size > 100:
            file.write_bytes(file.read_bytes()[:50])
    assert_one_line_error(script(f"{name} --resume {run}"), str(last), "damaged")
    shutil.rmtree(last)
    assert script(f"{name} --resume {run}").returncode == 0, "the one before it is used"

    for file in last.rglob("*"):
        if "manifest" in file.name:
            file.write_bytes(b"")
    assert_one_line_error(script(f"{name} --resume {run}"), str(last), "damaged")
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").write_text("")
    assert_one_line_error(script(f"{name} --resume {run}"), "cannot be")


def test_a_loss_that_is_not_finite_stops_the_run(script, small, tmp_path):
    process = script(f"{small} --total-timesteps {STEPS * 50} --learning-rate 1e30 --checkpoint-every 0")
    assert_one_line_error(process, "losses/", "after update", "last good checkpoint", code=1)
    run = only(tmp_path / "runs")
    assert not (run / "eval.json").exists()
    update = int(re.search(r"after update (\d+)", process.stderr)[1])
    kept = [int(p.name) for p in (run / "checkpoints").iterdir() if p.name.isdigit()]
    assert all(u < update for u in kept)
    assert all(np.isfinite(x).all() for u in kept for x in raw_state(run, u) if x.dtype.kind == "f")
    assert all(np.isfinite(value) for _, _, value in raw_points(run))


def test_a_full_disk_keeps_the_last_good_checkpoint(script, small, tmp_path):
    # A limit on the size of files fails a write as a full disk does.
    stopped = script(f"{small} --total-timesteps {STEPS * 1000}", stop=(signal.SIGTERM, "step"))
    assert stopped.returncode == 143
    run = only(tmp_path / "runs")
    (good,) = (p for p in (run / "checkpoints").iterdir() if p.name.isdigit())
    before = {p.relative_to(good): p.read_bytes() for p in good.rglob("*") if p.is_file()}
    limit = max(len(data) for data in before.values()) // 2

    env = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    process = script(f"{small.split()[0]} --resume {run} --checkpoint-every 0", file_size_limit=limit, env=env)
    assert_one_line_error(process, "cannot", code=1)
    assert {p.name for p in (run / "checkpoints").iterdir()} == {good.name}, "nothing half-written"
    assert {p.relative_to(good): p.read_bytes() for p in good.rglob("*") if p.is_file()} == before
    assert script(f"{small.split()[0]} --resume {run}").returncode == 0


@pytest.mark.parametrize("limit, word", [(6000, "cannot write to"), (500, "no run folder can be made")])
def test_a_disk_that_fills_up_by_the_log_or_at_once(script, small, tmp_path, limit, word):
    env = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    process = script(f"{small} --total-timesteps {STEPS * 10000}", file_size_limit=limit, env=env)
    assert_one_line_error(process, word, code=1)
    if limit == 500:
        assert list((tmp_path / "runs").iterdir()) == [], "nothing half-written"


def test_a_second_interrupt_ends_at_once(script, small, tmp_path):
    command = [sys.executable, str(ROOT / small.split()[0]), *small.split()[1:]]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while "run folder" not in process.stdout.readline():
        pass
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=600)
    assert process.returncode in (-signal.SIGINT, 130)


# ------------------------------------------------------------------------------------------------------------- shown
def test_a_terminal_gets_a_bar(small, tmp_path):
    main, side = pty.openpty()
    termios.tcsetwinsize(side, (40, 160))
    command = [sys.executable, str(ROOT / small.split()[0]), *small.split()[1:], "--total-timesteps", str(STEPS * 40)]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=side, stderr=subprocess.PIPE)
    os.close(side)
    shown = b""
    try:
        while chunk := os.read(main, 4096):
            shown += chunk
    except OSError:  # the other side is closed
        pass
    assert process.wait() == 0
    assert shown.count(b"\r") > 5 and b"SPS" in shown and b"return" in shown and "█".encode() in shown


def test_help_is_grouped_and_gives_defaults_and_sources(script, small, tmp_path):
    shown = script(f"{small.split()[0]} --help", env=os.environ | {"COLUMNS": "120"}).stdout
    for text in ("task options", "network options", "algorithm options", "run options", "(default: 0.95)", "FRN Table"):
        assert text in shown
    flags = re.findall(r"^│ (--[a-z-]+)", shown, re.M)
    assert len(flags) == len(set(flags)) > 30


def test_weights_and_biases_gets_every_point(script, small, tmp_path):
    (tmp_path / "wandb.py").write_text(
        "import json\n"
        "def init(**x):\n"
        "    out = open('calls.jsonl', 'a')\n"
        "    names = [x['name'], x['id'], x['resume'], sorted(x['config'])]\n"
        "    print(json.dumps({'init': names}), file=out, flush=True)\n"
        "    class Run:\n"
        "        def log(self, scalars, step): print(json.dumps({'log': [step, scalars]}), file=out, flush=True)\n"
        "        def finish(self): print(json.dumps({'finish': True}), file=out, flush=True)\n"
        "    return Run()\n"
    )
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    assert script(f"{small} --total-timesteps {STEPS * 8} --track", env=env).returncode == 0
    calls = [json.loads(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines()]
    run = only(tmp_path / "runs")
    assert calls[0]["init"][:3] == [run.name, run.name, "allow"] and "args" in calls[0]["init"][3]
    assert calls[-1] == {"finish": True}
    logged = [(tag, x["log"][0], np.float32(v)) for x in calls if "log" in x for tag, v in x["log"][1].items()]
    assert logged == [(tag, step, np.float32(v)) for tag, step, v in raw_points(run)]


def test_wandb_is_not_imported_unless_asked_for(script, small, tmp_path):
    (tmp_path / "wandb.py").write_text("raise SystemExit('wandb was imported')\n")
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    assert script(f"{small} --total-timesteps {STEPS}", env=env).returncode == 0


def test_a_fork_is_one_file_and_memory(script, small, tmp_path):
    """A copy of the script beside memory.py and popjym runs on its own, under its own name."""
    for name in (small.split()[0], "memory.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / small.split()[0]).rename(tmp_path / "fork.py")
    (tmp_path / "popjym").symlink_to(ROOT / "popjym")
    flags = [*small.split()[1:], "--total-timesteps", str(STEPS)]
    done = subprocess.run([sys.executable, "fork.py", *flags], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "__fork__" in only(tmp_path / "runs").name
    assert filecmp.cmp(ROOT / "memory.py", tmp_path / "memory.py")
