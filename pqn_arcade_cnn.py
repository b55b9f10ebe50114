"""PQN with a CNN before a recurrent memory, trained or frozen, on POPGym Arcade's partially observable pixel tasks.

Can an agent learn to see through a memory that does not learn? It sees a picture and its previous action. A CNN reads
the picture, a recurrent network keeps what matters of it, and what stands above learns Q values from the agent's own
rollouts with TD(λ): no replay buffer, no target network. `--memory` swaps the memory by one word; `--frozen` leaves its
weights as they were drawn: the gradient reaches the CNN through them, and changes none of them. All of that ends with
`film`; what comes after it, the keeping of runs, is the same in every script.

    python pqn_arcade_cnn.py --env Navigator --memory lru --frozen
    python pqn_arcade_cnn.py --env BattleShipHard --memory gru --fully-observable --capture-video

FRN: Does Learning Recurrent Networks Matter in Partially Observable RL? (Wang et al., 2026), section 4.5.
FFM: Reinforcement Learning with Fast and Forgetful Memory (Morad et al., 2023).
PQN: Simplifying Deep Temporal Difference Learning (Gallici et al., 2025).
POPGym Arcade: Investigating Memory in Model-Free RL with POPGym Arcade (Wang et al., 2026): the tasks.
"""

import contextlib
import copy
import dataclasses
import errno
import fcntl
import functools
import importlib.metadata
import importlib.util
import io
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import popgym_arcade
import tyro
from flax import struct
from PIL import Image
from popgym_arcade.registration import REGISTERED_ENVIRONMENTS
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.proto.summary_pb2 import Summary
from tqdm import tqdm

from memory import FFM, GRU, LRU, Memoryless, count_parameters, merge, partition, trace_durability

jax.config.update("jax_default_matmul_precision", "highest")  # TF32 on GPUs changes results


# --------------------------------------------------------------------------------------------------------- arguments
@dataclass
class Task:
    """What is learned, and for how long."""

    env: str = "NavigatorEasy"
    """POPGym Arcade task, with difficulty (BattleShipHard) or without (BattleShip means BattleShipEasy)"""
    fully_observable: bool = False
    """the twin of the task that hides nothing"""
    obs_size: Literal[128, 256] = 128
    """height and width of a picture"""
    total_timesteps: int = 20_000_000
    """environment steps of one seed (FRN Table A5)"""
    seed: int = 1
    """seed of the first run"""
    num_seeds: int = 1
    """seeds that train side by side in one program: seed, seed + 1, …; each has a run folder of its own"""
    eval_episodes: int = 10
    """greedy episodes after training (FRN section 4.1)"""
    capture_video: bool = False
    """film the first evaluated episode: what the agent sees, beside the fully observable twin's picture of it"""


@dataclass
class Network:
    """The agent (FRN Fig. 1 and 7, Tables A1 and A2) and its memory (FRN section 3; FFM)."""

    memory: Literal["gru", "lru", "ffm", "mlp"] = "lru"
    """memory unit; mlp is the same agent without one, the memoryless baseline"""
    frozen: bool = False
    """leave the memory units as initialised (FRN Algorithm 1)"""
    hidden_size: int = 256
    """width of every hidden layer after the CNN (FRN Table A1)"""
    num_blocks: int = 2
    """L, recurrent blocks of a unit and a mixer (FRN appendix E)"""
    num_readout_blocks: int = 2
    """K, hidden blocks of the readout (FRN appendix E)"""
    trace_size: int | None = None
    """ffm: m, the traces; None is 32"""
    context_size: int | None = None
    """ffm: c, the contexts of each trace; None is 4"""
    r_min: float | None = None
    """lru: smallest radius of a mode; None is 0.9 trained, 0.99 frozen"""
    r_max: float | None = None
    """lru: largest radius of a mode; None is 0.999 trained, 0.9999 frozen"""
    max_phase: float | None = None
    """lru: largest phase of a mode; None is 2π"""


@dataclass
class Algorithm:
    """PQN with λ-returns (FRN Table A5)."""

    learning_rate: float | None = None
    """initial learning rate; None takes FRN Table A5's: 5e-5 trained, 3e-4 frozen (mlp, not in it: as trained)"""
    final_learning_rate: float = 5e-7
    """learning rate at the last step, linear in between (FRN Table A5)"""
    gamma: float = 0.99
    """discount (FRN Table A5)"""
    td_lambda: float = 0.65
    """λ of the λ-returns (FRN Table A5)"""
    max_grad_norm: float = 10.0
    """gradients are clipped to this global norm (FRN Table A5)"""
    start_e: float = 1.0
    """ε of the ε-greedy policy at the first step (FRN Table A5)"""
    end_e: float = 0.05
    """ε at the end of the exploration, and after (FRN Table A5)"""
    exploration_fraction: float = 0.25
    """part of total_timesteps in which ε falls, linearly (not in FRN; POPGym Arcade's value)"""
    num_envs: int = 16
    """parallel environments (FRN Table A5)"""
    num_steps: int = 128
    """steps of each environment in a rollout (FRN Table A5)"""
    num_minibatches: int = 4
    """minibatches of an epoch: whole sequences of num_envs / num_minibatches environments (FRN Table A5)"""
    update_epochs: int = 4
    """passes over each rollout (FRN Table A5)"""


# --- shared block: run flags ---
@dataclass
class Run:
    """Where a run is kept, continued and shown."""

    run_dir: str = "runs"
    """folder of all runs"""
    exp_name: str = Path(__file__).stem
    """name of the experiment, a part of the run folder's name"""
    checkpoint_every: float = 600.0
    """seconds between two checkpoints; 0 writes one after every update"""
    resume: str | None = None
    """run folder to continue, with the flags it was started with"""
    evaluate: str | None = None
    """run folder whose last checkpoint is evaluated into its evaluate.json, without training"""
    track: bool = False
    """log to Weights & Biases too (pip install wandb; WANDB_PROJECT and WANDB_ENTITY say where)"""


# --- end shared block: run flags ---


@dataclass
class Args:
    """PQN with a CNN and a recurrent memory, trained or frozen, on POPGym Arcade's pixel tasks."""

    task: Task = field(default_factory=Task)
    network: Network = field(default_factory=Network)
    algorithm: Algorithm = field(default_factory=Algorithm)
    run: Run = field(default_factory=Run)


UNITS = {"gru": GRU, "lru": LRU, "ffm": FFM, "mlp": Memoryless}
UNIT_FLAGS = [f.name for f in dataclasses.fields(Network) if f.default is None]  # None: what the unit has


def check_args(args: SimpleNamespace):
    """Fills in what depends on other flags; ends the program where a flag makes no sense."""

    def check(holds: bool, name: str, right: str):
        if not holds:
            fail(f"--{name.replace('_', '-')} {getattr(args, name)}: {right}")

    args.env += "Easy" if args.env + "Easy" in REGISTERED_ENVIRONMENTS else ""
    families = dict.fromkeys(re.sub("(Easy|Medium|Hard)$", "", name) for name in REGISTERED_ENVIRONMENTS)
    known = f"must be one of {', '.join(families)}, or that with Easy, Medium or Hard behind it"
    check(args.env in REGISTERED_ENVIRONMENTS, "env", known)
    for f in (f for group in (Task, Network, Algorithm) for f in dataclasses.fields(group)):
        if f.type in (int, int | None) and f.name != "seed" and getattr(args, f.name) is not None:
            check(0 < getattr(args, f.name) < 2**31, f.name, "must be a positive integer (below 2^31)")
    check(0 <= args.seed <= 2**31 - args.num_seeds, "seed", "must be from 0 to 2^31 - num_seeds")
    for name in ("gamma", "td_lambda", "start_e", "end_e", "exploration_fraction"):
        check(0 <= getattr(args, name) <= 1, name, "must be from 0 to 1")
    if args.learning_rate is None:
        args.learning_rate = 3e-4 if args.frozen else 5e-5
    for name in ("learning_rate", "final_learning_rate", "checkpoint_every"):
        check(0 <= getattr(args, name) < 2.0**127, name, "must be a number that is not negative (below 2^127)")
    check(0 < args.max_grad_norm < 2.0**127, "max_grad_norm", "must be a number above 0 (below 2^127)")
    check(args.num_envs % args.num_minibatches == 0, "num_envs", f"no multiple of {args.num_minibatches} minibatches")
    batch_size = args.num_envs * args.num_steps
    check(args.total_timesteps >= batch_size, "total_timesteps", f"less than one rollout of {batch_size} steps")
    gradient_steps = args.total_timesteps // batch_size * args.update_epochs * args.num_minibatches
    check(gradient_steps < 2**31, "total_timesteps", f"{gradient_steps} gradient steps are more than 2^31")
    check(not (args.frozen and args.memory == "mlp"), "frozen", "--memory mlp has no memory unit to freeze")
    defaults = {f.name: f.default for f in dataclasses.fields(UNITS[args.memory])}
    if args.memory == "lru" and args.frozen:
        defaults |= {"r_min": 0.99, "r_max": 0.9999}  # slow modes, which a frozen unit cannot find by training
    for name in UNIT_FLAGS:
        if getattr(args, name) is None:
            setattr(args, name, defaults.get(name))
        else:
            check(name in defaults, name, f"--memory {args.memory} has no such part")
            check(0 <= getattr(args, name) < 2.0**127, name, "must be a number that is not negative (below 2^127)")
    if args.r_min is not None:
        check(args.r_max <= 1, "r_max", "must be at most 1")
        check(args.r_min < args.r_max, "r_min", f"must be below r_max, {args.r_max}")
        check(0 < args.max_phase <= 2 * np.pi, "max_phase", f"must be above 0 and at most 2π, {2 * np.pi}")
    check(not re.search(r"[*?[]", str(Path(args.run_dir).absolute())), "run_dir", "orbax cannot read paths with * ? [")
    named = re.fullmatch(r"[\w.-]+", args.exp_name) and "__" not in args.exp_name
    check(named, "exp_name", "must be of letters, digits, - . and single _")
    has_wandb = importlib.util.find_spec("wandb") is not None
    check(has_wandb or not args.track, "track", "needs Weights & Biases: pip install wandb")


# ------------------------------------------------------------------------------------------------------- environment
def make_env(args: SimpleNamespace):
    """The number of actions, and for B environments that reset themselves: reset, step, and draw(keys [B], state).

    A picture [S, S, 3] uint8 costs far more than a step. gymnax has one drawn after every possible action, and after a
    reset that is rarely needed, and chooses later; here, one is drawn of the state that was chosen.
    """
    env, env_params = popgym_arcade.make(args.env, partial_obs=not args.fully_observable, obs_size=args.obs_size)
    rules = copy.copy(env)
    rules.get_obs = lambda *_, **__: ()  # the same task without pictures

    def draw_one(x):
        key, state = x
        # Alone among the tasks, the cart poles add their noise while they draw.
        return env.get_obs(state, env_params, key) if "CartPole" in args.env else env.get_obs(state)

    def draw(keys, state):
        # One by one, what is drawn in some states only is not drawn in all of them; an accelerator draws all at once.
        batch_size = None if jax.default_backend() == "cpu" else len(keys)
        return jax.lax.map(draw_one, (keys, state), batch_size=batch_size)

    def reset(keys):
        _, state = jax.vmap(lambda key: rules.reset_env(key, env_params))(keys)
        draw_keys = jax.vmap(lambda key: jax.random.split(key)[0])(keys)  # other noise than that of the first state
        return draw(draw_keys, state), state

    def step_one(key, state, action):
        step_key, reset_key = jax.random.split(key)
        _, final_state, reward, done, info = rules.step_env(step_key, state, action, env_params)
        terminated = info["terminated"]
        if hasattr(state, "time"):  # these count the time limit as terminal; with the clock at 0, it is far away
            terminated = rules.step_env(step_key, state.replace(time=0), action, env_params)[3]
        _, first_state = rules.reset_env(reset_key, env_params)
        state = jax.tree.map(lambda first, final: jnp.where(done, first, final), first_state, final_state)
        # CartPole and AutoEncode announce an end one step before it comes: it counts when it comes.
        return step_key, state, reward, done & terminated, done & ~terminated, final_state

    def step(keys, state, action):
        """Also tells how an episode ended, and what state the action led to before the environment reset itself."""
        keys, state, reward, terminated, truncated, final_state = jax.vmap(step_one)(keys, state, action)
        return draw(keys, state), state, reward, terminated, truncated, final_state

    return env.action_space(env_params).n, reset, step, draw


# ------------------------------------------------------------------------------------------------------------- agent
FRAMES_AT_ONCE = 2
"""Frames that go through the first layers of the CNN together on a CPU: what they need fits its cache."""


def windows(x, size: int, stride: int) -> list[jax.Array]:
    """[H, W, C] -> size² arrays [H', W', C]: array (i, j) has the element (i, j) of every window."""
    H, W = ((n - size) // stride * stride + 1 for n in x.shape[:2])  # no padding; what is left over is left out
    return [x[i : i + H : stride, j : j + W : stride] for i in range(size) for j in range(size)]


def convolution(x, kernel, bias, stride: int):
    """x [H, W, C], kernel [k, k, C, F] -> [H', W', F].

    On a CPU as one matrix product: XLA's convolutions are slower there, most of all their gradients (docs/pqn_arcade_cnn.md).
    """
    if jax.default_backend() != "cpu":
        numbers = ("NHWC", "HWIO", "NHWC")
        x = x.astype(kernel.dtype)[None]
        return jax.lax.conv_general_dilated(x, kernel, (stride, stride), "VALID", dimension_numbers=numbers)[0] + bias
    patches = jnp.concatenate(windows(x, len(kernel), stride), axis=-1)  # [H', W', k k C]
    return patches.astype(kernel.dtype) @ kernel.reshape(-1, kernel.shape[-1]) + bias


def max_pool(x, size: int, stride: int):
    return functools.reduce(jnp.maximum, windows(x, size, stride))


class CNN(nn.Module):
    """Frames [N, S, S, 3] uint8 -> features [N, 512] (FRN Table A2; for 256 pixels, which it has not, POPGym Arcade's).

    Each layer is convolution -> LeakyReLU -> max-pooling; pooled first, the same numbers need a quarter of the work.

        128 pixels: 128² x 3 -> 62² x 64 -> 31² -> 15² x 128 -> 7² -> 3² x 256 -> 1² -> 1² x 512
        256 pixels: 256² x 3 -> 125² x 64 -> 62² -> 30² x 128 -> 15² -> 7² x 256 -> 3² -> 1² x 512
    """

    obs_size: int

    @nn.compact
    def __call__(self, frames):
        large = self.obs_size == 256
        # Channels, size and stride of the convolution, size and stride of the pooling.
        layers = [(64, 7 if large else 5, 2, 2, 2), (128, 3, 2, 2, 2)]
        layers += [(256, 3, 2, 2, 2), (512, 3, 2, 1, 1)] if large else [(256, 3, 2, 3, 1), (512, 1, 1, 1, 1)]
        weights, channels = [], 3
        for i, (features, size, *_) in enumerate(layers):
            kernel = self.param(f"kernel_{i}", nn.initializers.lecun_normal(), (size, size, channels, features))
            weights.append((kernel, self.param(f"bias_{i}", nn.initializers.zeros, (features,))))
            channels = features
        kernel, bias = weights[0]
        weights[0] = kernel / 255, bias  # in place of x / 255, which is larger

        def forward(x, first: int, last: int):
            for (kernel, bias), (_, _, stride, *pool) in zip(weights[first:last], layers[first:last], strict=True):
                x = nn.leaky_relu(max_pool(convolution(x, kernel, bias, stride), *pool))
            return x

        # The first two layers are large: a few frames at a time, and the gradient computes them again.
        bottom = jax.checkpoint(lambda frame: forward(frame, 0, 2), prevent_cse=False)
        batch_size = FRAMES_AT_ONCE if jax.default_backend() == "cpu" else len(frames)
        x = jax.lax.map(bottom, frames, batch_size=batch_size)  # [N, 7, 7, 128]
        return jax.vmap(lambda x: forward(x, 2, 4))(x).reshape(len(frames), -1)  # [N, 512]


def rows(x):
    """[T, B, F] -> [T · B, F]: on a CPU, the gradient of LayerNorm is faster there (docs/pqn_frozen_rnn.md)."""
    return x.reshape(-1, x.shape[-1])


class Agent(nn.Module):
    """[CNN(o_t), one-hot a_{t-1}] -> Linear -> L × [unit -> mixer] -> Linear -> K × readout -> Q (FRN Fig. 1, 7)."""

    num_actions: int
    obs_size: int
    make_unit: Callable[..., nn.Module]
    hidden_size: int
    num_blocks: int
    num_readout_blocks: int

    @nn.compact
    def __call__(self, carry, obs, previous_action, reset):
        """obs [T, B, S, S, 3] uint8, previous_action [T, B] (-1: none), reset [T, B] -> carry, Q values [T, B, A]."""
        x = CNN(self.obs_size, name="cnn")(obs.reshape(-1, *obs.shape[2:]))  # [T · B, 512]
        previous_action = jax.nn.one_hot(previous_action.reshape(-1), self.num_actions)  # no bit at an episode's start
        x = jnp.concatenate([x, previous_action], axis=-1)  # [T · B, 512 + A]
        x = nn.Dense(self.hidden_size, name="input")(x)  # [T · B, H]
        carry = list(carry)
        for i in range(self.num_blocks):
            carry[i], x = self.make_unit(name=f"memory_{i}")(carry[i], x.reshape(*reset.shape, -1), reset)  # [T, B, H]
            x = nn.Dense(self.hidden_size, name=f"mixer_{i}")(rows(x))  # [T · B, H]
            x = nn.leaky_relu(nn.LayerNorm(use_scale=False, use_bias=False)(x))
        x = nn.Dense(self.hidden_size, name="output")(x)  # no activation (FRN Table A1)
        for i in range(self.num_readout_blocks):
            x = nn.Dense(self.hidden_size, name=f"readout_{i}")(x)
            x = nn.leaky_relu(nn.LayerNorm(name=f"readout_norm_{i}")(x))
        q_values = nn.Dense(self.num_actions, name="q_values")(x).reshape(*reset.shape, -1)  # [T, B, A]
        return tuple(carry), q_values

    @nn.nowrap
    def initialize_carry(self, batch_size: int):
        return tuple(self.make_unit().initialize_carry(batch_size) for _ in range(self.num_blocks))  # leaves [B, ...]


# --------------------------------------------------------------------------------------------------------- algorithm
@struct.dataclass
class Actor:
    """The environments and what the agent knows of them before its next action; leaves [B, ...]."""

    env_state: Any
    obs: jax.Array
    previous_action: jax.Array  # -1 at an episode's start
    reset: jax.Array  # obs is the first of its episode
    carry: Any  # memory before obs
    episode_return: jax.Array  # of the episode under way
    episode_length: jax.Array

    def inputs(self):
        """What the agent reads, as a sequence of T = 1."""
        return self.obs[None], self.previous_action[None], self.reset[None]


@struct.dataclass
class TrainState:
    """All that a run is: it continues from here bit for bit."""

    params: Any
    frozen: Any
    opt_state: Any
    actor: Actor
    update: jax.Array
    key: jax.Array


def lambda_returns(reward, terminated, done, next_value, gamma, td_lambda):
    """G_t = r_t + γ (1 - terminated_t) [λ G_{t+1} + (1 - λ) V_{t+1}]; at an episode's end, V_{t+1} in place of [].

    All [T, B]. next_value[t] is V_{t+1} = max_a Q(o_{t+1}, a) of the rollout's network, for the o_{t+1} that the action
    led to (never the first one of the next episode).
    """

    def step(next_return, x):
        reward, terminated, done, next_value = x
        future = jnp.where(done, next_value, td_lambda * next_return + (1 - td_lambda) * next_value)
        target = reward + gamma * jnp.where(terminated, 0.0, future)
        return target, target

    return jax.lax.scan(step, next_value[-1], (reward, terminated, done, next_value), reverse=True)[1]


def make_train(args: SimpleNamespace) -> SimpleNamespace:
    """The functions of a run, each of one seed."""
    num_actions, env_reset, env_step, draw = make_env(args)
    settings = {name: getattr(args, name) for name in UNIT_FLAGS if getattr(args, name) is not None}
    make_unit = functools.partial(UNITS[args.memory], features=args.hidden_size, freeze=args.frozen, **settings)
    agent = Agent(num_actions, args.obs_size, make_unit, args.hidden_size, args.num_blocks, args.num_readout_blocks)
    *_, draw_all = make_env(SimpleNamespace(**vars(args) | {"fully_observable": True}))
    num_updates = args.total_timesteps // (args.num_envs * args.num_steps)
    gradient_steps = args.update_epochs * args.num_minibatches  # of an update
    learning_rate = optax.linear_schedule(args.learning_rate, args.final_learning_rate, num_updates * gradient_steps)
    exploration_steps = max(1, int(args.exploration_fraction * args.total_timesteps))
    epsilon = optax.linear_schedule(args.start_e, args.end_e, exploration_steps)
    optimizer = optax.chain(optax.clip_by_global_norm(args.max_grad_norm), optax.adam(learning_rate))

    def is_frozen(path: tuple[str, ...]) -> bool:
        return args.frozen and path[0].startswith("memory")

    def q_network(params, frozen, carry, obs, previous_action, reset):
        return agent.apply({"params": merge(params, frozen)}, carry, obs, previous_action, reset)

    def init_actor(key, num_envs: int) -> Actor:
        obs, env_state = env_reset(jax.random.split(key, num_envs))
        none, zeros, carry = jnp.full(num_envs, -1, jnp.int32), jnp.zeros(num_envs), agent.initialize_carry(num_envs)
        return Actor(env_state, obs, none, zeros == 0, carry, zeros, zeros.astype(jnp.int32))

    def init(key) -> TrainState:
        key, actor_key, agent_key = jax.random.split(key, 3)
        actor = init_actor(actor_key, args.num_envs)
        params, frozen = partition(agent.init(agent_key, actor.carry, *actor.inputs())["params"], is_frozen)
        return TrainState(params, frozen, optimizer.init(params), actor, jnp.int32(0), key)

    def interact(params, frozen, actor: Actor, key, epsilon) -> tuple[Actor, dict[str, Any]]:
        """One ε-greedy step of every environment: the actor after it, and what is to be learned from."""
        explore_key, action_key, env_key = jax.random.split(key, 3)
        carry, q_values = q_network(params, frozen, actor.carry, *actor.inputs())
        greedy_action = q_values[0].argmax(-1)  # [B]
        random_action = jax.random.randint(action_key, greedy_action.shape, 0, num_actions)
        explore = jax.random.uniform(explore_key, greedy_action.shape) < epsilon
        action = jnp.where(explore, random_action, greedy_action)
        env_keys = jax.random.split(env_key, len(action))
        obs, env_state, reward, terminated, truncated, final_state = env_step(env_keys, actor.env_state, action)
        done = terminated | truncated

        def final_values():
            """A time limit is not an end: value what was seen last, with the memory as it was before its reset."""
            final_obs = draw(env_keys, final_state)[None]  # [1, B, S, S, 3]
            _, q = q_network(params, frozen, carry, final_obs, action[None], jnp.zeros_like(done[None]))
            return q[0].max(-1)  # [B]

        # At once, so that only values of last pictures are kept.
        final_value = jax.lax.cond(truncated.any(), final_values, lambda: jnp.zeros_like(reward))
        episode_return, episode_length = actor.episode_return + reward, actor.episode_length + 1
        transition = dict(
            obs=actor.obs, previous_action=actor.previous_action, reset=actor.reset, q_values=q_values[0],
            action=action, reward=reward, terminated=terminated, truncated=truncated, done=done,
            final_state=final_state, final_value=final_value,
            episode_return=episode_return, episode_length=episode_length,
        )  # fmt: skip
        next_actor = Actor(
            env_state=env_state,
            obs=obs,
            previous_action=jnp.where(done, -1, action),
            reset=done,  # the memory is not reset here, but when it reads the first observation of the next episode
            carry=carry,
            episode_return=jnp.where(done, 0, episode_return),
            episode_length=jnp.where(done, 0, episode_length),
        )
        return next_actor, transition

    def rollout(state: TrainState, key) -> tuple[Actor, dict[str, Any]]:
        """num_steps steps of every environment; transitions [T, B, ...]."""

        def step(actor, x):
            t, key = x
            steps_so_far = (state.update * args.num_steps + t) * args.num_envs
            return interact(state.params, state.frozen, actor, key, epsilon(steps_so_far))

        return jax.lax.scan(step, state.actor, (jnp.arange(args.num_steps), jax.random.split(key, args.num_steps)))

    def compute_targets(params, frozen, actor: Actor, t: dict[str, Any]):
        """λ-returns [T, B] of transitions t from the Q values of the rollout itself; `actor` is the one after it."""
        _, last_q_values = q_network(params, frozen, actor.carry, *actor.inputs())  # [1, B, A]
        next_value = jnp.concatenate([t["q_values"], last_q_values])[1:].max(-1)  # [T, B]
        next_value = jnp.where(t["truncated"], t["final_value"], next_value)
        return lambda_returns(t["reward"], t["terminated"], t["done"], next_value, args.gamma, args.td_lambda)

    def loss(params, frozen, carry, t: dict[str, jax.Array]):
        """Squared TD error of whole sequences [T, b], from the memory [b] that the rollout began with."""
        _, q_values = q_network(params, frozen, carry, t["obs"], t["previous_action"], t["reset"])  # [T, b, A]
        q_taken = jnp.take_along_axis(q_values, t["action"][..., None], axis=-1)[..., 0]  # [T, b]
        return 0.5 * jnp.square(q_taken - t["target"]).mean(), q_taken.mean()

    def train_iteration(state: TrainState) -> tuple[TrainState, dict[str, jax.Array]]:
        """Rollout, targets, epochs."""
        key, rollout_key, epoch_key = jax.random.split(state.key, 3)
        actor, t = rollout(state, rollout_key)
        t["target"] = compute_targets(state.params, state.frozen, actor, t)
        learned_from = {name: t[name] for name in ("obs", "previous_action", "reset", "action", "target")}

        def minibatch_step(learner, envs):
            params, opt_state = learner
            carry = jax.tree.map(lambda x: x[envs], state.actor.carry)
            minibatch = jax.tree.map(lambda x: x[:, envs], learned_from)  # [T, b, ...]
            (td_loss, q_values), grads = jax.value_and_grad(loss, has_aux=True)(params, state.frozen, carry, minibatch)
            updates, opt_state = optimizer.update(grads, opt_state)
            scalars = {"td_loss": td_loss, "q_values": q_values, "grad_norm": optax.tree.norm(grads)}
            return (optax.apply_updates(params, updates), opt_state), scalars

        shuffle = jax.vmap(lambda key: jax.random.permutation(key, args.num_envs))
        minibatches = shuffle(jax.random.split(epoch_key, args.update_epochs)).reshape(gradient_steps, -1)
        (params, opt_state), scalars = jax.lax.scan(minibatch_step, (state.params, state.opt_state), minibatches)
        metrics = {f"losses/{name}": values.mean() for name, values in scalars.items()} | {
            "charts/learning_rate": learning_rate(state.update * gradient_steps),
            "charts/epsilon": epsilon(state.update * args.num_steps * args.num_envs),
            # Of finished episodes alone: NaN where there was none, and then not logged.
            "charts/episodic_return": t["episode_return"].mean(where=t["done"]),
            "charts/episodic_length": t["episode_length"].mean(where=t["done"]),
            "losses/parameter_norm": optax.tree.norm(params),  # finite only if all of them are
        }
        return TrainState(params, state.frozen, opt_state, actor, state.update + 1, key), metrics

    # ---------------------------------------------------------------------------------------------------- evaluation
    def evaluate(state: TrainState, key):
        """Returns and lengths [E] of eval_episodes greedy episodes, played side by side, and no other score."""

        def step(x):
            actor, key, finished, returns, lengths = x
            key, step_key = jax.random.split(key)
            actor, t = interact(state.params, state.frozen, actor, step_key, epsilon=0.0)
            returns = jnp.where(finished, returns, t["episode_return"])
            lengths = jnp.where(finished, lengths, t["episode_length"])
            return actor, key, finished | t["done"], returns, lengths

        key, actor_key = jax.random.split(key)
        actor = init_actor(actor_key, args.eval_episodes)
        start = (actor, key, ~actor.reset, actor.episode_return, actor.episode_length)
        return *jax.lax.while_loop(lambda x: ~x[2].all(), step, start)[3:], {}

    def describe_memory(params, frozen) -> dict[str, jax.Array]:
        """Spread of the steps that each FFM unit or LRU remembers: until a hundredth is left, and FFM's periods."""
        units = {name: unit for name, unit in merge(params, frozen).items() if name.startswith("memory")}
        steps = {name: make_unit().interpretation(unit) for name, unit in units.items() if args.memory == "ffm"}
        modes = {name: jnp.exp(unit["nu"]) for name, unit in units.items() if args.memory == "lru"}
        steps |= {name: {"trace_durability": trace_durability(decay)} for name, decay in modes.items()}
        spread = {"min": jnp.min, "median": jnp.median, "max": jnp.max}
        return {f"{u}/{q}_{s}": f(x) for u, unit in steps.items() for q, x in unit.items() for s, f in spread.items()}

    @jax.jit
    def film_step(state: TrainState, actor: Actor, key):
        """A greedy step: the actor after it; whether its first episode ended, and pictures before and after it."""
        next_actor, t = interact(state.params, state.frozen, actor, key, epsilon=0.0)
        obs, env_state, final_state = jax.tree.map(lambda x: x[:1], (actor.obs, actor.env_state, t["final_state"]))
        draw_keys = jax.random.fold_in(key, 1)[None]
        before = obs, draw_all(draw_keys, env_state)
        after = draw(draw_keys, final_state), draw_all(draw_keys, final_state)
        before, after = (jnp.concatenate([x[0] for x in pair], axis=1) for pair in (before, after))  # [S, 2 S, 3]
        return next_actor, t["done"][0], before, after

    def film(state: TrainState, key) -> Iterator[np.ndarray]:
        """The pictures [S, 2 S, 3] of the first of `evaluate`'s episodes: what the agent sees, beside everything."""
        key, actor_key = jax.random.split(key)
        actor, done = jax.jit(init_actor, static_argnums=1)(actor_key, args.eval_episodes), False
        while not done:
            key, step_key = jax.random.split(key)
            actor, done, before, after = film_step(state, actor, step_key)
            yield np.asarray(before)
        yield np.asarray(after)

    return SimpleNamespace(
        init=init, q_network=q_network, epsilon=epsilon, rollout=rollout, compute_targets=compute_targets, loss=loss,
        train_iteration=train_iteration, evaluate=evaluate, describe_memory=describe_memory, film=film,
    )  # fmt: skip


# --- shared block: run ---
def fail(message: str, code: int = 2, leave: Callable = sys.exit):
    """One line on stderr, and out."""
    print(f"{Path(__file__).name}: error: {' '.join(message.split())}", file=sys.__stderr__, flush=True)
    leave(code)


def parse_args() -> tuple[SimpleNamespace, dict | None]:
    """All groups' flags side by side; and the config.json of a run to resume or evaluate, whose flags then hold."""

    def parse(command_line: list[str]) -> dict[str, Any]:
        told = io.StringIO()
        try:
            with contextlib.redirect_stderr(told):
                groups = tyro.cli(Args, args=command_line, config=(tyro.conf.OmitArgPrefixes,))
        except SystemExit as end:
            if end.code:  # the message is a box with a title, maybe in colours
                fail(re.sub(r"\x1b\[[\d;]*m|[─│╭╮╰╯]|---+", "", told.getvalue().partition("\n")[2]))
            raise
        return {name: value for group in vars(groups).values() for name, value in vars(group).items()}

    args = parse(sys.argv[1:])
    given = [(f"--{name} {args[name]}", args[name]) for name in ("resume", "evaluate") if args[name] is not None]
    if not given:
        return SimpleNamespace(**args), None
    if len(given) > 1:
        fail(f"{given[0][0]} {given[1][0]}: give one of the two")
    (what, run), folder = given[0], Path(given[0][1]).absolute()
    try:
        config = json.loads((folder / "config.json").read_text()) if run else {}
        script, command_line, runs, saved = (config[name] for name in ("script", "command_line", "runs", "args"))
        config["seed"] - saved["seed"], {**saved}
        if len(runs) == 1:
            runs[0] = folder.name  # one run can be renamed; seeds that share a program cannot
        defaults = parse(command_line)
    except OSError:
        fail(f"{what}: no run there; a run folder has a config.json")
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        fail(f"{what}: its config.json is missing or damaged: {error!r}")
    if script != Path(__file__).stem:
        fail(f"{what}: a run of {script}.py; continue it there")
    if missing := [name for name in runs if folder.name not in runs or not (folder.parent / name).is_dir()]:
        fail(f"{what}: its seeds are one program, and their folders must be side by side as they were: {missing[0]}")
    args = parse(command_line + sys.argv[1:])
    free = {"resume", "evaluate", "checkpoint_every", "track", "capture_video"}
    free |= {"eval_episodes"} if args["evaluate"] else set()
    for name in args.keys() - free:
        if args[name] not in (defaults[name], saved[name]):
            fail(f"--{name.replace('_', '-')} {args[name]}: the run was started with {saved[name]}, and keeps it")
    kept = {name: value for name, value in saved.items() if name not in free}  # whatever today's defaults are
    return SimpleNamespace(**args | kept | {"run_dir": str(folder.parent)}), config


def write_json(file: Path, data: dict):
    file.with_suffix(".tmp").write_text(json.dumps(data, indent=1) + "\n")
    file.with_suffix(".tmp").replace(file)  # all of it or nothing


def make_folders(args: SimpleNamespace, parameters: dict) -> list[Path]:
    """A new run folder with a config.json for each seed. The seeds are one program, and share its checkpoints."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() if shutil.which("git") else ""
    packages = ("jax", "flax", "optax", "numpy", "orbax-checkpoint")
    versions = {name: importlib.metadata.version(name) for name in packages} | {"python": sys.version.split()[0]}
    config = {"script": Path(__file__).stem, "command_line": sys.argv[1:], "args": vars(args)}
    config |= {"parameters": parameters, "git_commit": commit or None, "versions": versions}
    setting, now, made = f"{args.env}__{args.exp_name}__{args.memory}{'-frozen' * args.frozen}", int(time.time()), []
    try:
        while len(made) < args.num_seeds:
            folder = Path(args.run_dir) / f"{setting}__{args.seed + len(made)}__{now}"
            try:
                folder.mkdir(parents=True)
                made.append(folder)
            except FileExistsError:
                if not folder.exists():
                    raise
                while made:  # another run started in the same second: the next one, for all seeds
                    made.pop().rmdir()
                now += 1
        names = [folder.name for folder in made]
        for i, folder in enumerate(made):
            write_json(folder / "config.json", config | {"seed": args.seed + i, "runs": names})
            if i > 0:
                (folder / "checkpoints").symlink_to(Path("..") / names[0] / "checkpoints")
    except OSError as error:
        for folder in made:
            shutil.rmtree(folder, ignore_errors=True)
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        fail(f"--run-dir {args.run_dir}: no run folder can be made there: {error}", code=1 if full else 2)
    return made


class Logger:
    """TensorBoard events in the run folder of each seed, and Weights & Biases if asked for; x-axis: environment steps.

    It writes in the loop's own thread, so that a full disk is noticed. A resumed run cuts its files back to their
    sizes at the checkpoint, so that no point is missing or double.
    """

    def __init__(self, folders: list[Path], sizes: list[dict[str, int]], track: bool):
        self.folders, self.next_flush, self.writers, self.wandb = folders, 0.0, [], []
        for folder, kept in zip(folders, sizes, strict=True):
            for file in folder.glob("events.out.tfevents.*"):
                os.truncate(file, kept[file.name]) if file.name in kept else file.unlink()
            self.writers.append(EventsWriter(str(folder / "events"), filename_suffix=f".{len(kept)}"))
            if track:
                import wandb

                config = json.loads((folder / "config.json").read_text())
                names = {"name": folder.name, "id": folder.name}
                self.wandb.append(wandb.init(**names, resume="allow", reinit="create_new", config=config))

    def log(self, step: int, scalars: dict[str, np.ndarray]):
        """Scalars [S]. What is not finite did not happen."""
        for i, writer in enumerate(self.writers):
            own = {tag: float(values[i]) for tag, values in scalars.items() if np.isfinite(values[i])}
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in own.items()])
            writer.write_event(Event(step=step, wall_time=time.time(), summary=summary))
            if self.wandb:
                self.wandb[i].log(own, step=step)
        if time.time() > self.next_flush:
            self.sizes()
            self.next_flush = time.time() + 5

    def sizes(self) -> list[dict[str, int]]:
        """Bytes of each seed's event files, with everything logged so far on the disk."""
        for writer in self.writers:
            writer.flush()
        return [{file.name: file.stat().st_size for file in f.glob("events.out.tfevents.*")} for f in self.folders]

    def close(self):
        for writer in self.writers:
            writer.close()
        for run in self.wandb:
            run.finish()


def restore(manager: ocp.CheckpointManager, state):
    """The newest checkpoint: a state of the shapes of `state`, and a note (json). Without one, `state` and None."""
    last = manager.latest_step()
    if last is None:
        return state, None
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    items = ocp.args.Composite(state=ocp.args.StandardRestore(like), note=ocp.args.JsonRestore())
    with contextlib.redirect_stderr(io.StringIO()):  # orbax's threads print tracebacks
        try:
            saved = manager.restore(last, args=items)
            saved.note["update"], saved.note["seconds"], saved.note["event_files"]
            return saved.state, saved.note
        except Exception as error:  # of many kinds, when it meets a damaged file
            manager.reload()
            if manager.latest_step() != last:  # the run goes on meanwhile, and keeps newer ones
                return restore(manager, state)
            reason = f"damaged or of another version ({type(error).__name__}); without it, the one before is used"
            fail(f"checkpoint {manager.directory / str(last)} is {reason}", leave=os._exit)  # with those threads


def save(manager: ocp.CheckpointManager, update: int, state, note: dict):
    items = ocp.args.Composite(state=ocp.args.StandardSave(state), note=ocp.args.JsonSave(note))
    with contextlib.redirect_stderr(io.StringIO()):  # orbax's threads print tracebacks
        try:
            manager.save(update, args=items)
        except Exception as error:  # of many kinds, when the disk is full
            for unfinished in Path(manager.directory).glob("*tmp*"):
                while unfinished.exists():  # and may still write
                    shutil.rmtree(unfinished, ignore_errors=True)
            message = f"checkpoint {update} cannot be written; the last good one is {manager.latest_step()}: {error}"
            fail(message, code=1, leave=os._exit)  # with those threads


def over_seeds(function: Callable, num_seeds: int) -> Callable:
    """`function` of one seed, for leaves [S, ...]. For a single one, vmap would only cost time (docs/pqn_frozen_rnn.md)."""
    if num_seeds > 1:
        return jax.vmap(function)
    return lambda *x: jax.tree.map(lambda y: y[None], function(*jax.tree.map(lambda y: y[0], x)))


# --- end shared block: run ---


if __name__ == "__main__":
    # --- shared block: main ---
    sys.stdout.reconfigure(errors="replace")  # a terminal without Unicode is no reason to stop
    for name in ("absl", "asyncio"):  # orbax tells of every file it writes, and of what is raised anyway
        logging.getLogger(name).setLevel(logging.CRITICAL)
    stop_signals = []
    for number in (signal.SIGINT, signal.SIGTERM):  # the first ends the loop, a second one the program
        signal.signal(number, lambda number, _: (stop_signals.append(number), signal.signal(number, signal.SIG_DFL)))
    args, config = parse_args()
    check_args(args)
    train = make_train(args)
    keys = jnp.stack([jax.random.PRNGKey(args.seed + i) for i in range(args.num_seeds)])  # from here on, [S, ...]
    functions = (train.init, train.train_iteration, train.evaluate, train.describe_memory)
    init, train_iteration, evaluate, describe_memory = (jax.jit(over_seeds(f, args.num_seeds)) for f in functions)
    shapes = jax.eval_shape(train.init, keys[0])
    parameters = count_parameters(shapes.params, shapes.frozen)
    folders = [Path(args.run_dir) / name for name in config["runs"]] if config else make_folders(args, parameters)
    print(f"device         {jax.devices()[0].device_kind} ({jax.default_backend()})")
    print(f"learning rate  {args.learning_rate:g} -> {args.final_learning_rate:g}")
    print(f"{'parameters':<16}{'total':>11}{'trainable':>11}{'frozen':>11}")
    for name, n in parameters.items():
        print(f"  {name:<14}{n['total']:>11,}{n['trainable']:>11,}{n['frozen']:>11,}")
    optimizer_size = sum(x.size for x in jax.tree.leaves(shapes.opt_state))  # Adam: two moments of what is trained
    print(f"optimizer      {optimizer_size:,} numbers")
    print(*(f"run folder     {folder}" for folder in folders), sep="\n", flush=True)

    reading = args.evaluate is not None
    options = {"max_to_keep": 2, "enable_async_checkpointing": False, "cleanup_tmp_directories": not reading}
    options = ocp.CheckpointManagerOptions(**options, read_only=reading)
    try:
        lock = open(folders[0] / "lock", "a")  # let go when this process ends, however it ends
        if not reading:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (folders[0] / "checkpoints").mkdir(exist_ok=True)
        checkpoints = ocp.CheckpointManager((folders[0] / "checkpoints").absolute(), options=options)
    except BlockingIOError:
        fail(f"--resume {args.resume}: another process is training this run")
    except OSError as error:
        fail(f"run folder {folders[0]}: cannot be written: {error}")
    state, note = restore(checkpoints, init(keys))
    if reading and note is None:
        fail(f"--evaluate {args.evaluate}: the run has no checkpoint yet")
    steps_per_update = args.num_envs * args.num_steps
    start_note = {"update": 0, "seconds": 0.0, "num_updates": args.total_timesteps // steps_per_update}
    fresh, note = note is None, start_note | {"event_files": [{} for _ in folders]} | (note or {})
    first_update, update, num_updates, seconds = (note[x] for x in ("update", "update", "num_updates", "seconds"))

    def evaluation() -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
        """The greedy episodes of each seed: for eval.json, and for the log."""
        eval_keys = jax.vmap(lambda key: jax.random.fold_in(key, 1))(keys)
        # Returns and lengths [S, E], and {name: [S]}.
        returns, lengths, scores = jax.device_get(evaluate(state, eval_keys))
        results = [
            {"mean_return": float(x.mean()), "std_return": float(x.std()), "mean_length": float(n.mean())}
            | {name: float(values[i]) for name, values in scores.items()}
            | {"returns": x.tolist(), "lengths": n.tolist(), "environment_steps": update * steps_per_update}
            for i, (x, n) in enumerate(zip(returns, lengths, strict=True))
        ]
        for folder, result in zip(folders, results, strict=True):
            told = "".join(f", {name} {result[name]:.3f}" for name in scores)
            print(f"evaluation     return {result['mean_return']:.3f} ± {result['std_return']:.3f}{told}  {folder}")
        return results, {f"eval/{name}": x for name, x in ({"episodic_return": returns.mean(1)} | scores).items()}

    if args.evaluate:
        write_json(Path(args.evaluate) / "evaluate.json", evaluation()[0][config["seed"] - args.seed])
        sys.exit()

    start = time.perf_counter()
    train_iteration = jax.jit(train_iteration, donate_argnums=0).lower(state).compile()
    compile_seconds = time.perf_counter() - start
    print(f"compile time   {compile_seconds:.1f} s", flush=True)
    terminal = sys.stdout.isatty()  # elsewhere the bar is printed as a line every ten seconds
    bar = tqdm(total=num_updates, initial=update, unit="update", file=sys.stdout if terminal else open(os.devnull, "w"))
    next_line, pending, mean_return = 0.0, [], np.nan
    try:
        logger = Logger(folders, note["event_files"], args.track)
        if fresh:
            logger.log(0, describe_memory(state.params, state.frozen))
        start = last_save = time.perf_counter()
        while True:
            running = update < num_updates and not stop_signals
            if running:
                state, metrics = train_iteration(state)
                update += 1
                pending.append((update, metrics))
            saving = not running or time.perf_counter() - last_save >= args.checkpoint_every
            # Fetched one update late, while the device is busy with the next; all of them before a checkpoint.
            while len(pending) > (0 if saving else 1):
                logged, metrics = pending.pop(0)
                metrics = jax.device_get(metrics)
                for name, values in metrics.items():
                    if name.startswith("losses/") and not np.isfinite(values).all():
                        kept = f"the last good checkpoint is {checkpoints.latest_step()}"
                        fail(f"{name} is not finite after update {logged}: {values}; {kept}", code=1)
                sps = (logged - first_update) * steps_per_update * args.num_seeds / (time.perf_counter() - start)
                if np.all(metrics.pop("solved", False)):  # for all seeds: the next update, maybe under way, is the last
                    num_updates = min(num_updates, logged + 1)
                logger.log(logged * steps_per_update, metrics | {"charts/SPS": np.full(args.num_seeds, sps)})
                returns = metrics["charts/episodic_return"]
                if not np.isnan(returns).all():  # else no episode ended, and the last mean stays
                    mean_return = np.nanmean(returns)
                message = f"step {logged * steps_per_update:,}, SPS {sps:,.0f}, return {mean_return:.3f}"
                bar.set_postfix_str(message, refresh=False)
                bar.update(logged - bar.n)
                if not terminal and (time.perf_counter() > next_line or logged == num_updates):
                    print(bar, flush=True)
                    next_line = time.perf_counter() + 10
            if saving and update != checkpoints.latest_step():
                last_save = time.perf_counter()
                seconds = note["seconds"] + last_save - start
                new_note = {"update": update, "seconds": seconds, "num_updates": num_updates}
                save(checkpoints, update, state, new_note | {"event_files": logger.sizes()})
            if not running:
                break
        bar.close()
        if update < num_updates:
            print(f"checkpoint {update} is in {checkpoints.directory}; go on with --resume {folders[0]}")
            sys.exit(128 + stop_signals[0])
        logger.log(update * steps_per_update, describe_memory(state.params, state.frozen))
        results, scalars = evaluation()
        logger.log(update * steps_per_update, scalars)
        logger.close()
        sps = update * steps_per_update * args.num_seeds / seconds
        timing = {"train_seconds": seconds, "compile_seconds": compile_seconds, "SPS": sps}
        for folder, result in zip(folders, results, strict=True):
            write_json(folder / "eval.json", result | timing)
    except OSError as error:
        fail(f"cannot write to {folders[0]}: {error}", code=1)
    # --- end shared block: main ---

    if args.capture_video:
        try:
            for i, folder in enumerate(folders):
                seed_state = jax.tree.map(lambda x, i=i: x[i], state)
                frames = [Image.fromarray(x) for x in train.film(seed_state, jax.random.fold_in(keys[i], 1))]
                film = folder / "film.gif"
                frames[0].save(film, save_all=True, append_images=frames[1:], duration=200, loop=0)
                picture = Summary.Image(height=args.obs_size, width=2 * args.obs_size, colorspace=3)
                picture.encoded_image_string = film.read_bytes()
                summary = Summary(value=[Summary.Value(tag="eval/film", image=picture)])
                writer = EventsWriter(str(folder / "events"), filename_suffix=".film")
                writer.write_event(Event(step=update * steps_per_update, wall_time=time.time(), summary=summary))
                writer.close()
                print(f"film           {len(frames)} pictures  {film}")
        except OSError as error:
            fail(f"cannot write to {folder}: {error}", code=1)
