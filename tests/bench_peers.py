"""pqn_ffm.py and pqn_frozen_rnn.py against memorax's recurrent PQN, the equal agent in turn in one process.

    pip install memorax==1.0.1        # in a virtual environment of its own, beside requirements.txt
    python tests/bench_peers.py       # or taskset -c 0,1 python … to choose the cores

Both train [obs, one-hot action] -> Linear -> 2 x [memory -> Linear, LayerNorm, LeakyReLU] -> Linear -> 2 x readout ->
Q values of width 256 on RepeatPreviousEasy: 16 environments, 128 steps, 16 minibatches, 4 epochs, Adam.
The peer's environment is ours, its network is made of its own parts, and its algorithm is called as it is.
"""

import statistics
import sys
import time
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from memorax.algorithms import PQN, PQNConfig
from memorax.networks import RNN, FFMCell, LRUCell, Memoroid, Network, Stack

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import popjym  # noqa: E402
import pqn_ffm  # noqa: E402
import pqn_frozen_rnn  # noqa: E402

WIDTH, ROUNDS = 256, 15


class Environment:
    """Ours, without what the peer does not know. All are equal: it is a part of what the peer compiles for."""

    def __init__(self, name: str):
        self.env, self.params = popjym.make(name)
        self.action_space, self.reset = self.env.action_space, self.env.reset

    def step(self, key, state, action, params):
        obs, state, reward, done, _ = self.env.step(key, state, action, params)
        return obs, state, reward, done, {}

    def __hash__(self):
        return 0

    def __eq__(self, other):
        return isinstance(other, Environment)


class Encoder(nn.Module):
    num_actions: int

    @nn.compact
    def __call__(self, observation, action, reward, done):
        return nn.Dense(WIDTH)(jnp.concatenate([observation, jax.nn.one_hot(action, self.num_actions)], -1))


class Mixer(nn.Module):
    @nn.compact
    def __call__(self, x, mask=None, initial_carry=None, **_):
        return initial_carry, nn.leaky_relu(nn.LayerNorm(use_scale=False, use_bias=False)(nn.Dense(WIDTH)(x)))


class Head(nn.Module):
    num_actions: int

    @nn.compact
    def __call__(self, x, **_):
        x = nn.Dense(WIDTH)(x)
        for _ in range(2):
            x = nn.leaky_relu(nn.LayerNorm()(nn.Dense(WIDTH)(x)))
        return nn.Dense(self.num_actions)(x), {}


def memory(name: str) -> nn.Module:
    if name == "gru":
        return RNN(nn.GRUCell(WIDTH))
    if name == "lru":
        return Memoroid(LRUCell(features=WIDTH, hidden_dim=WIDTH))
    return Memoroid(FFMCell(features=WIDTH, memory_size=32, context_size=4))


def peer(name: str):
    """A function that trains for one rollout, and its state."""
    env = Environment("RepeatPreviousEasy")
    num_actions = env.action_space(env.params).n
    blocks = (memory(name), Mixer(), memory(name), Mixer())
    algorithm = PQN(
        cfg=PQNConfig("", 16, 16, 128, 0.99, 0.95, 16, 4),
        env=env,
        env_params=env.params,
        q_network=Network(Encoder(num_actions), Stack(blocks), Head(num_actions)),
        optimizer=optax.chain(optax.clip_by_global_norm(10.0), optax.adam(1e-5)),
        epsilon_schedule=optax.linear_schedule(1.0, 0.05, 5_000_000),
    )
    state = algorithm.init(jax.random.key(1))

    def train(state):
        key, state, _ = algorithm.train(*state, num_steps=16 * 128)
        return key, state

    return train, state


def ours(name: str):
    script = pqn_frozen_rnn if name == "lru" else pqn_ffm
    args = script.Args(memory=name, env="RepeatPreviousEasy")
    script.check_args(args)
    train = script.make_train(args)
    state = jax.jit(train.init)(jnp.int32(1))
    iteration = jax.jit(train.train_iteration)
    return lambda state: iteration(state)[0], state


def main():
    for name in sys.argv[1:] or ("ffm", "lru", "gru"):
        agents = [ours(name), peer(name)]
        parameters = [sum(x.size for x in jax.tree.leaves(state)) for _, state in agents]
        times = [[], []]
        for _ in range(ROUNDS):
            for i, (train, state) in enumerate(agents):
                start = time.perf_counter()
                agents[i] = train, jax.block_until_ready(train(state))
                times[i].append(time.perf_counter() - start)
        mine, theirs = (statistics.median(t[2:]) for t in times)
        ratios = [b / a for a, b in zip(*times, strict=True)][2:]
        low, high = min(ratios), max(ratios)
        print(
            f"{name}: {2048 / mine:,.0f} against {2048 / theirs:,.0f} steps/s, "
            f"{statistics.median(ratios):.2f} times ({low:.2f} to {high:.2f}); numbers in the states {parameters}",
            flush=True,
        )


if __name__ == "__main__":
    main()
