"""Which initialisations of a memory recall how far: the tables of docs/ppo_memorychain.md and docs/memory.md.

    taskset -c 0 python tests/sweep_memorychain.py radii        # and on another core, taskset -c 1 … bias gru why

runs what is missing of the named groups, one run after the other, and goes on where it was stopped; several at once
share the work. Every run has the published schedule of 10 million steps.

radii   LRU, trained and frozen, radii drawn from three rings, delays 64 to 1024, two seeds; ends at success or after 3
        million steps.
bias    GRU, trained and frozen, bias of the update gate of -2 and -4, delays 32 to 128, three seeds; ends at success.
gru     GRU, trained and frozen, as published, delays 32 to 128, three seeds; never ends early.
why     GRU, trained, delays 64 and 32, three seeds, with one thing done otherwise that the paper leaves open; ends at
        success. `biases`: those of dense layers are drawn as N(0, 0.05). `value`: the value loss has weight 0.05.
        `hidden`: the observation does not show the time that is left.

`--collect FILE` writes what has ended, environment steps and success rates of every run, and prints it as tables: for
each seed, the steps to success; or the steps at which it ended without, and the share of 128 greedy episodes then.
"""

import argparse
import fcntl
import functools
import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parent.parent / "ppo_memorychain.py"
UPDATE = 64 * 1024  # environment steps
VALUE = ["--vf-coef", "0.05"]
SUCCESS = ["--stop-at-success", "0.99", "--checkpoint-every", "120"]


STARTS = {
    "radii": ("0 1", "0.9 0.999", "0.99 0.9999"),
    "bias": ("-4", "-2"),
    "gru": ("0",),
    "why": ("biases", "value", "hidden"),
}


def main_with(change: str):
    """The script's main(), with a change to what it imports or to its environment."""
    sys.path.insert(0, str(SCRIPT.parent))
    import ppo_memorychain as script

    make_env, dense = script.make_env, script.nn.Dense

    def make_env_without_time(args):
        num_actions, reset, step = make_env(args)

        def hidden(obs, *others):
            return obs.at[..., 0].set(0.0), *others

        return num_actions, lambda keys: hidden(*reset(keys)), lambda *state: hidden(*step(*state))

    if change == "biases":
        script.nn.Dense = functools.partial(dense, bias_init=script.nn.initializers.normal(0.05))
    elif change == "hidden":
        script.make_env = make_env_without_time
    script.main()


def jobs(group: str):
    """The runs of a group, the most telling first: a name, the flags, and the step at which the run is ended."""
    for seed, delay, start, frozen in itertools.product(
        (1, 2, 3),
        {"radii": (512, 1024, 256, 128, 64), "bias": (128, 64, 32), "gru": (128, 64, 32), "why": (64, 32)}[group],
        STARTS[group],
        (False,) if group == "why" else (False, True),
    ):
        name = f"{group}_{start.replace(' ', '_')}_{'frozen' if frozen else 'trained'}_{delay}_{seed}"
        flags = ["--delay", str(delay), "--seed", str(seed), *["--frozen"] * frozen]
        if group == "radii":
            r_min, r_max = start.split()
            if seed < 3:
                yield name, [*flags, "--memory", "lru", "--r-min", r_min, "--r-max", r_max, *SUCCESS], 3_000_000
        elif group == "why":
            yield name, [*flags, "--memory", "gru", *VALUE * (start == "value"), *SUCCESS], None
        elif group == "bias":
            yield name, [*flags, "--memory", "gru", "--update-bias", start, *SUCCESS], None
        else:
            yield name, [*flags, "--memory", "gru", "--checkpoint-every", "120"], None


def run(folder: Path, flags: list[str], limit: int | None, change: str | None):
    """Starts or resumes the run in `folder`, and writes result.json there when it has ended."""
    runs = sorted(folder.glob("*/checkpoint.msgpack"))
    command = ["--resume", str(runs[-1].parent)] if runs else [*flags, "--run-dir", str(folder)]
    program = [SCRIPT] if change is None else [__file__, "--change", change]
    process = subprocess.Popen([sys.executable, *program, *command], stdout=subprocess.PIPE, text=True)
    ended = "success" if SUCCESS[0] in flags else "all steps"
    for line in process.stdout:
        if (
            limit is not None
            and "step " in line
            and int(line.split("step ")[1].split(", ")[0].replace(",", "")) >= limit
        ):
            process.send_signal(signal.SIGTERM)  # it ends after the update under way, with a checkpoint
            ended = "limit"
    code = process.wait()
    name = max(folder.glob("*/checkpoint.msgpack")).parent
    if ended == "limit":
        subprocess.run([sys.executable, SCRIPT, "--evaluate", name], stdout=subprocess.DEVNULL, check=True)
    elif code != 0:
        sys.exit(f"{name} ended with code {code}")
    result = json.loads((name / ("evaluate.json" if ended == "limit" else "eval.json")).read_text())
    if ended == "success" and result["environment_steps"] >= 10_000_000 // UPDATE * UPDATE:
        ended = "all steps"
    notes = {name: result[name] for name in ("environment_steps", "success_rate", "success_rate_128")}
    (folder / "result.json").write_text(json.dumps({"flags": " ".join(flags), "ended": ended} | notes))


def table(group: str, results: dict) -> str:
    """What has ended, in Markdown: a row for each start and each of trained and frozen, a column for each delay."""
    cells, delays = {}, set()
    for name, _, _ in jobs(group):
        *start, kind, delay, seed = name.split("_")[1:]
        row = cells.setdefault((" … ".join(start), kind), {})
        delays.add(int(delay))
        if name in results:
            steps, rate = results[name]["environment_steps"], results[name]["success_rate_128"]
            solved = results[name]["ended"] == "success"
            row.setdefault(int(delay), []).append(f"{steps:,}" if solved else f"({steps:,}: {rate:.2f})")
    lines = [["start", "", *map(str, sorted(delays))], ["---"] * (2 + len(delays))]
    for (start, kind), row in cells.items():
        lines.append([start, kind, *(", ".join(row.get(delay, [])) for delay in sorted(delays))])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="+", choices=STARTS)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/memorychain_starts"))
    parser.add_argument("--collect", type=Path, metavar="FILE")
    args = parser.parse_args()
    if args.collect is not None:
        results = {}
        for name, _, _ in itertools.chain(*map(jobs, args.groups)):
            if (file := args.run_dir / name / "result.json").exists():
                results[name] = json.loads(file.read_text())
        args.collect.write_text(json.dumps(results, indent=1) + "\n")
        for group in args.groups:
            print(table(group, results))
        return
    for name, flags, limit in itertools.chain(*map(jobs, args.groups)):
        folder = args.run_dir / name
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue  # another process has it
        if not (folder / "result.json").exists():
            run(folder, flags, limit, change=name.split("_")[1] if name.startswith("why") else None)
            print(name, (folder / "result.json").read_text(), flush=True)
        os.close(lock)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--change"]:
        change = sys.argv[2]
        sys.argv[1:] = sys.argv[3:]
        main_with(change)
    else:
        main()
