"""How fast ppo_playground.py's physics and training are, and where the time goes, at the published setting.

    python tests/bench_ppo_playground.py                               # FRN's tasks by positions, GRU, 3 updates each
    python tests/bench_ppo_playground.py BallInCup gru-frozen lru 5    # this task, these agents, 5 updates each

Physics alone is steps of 16 and of 64 environments with random actions. Everything is timed in turn, so that whatever
else the machine does hits all of it; medians count.
"""

import statistics
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import ppo_playground  # noqa: E402

TASKS, STEPS = ["BallInCup", "CheetahRun", "ReacherHard", "WalkerWalk"], 128


def make_args(task: str, agent: str):
    memory, frozen = agent.removesuffix("-frozen"), agent.endswith("-frozen")
    args = ppo_playground.Args(env=task, memory=memory, frozen=frozen)
    ppo_playground.check_args(args)
    return args


def compiled(function, *x):
    start = time.perf_counter()
    program = jax.jit(function).lower(*x).compile()
    return program, time.perf_counter() - start


def physics(task: str, num_envs: int):
    """A compiled function of 128 steps with random actions, and what to call it with."""
    action_size, reset, step = ppo_playground.make_env(make_args(task, "gru"))

    def play(env_state, key):
        def once(env_state, key):
            action = jax.random.uniform(key, (num_envs, action_size), minval=-1, maxval=1)
            _, env_state, reward, *_ = step(jax.random.split(key, num_envs), env_state, action)
            return env_state, reward

        return jax.lax.scan(once, env_state, jax.random.split(key, STEPS))

    key = jax.random.key(0)
    _, env_state = jax.jit(reset)(jax.random.split(key, num_envs))
    return compiled(play, env_state, key)[0], env_state, key


def seconds(function, *x) -> float:
    start = time.perf_counter()
    jax.block_until_ready(function(*x))
    return time.perf_counter() - start


def report(task: str, agents: list[str], updates: int):
    parts = {f"physics {n}": physics(task, n) for n in (16, 64)}
    compile_seconds, key = {}, jax.random.key(0)
    for agent in agents:
        args = make_args(task, agent)
        train = ppo_playground.make_train(args)
        state = jax.jit(train.init)(jnp.int32(args.seed))
        iteration, compile_seconds[agent] = compiled(train.train_iteration, state)
        parts |= {f"update {agent}": (iteration, state)}
        parts |= {f"rollout {agent}": (compiled(train.rollout, state, key)[0], state, key)}
    times = {name: [] for name in parts}
    for _ in range(updates + 1):
        for name, part in parts.items():
            times[name].append(seconds(*part))
    median = {name: statistics.median(x[1:]) for name, x in times.items()}  # the first warms up
    sps16, sps64 = (n * STEPS / median[f"physics {n}"] for n in (16, 64))
    for agent in agents:
        whole, acting = median[f"update {agent}"], median[f"rollout {agent}"]
        simulating = median["physics 16"]
        shares = simulating / whole, (acting - simulating) / whole, (whole - acting) / whole
        cells = (f"{sps16:,.0f}", f"{sps64:,.0f}", f"{compile_seconds[agent]:.0f}", f"{16 * STEPS / whole:,.0f}")
        print(f"| {task} | {agent} | {' | '.join(cells)} | {' | '.join(f'{x:.0%}' for x in shares)} |", flush=True)


if __name__ == "__main__":
    arguments = sys.argv[1:]
    updates = int(arguments.pop()) if arguments and arguments[-1].isdigit() else 3
    agents = [x for x in arguments if x.removesuffix("-frozen") in ppo_playground.UNITS] or ["gru"]
    tasks = [x for x in arguments if x not in agents] or TASKS
    print("| task | memory | physics SPS, 16 | 64 | compile s | training SPS | physics | acting | learning |")
    print("|---|---|---|---|---|---|---|---|---|")
    for task in tasks:
        report(task, agents, updates)
