"""Where the time of ppo_memorychain.py goes, at the published setting (64 environments × 1024 steps).

    python tests/bench_ppo_memorychain.py                      # the agents of docs/ppo_memorychain.md, 3 updates each
    python tests/bench_ppo_memorychain.py lru-frozen gru 5     # these, 5 updates each

Agents are timed in turn, so that whatever else the machine does hits all of them; medians count.
"""

import statistics
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import ppo_memorychain  # noqa: E402

AGENTS = ["mlp", "gru", "gru-frozen", "lru", "lru-frozen", "ffm", "ffm-frozen"]


def make(agent: str):
    args = ppo_memorychain.Args(memory=agent.removesuffix("-frozen"), frozen=agent.endswith("-frozen"))
    ppo_memorychain.check_args(args)
    train = ppo_memorychain.make_train(args)
    return args, train, jax.jit(train.init)(jnp.int32(args.seed))


def compiled(function, *x):
    start = time.perf_counter()
    program = jax.jit(function).lower(*x).compile()
    return program, time.perf_counter() - start


def seconds(function, *x) -> float:
    start = time.perf_counter()
    jax.block_until_ready(function(*x))
    return time.perf_counter() - start


if __name__ == "__main__":
    updates = int(sys.argv.pop()) if sys.argv[-1].isdigit() else 3
    rows, key = [], jax.random.key(0)
    for agent in sys.argv[1:] or AGENTS:
        args, train, state = make(agent)
        iteration, compile_seconds = compiled(train.train_iteration, state)
        rollout, _ = compiled(train.rollout, state, key)
        advantages, _ = compiled(train.compute_advantages, state.params, state.frozen, *rollout(state, key))
        rows.append((agent, args, state, iteration, rollout, advantages, compile_seconds, [], [], []))
    for _ in range(updates):
        for _, _, state, iteration, rollout, advantages, _, *times in rows:
            runner, transitions = rollout(state, key)
            parts = (
                (iteration, state),
                (rollout, state, key),
                (advantages, state.params, state.frozen, runner, transitions),
            )
            for part, measured in zip(parts, times, strict=True):
                measured.append(seconds(*part))
    print("| memory | compile s | update s | SPS | rollout | advantages | epochs |\n|---|---|---|---|---|---|---|")
    for agent, args, _, _, _, _, compile_seconds, *times in rows:
        whole, acting, valuing = (statistics.median(measured) for measured in times)
        a, b = acting / whole, valuing / whole
        sps = args.num_envs * args.num_steps / whole
        print(f"| {agent} | {compile_seconds:.1f} | {whole:.2f} | {sps:,.0f} | {a:.1%} | {b:.1%} | {1 - a - b:.1%} |")
