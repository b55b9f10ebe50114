"""Speed of popjym beside the numpy original, and what scripted players get, as the tables of popjym/README.md.

    python tests/bench_popjym.py                      # speed of every id
    python tests/bench_popjym.py MinesweeperEasy ...  # of some
    python tests/bench_popjym.py --write              # speed and returns of every id, into popjym/README.md

Environment steps per second, auto-reset included. Ours: one jitted scan over vmapped steps that carries observations
and states, its keys split inside. The original: a loop over `step` and `reset`. All get ready-made random actions.
Rounds of the three alternate, so that whatever else the machine does hits all of them; the best round counts.
"""

import argparse
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import popgym.envs

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import popjym_players as players  # noqa: E402

import popjym  # noqa: E402

BATCHES = {16: 2000, 1024: 100}  # environments: steps of each in one timed call
ROUNDS = 7


def jax_runner(env, params, batch, steps):
    """A function that plays `batch` environments for `steps` steps and returns the seconds it took."""
    step = jax.vmap(env.step, in_axes=(0, 0, 0, None))

    @jax.jit
    def run(key, carry, actions):
        def body(carry, xs):
            obs, state, total = carry
            keys, action = xs
            obs, state, reward, done, info = step(keys, state, action, params)
            return (obs, state, total + reward), None

        return jax.lax.scan(body, carry, (jax.random.split(key, (steps, batch)), actions))[0]

    sample = jax.vmap(jax.vmap(env.action_space(params).sample))
    actions = jax.jit(sample)(jax.random.split(jax.random.key(0), (steps, batch)))
    obs, state = jax.vmap(env.reset, (0, None))(jax.random.split(jax.random.key(1), batch), params)
    carry = jax.block_until_ready(run(jax.random.key(2), (obs, state, jnp.zeros(batch)), actions))

    def timed():
        nonlocal carry  # so that every call goes on where the last one ended
        start = time.perf_counter()
        carry = jax.block_until_ready(run(jax.random.key(3), carry, actions))
        return time.perf_counter() - start

    return timed


def numpy_runner(env_id, steps):
    env = getattr(popgym.envs, players.original_name(env_id))()
    env.action_space.seed(0)
    env.reset(seed=0)
    actions = [env.action_space.sample() for _ in range(steps)]

    def timed():
        start = time.perf_counter()
        for action in actions:
            _, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                env.reset()
        return time.perf_counter() - start

    return timed


def measure(env_id):
    """Steps per second: of the original, and of ours for every batch size."""
    env, params = popjym.make(env_id)
    numpy_steps = 2000
    runners = [(numpy_steps, numpy_runner(env_id, numpy_steps))]
    runners += [(batch * steps, jax_runner(env, params, batch, steps)) for batch, steps in BATCHES.items()]
    seconds = np.array([[timed() for _, timed in runners] for _ in range(ROUNDS)])  # [rounds, runners]
    return np.array([steps for steps, _ in runners]) / seconds.min(axis=0)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("env_ids", nargs="*", default=popjym.registered_envs)
    parser.add_argument("--write", action="store_true", help="write the tables of popjym/README.md")
    args = parser.parse_args()

    ratios = []
    print(f"{'':32}{'numpy':>12}{'16 envs':>14}{'1024 envs':>14}{'ratio':>8}")
    for env_id in args.env_ids:
        numpy_speed, few, many = measure(env_id)
        ratios.append(many / numpy_speed)
        print(f"{env_id:32}{numpy_speed:12,.0f}{few:14,.0f}{many:14,.0f}{ratios[-1]:8.0f}", flush=True)
    print(f"ratio at 1024: least {min(ratios):.0f}, median {np.median(ratios):.0f}")


if __name__ == "__main__":
    main()
