"""Speed of pqn_arcade_cnn.py on a CPU.

    python tests/bench_pqn_arcade_cnn.py parts                 where an update's time goes, at the published setting
    python tests/bench_pqn_arcade_cnn.py cnn                   the CNN by XLA's convolutions, and by products
    python tests/bench_pqn_arcade_cnn.py tasks                 environment steps, popgym-arcade's and the script's
    python tests/bench_pqn_arcade_cnn.py against BASELINE ...  beside popgym-arcade's own PQN_RNN, in turn

BASELINE is the Python of an environment with `pip install "popgym-arcade[baselines]==0.0.7" six`; behind it can stand
the rollout's steps of each environment (16) and the minibatches (4). Both train an LRU on BattleShipEasy with 16
environments and 4 epochs. The time is that of PQN_RNN's second update, and the mean of three of ours after the first.
"""

import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

NUM_ENVS = 16
BASELINE = """
import sys, time, types
times = []
sys.modules["wandb"] = types.SimpleNamespace(log=lambda *_, **__: times.append(time.perf_counter()))  # once an update
import equinox as eqx
import jax
from popgym_arcade.baselines import pqn_rnn

num_steps, num_minibatches = map(int, sys.argv[1:])
steps = 2 * num_steps * 16
config = dict(
    TOTAL_TIMESTEPS=steps, TOTAL_TIMESTEPS_DECAY=steps, NUM_STEPS=num_steps, NUM_ENVS=16, NUM_EPOCHS=4, MEMORY_WINDOW=0,
    NUM_MINIBATCHES=num_minibatches, ENV_NAME="BattleShipEasy", PARTIAL=True, OBS_SIZE=128, MEMORY_TYPE="LRU", LR=5e-5,
    LR_LINEAR_DECAY=True, MAX_GRAD_NORM=10, EPS_START=1.0, EPS_FINISH=0.05, EPS_DECAY=0.25, GAMMA=0.99, LAMBDA=0.65,
    WANDB_MODE="online", TEST_DURING_TRAINING=False,
)
train = eqx.filter_jit(eqx.filter_vmap(pqn_rnn.make_train(config)))  # as its own runner does
jax.block_until_ready(train(jax.random.PRNGKey(0)[None]))
jax.effects_barrier()
print(times[1] - times[0])
"""
OURS = """
import sys, time
sys.path[:0] = [".", "tests"]
import jax
import jax.numpy as jnp
import bench_pqn_arcade_cnn as bench, pqn_arcade_cnn

num_steps, num_minibatches = map(int, sys.argv[1:])
args = bench.make_args(num_steps=num_steps, num_minibatches=num_minibatches)
train = pqn_arcade_cnn.make_train(args)
state = jax.jit(train.init)(jnp.int32(args.seed))
iteration = jax.jit(train.train_iteration, donate_argnums=0).lower(state).compile()
times = []
for _ in range(4):
    times.append(time.perf_counter())
    state, metrics = jax.block_until_ready(iteration(state))
print((time.perf_counter() - times[1]) / 3)
"""


def make_args(env: str = "BattleShipEasy", **changes):
    import pqn_arcade_cnn

    args = pqn_arcade_cnn.Args(env=env, **changes)
    pqn_arcade_cnn.check_args(args)
    return args


def timed(function, *x, turns: int = 3) -> float:
    """Median seconds of a compiled program; the first turn warms up."""
    import jax

    program, times = jax.jit(function).lower(*x).compile(), []
    for _ in range(turns + 1):
        start = time.perf_counter()
        jax.block_until_ready(program(*x))
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def gradient_of(cnn):
    import jax
    import jax.numpy as jnp

    return jax.grad(lambda params, frames: jnp.square(cnn.apply(params, frames)).mean())


def gradients_in_a_loop(cnn):
    """Two gradients, one after the other, as the epochs take them."""
    import jax
    import jax.numpy as jnp

    def step(params, frames):
        return jax.tree.map(jnp.add, params, gradient_of(cnn)(params, frames)), None

    return lambda params, frames: jax.lax.scan(lambda p, _: step(p, frames), params, None, length=2)[0]


def parts():
    import jax
    import jax.numpy as jnp

    import pqn_arcade_cnn

    args = make_args(frozen=True)
    train = pqn_arcade_cnn.make_train(args)
    state, key = jax.jit(train.init)(jnp.int32(args.seed)), jax.random.key(0)
    iteration = timed(train.train_iteration, state, turns=1)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    rollout = timed(train.rollout, state, key, turns=1)
    *_, draw = pqn_arcade_cnn.make_env(args)
    keys = jax.random.split(key, NUM_ENVS)
    drawing = timed(draw, keys, state.runner.env_state) * args.num_steps
    cnn = pqn_arcade_cnn.CNN(args.obs_size)
    frames, params = state.runner.obs, {"params": state.params["cnn"]}
    acting = timed(cnn.apply, params, frames) * args.num_steps
    minibatch = jnp.tile(frames, (args.num_steps // args.num_minibatches, 1, 1, 1))
    forward = timed(cnn.apply, params, minibatch) * args.update_epochs * args.num_minibatches
    gradient = timed(gradients_in_a_loop(cnn), params, minibatch) / 2
    backward = gradient * args.update_epochs * args.num_minibatches - forward
    steps = args.num_envs * args.num_steps
    print(f"an update {iteration:.1f} s, {steps / iteration:.1f} steps/s, {peak:.2f} GB at most; of it")
    for name, seconds in (
        ("rollout", rollout),
        ("  drawing", drawing),
        ("  CNN forward", acting),
        ("epochs", iteration - rollout),
        ("  CNN forward", forward),
        ("  CNN backward, with the first layers once more", backward),
    ):
        print(f"{name:<50}{seconds:7.1f} s {seconds / iteration:5.0%}")


def cnn():
    import jax
    import jax.numpy as jnp

    import pqn_arcade_cnn

    module, n = pqn_arcade_cnn.CNN(128), 64
    frames = jax.random.randint(jax.random.key(0), (n, 128, 128, 3), 0, 256).astype(jnp.uint8)
    params = module.init(jax.random.key(1), frames[:1])
    backend = jax.default_backend
    for name, at_once in (("XLA's convolutions", n), *((f"products, {k} at once", k) for k in (n, 8, 4, 2, 1))):
        jax.default_backend = (lambda: "other") if name.startswith("XLA") else backend
        pqn_arcade_cnn.FRAMES_AT_ONCE = at_once

        forward, backward = timed(module.apply, params, frames), timed(gradient_of(module), params, frames)
        loop = timed(gradients_in_a_loop(module), params, frames, turns=2) / 2
        milliseconds = ", ".join(f"{1e3 * s / n:.2f}" for s in (forward, backward, loop))
        print(f"{name}: ms a frame: forward, gradient, gradient in a loop: {milliseconds}", flush=True)


def tasks():
    import jax
    import jax.numpy as jnp
    import popgym_arcade

    import pqn_arcade_cnn

    for family in ("BattleShip", "CountRecall", "MineSweeper", "Navigator"):
        args = make_args(env=family)
        own, params = popgym_arcade.make(args.env, partial_obs=True)
        _, reset, step, _ = pqn_arcade_cnn.make_env(args)
        keys, action = jax.random.split(jax.random.key(0), NUM_ENVS), jnp.arange(NUM_ENVS) % 5
        _, state = jax.jit(reset)(keys)
        own_seconds = timed(jax.vmap(own.step, in_axes=(0, 0, 0, None)), keys, state, action, params)
        seconds = timed(step, keys, state, action, turns=9)
        print(f"{args.env}: {NUM_ENVS / own_seconds:.0f} steps/s, here {NUM_ENVS / seconds:.0f}", flush=True)


def against(python: str, num_steps: str = "16", num_minibatches: str = "4"):
    seconds = {}
    for name, code, interpreter in (("this", OURS, sys.executable), ("PQN_RNN", BASELINE, python)):
        command = [interpreter, "-c", code, num_steps, num_minibatches]
        seconds[name] = float(subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout.split()[-1])
        sps = NUM_ENVS * int(num_steps) / seconds[name]
        print(f"{name}: {seconds[name]:.1f} s an update, {sps:.2f} steps/s, load {os.getloadavg()[0]:.1f}", flush=True)
    print(f"ratio {seconds['PQN_RNN'] / seconds['this']:.1f}")


if __name__ == "__main__":
    {"parts": parts, "cnn": cnn, "tasks": tasks, "against": against}[sys.argv[1]](*sys.argv[2:])
