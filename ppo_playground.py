"""PPO with recurrent memory on robots whose positions or velocities are hidden (MuJoCo Playground, DM Control suite).

Velocities can be told from positions seen one after the other, and changes of position from velocities. So the agent
keeps what it saw in a recurrent memory on which an actor and a critic stand, and learns from its own rollouts with PPO.
`--memory` swaps the memory by one word; `--frozen` leaves its weights as they were drawn and trains only what stands
around it. All of that ends with `film`; what comes after it, the keeping of runs, is the same in every script.

    python ppo_playground.py --env WalkerWalk --observe positions --memory gru --frozen
    python ppo_playground.py --env BallInCup --observe velocities --memory lru --num-seeds 3 --capture-video

FRN: Does Learning Recurrent Networks Matter in Partially Observable RL? (Wang et al., 2026): agent and hyperparameters.
PPO: Proximal Policy Optimization Algorithms (Schulman et al., 2017), with the details of CleanRL's.
Tasks: DeepMind Control Suite (Tassa et al., 2018), as in MuJoCo Playground (Zakka et al., 2025).
"""

import contextlib
import dataclasses
import difflib
import errno
import fcntl
import functools
import importlib
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
from collections.abc import Callable
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
import tyro
from flax import struct
from PIL import Image
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.proto.summary_pb2 import Summary
from tqdm import tqdm

try:
    import mujoco
    from mujoco import mjx
    from mujoco.rendering.classic import gl_context
    from mujoco_playground import State, dm_control_suite
except RuntimeError as error:  # mujoco reads MUJOCO_GL when it is imported
    print(f"ppo_playground.py: error: {error}; must be egl, osmesa or glfw", file=sys.stderr)
    sys.exit(2)

from memory import (
    FFM,
    GRU,
    LRU,
    SRC,
    DeepESN,
    Memoryless,
    ParalESN,
    count_parameters,
    merge,
    partition,
    trace_durability,
)

jax.config.update("jax_default_matmul_precision", "highest")  # TF32 on GPUs changes results


# --------------------------------------------------------------------------------------------------------- arguments
@dataclass
class Task:
    """What is learned, and for how long."""

    env: str = "BallInCup"
    """a task of the DM Control suite (FRN section 4.4: BallInCup, CheetahRun, ReacherHard, WalkerWalk)"""
    observe: Literal["all", "positions", "velocities"] = "positions"
    """what is seen; the rest is removed. The run's name has it too, as in BallInCup-positions"""
    impl: Literal["auto", "jax", "warp"] = "auto"
    """physics engine of MuJoCo MJX; auto is warp on a CUDA device and jax elsewhere"""
    total_timesteps: int = 60_000_000
    """environment steps of one seed (FRN Table A6)"""
    seed: int = 1
    """seed of the first run"""
    num_seeds: int = 1
    """seeds that train side by side in one program: seed, seed + 1, …; each has a run folder of its own (FRN: 10)"""
    eval_episodes: int = 10
    """episodes of the mean action after training (FRN section 4.1)"""
    capture_video: bool = False
    """film the first of these episodes: film.gif in the run folder, and in the log"""


@dataclass
class Network:
    """The agent (FRN Fig. A1, Table A1) and its memory (FRN section 3, appendix B; FFM)."""

    memory: Literal["gru", "lru", "ffm", "deepesn", "src", "paralesn", "mlp"] = "gru"
    """memory unit; mlp is the same agent without one, the memoryless baseline"""
    frozen: bool = False
    """leave the memory units as initialised (FRN Algorithm 1)"""
    hidden_size: int = 256
    """width of every hidden layer (FRN Table A1)"""
    num_blocks: int = 2
    """L, recurrent blocks of a unit and a mixer, or layers of a reservoir (FRN appendix E)"""
    num_readout_blocks: int = 3
    """K, hidden blocks of the actor's and of the critic's readout (FRN appendix E)"""
    trace_size: int | None = None
    """ffm: m, the traces; None is 32"""
    context_size: int | None = None
    """ffm: c, the contexts of each trace; None is 4"""
    r_min: float | None = None
    """lru, paralesn: smallest radius of a mode; None is 0.9 for a trained lru, 0.99 otherwise"""
    r_max: float | None = None
    """lru, paralesn: largest radius of a mode; None is 0.999 for a trained lru, 0.9999 otherwise"""
    max_phase: float | None = None
    """lru, paralesn: largest phase of a mode; None is 2π"""
    spectral_radius: float | None = None
    """deepesn: largest |eigenvalue| of W_rec; None is 0.99"""
    leak: float | None = None
    """deepesn, paralesn: α, the part of the state that is replaced; None is 1"""
    recurrent_scaling: float | None = None
    """src: σ_r, scale of the state; None is 1"""
    input_scaling: float | None = None
    """reservoirs: scale of the input; None is 1 for src, 0.1 for the others"""
    bias_scaling: float | None = None
    """deepesn, paralesn: scale of the biases; None is 0.01"""
    projection_scaling: float | None = None
    """src: γ, scale of the random transform; None is 1"""
    kernel_size: int | None = None
    """paralesn: width of the convolution across the state; None is 3"""


@dataclass
class Algorithm:
    """Recurrent PPO (FRN Table A6); what the table does not name is CleanRL's, or measured (docs/ppo_playground.md)."""

    learning_rate: float | None = None
    """initial learning rate; None is 5e-5, or 1e-5 with a trained memory (FRN Table A6: 1e-5 to 5e-5)"""
    final_learning_rate: float = 1e-8
    """learning rate at the last step, linear in between (FRN Table A6)"""
    gamma: float = 0.995
    """discount (FRN Table A6)"""
    gae_lambda: float = 0.95
    """λ of the generalised advantage estimates (FRN Table A6)"""
    max_grad_norm: float | None = None
    """gradients are clipped to this global norm; None leaves them as they are (FRN Table A6)"""
    clip_coef: float = 0.3
    """ε of PPO's clipped objective (FRN Table A6)"""
    ent_coef: float = 0.01
    """weight of the entropy bonus (FRN Table A6)"""
    vf_coef: float = 0.5
    """weight of the value loss (FRN Table A6)"""
    norm_adv: bool = True
    """normalise the advantages of each minibatch (CleanRL)"""
    clip_vloss: bool = False
    """clip the change of the values too (CleanRL does)"""
    normalize_observations: bool = True
    """by the mean and the standard deviation of all that were seen so far (as playground's own settings for PPO do)"""
    num_envs: int = 16
    """parallel environments (FRN Table A6)"""
    num_steps: int = 128
    """steps of each environment in a rollout (FRN Table A6)"""
    num_minibatches: int = 4
    """minibatches of an epoch: whole sequences of num_envs / num_minibatches environments (FRN Table A6)"""
    update_epochs: int = 4
    """passes over each rollout (FRN Table A6)"""


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
    """PPO with recurrent memory on MuJoCo Playground, without positions or velocities."""

    task: Task = field(default_factory=Task)
    network: Network = field(default_factory=Network)
    algorithm: Algorithm = field(default_factory=Algorithm)
    run: Run = field(default_factory=Run)


UNITS = {"gru": GRU, "lru": LRU, "ffm": FFM, "deepesn": DeepESN, "src": SRC, "paralesn": ParalESN, "mlp": Memoryless}
RESERVOIRS = ("deepesn", "src", "paralesn")
UNIT_FLAGS = [f.name for f in dataclasses.fields(Network) if f.default is None]  # None: what the unit has


POSITIONS = {
    **dict.fromkeys(("AcrobotSwingup", "AcrobotSwingupSparse"), 4),  # sines and cosines of both links
    "BallInCup": 4,  # qpos
    **dict.fromkeys(("CartpoleBalance", "CartpoleBalanceSparse", "CartpoleSwingup", "CartpoleSwingupSparse"), 3),
    "CheetahRun": 8,  # qpos without the distance run
    "FishSwim": 11,  # how upright, joints, target as seen from the mouth
    **dict.fromkeys(("HumanoidRun", "HumanoidStand", "HumanoidWalk"), 37),  # joints, head, hands and feet, torso
    "PendulumSwingup": 2,  # sine and cosine
    "PointMass": 2,  # qpos
    **dict.fromkeys(("ReacherEasy", "ReacherHard"), 4),  # qpos, vector from the finger to the target
    "SwimmerSwimmer6": 7,  # joints, target as seen from the nose
    **dict.fromkeys(("WalkerRun", "WalkerStand", "WalkerWalk"), 15),  # orientations of all links, one of them twice
}
"""How many entries of an observation are positions. They come first, and all others are velocities: of the joints
(qvel), of a humanoid's centre of mass too, of a swimmer's links. From each task's _get_obs in mujoco_playground 0.2.0;
a test holds them against the simulation. Finger* and Hopper* are not here: touch sensors are neither."""


def choose_gl() -> bool:
    """Sets MUJOCO_GL to the first OpenGL that draws without a screen, and tells if there is one.

    Each is tried in a process of its own: one that fails can end the process, and leaves its libraries loaded.
    """
    draw = "import mujoco as m; m.Renderer(m.MjModel.from_xml_string('<mujoco/>'), 8, 8).render()"
    for name in [os.environ["MUJOCO_GL"]] if os.environ.get("MUJOCO_GL") else ["egl", "osmesa", "glfw"]:
        env = os.environ | {"MUJOCO_GL": name}
        if subprocess.run([sys.executable, "-c", draw], env=env, capture_output=True).returncode == 0:
            os.environ["MUJOCO_GL"] = name
            importlib.reload(gl_context)  # MuJoCo chose when it was imported
            return True
    return False


def check_args(args: SimpleNamespace):
    """Fills in what depends on other flags; ends the program where a flag makes no sense."""

    def check(holds: bool, name: str, right: str):
        if not holds:
            fail(f"--{name.replace('_', '-')} {getattr(args, name)}: {right}")

    task, *named = args.env.split("-", 1)
    near = difflib.get_close_matches(task, dm_control_suite.ALL_ENVS, n=3) or dm_control_suite.ALL_ENVS
    check(task in dm_control_suite.ALL_ENVS, "env", f"no task of the DM Control suite; there is {', '.join(near)}")
    check(named in ([], [args.observe]), "env", f"must be {task}; --observe {args.observe} is added to it")
    mixed = f"{task} shows touch, which is neither; only --observe all"
    check(args.observe == "all" or task in POSITIONS, "observe", mixed)
    args.env = f"{task}-{args.observe}"
    if args.impl == "auto":
        args.impl = "warp" if jax.default_backend() == "gpu" else "jax"
    for f in (f for group in (Task, Network, Algorithm) for f in dataclasses.fields(group)):
        if f.type in (int, int | None) and f.name != "seed" and getattr(args, f.name) is not None:
            check(0 < getattr(args, f.name) < 2**31, f.name, "must be a positive integer (below 2^31)")
    check(0 <= args.seed <= 2**31 - args.num_seeds, "seed", "must be from 0 to 2^31 - num_seeds")
    for name in ("gamma", "gae_lambda"):
        check(0 <= getattr(args, name) <= 1, name, "must be from 0 to 1")
    if args.learning_rate is None:
        args.learning_rate = 1e-5 if args.memory != "mlp" and not args.frozen else 5e-5
    numbers = ("learning_rate", "final_learning_rate", "clip_coef", "ent_coef", "vf_coef")
    for name in (*numbers, "checkpoint_every"):
        check(0 <= getattr(args, name) < 2.0**127, name, "must be a number that is not negative (below 2^127)")
    clips = args.max_grad_norm is None or 0 < args.max_grad_norm < 2.0**127
    check(clips, "max_grad_norm", "must be a number above 0, or None")
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
    for name in ("max_phase", "leak", "spectral_radius"):
        check(getattr(args, name) != 0, name, "must be above 0")
    check(args.leak is None or args.leak <= 1, "leak", "must be at most 1")
    narrow = args.kernel_size is None or args.kernel_size <= args.hidden_size
    check(narrow, "kernel_size", f"must be at most hidden_size, {args.hidden_size}")
    if args.r_min is not None:
        check(args.r_max <= 1, "r_max", "must be at most 1")
        check(args.r_min < args.r_max, "r_min", f"must be below r_max, {args.r_max}")
        check(args.max_phase <= 2 * np.pi, "max_phase", f"must be at most 2π, {2 * np.pi}")
    check(not re.search(r"[*?[]", str(Path(args.run_dir).absolute())), "run_dir", "orbax cannot read paths with * ? [")
    named = re.fullmatch(r"[\w.-]+", args.exp_name) and "__" not in args.exp_name
    check(named, "exp_name", "must be of letters, digits, - . and single _")
    has_wandb = importlib.util.find_spec("wandb") is not None
    check(has_wandb or not args.track, "track", "needs Weights & Biases: pip install wandb")
    if args.capture_video and args.evaluate is None:
        tried = os.environ.get("MUJOCO_GL") or "egl, osmesa and glfw"
        check(choose_gl(), "capture_video", f"no OpenGL draws without a screen (MUJOCO_GL: {tried}); install libegl1")


# ------------------------------------------------------------------------------------------------------- environment
def make_task(args: SimpleNamespace):
    """The task and its settings: time step, time limit …; none of them repeats actions."""
    task = args.env.partition("-")[0]
    config = dm_control_suite.get_default_config(task)
    return dm_control_suite.load(task, config, {"impl": args.impl}), config


def make_env(args: SimpleNamespace):
    """The size of an action, the time limit, reset(keys [B]) -> obs, state, and a step of B that reset themselves.

    Actions are clipped to [-1, 1]. Episodes end by their time limit, which the observation does not show; only a
    simulation that has diverged (NaN) ends in a terminal state. Every episode is reset with a key of its own.
    """
    env, config = make_task(args)
    # All that MuJoCo carries from step to step, where a task has it; everything else in its data follows from it.
    names, data = ("qpos", "qvel", "act", "qacc_warmstart", "mocap_pos", "mocap_quat"), mujoco.MjData(env.mj_model)
    names = [name for name in names if getattr(data, name).size]
    cut = POSITIONS.get(args.env.partition("-")[0])
    seen = {"all": slice(None), "positions": slice(cut), "velocities": slice(cut, None)}[args.observe]

    def reset(keys):
        state = jax.vmap(env.reset)(keys)
        env_state = {name: getattr(state.data, name) for name in names}
        return state.obs[:, seen], env_state | {"steps": jnp.zeros(len(keys), jnp.int32)}

    def simulate(physics, action):
        data = mjx.make_data(env.mj_model, impl=args.impl, naconmax=config.naconmax, njmax=config.njmax)
        state = State(data.replace(**physics), jnp.zeros(0), 0.0, 0.0, {}, {})
        state = env.step(state, jnp.clip(action, -1, 1))
        physics = {name: getattr(state.data, name) for name in names}
        return state.obs[seen], physics, state.reward, state.done

    def step(keys, env_state, action):
        """Also tells how an episode ended, and what the action led to before the environment reset itself."""
        physics = {name: env_state[name] for name in names}
        final_obs, physics, reward, diverged = jax.vmap(simulate)(physics, action)
        after = physics | {"steps": env_state["steps"] + 1}
        terminated, truncated = diverged > 0, after["steps"] >= config.episode_length
        reward = jnp.where(terminated, 0.0, reward)  # which is NaN then

        def start_again(x):
            done, *old = x
            new = reset(keys)

            def select(new, old):  # [B, ...]
                return jnp.where(done.reshape(-1, *[1] * (old.ndim - 1)), new, old)

            return jnp.zeros_like(done), *jax.tree.map(select, new, tuple(old))

        # A reset costs more than a step. This loop of one pass or none skips it while no episode ends, also under vmap,
        # which would make a cond compute both branches.
        x = (terminated | truncated, final_obs, after)
        _, obs, env_state = jax.lax.while_loop(lambda x: x[0].any(), start_again, x)
        return obs, env_state, reward, terminated, truncated, final_obs

    return env.action_size, config.episode_length, reset, step


# ------------------------------------------------------------------------------------------------------------- agent
def rows(x):
    """[T, B, F] -> [T · B, F]: on a CPU, the gradient of LayerNorm is faster there (docs/pqn_frozen_rnn.md)."""
    return x.reshape(-1, x.shape[-1])


class Agent(nn.Module):
    """o_t -> Linear -> L × [memory unit -> mixer] -> Linear -> K × readout -> policy and, apart, value (FRN Fig. A1).

    The policy is Gaussian; its standard deviations do not depend on what is seen.
    A reservoir reads o_t itself, and its L layers go side by side to the Linear before the readouts (FRN appendix B).
    """

    action_size: int
    make_unit: Callable[..., nn.Module]
    reservoir: bool
    hidden_size: int
    num_blocks: int
    num_readout_blocks: int

    @nn.compact
    def __call__(self, carry, obs, reset):
        """obs [T, B, O], reset [T, B] -> carry, means [T, B, A], log standard deviations [A], values [T, B]."""
        # Where an observation is all zeros, as at rest, biases of 0 would make every layer 0, and each LayerNorm would
        # multiply the gradient by 1000.
        hidden = functools.partial(nn.Dense, self.hidden_size, bias_init=nn.initializers.normal(0.05))
        carry, x = list(carry), obs
        if self.reservoir:
            carry[0], x = self.make_unit(name="memory_0")(carry[0], x, reset)  # [T, B, L · H]
        else:
            x = hidden(name="input")(rows(x))  # [T · B, H]
            for i in range(self.num_blocks):
                x = x.reshape(*reset.shape, -1)
                carry[i], x = self.make_unit(name=f"memory_{i}")(carry[i], x, reset)  # [T, B, H]
                x = hidden(name=f"mixer_{i}")(rows(x))  # [T · B, H]
                x = nn.leaky_relu(nn.LayerNorm(use_scale=False, use_bias=False)(x))
        x = hidden(name="output")(rows(x))  # no activation (FRN Table A1)

        def readout(name: str, y):
            for i in range(self.num_readout_blocks):
                y = hidden(name=f"{name}_{i}")(y)
                y = nn.leaky_relu(nn.LayerNorm(name=f"{name}_norm_{i}")(y))
            return y  # [T · B, H]

        small = nn.initializers.variance_scaling(1e-4, "fan_in", "normal")  # the first means are near 0 (CleanRL)
        mean = nn.Dense(self.action_size, kernel_init=small, name="mean")(readout("actor", x))
        log_std = self.param("log_std", nn.initializers.zeros, (self.action_size,))
        value = nn.Dense(1, name="value")(readout("critic", x))
        return tuple(carry), mean.reshape(*reset.shape, -1), log_std, value.reshape(reset.shape)

    @nn.nowrap
    def initialize_carry(self, batch_size: int):
        units = 1 if self.reservoir else self.num_blocks
        return tuple(self.make_unit().initialize_carry(batch_size) for _ in range(units))  # leaves [B, ...]


# --------------------------------------------------------------------------------------------------------- algorithm
@struct.dataclass
class Actor:
    """The environments and what the agent knows of them before its next action; leaves [B, ...]."""

    env_state: Any
    obs: jax.Array
    reset: jax.Array  # obs is the first of its episode
    carry: Any  # memory before obs
    episode_return: jax.Array  # of the episode under way
    episode_length: jax.Array

    def inputs(self):
        """What the agent reads, as a sequence of T = 1."""
        return self.obs[None], self.reset[None]


@struct.dataclass
class Statistics:
    """Of all observations so far: their number, mean and variance [O]."""

    count: jax.Array
    mean: jax.Array
    var: jax.Array

    def normalize(self, obs):
        return jnp.clip((obs - self.mean) / jnp.sqrt(self.var + 1e-8), -10, 10)  # the numbers are CleanRL's

    def update(self, obs):
        """With those of a rollout, obs [T, B, O] (Chan et al., 1979)."""
        new, delta = obs.shape[0] * obs.shape[1], obs.mean((0, 1)) - self.mean
        total = self.count + new
        var = (self.count * self.var + new * obs.var((0, 1)) + delta**2 * self.count * new / total) / total
        return Statistics(total, self.mean + delta * new / total, var)


@struct.dataclass
class TrainState:
    """All that a run is: it continues from here bit for bit."""

    params: Any
    frozen: Any
    opt_state: Any
    statistics: Any  # Statistics of the observations; None if they are not normalised
    actor: Actor
    update: jax.Array
    key: jax.Array


def advantages(reward, terminated, done, value, next_value, gamma, gae_lambda):
    """A_t = δ_t + γ λ A_{t+1} within an episode, δ_t = r_t + γ (1 - terminated_t) V_{t+1} - V_t (PPO, Eq. 11 and 12).

    All [T, B]. next_value[t] is V_{t+1} = V(o_{t+1}) of the rollout's network, for the o_{t+1} that the action led to
    (never the first one of the next episode).
    """

    def step(next_advantage, x):
        reward, terminated, done, value, next_value = x
        delta = reward + gamma * jnp.where(terminated, 0.0, next_value) - value
        advantage = delta + gamma * gae_lambda * jnp.where(done, 0.0, next_advantage)
        return advantage, advantage

    x = (reward, terminated, done, value, next_value)
    return jax.lax.scan(step, jnp.zeros_like(value[0]), x, reverse=True)[1]


def log_probability(mean, log_std, action):
    """log π(a) [...] of actions [..., A] as drawn, not clipped, from Gaussians with mean [..., A] and log_std [A]."""
    error = (action - mean) / jnp.exp(log_std)
    return (-0.5 * error**2 - log_std - 0.5 * jnp.log(2 * jnp.pi)).sum(-1)


def make_train(args: SimpleNamespace) -> SimpleNamespace:
    """The functions of a run, each of one seed."""
    action_size, episode_length, env_reset, env_step = make_env(args)
    settings = {name: getattr(args, name) for name in UNIT_FLAGS if getattr(args, name) is not None}
    make_unit = functools.partial(UNITS[args.memory], features=args.hidden_size, freeze=args.frozen, **settings)
    if args.memory in RESERVOIRS:
        make_unit = functools.partial(make_unit, num_layers=args.num_blocks)
    sizes = (args.hidden_size, args.num_blocks, args.num_readout_blocks)
    agent = Agent(action_size, make_unit, args.memory in RESERVOIRS, *sizes)
    num_updates = args.total_timesteps // (args.num_envs * args.num_steps)
    gradient_steps = args.update_epochs * args.num_minibatches  # of an update
    learning_rate = optax.linear_schedule(args.learning_rate, args.final_learning_rate, num_updates * gradient_steps)
    optimizer = optax.adam(learning_rate, eps=1e-5)  # ε is CleanRL's
    if args.max_grad_norm is not None:
        optimizer = optax.chain(optax.clip_by_global_norm(args.max_grad_norm), optimizer)

    def is_frozen(path: tuple[str, ...]) -> bool:
        return args.frozen and path[0].startswith("memory")

    def network(params, state: TrainState, carry, obs, reset):
        """The agent with these params, and everything else from the state."""
        if args.normalize_observations:
            obs = state.statistics.normalize(obs)
        return agent.apply({"params": merge(params, state.frozen)}, carry, obs, reset)

    def init_actor(key, num_envs: int) -> Actor:
        obs, env_state = env_reset(jax.random.split(key, num_envs))
        zeros, carry = jnp.zeros(num_envs), agent.initialize_carry(num_envs)
        return Actor(env_state, obs, zeros == 0, carry, zeros, zeros.astype(jnp.int32))

    def init(key) -> TrainState:
        key, actor_key, agent_key = jax.random.split(key, 3)
        actor = init_actor(actor_key, args.num_envs)
        params, frozen = partition(agent.init(agent_key, actor.carry, *actor.inputs())["params"], is_frozen)
        zeros = jnp.zeros(actor.obs.shape[1])
        statistics = Statistics(jnp.zeros(()), zeros, zeros + 1) if args.normalize_observations else None
        return TrainState(params, frozen, optimizer.init(params), statistics, actor, jnp.int32(0), key)

    def interact(state: TrainState, actor: Actor, key, greedy: bool = False) -> tuple[Actor, dict[str, Any]]:
        """One step of every environment: the actor after it, and what is to be learned from."""
        action_key, env_key = jax.random.split(key)
        # Means [1, B, A], log standard deviations [A], values [1, B].
        carry, mean, log_std, value = network(state.params, state, actor.carry, *actor.inputs())
        noise = 0.0 if greedy else jnp.exp(log_std) * jax.random.normal(action_key, mean[0].shape)
        action = mean[0] + noise  # [B, A]
        env_keys = jax.random.split(env_key, len(action))
        obs, env_state, reward, terminated, truncated, final_obs = env_step(env_keys, actor.env_state, action)
        done = terminated | truncated
        episode_return, episode_length = actor.episode_return + reward, actor.episode_length + 1
        transition = dict(
            obs=actor.obs, reset=actor.reset, action=action, log_prob=log_probability(mean[0], log_std, action),
            value=value[0], reward=reward, terminated=terminated, truncated=truncated, done=done, final_obs=final_obs,
            carry=carry, episode_return=episode_return, episode_length=episode_length,
        )  # fmt: skip
        next_actor = Actor(
            env_state=env_state,
            obs=obs,
            reset=done,  # the memory is not reset here, but when it reads the first observation of the next episode
            carry=carry,
            episode_return=jnp.where(done, 0, episode_return),
            episode_length=jnp.where(done, 0, episode_length),
        )
        return next_actor, transition

    def rollout(state: TrainState, key) -> tuple[Actor, dict[str, Any]]:
        """num_steps steps of every environment; transitions [T, B, ...]."""
        keys = jax.random.split(key, args.num_steps)
        return jax.lax.scan(lambda actor, key: interact(state, actor, key), state.actor, keys)

    def compute_advantages(state: TrainState, actor: Actor, t: dict[str, Any]):
        """Advantages [T, B] of transitions t from the values of the rollout itself; `actor` is the one after it."""
        *_, last_value = network(state.params, state, actor.carry, *actor.inputs())  # [1, B]
        next_value = jnp.concatenate([t["value"], last_value])[1:]  # [T, B]

        def at_time_limits():
            """A time limit is not an end: value what was seen last, with the memory as it was before its reset."""
            x = (t["carry"], t["final_obs"])
            carry, obs = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), x)  # [T · B, ...]
            *_, value = network(state.params, state, carry, obs[None], jnp.zeros((1, len(obs)), bool))
            return jnp.where(t["truncated"], value.reshape(next_value.shape), next_value)

        next_value = jax.lax.cond(t["truncated"].any(), at_time_limits, lambda: next_value)
        x = (t["reward"], t["terminated"], t["done"], t["value"], next_value)
        return advantages(*x, args.gamma, args.gae_lambda)

    def loss(params, state: TrainState, carry, t: dict[str, jax.Array]):
        """PPO's loss of whole sequences [T, b], from the memory [b] that the rollout began with (PPO, Eq. 7 and 9)."""
        _, mean, log_std, value = network(params, state, carry, t["obs"], t["reset"])  # [T, b, A], [A], [T, b]
        log_ratio = log_probability(mean, log_std, t["action"]) - t["log_prob"]
        ratio, advantage, error = jnp.exp(log_ratio), t["advantage"], jnp.square(value - t["return"])
        if args.norm_adv:
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        clipped_ratio = jnp.clip(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
        policy_loss = -jnp.minimum(advantage * ratio, advantage * clipped_ratio).mean()
        if args.clip_vloss:
            clipped_value = t["value"] + jnp.clip(value - t["value"], -args.clip_coef, args.clip_coef)
            error = jnp.maximum(error, jnp.square(clipped_value - t["return"]))
        value_loss = 0.5 * error.mean()
        entropy = (log_std + 0.5 * jnp.log(2 * jnp.pi * jnp.e)).sum()
        return policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss, {
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "entropy": entropy,
            "approx_kl": (ratio - 1 - log_ratio).mean(),
            "clipfrac": (jnp.abs(ratio - 1) > args.clip_coef).mean(),
        }

    def train_iteration(state: TrainState) -> tuple[TrainState, dict[str, jax.Array]]:
        """Rollout, advantages, epochs."""
        key, rollout_key, epoch_key = jax.random.split(state.key, 3)
        actor, t = rollout(state, rollout_key)
        t["advantage"] = compute_advantages(state, actor, t)
        t["return"] = t["advantage"] + t["value"]  # what the value should have been
        names = ("obs", "reset", "action", "log_prob", "value", "advantage", "return")
        learned_from = {name: t[name] for name in names}

        def minibatch_step(learner, envs):
            params, opt_state = learner
            carry = jax.tree.map(lambda x: x[envs], state.actor.carry)
            minibatch = jax.tree.map(lambda x: x[:, envs], learned_from)  # [T, b, ...]
            grads, scalars = jax.grad(loss, has_aux=True)(params, state, carry, minibatch)
            updates, opt_state = optimizer.update(grads, opt_state)
            return (optax.apply_updates(params, updates), opt_state), scalars | {"grad_norm": optax.tree.norm(grads)}

        shuffle = jax.vmap(lambda key: jax.random.permutation(key, args.num_envs))
        minibatches = shuffle(jax.random.split(epoch_key, args.update_epochs)).reshape(gradient_steps, -1)
        (params, opt_state), scalars = jax.lax.scan(minibatch_step, (state.params, state.opt_state), minibatches)
        unexplained = t["advantage"].var() / jnp.maximum(t["return"].var(), 1e-8)
        metrics = {f"losses/{name}": values.mean() for name, values in scalars.items()} | {
            "losses/explained_variance": 1 - unexplained,
            "charts/learning_rate": learning_rate(state.update * gradient_steps),
            # Of finished episodes alone: NaN where there was none, and then not logged.
            "charts/episodic_return": t["episode_return"].mean(where=t["done"]),
            "charts/episodic_length": t["episode_length"].mean(where=t["done"]),
            "losses/parameter_norm": optax.tree.norm(params),  # finite only if all of them are
        }
        # The statistics change between rollouts only, so that a rollout is learned from as it was seen.
        statistics = state.statistics.update(t["obs"]) if args.normalize_observations else None
        return TrainState(params, state.frozen, opt_state, statistics, actor, state.update + 1, key), metrics

    # ---------------------------------------------------------------------------------------------------- evaluation
    def play(state: TrainState, key):
        """Returns and lengths [E] of eval_episodes episodes of the mean action, side by side; the first one's poses."""

        def step(x, key):
            actor, finished, returns, lengths = x
            env_state = actor.env_state
            pose = {name: env_state[name][0] for name in ("qpos", "mocap_pos", "mocap_quat") if name in env_state}
            actor, t = interact(state, actor, key, greedy=True)
            returns = jnp.where(finished, returns, t["episode_return"])
            lengths = jnp.where(finished, lengths, t["episode_length"])
            return (actor, finished | t["done"], returns, lengths), pose

        key, actor_key = jax.random.split(key)
        actor = init_actor(actor_key, args.eval_episodes)
        start = (actor, ~actor.reset, actor.episode_return, actor.episode_length)
        (_, _, returns, lengths), poses = jax.lax.scan(step, start, jax.random.split(key, episode_length))
        return returns, lengths, poses  # [episode_length, ...]

    def evaluate(state: TrainState, key):
        returns, lengths, _ = play(state, key)
        return returns, lengths, {}

    def describe_memory(params, frozen) -> dict[str, jax.Array]:
        """Spread of the steps that each FFM unit or LRU remembers: until a hundredth is left, and FFM's periods."""
        units = {name: unit for name, unit in merge(params, frozen).items() if name.startswith("memory")}
        steps = {name: make_unit().interpretation(unit) for name, unit in units.items() if args.memory == "ffm"}
        modes = {name: jnp.exp(unit["nu"]) for name, unit in units.items() if args.memory == "lru"}
        steps |= {name: {"trace_durability": trace_durability(decay)} for name, decay in modes.items()}
        spread = {"min": jnp.min, "median": jnp.median, "max": jnp.max}
        return {f"{u}/{q}_{s}": f(x) for u, unit in steps.items() for q, x in unit.items() for s, f in spread.items()}

    return SimpleNamespace(
        init=init, network=network, rollout=rollout, compute_advantages=compute_advantages, loss=loss,
        train_iteration=train_iteration, evaluate=evaluate, describe_memory=describe_memory, play=play,
    )  # fmt: skip


def film(args: SimpleNamespace, poses: dict[str, np.ndarray], file: Path):
    """Draws an episode from the poses [T, ...] of its steps: a gif of about 13 pictures a second, in real time."""
    env, _ = make_task(args)
    model, every = env.mj_model, max(1, round(0.08 / env.dt))
    data, pictures = mujoco.MjData(model), []
    with mujoco.Renderer(model, 240, 320) as renderer:
        for t in range(0, len(poses["qpos"]), every):
            for name, values in poses.items():
                getattr(data, name)[:] = values[t]
            mujoco.mj_forward(model, data)
            renderer.update_scene(data, camera=0)
            picture = Image.fromarray(renderer.render())
            pictures.append(picture.quantize(64, dither=Image.Dither.NONE))  # a quarter of the size
    first, *others = pictures
    ends = np.round(100 * every * env.dt * np.arange(len(pictures) + 1))  # a gif counts hundredths of a second
    durations = (10 * np.diff(ends)).astype(int).tolist()  # milliseconds
    first.save(file, save_all=True, append_images=others, duration=durations, loop=0)


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

    if args.capture_video:  # the same episode as the first of the evaluation: it has the same key
        eval_keys = jax.vmap(lambda key: jax.random.fold_in(key, 1))(keys)
        _, lengths, poses = jax.device_get(jax.jit(over_seeds(train.play, args.num_seeds))(state, eval_keys))
        try:
            for i, folder in enumerate(folders):
                file = folder / "film.gif"
                film(args, {name: values[i, : lengths[i, 0]] for name, values in poses.items()}, file)
                image = Summary.Value(tag="eval/film", image=Summary.Image(encoded_image_string=file.read_bytes()))
                event = Event(step=update * steps_per_update, wall_time=time.time(), summary=Summary(value=[image]))
                writer = EventsWriter(str(folder / "events"), filename_suffix=".film")
                writer.write_event(event)
                writer.close()
                print(f"film           {file}")
        except OSError as error:
            fail(f"cannot write to {folder}: {error}", code=1)
