"""benchmark.sh: which commands it runs, skips, resumes, side by side or not, and what it says of failures and signals.

A stub stands for the training scripts.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import time

import pytest
from conftest import ROOT

import popjym

# Plays a training script: makes the run folders, and fails or is interrupted where the test says so. With WAIT it ends
# when there is a file `go`, or by a signal (with SLOW, by `go` after the signal). It writes what happens to events.txt:
# "begin PID CORES", "end PID" and "signal PID NAME".
STUB = """#!/usr/bin/env bash
echo "$*" >> calls.txt
script=$1; shift
[ "$script" = plot_results.py ] && exit 0
frozen="" num_seeds=1 resumed="" code=""
while [ $# -gt 0 ]; do
  case $1 in
    --env) env=$2 ;; --memory) memory=$2 ;; --exp-name) name=$2 ;; --run-dir) dir=$2 ;;
    --seed) seed=$2 ;; --num-seeds) num_seeds=$2 ;; --frozen) frozen=-frozen ;; --resume) resumed=$2 ;;
  esac
  shift
done
if [ -n "$resumed" ]; then
  runs=$(grep -o '[A-Za-z0-9_.-]*__[0-9]*__[0-9.]*' "$resumed/config.json") dir=${resumed%/*}
else
  [ "$env$frozen" = "$BROKEN" ] && exit 1
  setting=${env}__${name}__$memory$frozen
  runs=$(for ((i = seed; i < seed + num_seeds; i++)); do echo "${setting}__${i}__1700000000"; done)
  for run in $runs; do
    mkdir -p "$dir/$run"
    printf '{"runs": [%s]}' "$(printf '"%s", ' $runs | sed 's/, $//')" > "$dir/$run/config.json"
  done
  [ "$env$frozen" = "$INTERRUPTED" ] && exit 143
fi
if [ -n "$WAIT" ]; then
  for pair in HUP:129 INT:130 USR1:138 TERM:143; do
    trap "echo signal $$ ${pair%:*} >> events.txt; code=${pair#*:}; [ -n '$SLOW' ] || exit ${pair#*:}" ${pair%:*}
  done
  echo "begin $$ $(taskset -cp $$ | sed 's/.* //')" >> events.txt
  while [ ! -e go ]; do sleep 0.02; done
  [ -z "$code" ] || exit "$code"
  sleep "$WAIT"
  echo "end $$" >> events.txt
fi
for run in $runs; do echo '{"SPS": 1000.0}' >> "$dir/$run/eval.json"; done
exit 0
"""


@pytest.fixture
def bench(tmp_path):
    """bench(*flags, **environment) runs benchmark.sh in an empty folder; the ended process, and the stub's calls."""
    shutil.copy(ROOT / "benchmark.sh", tmp_path)
    stub, calls, events = tmp_path / "stub", tmp_path / "calls.txt", tmp_path / "events.txt"
    stub.write_text(STUB)
    stub.chmod(0o755)

    def start(*flags, wrapper=(), **env):
        command = [*wrapper, str(tmp_path / "benchmark.sh"), *flags]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, cwd=tmp_path, text=True, env=os.environ | {"PYTHON": str(stub)} | env, **pipes)

    def run(*flags, **env):
        calls.unlink(missing_ok=True)
        process = start(*flags, **env)
        stdout, stderr = process.communicate(timeout=120)
        done = subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)
        return done, calls.read_text().splitlines() if calls.exists() else []

    def happened(kind):
        lines = [line.split() for line in events.read_text().splitlines()] if events.exists() else []
        return [line[1:] for line in lines if line[0] == kind]

    run.start, run.happened, run.folder = start, happened, tmp_path
    return run


def test_the_ffm_group_is_every_discrete_task_with_four_agents_and_six_ablations(bench):
    done, calls = bench("ffm", "--dry-run")
    assert done.returncode == 0 and calls == []
    lines = done.stdout.splitlines()
    assert all("--run-dir runs/benchmark/ffm " in line for line in lines)
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


def test_the_evidence_is_what_the_paper_trains_for_as_long(bench):
    """Every run but FFM's is one of another group, with fewer seeds."""
    done, _ = bench("evidence", "--dry-run")
    assert done.returncode == 0 and "# 31 runs" in done.stderr
    others = bench("popgym", "mixers", "ffm", "--dry-run")[0].stdout.splitlines()

    def without_seeds(line):
        return re.sub(r" --num-seeds \d+| --run-dir \S+", "", line)

    evidence = [without_seeds(line) for line in done.stdout.splitlines()]
    assert len(evidence) == 17 and set(evidence) <= {without_seeds(line) for line in others}


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


def test_finished_runs_are_skipped_and_interrupted_ones_resume(bench):
    flags = ("arcade", "--seeds", "2", "--run-dir", "r")
    done, first = bench(*flags, INTERRUPTED="CountRecallEasy-frozen")
    assert done.returncode == 143 and "--env CountRecallEasy" in first[-1] and "--frozen" in first[-1]
    assert "the same command goes on" in done.stderr
    done, second = bench(*flags)
    assert done.returncode == 0, done.stderr
    assert "# 32 runs: 10 finished, 2 to resume, 20 to start, in 11 programs" in done.stderr
    # The two seeds are one program, which is resumed once, by its first run.
    interrupted = "r/arcade/CountRecallEasy__pqn_arcade_cnn__gru-frozen__1__1700000000"
    assert second[0] == f"pqn_arcade_cnn.py --resume {interrupted}"
    assert not set(first) & set(second) and len(first) + len(second) - 1 == 16
    done, third = bench(*flags)
    assert done.returncode == 0 and third == [] and "# 32 runs: 32 finished, 0 to resume" in done.stderr


def test_a_folder_without_a_config_is_no_run_and_a_finished_one_goes_before_a_newer_one(bench):
    flags = ("table1", "--run-dir", "r")
    assert bench(*flags)[0].returncode == 0
    gru, lru = (f"StatelessCartPoleEasy__pqn_frozen_rnn__{memory}__1__" for memory in ("gru", "lru"))
    shutil.copytree(bench.folder / f"r/table1/{gru}1700000000", bench.folder / f"r/table1/{gru}1800000000")
    (bench.folder / f"r/table1/{gru}1800000000/eval.json").unlink()
    for name in ("config.json", "eval.json"):
        (bench.folder / f"r/table1/{lru}1700000000/{name}").unlink()
    done, calls = bench(*flags)
    assert done.returncode == 0 and len(calls) == 2 and "--memory lru --exp-name" in calls[0]


def test_the_newest_of_several_interrupted_runs_resumes(bench):
    """Runs were once named by whole seconds."""
    names = [
        f"StatelessCartPoleEasy__pqn_frozen_rnn__gru__1__{time}"
        for time in ("1700000000", "1796106330", "1796106330.099999", "1796106330.523175")
    ]
    for i, name in enumerate(names):
        (bench.folder / f"{i}/table1").mkdir(parents=True)
        for earlier in names[: i + 1]:
            (bench.folder / f"{i}/table1/{earlier}").mkdir()
            (bench.folder / f"{i}/table1/{earlier}/config.json").write_text(json.dumps({"runs": [earlier]}))
        done, calls = bench("table1", "--run-dir", str(i))
        assert done.returncode == 0 and f"pqn_frozen_rnn.py --resume {i}/table1/{name}" in calls, done.stderr


def test_groups_do_not_meet(bench):
    # Both have the frozen GRU and LRU. Where popgym's have finished, mixers still runs its own.
    popgym, _ = bench("popgym", "--seeds", "1", "--run-dir", "r", "--dry-run")
    for line in popgym.stdout.splitlines()[:5]:
        command = {"shell": True, "cwd": bench.folder, "check": True, "stdout": subprocess.DEVNULL}
        subprocess.run(line, **command, env=os.environ | {"PYTHON": "none of its business"})
    done, _ = bench("popgym", "mixers", "--seeds", "1", "--run-dir", "r", "--dry-run")
    assert "# 189 runs: 5 finished, 0 to resume, 184 to start" in done.stderr
    assert sum("--run-dir r/mixers " in line for line in done.stdout.splitlines()) == 84


def test_more_seeds_run_only_those_that_are_missing(bench):
    bench("arcade", "--seeds", "2", "--run-dir", "r")
    done, calls = bench("arcade", "--seeds", "5", "--run-dir", "r")
    assert done.returncode == 0 and len(calls) == 16 and all(c.endswith("--seed 3 --num-seeds 3") for c in calls)


def test_two_interrupted_programs_of_one_setting_both_resume(bench):
    broken_off = {"INTERRUPTED": "BattleShipEasy"}
    bench("arcade", "--seeds", "2", "--run-dir", "r", **broken_off)
    # Seeds 3 and 4 are a program of their own, and interrupted too.
    done, calls = bench("arcade", "--seeds", "4", "--run-dir", "r", **broken_off)
    assert done.returncode == 143 and len(calls) == 2 and calls[1].endswith("--seed 3 --num-seeds 2")
    (bench.folder / "r/arcade/BattleShipEasy__pqn_arcade_cnn__gru__1__1700000000/eval.json").unlink()
    (bench.folder / "r/arcade/BattleShipEasy__pqn_arcade_cnn__gru__2__1700000000/eval.json").unlink()
    done, calls = bench("arcade", "--seeds", "4", "--run-dir", "r")
    resumed = [call.split("__")[3] for call in calls if "--resume" in call]
    assert done.returncode == 0 and resumed == ["1", "3"] and len(calls) == 2 + 15


@pytest.mark.parametrize("workers", [(), ("--workers", "2")])
def test_a_failed_run_is_named_at_the_end_and_the_rest_still_runs(bench, workers):
    flags = ("arcade", "--seeds", "1", "--run-dir", "r", *workers)
    done, calls = bench(*flags, BROKEN="NavigatorEasy-frozen")
    assert done.returncode == 1 and len(calls) == 16
    named = done.stderr.split("failed:\n")[1].splitlines()
    assert len(named) == 2 and all("--env NavigatorEasy" in line and "--frozen" in line for line in named)
    assert all("# exit code 1" in line for line in named)
    for line in named if workers else []:
        assert "--env NavigatorEasy" in (bench.folder / line.split(", ")[-1]).read_text()


def test_a_line_of_the_list_starts_resumes_and_skips_its_run(bench):
    done, _ = bench("table1", "--dry-run", "--run-dir", "a folder")
    line = done.stdout.splitlines()[1]
    environment = os.environ | {"PYTHON": "none of its business"}

    def run(**env):
        options = {"shell": True, "cwd": bench.folder, "capture_output": True, "text": True}
        return subprocess.run(line, env=environment | env, **options)

    assert run(INTERRUPTED="StatelessCartPoleEasy-frozen").returncode == 143
    folder = "a folder/table1/StatelessCartPoleEasy__pqn_frozen_rnn__gru-frozen__1__1700000000"
    assert (bench.folder / folder / "config.json").exists() and not (bench.folder / folder / "eval.json").exists()
    resumed = run()
    assert resumed.returncode == 0 and resumed.stdout.endswith(f"pqn_frozen_rnn.py --resume {folder}\n")
    skipped = run()
    assert skipped.returncode == 0 and skipped.stdout == f"# finished: {folder}\n"
    assert (bench.folder / folder / "eval.json").read_text().count("SPS") == 1


def test_the_page_on_sweeps_runs_a_line_by_its_index_and_lists_runs_of_ones_own(bench):
    page = (ROOT / "docs" / "sweeps.md").read_text()
    options = {"cwd": bench.folder, "check": True, "stdout": subprocess.DEVNULL}
    environment = os.environ | {"JOB_COMPLETION_INDEX": "1"}
    own_list = re.search(r"^for lr in .*?^done > runs.txt$", page, re.DOTALL | re.MULTILINE)[0]
    subprocess.run(["bash", "-c", own_list.replace(" python ", " ./stub ")], **options)
    command = re.search(r"command: \[bash, -c, '(.*)'\]", page)[1]
    subprocess.run(["bash", "-c", command], **options, env=environment)
    done = [file.parent.name for file in sorted(bench.folder.glob("runs/lr/*/eval.json"))]
    assert done == [f"RepeatFirstEasy__lr-3e-4__ffm-frozen__{seed}__1700000000" for seed in range(1, 6)]


def test_a_dry_run_counts_runs_and_hours_by_what_has_finished(bench):
    done, _ = bench("arcade", "--dry-run", "--run-dir", "r")
    assert done.stderr.splitlines()[0] == "# 80 runs: 0 finished, 0 to resume, 80 to start, in 16 programs"
    assert "# hours unknown for 16 programs" in done.stderr
    for name, sps in (("pqn_arcade_cnn__gru", 1000.0), ("pqn_arcade_cnn-x__gru", 4000.0), ("pqn_ffm__lru", 1.0)):
        run = bench.folder / f"r/other/Task__{name}__1__1700000000"
        run.mkdir(parents=True)
        (run / "eval.json").write_text(json.dumps({"SPS": sps, "returns": [1.0]}, indent=1))
    done, _ = bench("arcade", "--dry-run", "--run-dir", "r")
    # A second for 1000 steps and one for 4000: 0.625 s for 1000. Four tasks with five seeds of 20 million steps.
    hours = 4 * 5 * 20e6 * (1 / 1000 + 1 / 4000) / 2 / 3600
    assert f"# {hours:.1f} hours for 4 programs, 1 at a time" in done.stderr
    assert "# hours unknown for 12 programs" in done.stderr
    done, _ = bench("arcade", "--dry-run", "--run-dir", "r", "--workers", "2")
    assert f"# {hours / 2:.1f} hours for 4 programs, 2 at a time" in done.stderr


def await_(condition, process):
    for _ in range(1000):
        if condition():
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    raise AssertionError("not within 20 seconds")


def cores_of_this_machine():
    return os.sched_getaffinity(0)


two_cores = pytest.mark.skipif(
    not shutil.which("taskset") or len(cores_of_this_machine()) < 2, reason="needs taskset and two cores"
)


@two_cores
def test_workers_are_never_more_than_asked_for_and_have_cores_of_their_own(bench):
    (bench.folder / "go").touch()
    done, calls = bench("arcade", "--seeds", "3", "--run-dir", "r", "--workers", "2", WAIT="0.1")
    assert done.returncode == 0 and len(calls) == 16
    running, most = {}, 0
    for line in (bench.folder / "events.txt").read_text().splitlines():
        kind, pid, *cores = line.split()
        if kind == "begin":
            assert cores[0] not in running.values(), "another has these cores"
            running[pid] = cores[0]
        else:
            del running[pid]
        most = max(most, len(running))
    assert most == 2 and running == {}
    cores = {cores for _, cores in bench.happened("begin")}
    assert len(cores) == 2 and len(list(bench.folder.glob("r/arcade/*/eval.json"))) == 48
    progress = re.findall(r"# (\d+) of 16 finished, (\d) running, 0 failed, about 0 h 00 min left", done.stdout)
    assert [int(finished) for finished, _ in progress] == list(range(1, 17)) and progress[-1][1] == "0"
    logs = sorted(bench.folder.glob("r/arcade/logs/*.log"))
    assert len(logs) == 16 and all(log.read_text().count(" --env ") == 1 for log in logs)
    assert "--env" not in done.stdout


@pytest.mark.parametrize("workers", [(), pytest.param(("--workers", "2"), marks=two_cores)])
@pytest.mark.parametrize("name, code", [("HUP", 129), ("INT", 130), ("USR1", 138), ("TERM", 143)])
def test_a_signal_to_benchmark_sh_alone_reaches_every_run_once(bench, workers, name, code):
    flags, count = ("table1", "--seeds", "2", "--run-dir", "r", *workers), 2 if workers else 1
    process = bench.start(*flags, WAIT="0")
    await_(lambda: len(bench.happened("begin")) == count, process)
    process.send_signal(getattr(signal, f"SIG{name}"))
    stdout, stderr = process.communicate(timeout=20)
    assert process.returncode == code and "# stopped: 0 of 8 finished; the same command goes on" in stderr
    began = [pid for pid, _ in bench.happened("begin")]
    assert sorted(bench.happened("signal")) == sorted([pid, name] for pid in began) and bench.happened("end") == []
    assert not any(os.path.exists(f"/proc/{pid}") for pid in began)
    (bench.folder / "go").touch()
    done, calls = bench(*flags, WAIT="0")
    assert done.returncode == 0 and sum("--resume" in call for call in calls) == count and len(calls) == 8 + 1
    evals = [file.read_text() for file in bench.folder.glob("r/table1/*/eval.json")]
    assert len(evals) == 16 and all(text.count("SPS") == 1 for text in evals), "each run has finished once"


@two_cores
def test_ctrl_c_in_a_terminal_reaches_every_run_once(bench):
    master, terminal = os.openpty()
    command = [str(bench.folder / "benchmark.sh"), "arcade", "--run-dir", "r", "--workers", "2"]
    options = {"cwd": bench.folder, "env": os.environ | {"PYTHON": str(bench.folder / "stub"), "WAIT": "0"}}
    options |= dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
    process = subprocess.Popen(["setsid", "--ctty", "--wait", *command], **options)
    await_(lambda: len(bench.happened("begin")) == 2, process)
    os.write(master, b"\x03")
    assert process.wait(timeout=20) == 130
    os.close(terminal)
    os.close(master)
    assert sorted(bench.happened("signal")) == sorted([pid, "INT"] for pid, _ in bench.happened("begin"))


@two_cores
def test_a_run_that_was_told_to_stop_by_another_stops_the_list(bench):
    process = bench.start("arcade", "--run-dir", "r", "--workers", "2", WAIT="0")
    await_(lambda: len(bench.happened("begin")) == 2, process)
    (first, _), (second, _) = bench.happened("begin")
    os.kill(int(first), signal.SIGHUP)
    process.communicate(timeout=20)
    assert process.returncode == 129 and bench.happened("signal") == [[first, "HUP"], [second, "TERM"]]


@two_cores
def test_a_killed_run_is_a_failure_and_the_others_go_on(bench):
    process = bench.start("table1", "--run-dir", "r", "--workers", "2", WAIT="0")
    await_(lambda: len(bench.happened("begin")) == 2, process)
    killed = bench.happened("begin")[0][0]
    os.kill(int(killed), signal.SIGKILL)
    await_(lambda: len(bench.happened("begin")) == 3, process)
    (bench.folder / "go").touch()
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 1 and stderr.count("# exit code 137") == 1
    done, calls = bench("table1", "--run-dir", "r")
    assert done.returncode == 0 and len(calls) == 2 and "--resume" in calls[0]


def test_slurm_is_one_array_of_the_unfinished_programs_and_passes_flags_on(bench):
    programs = bench.folder / "bin"
    programs.mkdir()
    (programs / "sbatch").write_text('#!/bin/sh\nprintf "%s\\n" "$@" > sbatch.txt\n')
    (programs / "sbatch").chmod(0o755)
    path = f"{programs}:{os.environ['PATH']}"
    bench("arcade", "--seeds", "1", "--run-dir", "r", INTERRUPTED="MineSweeperEasy")
    flags = ("arcade", "--seeds", "1", "--run-dir", "r", "--slurm", "--workers", "30", "--", "--partition=long", "-t9")
    done, calls = bench(*flags, PATH=path)
    assert done.returncode == 0 and calls == [], done.stderr
    given = (bench.folder / "sbatch.txt").read_text().splitlines()
    assert {"--array=0-7%30", "--requeue", "--signal=B:USR1@300", "--partition=long", "-t9"} <= set(given)
    (listed,) = bench.folder.glob("r/slurm/*.txt")
    expected, _ = bench("arcade", "--seeds", "1", "--run-dir", "r", "--dry-run")
    assert listed.read_text() == expected.stdout and given[-1].endswith(str(listed.relative_to(bench.folder)))
    done, _ = bench(*flags, PATH=path, SBATCH_SIGNAL="B:USR1@60")
    assert "--signal=B:USR1@60" in (bench.folder / "sbatch.txt").read_text()


def test_a_task_of_an_array_passes_one_sigusr1_on_and_no_sigterm_and_asks_to_be_started_again(bench):
    (bench.folder / "bin").mkdir()
    (bench.folder / "bin/scontrol").write_text('#!/bin/sh\necho "$@" > scontrol.txt\n')
    (bench.folder / "bin/scontrol").chmod(0o755)
    listed, _ = bench("table1", "--run-dir", "r", "--dry-run")
    (bench.folder / "list.txt").write_text(listed.stdout)
    slurm = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3", "SLURM_JOB_ID": "11"}
    slurm["PATH"] = f"{bench.folder}/bin:{os.environ['PATH']}"
    process = bench.start("--array-task", "list.txt", WAIT="0", SLOW="1", **slurm)
    await_(lambda: len(bench.happened("begin")) == 1, process)
    for name in ("SIGUSR1", "SIGUSR1", "SIGTERM"):  # Slurm repeats the first, and sends the last to every process
        process.send_signal(getattr(signal, name))
        time.sleep(0.1)
    (bench.folder / "go").touch()
    process.communicate(timeout=20)
    ((pid, _),) = bench.happened("begin")
    assert process.returncode == 138 and bench.happened("signal") == [[pid, "USR1"]]
    assert (bench.folder / "scontrol.txt").read_text() == "requeue 7_3\n"
    (bench.folder / "scontrol.txt").unlink()
    process = bench.start("--array-task", "list.txt", WAIT="0", **slurm)
    stdout, _ = process.communicate(timeout=20)
    run = "r/table1/StatelessCartPoleEasy__pqn_frozen_rnn__lru-frozen__1__1700000000"  # the fourth line
    assert process.returncode == 0 and f"--resume {run}" in stdout and (bench.folder / run / "eval.json").exists()
    assert not (bench.folder / "scontrol.txt").exists()


def test_slurm_submits_nothing_where_all_is_finished(bench):
    bench("table1", "--run-dir", "r")
    done, _ = bench("table1", "--run-dir", "r", "--slurm", "--dry-run")
    assert done.returncode == 0 and "sbatch" not in done.stderr and "--kind parameters" in done.stderr


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
        (("ffm", "--workers", "0"), "--workers 0"),
        (("ffm", "--workers"), "--workers"),
        (("ffm", "--", "--partition=x"), "--slurm"),
        (("--once",), "--once"),
        (("--once", "python", "pqn_ffm.py", "--env", "RepeatFirstEasy"), "--exp-name"),
    ],
)
def test_bad_flags_are_one_line(bench, flags, word):
    done, calls = bench(*flags)
    assert done.returncode == 2 and calls == [] and done.stderr.count("\n") == 1 and word in done.stderr


def test_help_names_the_groups(bench):
    done, _ = bench("--help")
    assert done.returncode == 0 and "--dry-run" in done.stdout
    groups = ("ffm", "popgym", "reservoirs", "mixers", "table1", "memorychain", "playground", "arcade", "evidence")
    assert all(f"{group}:" in done.stdout for group in groups)
