"""plot_results.py on run folders whose numbers are known."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import scipy.stats
from conftest import ROOT
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.proto.summary_pb2 import Summary


def make_run(folder, task, script, memory, seed, values, evaluation=None, gamma=0.99):
    """A run of 1000 steps with one point every 100."""
    run = folder / f"{task}__{script}__{memory}__{seed}__1700000000"
    run.mkdir(parents=True)
    memory, frozen = memory.removesuffix("-frozen"), memory.endswith("-frozen")
    args = {"env": task, "exp_name": script, "memory": memory, "frozen": frozen, "total_timesteps": 1000}
    args["gamma"] = gamma
    (run / "config.json").write_text(json.dumps({"args": args, "seed": seed}))
    writer = EventsWriter(str(run / "events"))
    for step, value in zip(range(100, 1001, 100), values, strict=True):
        summary = Summary(value=[Summary.Value(tag="charts/episodic_return", simple_value=value)])
        writer.write_event(Event(step=step, summary=summary))
    writer.close()
    if evaluation is not None:
        (run / "eval.json").write_text(json.dumps({"mean_return": evaluation, "SPS": 1000 + seed}))


def plot(tmp_path, *flags):
    command = [sys.executable, str(ROOT / "plot_results.py"), "--run-dir", "runs", *flags]
    env = os.environ | {"MPLBACKEND": "agg"}
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=env)


def test_curves_are_means_over_seeds_with_their_t_interval(tmp_path):
    rng = np.random.default_rng(0)
    values = rng.normal(size=(3, 10)).astype(np.float32)
    for seed in range(3):
        make_run(tmp_path / "runs", "RepeatFirstEasy", "pqn_ffm", "ffm-frozen", seed, values[seed])
    make_run(tmp_path / "runs", "RepeatFirstEasy", "pqn_ffm", "gru", 0, np.arange(10.0))
    done = plot(tmp_path, "--out", "c.png", "--points", "5")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    numbers = json.loads((tmp_path / "c.json").read_text())
    frozen = numbers["RepeatFirstEasy ffm-frozen"]
    assert frozen["steps"] == [100, 300, 500, 700, 900] and frozen["seeds"] == [0, 1, 2]
    points = values.reshape(3, 5, 2).mean(-1)
    np.testing.assert_allclose(frozen["mean"], points.mean(0), atol=1e-4)
    low, high = scipy.stats.t.interval(0.95, 2, points.mean(0), scipy.stats.sem(points, axis=0))
    np.testing.assert_allclose(frozen["low"], low, atol=1e-4)
    np.testing.assert_allclose(frozen["high"], high, atol=1e-4)
    single = numbers["RepeatFirstEasy gru"]
    assert single["mean"] == single["low"] == single["high"] == [0.5, 2.5, 4.5, 6.5, 8.5]


def test_heatmap_has_mean_and_sample_deviation_of_the_evaluations(tmp_path):
    for seed, evaluation in enumerate((0.1, 0.4, None)):
        make_run(tmp_path / "runs", "RepeatFirstEasy", "pqn_ffm", "ffm", seed, np.zeros(10), evaluation)
    make_run(tmp_path / "runs", "RepeatFirstHard", "pqn_ffm-no-decay", "ffm", 0, np.zeros(10), -0.3)
    done = plot(tmp_path, "--out", "h.png", "--kind", "heatmap")
    assert done.returncode == 0, done.stderr
    numbers = json.loads((tmp_path / "h.json").read_text())
    assert numbers["RepeatFirstEasy ffm"] == {
        "seeds": [0.1, 0.4],
        "mean": pytest.approx(0.25),
        "std": pytest.approx(np.std([0.1, 0.4], ddof=1)),
        "SPS": 1000.5,
    }
    ablation = numbers["RepeatFirstHard pqn_ffm-no-decay ffm"]
    assert ablation == {"seeds": [-0.3], "mean": pytest.approx(-0.3), "std": None, "SPS": 1000}

    done = plot(tmp_path, "--kind", "table")
    table = ["|  | RepeatFirstEasy | RepeatFirstHard | SPS |", "| --- | --- | --- | --- |"]
    table += ["| ffm | 0.25 ± 0.21 |  | 1,000 |", "| pqn_ffm-no-decay ffm |  | -0.30 | 1,000 |"]
    assert (tmp_path / "table.md").read_text().splitlines() == done.stdout.splitlines()[:-1] == table
    assert json.loads((tmp_path / "table.json").read_text()) == numbers


def test_parameters_are_those_of_each_agent(tmp_path):
    for memory, frozen in (("gru", 0), ("gru-frozen", 787_968)):
        make_run(tmp_path / "runs", "StatelessCartPoleEasy", "pqn_frozen_rnn", memory, 1, np.zeros(10))
        (run,) = (tmp_path / "runs").glob(f"*__{memory}__*")
        config = json.loads((run / "config.json").read_text())
        config["script"] = "pqn_frozen_rnn"
        config["parameters"] = {"all": {"total": 1_119_746, "trainable": 1_119_746 - frozen, "frozen": frozen}}
        (run / "config.json").write_text(json.dumps(config))
    done = plot(tmp_path, "--kind", "parameters")
    assert done.returncode == 0, done.stderr
    name = "pqn_frozen_rnn StatelessCartPoleEasy gru"
    assert (tmp_path / "parameters.md").read_text().splitlines()[2:] == [
        f"| {name} | 1,119,746 | 1,119,746 | 0 | 0.00% |",
        f"| {name}-frozen | 1,119,746 | 331,778 | 787,968 | 70.37% |",
    ]


def test_recall_is_the_success_rate_of_each_agent_against_the_delay(tmp_path):
    rates = {(8, "lru"): [1.0, 0.8], (128, "lru"): [0.5], (16, "lru"): [1.0, 1.0], (8, "lru-frozen"): [0.9]}
    for (delay, agent), seeds in rates.items():
        for seed, rate in enumerate(seeds):
            make_run(tmp_path / "runs", f"MemoryChain-{delay}", "ppo_memorychain", agent, seed, np.zeros(10), 0.0)
            (run,) = (tmp_path / "runs").glob(f"MemoryChain-{delay}__*__{agent}__{seed}__*")
            scores = {"success_rate": rate, "success_rate_128": rate - 0.1, "environment_steps": 1000 + seed}
            (run / "eval.json").write_text(json.dumps(scores))
    make_run(tmp_path / "runs", "MemoryChain-64", "ppo_memorychain", "lru", 0, np.zeros(10))  # not finished
    done = plot(tmp_path, "--kind", "recall", "--out", "r.png")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    numbers = json.loads((tmp_path / "r.json").read_text())
    assert numbers["lru"] == {
        "delays": [8, 16, 128],
        "seeds": [[1.0, 0.8], [1.0, 1.0], [0.5]],
        "mean": pytest.approx([0.9, 1.0, 0.5]),
        "mean_128": pytest.approx([0.8, 0.9, 0.4]),
        "steps": [[1000, 1001], [1000, 1001], [1000]],
    }
    assert numbers["lru-frozen"]["delays"] == [8] and len(numbers) == 2


def test_recall_without_a_run_of_memorychain_is_one_line(tmp_path):
    make_run(tmp_path / "runs", "RepeatFirstEasy", "pqn_ffm", "ffm", 0, np.zeros(10), 0.5)
    done = plot(tmp_path, "--kind", "recall", "--out", "r.png")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "ppo_memorychain.py" in done.stderr


def test_different_settings_are_not_taken_for_seeds_of_one(tmp_path):
    make_run(tmp_path / "runs", "RepeatFirstEasy", "pqn_ffm", "ffm", 0, np.zeros(10))
    make_run(tmp_path / "runs", "RepeatFirstEasy", "pqn_ffm", "ffm", 1, np.zeros(10), gamma=0.5)
    done = plot(tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "differ in gamma" in done.stderr


def test_of_a_seed_that_ran_twice_the_newest_run_counts(tmp_path):
    make_run(tmp_path / "old", "RepeatFirstEasy", "pqn_ffm", "ffm", 0, np.zeros(10))
    make_run(tmp_path / "runs", "RepeatFirstEasy", "pqn_ffm", "ffm", 0, np.ones(10))
    (old,) = (tmp_path / "old").iterdir()
    os.utime(old / "config.json", (1, 1))
    old.rename(tmp_path / "runs" / "renamed")
    assert plot(tmp_path, "--out", "c.png", "--points", "2").returncode == 0
    numbers = json.loads((tmp_path / "c.json").read_text())
    assert numbers["RepeatFirstEasy ffm"]["mean"] == [1, 1] and numbers["RepeatFirstEasy ffm"]["seeds"] == [0]


def test_an_unknown_metric_names_those_there_are(tmp_path):
    make_run(tmp_path / "runs", "RepeatFirstEasy", "pqn_ffm", "ffm", 0, np.zeros(10))
    done = plot(tmp_path, "--metric", "no/such")
    assert done.returncode == 2 and "charts/episodic_return" in done.stderr and not (tmp_path / "curves.png").exists()


def test_an_empty_folder_and_bad_flags_are_one_line(tmp_path):
    for flags, word in (
        ((), "no run folder"),
        (("--confidence", "1.5"), "1.5"),
        (("--kind", "table", "--out", "x.png"), "x.png"),
        (("--out", "x.txt"), "x.txt"),
    ):
        done = plot(tmp_path, *flags)
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and word in done.stderr, done.stderr
        make_run(tmp_path / "runs", "RepeatFirstEasy", "pqn_ffm", "ffm", word, np.zeros(10))
