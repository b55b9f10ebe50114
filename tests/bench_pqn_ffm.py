"""Where the time of pqn_ffm.py goes, at the published setting.

    python tests/bench_pqn_ffm.py parts     # compile seconds, SPS, rollout against update, of each memory
    python tests/bench_pqn_ffm.py loop      # the script with its log against a bare loop over train_iteration

Alternatives are timed in turn, so that whatever else the machine does hits all of them; medians count.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import pqn_ffm  # noqa: E402

AGENTS = [("ffm", False), ("ffm", True), ("gru", False), ("gru", True), ("mlp", False)]
UPDATES = 60


def make(memory: str, frozen: bool):
    args = pqn_ffm.Args(memory=memory, frozen=frozen)
    pqn_ffm.check_args(args)
    train = pqn_ffm.make_train(args)
    return args, train, jax.jit(train.init)(jnp.int32(args.seed))


def compiled(function, *x, **options):
    start = time.perf_counter()
    program = jax.jit(function, **options).lower(*x).compile()
    return program, time.perf_counter() - start


def seconds(function, *x) -> float:
    start = time.perf_counter()
    jax.block_until_ready(function(*x))
    return time.perf_counter() - start


def parts():
    rows = []
    for memory, frozen in AGENTS:
        args, train, state = make(memory, frozen)
        iteration, compile_seconds = compiled(train.train_iteration, state)
        rollout, _ = compiled(train.rollout, state, jax.random.key(0))
        rows.append((memory, frozen, args, state, iteration, rollout, compile_seconds, [], []))
    for _ in range(8):
        for row in rows:
            _, _, _, state, iteration, rollout, _, whole, acting = row
            whole.append(seconds(iteration, state))
            acting.append(seconds(rollout, state, jax.random.key(0)))
    print("| memory | compile s | iteration s | SPS | rollout | update |\n|---|---|---|---|---|---|")
    for memory, frozen, args, _, _, _, compile_seconds, whole, acting in rows:
        whole, acting = statistics.median(whole[1:]), statistics.median(acting[1:])
        sps = args.num_envs * args.num_steps / whole
        name = memory + (" frozen" if frozen else "")
        share = acting / whole
        print(f"| {name} | {compile_seconds:.1f} | {whole:.3f} | {sps:,.0f} | {share:.0%} | {1 - share:.0%} |")


def loop():
    """Ratio of the script's SPS, measured by itself over whole runs, to that of a loop that does nothing else."""
    args, train, state = make("ffm", True)
    iteration, _ = compiled(train.train_iteration, state, donate_argnums=0)
    steps = args.num_envs * args.num_steps * UPDATES
    bare, script = [], []
    for _ in range(4):
        with tempfile.TemporaryDirectory() as folder:
            flags = f"--frozen --total-timesteps {steps} --run-dir {folder}".split()
            subprocess.run([sys.executable, str(ROOT / "pqn_ffm.py"), *flags], check=True, stdout=subprocess.DEVNULL)
            (result,) = Path(folder).glob("*/eval.json")
            script.append(json.loads(result.read_text())["SPS"])
        state = jax.jit(train.init)(jnp.int32(args.seed))
        start = time.perf_counter()
        for _ in range(UPDATES):
            state, metrics = iteration(state)
        jax.block_until_ready(metrics)
        bare.append(steps / (time.perf_counter() - start))
    ratios = [a / b for a, b in zip(script, bare, strict=True)]
    print(f"bare loop {statistics.median(bare):,.0f} SPS, script {statistics.median(script):,.0f} SPS")
    print(f"ratio of each pair {', '.join(f'{r:.3f}' for r in ratios)}; median {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    {"parts": parts, "loop": loop}[sys.argv[1]]()
