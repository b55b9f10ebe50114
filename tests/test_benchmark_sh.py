"""benchmark.sh: which commands it runs, skips, resumes, and what it says of failures. A stub stands for the scripts."""

import os
import re
import shutil
import stat
import subprocess

import pytest
from conftest import ROOT

import popjym

# Plays a training script: makes the run folders, and fails, dies or is interrupted where the test says so.
STUB = """#!/usr/bin/env bash
echo "$*" >> calls.txt
script=$1; shift
[ "$script" = plot_results.py ] && exit 0
frozen="" num_seeds=1
while [ $# -gt 0 ]; do
  case $1 in
    --env) env=$2 ;; --memory) memory=$2 ;; --exp-name) name=$2 ;; --run-dir) dir=$2 ;;
    --seed) seed=$2 ;; --num-seeds) num_seeds=$2 ;; --frozen) frozen=-frozen ;;
    --resume) touch "$2/eval.json"; exit 0 ;;
  esac
  shift
done
[ "$env$frozen" = "$BROKEN" ] && exit 1
for ((i = seed; i < seed + num_seeds; i++)); do
  run=$dir/${env}__${name}__$memory${frozen}__${i}__1700000000
  mkdir -p "$run"
  [ "$env$frozen" = "$INTERRUPTED" ] || touch "$run/eval.json"
done
[ "$env$frozen" = "$INTERRUPTED" ] && exit 130
exit 0
"""


@pytest.fixture
def bench(tmp_path):
    shutil.copy(ROOT / "benchmark.sh", tmp_path)
    stub = tmp_path / "stub"
    stub.write_text(STUB)
    stub.chmod(stub.stat().st_mode | stat.S_IXUSR)

    def run(*flags, **env):
        calls = tmp_path / "calls.txt"
        calls.unlink(missing_ok=True)
        command = [str(tmp_path / "benchmark.sh"), *flags]
        env = os.environ | {"PYTHON": str(stub)} | env
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=env)
        return done, calls.read_text().splitlines() if calls.exists() else []

    return run


def test_the_ffm_group_is_every_discrete_task_with_four_agents_and_six_ablations(bench):
    done, calls = bench("ffm", "--dry-run")
    assert done.returncode == 0 and calls == []
    lines = done.stdout.splitlines()
    settings = set()
    for line in lines:
        flags = dict(re.findall(r"--([a-z-]+)(?: ([^-]\S*))?", line))
        assert flags["total-timesteps"] == "20000000" and flags["seed"] == "1" and flags["num-seeds"] == "10"
        part = next((name for name in flags if name.startswith("no-")), "")
        assert flags["exp-name"] == (f"pqn_ffm-{part}" if part else "pqn_ffm")
        settings.add((flags["env"], flags["memory"], "frozen" in flags, part))
    parts = ["decay", "oscillation", "learn-decay", "learn-oscillation", "input-gate", "output-gate"]
    agents = [("ffm", False, ""), ("ffm", True, ""), ("gru", False, ""), ("mlp", False, "")]
    agents += [("ffm", False, f"no-{part}") for part in parts]
    discrete = [env for env in popjym.registered_envs if hasattr(popjym.make(env)[0].action_space(), "n")]
    assert settings == {(env, *agent) for env in discrete for agent in agents} and len(lines) == len(settings)


def settings_of(lines):
    """(task, agent, experiment) of each command, which must be the published one."""
    found = set()
    for line in lines:
        assert " pqn_frozen_rnn.py --env " in line
        flags = dict(re.findall(r"--([a-z-]+)(?: ([^-]\S*))?", line))
        assert flags["total-timesteps"] == "20000000" and flags["seed"] == "1" and flags["num-seeds"] == "10"
        assert ("frozen-mixers" in flags) == flags["exp-name"].endswith("frozen-mixers")
        found.add((flags["env"], flags["memory"] + "-frozen" * ("frozen" in flags), flags["exp-name"]))
    assert len(found) == len(lines)
    return found


FRN_FAMILIES = "Minesweeper NoisyStatelessCartPole RepeatFirst RepeatPrevious StatelessCartPole Battleship HigherLower"


@pytest.mark.parametrize(
    "group, agents",
    [
        ("popgym", ["mlp", "gru", "gru-frozen", "lru", "lru-frozen"]),
        ("reservoirs", [r + frozen for r in ("deepesn", "src", "paralesn") for frozen in ("", "-frozen")]),
        ("mixers", ["gru-frozen", "lru-frozen"]),
    ],
)
def test_the_groups_of_frn_are_its_tasks_and_agents(bench, group, agents):
    done, _ = bench(group, "--dry-run")
    tasks = [family + level for family in FRN_FAMILIES.split() for level in ("Easy", "Medium", "Hard")]
    names = ["pqn_frozen_rnn"] + ["pqn_frozen_rnn-frozen-mixers"] * (group == "mixers")
    expected = {(task, agent, name) for task in tasks for agent in agents for name in names}
    assert done.returncode == 0 and settings_of(done.stdout.splitlines()) == expected


def test_table_1_is_four_agents_of_both_scripts_and_the_table(bench, tmp_path):
    done, calls = bench("table1", "--run-dir", "r")
    assert done.returncode == 0, done.stderr
    found = re.compile(r"(\w+)\.py --env (\S+) --memory (\w+).*?(--frozen)?(?= --total)")
    agents = [("gru", None), ("gru", "--frozen"), ("lru", None), ("lru", "--frozen")]
    pqn, ppo = ("pqn_frozen_rnn", "StatelessCartPoleEasy"), ("ppo_playground", "BallInCup-positions")
    assert [found.search(call).groups() for call in calls[:-1]] == [(*x, *y) for x in (pqn, ppo) for y in agents]
    assert all(("--observe positions" in call) == ("BallInCup" in call) for call in calls[:-1])
    assert calls[-1] == "plot_results.py --run-dir r/table1 --kind parameters --out r/table1/parameters.md"


def test_the_memorychain_group_is_ten_delays_with_five_agents(bench):
    done, _ = bench("memorychain", "--dry-run")
    settings = set()
    for line in done.stdout.splitlines():
        assert " ppo_memorychain.py --env " in line
        flags = dict(re.findall(r"--([a-z-]+)(?: ([^-]\S*))?", line))
        assert flags["total-timesteps"] == "10000000" and flags["seed"] == "1" and flags["num-seeds"] == "5"
        assert flags["env"] == f"MemoryChain-{flags['delay']}" and flags["exp-name"] == "ppo_memorychain"
        settings.add((int(flags["delay"]), flags["memory"] + "-frozen" * ("frozen" in flags)))
    agents = ["mlp", "gru", "gru-frozen", "lru", "lru-frozen"]
    assert settings == {(2**k, agent) for k in range(2, 12) for agent in agents}
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 50
    done, _ = bench("memorychain", "--dry-run", "--budget", "0.000001")
    assert all("--total-timesteps 65536 " in line for line in done.stdout.splitlines()), "at least one rollout"


def test_the_playground_group_is_seven_settings_with_five_agents(bench):
    done, _ = bench("playground", "--dry-run")
    found = set()
    for line in done.stdout.splitlines():
        assert " ppo_playground.py --env " in line
        flags = dict(re.findall(r"--([a-z-]+)(?: ([^-]\S*))?", line))
        assert flags["total-timesteps"] == "60000000" and flags["seed"] == "1" and flags["num-seeds"] == "10"
        assert flags["exp-name"] == "ppo_playground" and flags["env"].endswith(f"-{flags['observe']}")
        found.add((flags["env"], flags["memory"] + "-frozen" * ("frozen" in flags)))
    tasks = [
        f"{task}-{part}" for task in ("BallInCup", "CheetahRun", "WalkerWalk") for part in ("positions", "velocities")
    ]
    agents = ["mlp", "gru", "gru-frozen", "lru", "lru-frozen"]
    assert found == {(task, agent) for task in [*tasks, "ReacherHard-positions"] for agent in agents}
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 35


def test_the_arcade_group_is_four_tasks_with_four_agents(bench):
    done, _ = bench("arcade", "--dry-run")
    settings = set()
    for line in done.stdout.splitlines():
        assert " pqn_arcade_cnn.py --env " in line
        flags = dict(re.findall(r"--([a-z-]+)(?: ([^-]\S*))?", line))
        assert flags["total-timesteps"] == "20000000" and flags["seed"] == "1" and flags["num-seeds"] == "5"
        assert flags["exp-name"] == "pqn_arcade_cnn"
        settings.add((flags["env"], flags["memory"] + "-frozen" * ("frozen" in flags)))
    tasks = [f"{family}Easy" for family in ("BattleShip", "CountRecall", "MineSweeper", "Navigator")]
    assert settings == {(task, agent) for task in tasks for agent in ("gru", "gru-frozen", "lru", "lru-frozen")}
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 16


def test_a_budget_scales_the_steps_and_says_so_in_the_names(bench):
    done, _ = bench("ffm", "--dry-run", "--budget", "0.01", "--seeds", "3")
    for line in done.stdout.splitlines():
        assert "--total-timesteps 200000 " in line and "-budget0.01 " in line
        assert line.endswith("--seed 1 --num-seeds 3")
    done, _ = bench("ffm", "--dry-run", "--budget", "0.000001")
    assert all("--total-timesteps 2048 " in line for line in done.stdout.splitlines())


def test_finished_runs_are_skipped_and_interrupted_ones_resume(bench, tmp_path):
    flags = ("ffm", "--seeds", "2", "--run-dir", "r")
    done, first = bench(*flags, INTERRUPTED="StatelessCartPoleEasy-frozen")
    assert done.returncode == 130 and "--env StatelessCartPoleEasy" in first[-1] and "--frozen" in first[-1]
    done, second = bench(*flags)
    assert done.returncode == 0, done.stderr
    # The interrupted program is resumed by its first run, which the stub ends alone; then comes the second.
    interrupted = "r/StatelessCartPoleEasy__pqn_ffm__ffm-frozen__{}__1700000000"
    assert [call.split("--resume ")[1] for call in second[:2]] == [interrupted.format(1), interrupted.format(2)]
    assert not set(first) & set(second[2:]) and len(first) + len(second) - 2 == 360
    done, third = bench(*flags)
    assert done.returncode == 0 and third == [] and done.stdout.count("# finished") == 720


def test_more_seeds_run_only_those_that_are_missing(bench):
    bench("ffm", "--seeds", "2", "--run-dir", "r")
    done, calls = bench("ffm", "--seeds", "5", "--run-dir", "r")
    assert done.returncode == 0 and len(calls) == 360 and all(c.endswith("--seed 3 --num-seeds 3") for c in calls)


def test_a_failed_run_is_named_at_the_end_and_the_rest_still_runs(bench):
    done, calls = bench("ffm", "--seeds", "1", BROKEN="RepeatFirstHard-frozen")
    assert done.returncode == 1 and len(calls) == 360
    assert done.stderr.startswith("failed:") and done.stderr.count("pqn_ffm.py") == 1
    assert "RepeatFirstHard" in done.stderr and "--frozen" in done.stderr


@pytest.mark.parametrize(
    "flags, word",
    [
        ((), "name a group"),
        (("nothing",), "nothing"),
        (("ffm", "--budget", "0"), "--budget 0"),
        (("ffm", "--budget", "-1"), "--budget -1"),
        (("ffm", "--budget", "x"), "--budget x"),
        (("ffm", "--budget", "1.2.3"), "--budget 1.2.3"),
        (("ffm", "--budget", "1e5"), "--budget 1e5"),
        (("ffm", "--budget"), "--budget"),
        (("ffm", "--seeds", "0"), "--seeds 0"),
        (("ffm", "--seeds", "1.5"), "--seeds 1.5"),
        (("ffm", "--speed"), "--speed"),
    ],
)
def test_bad_flags_are_one_line(bench, flags, word):
    done, calls = bench(*flags)
    assert done.returncode == 2 and calls == [] and done.stderr.count("\n") == 1 and word in done.stderr


def test_help_names_the_groups(bench):
    done, _ = bench("--help")
    assert done.returncode == 0 and "--dry-run" in done.stdout
    groups = ("ffm", "popgym", "reservoirs", "mixers", "table1", "memorychain", "playground", "arcade")
    assert all(f"{group}:" in done.stdout for group in groups)
