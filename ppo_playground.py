"""PPO with recurrent memory on robots whose positions or velocities are hidden (MuJoCo Playground, DM Control suite).

Velocities can be told from positions seen one after the other, and changes of position from velocities. So the agent
keeps what it saw in a recurrent memory on which an actor and a critic stand, and learns from its own rollouts with PPO.
`--memory` swaps the memory by one word; `--frozen` leaves its weights as they were drawn and trains only what stands
around it.

    python ppo_playground.py --env WalkerWalk --observe positions --memory gru --frozen
    python ppo_playground.py --env BallInCup --observe velocities --memory lru --num-seeds 3 --capture-video

FRN: Does Learning Recurrent Networks Matter in Partially Observable RL? (Wang et al., 2026): agent and hyperparameters.
PPO: Proximal Policy Optimization Algorithms (Schulman et al., 2017), with the details of CleanRL's.
Tasks: DeepMind Control Suite (Tassa et al., 2018), as in MuJoCo Playground (Zakka et al., 2025).
"""

import contextlib
import dataclasses
import difflib
import fcntl
import functools
import importlib
import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", os.path.expanduser(f"{os.getenv('XDG_CACHE_HOME', '~/.cache')}/jax"))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # compiled programs are kept, and loaded without a page of warnings

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import serialization, struct
from jax.experimental.multihost_utils import process_allgather
from jax.extend.backend import clear_backends
from jax.tree_util import keystr
from PIL import Image
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.summary import hparams, text
from tqdm import tqdm

try:
    import mujoco
    from mujoco import mjx
    from mujoco.mjx._src import io as mjx_io
    from mujoco.rendering.classic import gl_context
    from mujoco_playground import State, dm_control_suite
except RuntimeError as error:  # mujoco reads MUJOCO_GL when it is imported
    print(f"ppo_playground.py: error: {error}; must be egl, osmesa or glfw", file=sys.stderr)
    sys.exit(2)

from memory import UNITS, count_parameters, describe_units, merge, parameter_table, partition, rows

jax.config.update("jax_default_matmul_precision", "highest")  # TF32 on GPUs changes results
# MJX's own choice is the first device of all processes, which may be another one's (--distributed).
mjx_io._resolve_device = lambda impl: jax.local_devices()[0]


# ------------------------------------------------------------------------------------------------------------- flags
@dataclasses.dataclass
class Args:
    """PPO with recurrent memory on MuJoCo Playground, without positions or velocities."""

    # The task.
    env: str = "BallInCup"  # DM Control task (FRN section 4.4: BallInCup, CheetahRun, ReacherHard, WalkerWalk)
    observe: Literal["all", "positions", "velocities"] = "positions"  # what is seen; the run's name has it too
    impl: Literal["auto", "jax", "warp"] = "auto"  # physics engine of MJX; auto is warp on a CUDA device, else jax
    total_timesteps: float = 60_000_000  # environment steps of a seed (FRN Table A6)
    seed: int = 1  # seed of the first run
    num_seeds: int = 1  # seeds that train side by side in one program: seed, seed + 1, …; each has a run folder
    eval_episodes: int = 10  # episodes of the mean action after training (FRN section 4.1)
    capture_video: bool = False  # film the first of these episodes: film.gif in the run folder, and in the log

    # The agent (FRN Fig. A1, Table A1) and its memory (FRN section 3).
    memory: Literal["gru", "lru", "mlp"] = "gru"  # memory unit; mlp is the same agent without one
    frozen: bool = False  # leave the memory units as initialised (FRN Algorithm 1)
    hidden_size: int = 256  # width of every hidden layer (FRN Table A1)
    num_blocks: int = 2  # L, recurrent blocks of a unit and a mixer (FRN appendix E)
    num_readout_blocks: int = 3  # K, hidden blocks of the actor's and of the critic's readout (FRN appendix E)
    update_bias: float | None = None  # gru: bias of the update gate at the start, 0; below 0, it forgets more slowly
    r_min: float | None = None  # lru: smallest radius of a mode at the start, 0.9
    r_max: float | None = None  # lru: largest radius of a mode at the start, 0.999
    max_phase: float | None = None  # lru: largest phase of a mode at the start, 2π

    # The algorithm; what FRN does not name is CleanRL's, as is Adam's ε of 1e-5.
    learning_rate: float | None = None  # at the start; None is 5e-5, or 1e-5 for a trained memory (FRN Table A6)
    final_learning_rate: float = 1e-8  # at the last step, linear in between (FRN Table A6)
    gamma: float = 0.995  # discount (FRN Table A6)
    gae_lambda: float = 0.95  # λ of the generalised advantage estimates (FRN Table A6)
    max_grad_norm: float | None = None  # gradients are clipped to this global norm; None: not (FRN Table A6)
    clip_coef: float = 0.3  # ε of PPO's clipped objective (FRN Table A6)
    ent_coef: float = 0.01  # weight of the entropy bonus (FRN Table A6)
    vf_coef: float = 0.5  # weight of the value loss (FRN Table A6)
    norm_adv: bool = True  # normalise the advantages of each minibatch (CleanRL)
    clip_vloss: bool = False  # clip the change of the values too (CleanRL does)
    normalize_observations: bool = True  # by mean and deviation of all so far (as playground's own settings for PPO do)
    num_envs: int = 16  # parallel environments (FRN Table A6)
    num_steps: int = 128  # steps of each environment in a rollout (FRN Table A6)
    num_minibatches: int = 4  # minibatches of an epoch, each of whole sequences (FRN Table A6)
    update_epochs: int = 4  # passes over each rollout (FRN Table A6)

    # The run.
    run_dir: str = "runs"  # folder of all runs
    exp_name: str = Path(__file__).stem  # name of the experiment, a part of the run folder's name
    checkpoint_every: float = 60.0  # seconds between two checkpoints; 0 writes one after every update
    resume: str | None = None  # run folder to go on with, and with the flags it was started with
    evaluate: str | None = None  # run folder whose agent plays eval_episodes into evaluate.json, without training
    forget: bool = False  # with evaluate: empty the memory at every step, to see what it is worth
    eval_every: float | None = None  # environment steps between two rounds of eval_episodes during training
    keep_best: bool = False  # keep the best of these agents in best.msgpack; with evaluate, it is the one that plays
    shard_envs: bool = False  # the environments of every seed lie over the devices that its seeds leave
    distributed: bool = False  # one of several processes, started by Slurm, MPI or Kubernetes, that are one run
    track: bool = False  # log to Weights & Biases too (pip install wandb; WANDB_PROJECT and WANDB_ENTITY say where)


# ------------------------------------------------------------------------------------------------------- environment
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


def make_task(args: Args):
    """The task and its settings: time step, time limit …; none of them repeats actions."""
    task = args.env.partition("-")[0]
    config = dm_control_suite.get_default_config(task)
    return dm_control_suite.load(task, config, {"impl": args.impl}), config


def make_env(args: Args):
    """The size of an action, reset(keys [B]) -> obs, state, and a step of B environments that reset themselves.

    Actions are clipped to [-1, 1]. Episodes end by their time limit, which the observation does not show; only a
    simulation that has diverged (NaN) ends in a terminal state. Every episode is reset with a key of its own.
    """
    with jax.enable_x64(False):  # it does not name its types
        env, config = make_task(args)
    # All that MuJoCo carries from step to step, where a task has it; everything else in its data follows from it.
    names, data = ("qpos", "qvel", "act", "qacc_warmstart", "mocap_pos", "mocap_quat"), mujoco.MjData(env.mj_model)
    names = [name for name in names if getattr(data, name).size]
    cut = POSITIONS.get(args.env.partition("-")[0])
    seen = {"all": slice(None), "positions": slice(cut), "velocities": slice(cut, None)}[args.observe]

    def reset(keys):
        with jax.enable_x64(False):
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
        with jax.enable_x64(False):
            final_obs, physics, reward, diverged = jax.vmap(simulate)(physics, action)
        after = physics | {"steps": env_state["steps"] + 1}
        terminated, truncated = diverged > 0, after["steps"] >= config.episode_length
        reward = jnp.where(terminated, 0.0, reward)  # which is NaN then

        def start_again(now):
            done, keys, *old = now
            pairs = jax.vmap(jax.random.split)(keys)  # [B, 2]
            keys, new = pairs[:, 0], reset(pairs[:, 1])

            def select(new, old):  # [B, ...]
                return jnp.where(done.reshape(-1, *[1] * (old.ndim - 1)), new, old)

            return jnp.zeros_like(done), keys, *jax.tree.map(select, new, tuple(old))

        # A reset costs more than a step. This loop of one pass or none skips it while no episode ends, also under vmap,
        # which would make a cond compute both branches.
        start = (terminated | truncated, keys, final_obs, after)
        _, _, obs, env_state = jax.lax.while_loop(lambda now: now[0].any(), start_again, start)
        return obs, env_state, reward, terminated, truncated, final_obs

    return env.action_size, reset, step


# ------------------------------------------------------------------------------------------------------------- agent
def make_unit(args: Args, **options) -> nn.Module:
    """A memory unit with those of the flags that are its settings; where one is None, the unit's own holds."""
    unit, given = UNITS[args.memory], {name: value for name, value in vars(args).items() if value is not None}
    settings = {name: given[name] for name in unit.__dataclass_fields__ if name in given}
    return unit(features=args.hidden_size, freeze=args.frozen, **settings, **options)


class Agent(nn.Module):
    """o_t -> Linear -> L × [memory unit -> mixer] -> Linear -> K × readout -> policy and, apart, value (FRN Fig. A1).

    The policy is Gaussian; its standard deviations do not depend on what is seen.
    """

    args: Args
    action_size: int

    @nn.compact
    def __call__(self, carry, obs, reset):
        """obs [T, B, O], reset [T, B] -> carry, (means [T, B, A], log standard deviations [A]), values [T, B]."""
        # Where an observation is all zeros, as at rest, biases of 0 would make every layer 0, and each LayerNorm would
        # multiply the gradient by 1000.
        hidden = functools.partial(nn.Dense, self.args.hidden_size, bias_init=nn.initializers.normal(0.05))
        carry = list(carry)
        x = hidden(name="input")(rows(obs))  # [T · B, H]
        for i in range(self.args.num_blocks):
            x = x.reshape(*reset.shape, -1)  # [T, B, H]
            carry[i], x = make_unit(self.args, name=f"memory_{i}")(carry[i], x, reset)  # [T, B, H]
            x = hidden(name=f"mixer_{i}")(rows(x))  # [T · B, H]
            x = nn.leaky_relu(nn.LayerNorm(use_scale=False, use_bias=False)(x))
        x = hidden(name="output")(x)  # no activation (FRN Table A1)

        def readout(name: str, y):
            for i in range(self.args.num_readout_blocks):
                y = hidden(name=f"{name}_{i}")(y)
                y = nn.leaky_relu(nn.LayerNorm(name=f"{name}_norm_{i}")(y))
            return y  # [T · B, H]

        small = nn.initializers.variance_scaling(1e-4, "fan_in", "normal")  # the first means are near 0 (CleanRL)
        mean = nn.Dense(self.action_size, kernel_init=small, name="mean")(readout("actor", x))
        log_std = self.param("log_std", nn.initializers.zeros, (self.action_size,), jnp.float32)
        value = nn.Dense(1, name="value")(readout("critic", x))
        mean = mean.reshape(*reset.shape, -1)  # [T, B, A]
        return tuple(carry), (mean, jnp.broadcast_to(log_std, mean.shape)), value.reshape(reset.shape)

    @nn.nowrap
    def initialize_carry(self, batch_size: int):
        return tuple(make_unit(self.args).initialize_carry(batch_size) for _ in range(self.args.num_blocks))


# --------------------------------------------------------------------------------------------------------- algorithm
@struct.dataclass
class Runner:
    """The environments, and what the agent knows of them before its next action; leaves [B, ...]."""

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
    runner: Runner
    update: jax.Array  # updates so far
    seed: jax.Array  # every random number follows from the seed and the update
    statistics: Any  # Statistics of the observations; None if they are not normalised


def generalized_advantages(reward, terminated, done, value, next_value, gamma, gae_lambda):
    """A_t = δ_t + γ λ A_{t+1} within an episode, δ_t = r_t + γ (1 - terminated_t) V_{t+1} - V_t (PPO, Eq. 11 and 12).

    All [T, B]. next_value[t] is V_{t+1} = V(o_{t+1}) of the rollout's network, for the o_{t+1} that the action led to
    (never the first one of the next episode).
    """

    def step(next_advantage, now):
        reward, terminated, done, value, next_value = now
        delta = reward + gamma * jnp.where(terminated, 0.0, next_value) - value
        advantage = delta + gamma * gae_lambda * jnp.where(done, 0.0, next_advantage)
        return advantage, advantage

    return jax.lax.scan(step, jnp.zeros_like(value[0]), (reward, terminated, done, value, next_value), reverse=True)[1]


def log_probability(policy, action):
    """log π(a) [...] of actions [..., A] as drawn, not clipped."""
    mean, log_std = policy
    return jax.scipy.stats.norm.logpdf(action, mean, jnp.exp(log_std)).sum(-1)


def make_train(args: Args) -> SimpleNamespace:
    """The functions of a run, each of one seed."""
    action_size, env_reset, env_step = make_env(args)
    agent = Agent(args, action_size)
    apply = over_devices(agent.apply) if args.shard_envs else agent.apply
    num_updates = args.total_timesteps // (args.num_envs * args.num_steps)
    gradient_steps = args.update_epochs * args.num_minibatches  # of an update
    learning_rate = optax.linear_schedule(args.learning_rate, args.final_learning_rate, num_updates * gradient_steps)
    clip = optax.identity() if args.max_grad_norm is None else optax.clip_by_global_norm(args.max_grad_norm)
    optimizer = optax.chain(clip, optax.adam(learning_rate, eps=1e-5))

    def is_frozen(path: tuple[str, ...]) -> bool:
        return args.frozen and path[0].startswith("memory")

    def network(params, frozen, statistics, carry, obs, reset):
        obs = obs if statistics is None else statistics.normalize(obs)
        return apply({"params": merge(params, frozen)}, carry, obs, reset)

    def init_runner(key, num_envs: int) -> Runner:
        obs, env_state = env_reset(jax.random.split(key, num_envs))
        carry, zeros = agent.initialize_carry(num_envs), jnp.zeros(num_envs, jnp.float32)
        return Runner(env_state, obs, jnp.ones(num_envs, jnp.bool_), carry, zeros, zeros.astype(jnp.int32))

    def init(seed) -> TrainState:
        runner_key, agent_key, _, _ = jax.random.split(jax.random.key(seed), 4)
        runner = init_runner(runner_key, args.num_envs)
        params, frozen = partition(agent.init(agent_key, runner.carry, *runner.inputs())["params"], is_frozen)
        zeros = jnp.zeros(runner.obs.shape[1], jnp.float32)
        statistics = Statistics(jnp.float32(0), zeros, zeros + 1) if args.normalize_observations else None
        return TrainState(params, frozen, optimizer.init(params), runner, jnp.int32(0), seed, statistics)

    def interact(params, frozen, statistics, runner: Runner, key, greedy: bool = False) -> tuple[Runner, dict]:
        """One step of every environment: the runner after it, and what is to be learned from."""
        action_key, env_key = jax.random.split(key)
        carry, policy, value = network(params, frozen, statistics, runner.carry, *runner.inputs())
        mean, log_std = policy  # [1, B, A]
        noise = jnp.exp(log_std) * jax.random.normal(action_key, mean.shape, jnp.float32)
        action = mean if greedy else mean + noise  # [1, B, A]
        log_prob, action = log_probability(policy, action)[0], action[0]
        env_keys = jax.random.split(env_key, len(action))
        obs, env_state, reward, terminated, truncated, final_obs = env_step(env_keys, runner.env_state, action)
        done = terminated | truncated
        episode_return, episode_length = runner.episode_return + reward, runner.episode_length + 1
        transition = dict(
            obs=runner.obs, reset=runner.reset, value=value[0], log_prob=log_prob,
            action=action, reward=reward, terminated=terminated, truncated=truncated, done=done, final_obs=final_obs,
            carry=carry, episode_return=episode_return, episode_length=episode_length,
        )  # fmt: skip
        runner = Runner(
            env_state=env_state,
            obs=obs,
            reset=done,  # the memory is not reset here, but when it reads the first observation of the next episode
            carry=carry,
            episode_return=jnp.where(done, 0, episode_return),
            episode_length=jnp.where(done, 0, episode_length),
        )
        return runner, transition

    def rollout(state: TrainState, key) -> tuple[Runner, dict]:
        """num_steps steps of every environment; transitions [T, B, ...]."""
        step = functools.partial(interact, state.params, state.frozen, state.statistics)
        return jax.lax.scan(step, state.runner, jax.random.split(key, args.num_steps))

    def compute_advantages(params, frozen, statistics, runner: Runner, transitions: dict):
        """Advantages [T, B] from the values of the rollout itself; `runner` is the one after it."""
        _, _, last_value = network(params, frozen, statistics, runner.carry, *runner.inputs())  # [1, B]
        next_value = jnp.concatenate([transitions["value"], last_value])[1:]  # [T, B]

        def at_time_limits():
            """A time limit is not an end: value what was seen last, with the memory as it was before its reset."""
            seen = (transitions["carry"], transitions["final_obs"])
            carry, obs = jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(-1, *x.shape[2:]), seen)  # [B·T, ...]
            no_reset = jnp.zeros((1, len(obs)), jnp.bool_)
            _, _, value = network(params, frozen, statistics, carry, obs[None], no_reset)  # [1, B·T]
            return jnp.where(transitions["truncated"], value.reshape(next_value.T.shape).T, next_value)

        next_value = jax.lax.cond(transitions["truncated"].any(), at_time_limits, lambda: next_value)
        steps = (transitions[name] for name in ("reward", "terminated", "done", "value"))
        return generalized_advantages(*steps, next_value, args.gamma, args.gae_lambda)

    def loss(params, frozen, statistics, carry, transitions: dict, advantages, returns):
        """PPO's loss of whole sequences [T, b], from the memory [b] that the rollout began with (PPO, Eq. 7 and 9)."""
        inputs = transitions["obs"], transitions["reset"]
        _, policy, value = network(params, frozen, statistics, carry, *inputs)  # [T, b]
        log_ratio = log_probability(policy, transitions["action"]) - transitions["log_prob"]
        ratio, value_error = jnp.exp(log_ratio), jnp.square(value - returns)
        if args.norm_adv:
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        clipped_ratio = jnp.clip(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
        policy_loss = -jnp.minimum(advantages * ratio, advantages * clipped_ratio).mean()
        if args.clip_vloss:
            change = jnp.clip(value - transitions["value"], -args.clip_coef, args.clip_coef)
            value_error = jnp.maximum(value_error, jnp.square(transitions["value"] + change - returns))
        value_loss = 0.5 * value_error.mean()
        entropy = (policy[1] + 0.5 * jnp.log(jnp.float32(2 * jnp.pi * jnp.e))).sum(-1).mean()
        losses = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
        losses["approx_kl"] = (ratio - 1 - log_ratio).mean()
        losses["clipfrac"] = (jnp.abs(ratio - 1) > args.clip_coef).mean(dtype=jnp.float32)
        return policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss, losses

    def train_iteration(state: TrainState) -> tuple[TrainState, dict[str, jax.Array]]:
        """Rollout, advantages, epochs."""
        _, _, training_key, _ = jax.random.split(jax.random.key(state.seed), 4)
        rollout_key, epoch_key = jax.random.split(jax.random.fold_in(training_key, state.update))
        runner, transitions = rollout(state, rollout_key)
        advantages = compute_advantages(state.params, state.frozen, state.statistics, runner, transitions)
        returns = advantages + transitions["value"]  # what the values should have been

        def minibatch_step(learner, envs):
            params, opt_state = learner
            carry = jax.tree.map(lambda x: pick(x, envs, axis=0), state.runner.carry)
            minibatch = jax.tree.map(lambda x: pick(x, envs, axis=1), (transitions, advantages, returns))  # [T, b, ...]
            grads, losses = jax.grad(loss, has_aux=True)(params, state.frozen, state.statistics, carry, *minibatch)
            updates, opt_state = optimizer.update(grads, opt_state)
            return (optax.apply_updates(params, updates), opt_state), losses | {"grad_norm": optax.tree.norm(grads)}

        minibatches = shuffle(args, epoch_key)
        (params, opt_state), losses = jax.lax.scan(minibatch_step, (state.params, state.opt_state), minibatches)
        done = transitions["done"]
        episodes = done.sum(dtype=jnp.int32)  # that ended in this rollout
        weights = done.astype(jnp.float32) / jnp.maximum(episodes, 1)  # of a mean over them
        metrics = {f"losses/{name}": values.mean() for name, values in losses.items()} | {
            "losses/explained_variance": 1 - advantages.var() / jnp.maximum(returns.var(), 1e-8),
            "losses/parameter_norm": optax.tree.norm(params),  # finite only if all of them are
            "charts/learning_rate": learning_rate(state.update * gradient_steps),
            "charts/episodes": episodes,
            "charts/episodic_return": (transitions["episode_return"] * weights).sum(),
            "charts/episodic_length": (transitions["episode_length"] * weights).sum(),
        }
        # They change between rollouts only, so that a rollout is learned from as it was seen.
        statistics = None if state.statistics is None else state.statistics.update(transitions["obs"])
        metrics |= describe_units(functools.partial(make_unit, args), merge(state.params, state.frozen))
        return TrainState(params, state.frozen, opt_state, runner, state.update + 1, state.seed, statistics), metrics

    def finished(state: TrainState):
        return state.update >= num_updates

    # ---------------------------------------------------------------------------------------------------- evaluation
    def evaluate(state: TrainState) -> dict[str, jax.Array]:
        """Returns and lengths [E] of eval_episodes of the mean action, played side by side, and what they come to."""

        def step(now):
            runner, key, finished, returns, lengths = now
            key, step_key = jax.random.split(key)
            runner = runner.replace(reset=runner.reset | args.forget)
            runner, transition = interact(state.params, state.frozen, state.statistics, runner, step_key, greedy=True)
            returns = jnp.where(finished, returns, transition["episode_return"])
            lengths = jnp.where(finished, lengths, transition["episode_length"])
            return runner, key, finished | transition["done"], returns, lengths

        _, _, _, evaluation_key = jax.random.split(jax.random.key(state.seed), 4)
        key, runner_key = jax.random.split(evaluation_key)
        runner = init_runner(runner_key, args.eval_episodes)
        start = (runner, key, ~runner.reset, runner.episode_return, runner.episode_length)
        *_, returns, lengths = jax.lax.while_loop(lambda now: ~now[2].all(), step, start)
        means = {"mean_return": returns.mean(), "std_return": returns.std(), "mean_length": lengths.mean()}
        return {"returns": returns, "lengths": lengths} | means

    start_episodes = jax.jit(init_runner, static_argnames="num_envs")
    step_episodes = jax.jit(interact, static_argnames="greedy")

    def after(state: TrainState, folder: Path):
        """What follows a seed's evaluation: the film of its first episode, if it is asked for, and not to evaluate."""
        if args.capture_video and args.evaluate is None:
            agent = (state.params, state.frozen, state.statistics)
            _, _, _, evaluation_key = jax.random.split(jax.random.key(state.seed), 4)
            key, runner_key = jax.random.split(evaluation_key)
            runner, poses, done = start_episodes(runner_key, args.eval_episodes), [], False
            while not done:
                poses.append({name: np.asarray(values[0]) for name, values in runner.env_state.items()})
                key, step_key = jax.random.split(key)
                runner, transition = step_episodes(*agent, runner, step_key, greedy=True)
                done = transition["done"][0]
            gif, step = film(args, poses), int(state.update) * args.num_envs * args.num_steps
            write(folder / "film.gif", gif)
            value = Summary.Value(tag="eval/film", image=Summary.Image(encoded_image_string=gif))
            writer = EventsWriter(str(folder / "events"), filename_suffix=".film")
            writer.write_event(Event(step=step, wall_time=time.time(), summary=Summary(value=[value])))
            writer.close()
            say(f"film           {folder / 'film.gif'}")

    return SimpleNamespace(
        init=init, network=network, rollout=rollout, compute_advantages=compute_advantages, loss=loss,
        train_iteration=train_iteration, finished=finished, evaluate=evaluate, after=after,
    )  # fmt: skip


def film(args: Args, poses: list[dict[str, np.ndarray]]) -> bytes:
    """Draws an episode from the poses of its steps: a gif of about 13 pictures a second, in real time."""
    env, _ = make_task(args)
    data, every, pictures = mujoco.MjData(env.mj_model), max(1, round(0.08 / env.dt)), []
    with mujoco.Renderer(env.mj_model, 240, 320) as renderer:
        for pose in poses[::every]:
            for name in pose.keys() & {"qpos", "mocap_pos", "mocap_quat"}:
                getattr(data, name)[:] = pose[name]
            mujoco.mj_forward(env.mj_model, data)
            renderer.update_scene(data, camera=0)
            picture = Image.fromarray(renderer.render())
            pictures.append(picture.quantize(64, dither=Image.Dither.NONE))  # a quarter of the size
    first, *others = pictures
    ends = np.round(100 * every * env.dt * np.arange(len(pictures) + 1))  # a gif counts hundredths of a second
    durations = (10 * np.diff(ends)).astype(int).tolist()  # milliseconds
    gif = io.BytesIO()
    first.save(gif, "GIF", save_all=True, append_images=others, duration=durations, loop=0)
    return gif.getvalue()


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


# Flags that may differ from the run's when it is resumed, and when it is evaluated.
CHANGEABLE = {"resume", "total_timesteps", "checkpoint_every", "eval_episodes", "eval_every", "keep_best", "track"}
CHANGEABLE |= {"capture_video"}
EVALUATE_WITH = {"resume", "evaluate", "env", "eval_episodes", "forget", "keep_best"}


def check_args(args: Args):
    """Fills in what depends on other flags; ends the program where a flag makes no sense."""

    def check(holds: bool, name: str, right: str):
        if not holds:
            fail(f"--{name.replace('_', '-')} {getattr(args, name)}: {right}")

    tasks, spelling = dm_control_suite.ALL_ENVS, re.sub("[_-]", "", args.env.lower())
    named = [task for task in tasks if spelling in (task.lower(), f"{task}{args.observe}".lower())]
    near = difflib.get_close_matches(args.env.partition("-")[0], tasks, n=3) or tasks
    right = f"no task of the DM Control suite (--observe {args.observe} is added to it); there is {', '.join(near)}"
    check(len(named) == 1, "env", right)
    touch = f"{named[0]} shows touch, which is neither; only --observe all"
    check(args.observe == "all" or named[0] in POSITIONS, "observe", touch)
    args.env = f"{named[0]}-{args.observe}"
    if args.impl == "auto":
        args.impl = "warp" if jax.default_backend() == "gpu" else "jax"
    if args.learning_rate is None:
        args.learning_rate = 1e-5 if args.memory != "mlp" and not args.frozen else 5e-5
    check(float(args.total_timesteps).is_integer(), "total_timesteps", "must be a whole number")
    args.total_timesteps = int(args.total_timesteps)  # which may be given as 1e6
    settings = {name for unit in UNITS.values() for name in unit.__dataclass_fields__}  # which the units check
    for name, value in vars(args).items():
        if type(value) in (int, float) and name not in settings | {"seed"}:
            above = 0 if type(value) is int or name in ("max_grad_norm", "eval_every") else -1e-30  # 0 is allowed
            check(above < value < 2**31, name, "must be a positive number below 2^31")
    check(0 <= args.seed <= 2**31 - args.num_seeds, "seed", "must be from 0 to 2^31 - num_seeds")
    for name in ("gamma", "gae_lambda"):
        check(getattr(args, name) <= 1, name, "must be from 0 to 1")
    check(args.num_envs % args.num_minibatches == 0, "num_envs", f"no multiple of {args.num_minibatches} minibatches")
    rollout = args.num_envs * args.num_steps
    check(args.total_timesteps >= rollout, "total_timesteps", f"less than one rollout of {rollout} steps")
    single = args.norm_adv and rollout == args.num_minibatches
    check(not single, "num_minibatches", "one sample in each, whose advantage --norm-adv makes 0")
    check(not (args.frozen and args.memory == "mlp"), "frozen", "--memory mlp has no memory unit to freeze")
    for name in vars(args).keys() & settings - UNITS[args.memory].__dataclass_fields__.keys():
        check(getattr(args, name) is None, name, f"--memory {args.memory} has no such part")
    check(args.resume is None or args.evaluate is None, "resume", "give this or --evaluate")
    check(not args.forget or args.evaluate is not None, "forget", "only with --evaluate")
    check(not args.keep_best or args.eval_every is not None, "keep_best", "only with --eval-every")
    check("/" not in args.exp_name and "__" not in args.exp_name, "exp_name", "must have no / and no __")
    check("://" not in args.run_dir, "run_dir", "must be a folder of this machine")
    try:
        make_unit(args)
    except ValueError as error:
        fail("--" + str(error).partition(": ")[2].replace("features", "hidden_size").replace("_", "-"))
    if args.capture_video and args.evaluate is None:
        tried = os.environ.get("MUJOCO_GL") or "egl, osmesa and glfw"
        check(choose_gl(), "capture_video", f"no OpenGL draws without a screen (MUJOCO_GL: {tried}); install libegl1")


# --- shared block: runs ---
def fail(message: str, code: int = 2):
    """Ends the program with one line on stderr."""
    print(f"{Path(__file__).name}: error: {' '.join(message.split())}", file=sys.stderr)
    if code == 1 and jax.distributed.is_initialized():
        os._exit(code)  # an orderly end would wait for the other processes, which end when this one has
    sys.exit(code)


def say(text: str, end: str = "\n"):
    """Prints. A closed pipe or a full disk behind stdout ends the printing, and not the training."""
    with contextlib.suppress(OSError):
        if jax.process_index() == 0:  # which speaks for all processes
            os.write(sys.stdout.fileno(), f"{text}{end}".encode())


def over_devices(apply):
    """apply(variables, carry [B, ...], *sequences [T, B, ...]) -> carry, *sequences, for --shard-envs: a device does it
    for its own environments, and a gradient with respect to the variables is the sum over the devices."""
    of_carry, of_sequences = jax.P("envs"), jax.P(None, "envs")
    specs = {"in_specs": (jax.P(), of_carry, of_sequences), "out_specs": (of_carry, of_sequences)}

    def of_device(variables, carry, sequences):
        carry, *outputs = apply(variables, carry, *sequences)
        return carry, outputs

    def apply_on_devices(variables, carry, *sequences):
        if len(sequences[0]) == 1:  # acting, which needs no such help, also with a batch that devices cannot share
            return apply(variables, carry, *sequences)
        function = jax.shard_map(of_device, **specs, axis_names={"envs"}, check_vma=False)
        carry, outputs = function(variables, carry, sequences)
        return carry, *outputs

    return apply_on_devices


def shuffle(args: Args, key):
    """The environments [G, n] of each minibatch of all epochs: n of each of G groups of neighbours. G is 1; with
    --shard-envs, a minibatch's size: as many from every device, and the same ones on any number of devices."""
    groups = args.num_envs // args.num_minibatches if args.shard_envs else 1
    envs = jnp.tile(jnp.arange(args.num_envs // groups, dtype=jnp.int32), (groups, 1))  # [G, B / G]
    permute = jax.vmap(lambda key: jax.random.permutation(key, envs, axis=1, independent=True))
    order = permute(jax.random.split(key, args.update_epochs))  # [update_epochs, G, B / G]
    order = order.reshape(args.update_epochs, groups, args.num_minibatches, -1).swapaxes(1, 2)
    return order.reshape(-1, groups, order.shape[-1])


def pick(x, envs, axis: int):
    """The environments [G, n] of x, which has all of them along `axis`, as G · n."""
    groups = x.reshape(*x.shape[:axis], len(envs), -1, *x.shape[axis + 1 :])
    picked = jax.vmap(functools.partial(jnp.take, axis=axis, mode="clip"), (axis, 0), axis)(groups, envs)
    return picked.reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])


def parse_args() -> tuple[Args, list[Path]]:
    """The flags, and a run folder for each seed. A run that is resumed or evaluated keeps its flags."""
    os.environ["COLUMNS"] = str(max(60, shutil.get_terminal_size().columns))  # tyro hangs in a terminal of one column
    sys.stdout = sys.stdout or open(os.devnull, "w")  # the shell's >&- closes it
    sys.stdout.reconfigure(errors="replace")  # a terminal without Unicode is no reason to stop
    args = tyro.cli(Args)
    if args.resume is None and args.evaluate is None:
        check_args(args)
        setting = f"{args.env}__{args.exp_name}__{args.memory}{'-frozen' * args.frozen}"
        now = np.array(divmod(time.time_ns() // 1000, 1_000_000), np.int32)
        now = "{}.{:06}".format(*process_allgather(now, tiled=True)[:2])  # process 0's, in all of them
        seeds = range(args.seed, args.seed + args.num_seeds)
        return args, [Path(args.run_dir).expanduser() / f"{setting}__{seed}__{now}" for seed in seeds]
    run = Path(os.path.realpath(args.evaluate or args.resume))  # through a link, to where its other seeds are
    try:
        config = json.loads((run / "config.json").read_text())
        saved, folders = Args(**config["args"]), [run.with_name(name) for name in config["runs"]]
        jax.config.update("jax_default_prng_impl", config["generator"])  # its random numbers go on
    except (OSError, ValueError, KeyError, TypeError) as error:
        fail(f"{run} holds no run that this version of the script has written: {error!r}")
    saved.keep_best &= args.evaluate is None  # the last agent plays, unless the best one is asked for
    saved.distributed = args.distributed  # it goes on in any number of processes
    args = tyro.cli(Args, default=saved)
    for name, value in vars(saved).items():
        if getattr(args, name) != value and name not in (CHANGEABLE if args.evaluate is None else EVALUATE_WITH):
            fail(f"--{name.replace('_', '-')} {getattr(args, name)}: the run has {value}, and keeps it")
    check_args(args)
    return args, folders if len(folders) > 1 else [run]  # a single one can be renamed


def write(file: Path, data: bytes):
    """All of it or nothing, even if the power fails; what a checkpoint replaces stays as .previous."""
    with contextlib.ExitStack() as cleanup, open(f"{file}.new", "wb") as new:
        cleanup.callback(Path(new.name).unlink, missing_ok=True)  # what a full disk has taken of it
        new.write(data)
        new.flush()
        os.fsync(new.fileno())
        if file.suffix == ".msgpack" and file.exists():
            file.replace(file.with_suffix(".previous"))
        os.replace(new.name, file)
    folder = os.open(file.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def load(file: Path, like) -> tuple[Any, dict]:
    """A state of the form of `like`, and all that the newest whole checkpoint holds."""
    for name in filter(Path.exists, (file, file.with_suffix(".previous"))):
        try:
            saved = serialization.msgpack_restore(name.read_bytes())
            leaves = [saved["state"][keystr(path)] for path, _ in jax.tree.leaves_with_path(like)]
            if [leaf.shape for leaf in leaves] != [x.shape for x in jax.tree.leaves(like)]:
                fail(f"{name} is of a network of other sizes: what --env shows, and its actions, must be of the run's")
            return jax.tree.unflatten(jax.tree.structure(like), leaves), saved
        except Exception as error:  # of many kinds, where a file is damaged
            print(f"{name} is damaged: {error!r}", file=sys.stderr)
    return fail(f"{file.parent} holds no whole checkpoint")


def write_config(args: Args, folders: list[Path], own: list[int], parameters: dict):
    """What a run is, in each of the folders that this process keeps."""
    git = ["git", "-C", Path(__file__).parent, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() if shutil.which("git") else ""
    config = {"script": Path(__file__).stem, "args": vars(args) | {"resume": None}, "parameters": parameters}
    config["versions"] = {package.__name__: package.__version__ for package in (jax, flax, optax, np)}
    config |= {"git_commit": commit, "generator": jax.config.jax_default_prng_impl, "runs": [f.name for f in folders]}
    for i in own:
        write(folders[i] / "config.json", json.dumps(config | {"seed": args.seed + i}, indent=1).encode())


def main():
    if jax.config.jax_disable_jit:
        fail("JAX_DISABLE_JIT: an update is one compiled program; jax.debug.print shows what happens in it")
    if "--distributed" in sys.argv:  # before anything touches a device
        jax.config.update("jax_enable_preemption_service", False)  # SIGTERM is answered below
        clear_backends()  # some packages make arrays when they are imported
        try:
            jax.distributed.initialize(heartbeat_timeout_seconds=30, shutdown_timeout_seconds=10)
        except (ValueError, RuntimeError) as error:
            fail(f"--distributed True: no cluster that JAX knows has started this process: {error}")
    try:
        devices = sorted(jax.devices(), key=lambda device: device.process_index)
    except (AssertionError, RuntimeError):
        jax.config.update("jax_platforms", "")
        fail(f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS')}: there is none here, but {jax.devices()[0].platform}")
    args, folders = parse_args()
    train, steps_per_update, writers, tracked, signals = make_train(args), args.num_envs * args.num_steps, {}, {}, []
    num_updates = args.total_timesteps // steps_per_update
    devices = np.reshape(devices, (jax.process_count(), -1))  # [processes, devices of each]
    over_seeds, in_minibatch = math.gcd(devices.size, args.num_seeds), args.num_envs // args.num_minibatches
    if args.shard_envs and in_minibatch == 1:
        fail("--shard-envs True: a minibatch has one environment, which devices cannot share; fewer --num-minibatches")
    over_envs = math.gcd(devices.size // over_seeds, in_minibatch) if args.shard_envs else 1
    used, left = divmod(over_seeds * over_envs, len(devices))  # of each process
    if left:
        fail(f"--distributed True: {len(devices)} processes cannot share --num-seeds {args.num_seeds} evenly")
    mesh = jax.sharding.Mesh(devices[:, :used].reshape(over_seeds, over_envs), ("seeds", "envs"))
    of_seed, of_runner = jax.NamedSharding(mesh, jax.P("seeds")), jax.NamedSharding(mesh, jax.P("seeds", "envs"))
    everywhere = jax.NamedSharding(mesh, jax.P())
    keepers = [mesh.devices[i * over_seeds // args.num_seeds, 0].process_index for i in range(args.num_seeds)]
    own = [i for i, process in enumerate(keepers) if process == jax.process_index()]  # seeds whose folders it keeps
    layout = TrainState(**dict.fromkeys(TrainState.__dataclass_fields__, of_seed)).replace(runner=of_runner)

    def across(function):
        """The function of one seed for [S]: seeds lie over the devices, and take turns on a CPU."""
        of_device = functools.partial(jax.lax.map, function) if jax.default_backend() == "cpu" else jax.vmap(function)
        specs = {"in_specs": jax.P("seeds"), "out_specs": jax.P("seeds")}
        return jax.shard_map(of_device, mesh=mesh, **specs, axis_names={"seeds"}, check_vma=False)

    init = jax.jit(across(train.init), out_shardings=layout)
    evaluate = jax.jit(across(train.evaluate), out_shardings=everywhere)
    all_finished = jax.jit(lambda state: train.finished(state).all(), out_shardings=everywhere)
    seeds = np.arange(args.seed, args.seed + args.num_seeds, dtype=np.int32)  # from here on, leaves are [S, ...]
    like = jax.eval_shape(init, seeds)
    size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(like))
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size > available:
        fail(f"--hidden-size, --num-envs or the memory is too large: {size:,} bytes, and here are {available:,}")

    def log(scalars: dict[str, np.ndarray]):
        """Scalars [S]; those of episodes only where one has ended."""
        for i, writer in writers.items():
            values = {tag: float(value[i]) for tag, value in scalars.items()}
            if values.get("charts/episodes") == 0:
                values = {tag: value for tag, value in values.items() if not tag.startswith("charts/episodic")}
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
            writer.write_event(Event(step=step, wall_time=time.time(), summary=summary))
            if tracked:
                tracked[i].log(values, step=step)

    def save(name: str):
        """The state as {".params['memory_0']['alpha']": array, …}."""
        for writer in writers.values():
            writer.flush()
        leaves = jax.tree.leaves_with_path(process_allgather(state, tiled=True))
        saved = {"state": {keystr(path): leaf for path, leaf in leaves}, "update": update, "seconds": seconds}
        saved |= {"best": best, "best_update": best_update}
        if 0 in own:
            write(folders[0] / name, serialization.msgpack_serialize(saved))

    def evaluation(file: str, **notes):
        """Each seed's greedy episodes, into its folder."""
        results = jax.device_get(evaluate(state))
        log({"eval/episodic_return": results["mean_return"]})
        for folder, mean, std in zip(folders, results["mean_return"], results["std_return"], strict=True):
            say(f"evaluation     return {mean:.3f} ± {std:.3f}  {folder}")
        agents = process_allgather(state.replace(opt_state=None, runner=None), tiled=True)
        for i in own:
            result = {name: values[i].tolist() for name, values in results.items()} | {"environment_steps": step}
            write(folders[i] / file, json.dumps(result | notes, indent=1).encode())
            if hasattr(train, "after"):  # where episodes are filmed
                train.after(jax.tree.map(lambda x, i=i: x[i], agents), folders[i])
            if tracked and (film := folders[i] / "film.gif").exists():
                tracked[i].log({"eval/film": importlib.import_module("wandb").Video(str(film))}, step=step)
        process_allgather(np.zeros(1, np.int32))  # a process that ends while another writes would end it too

    def stop(number, _):
        signals.append(number)
        signal.signal(number, signal.SIG_DFL)
        say("\nstopping after this update; a second time stops at once")

    if args.evaluate is not None:
        checkpoint = "best.msgpack" if args.keep_best else "checkpoint.msgpack"
        state, saved = load(folders[0] / checkpoint, like.replace(opt_state=None, runner=None))
        state = jax.device_put(state, layout)
        step = saved["update"] * steps_per_update
        flags = {name: getattr(args, name) for name in sorted({"env"} | EVALUATE_WITH - {"resume", "evaluate"})}
        evaluation("evaluate.json", **flags)
        return
    for i in own:
        folders[i].mkdir(parents=True, exist_ok=args.resume is not None)
    locked = True
    try:
        if 0 in own:
            lock = os.open(folders[0] / "lock", os.O_CREAT | os.O_RDWR)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until this process ends, however it ends
    except BlockingIOError:
        locked = False
    except OSError as error:
        say(f"no lock        two processes could train this run at once: {error}")
    if not process_allgather(np.array([locked]), tiled=True).all():
        fail(f"--resume {args.resume}: another process is training this run")
    try:
        for i in own if args.track else []:
            names = {"name": folders[i].name, "id": folders[i].name, "config": vars(args)}
            tracked[i] = importlib.import_module("wandb").init(**names, resume="allow", reinit="create_new")
    except Exception as error:
        for i in own if args.resume is None else []:
            shutil.rmtree(folders[i])
        fail(f"--track: {error} (WANDB_MODE=offline needs no server)")
    if list(folders[0].glob("checkpoint.*")):
        state, saved = load(folders[0] / "checkpoint.msgpack", like)
        state = jax.device_put(state, layout)
        update, seconds, best, best_update = (saved.get(x) for x in ("update", "seconds", "best", "best_update"))
    else:
        state, update, seconds, best, best_update = init(seeds), 0, 0.0, -math.inf, -1
    step, done = update * steps_per_update, bool(all_finished(state))
    files = [folders[i] / "eval.json" for i in own]
    played = all(f.exists() and len(json.loads(f.read_text())["returns"]) == args.eval_episodes for f in files)
    if process_allgather(np.array([done and played]), tiled=True).all():
        say(f"finished       {folders[-1]}")
        return
    of_one = jax.eval_shape(train.init, seeds[0])
    parameters = count_parameters(of_one.params, of_one.frozen)
    write_config(args, folders, own, parameters)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, stop)
    say(f"devices        {mesh.size} of {devices.size} x {devices[0, 0].device_kind} ({devices[0, 0].platform})")
    say(f"processes      {len(devices)}")
    say(f"of a device    {args.num_seeds // over_seeds} seeds, {args.num_envs // over_envs} environments each")
    say(parameter_table(parameters))
    table = "\n".join(["|flag|value|", "|-|-|", *(f"|{name}|{value}|" for name, value in vars(args).items())])
    say("\n".join(f"run folder     {folder}" for folder in folders))
    for i in own:
        (folders[i] / "eval.json").unlink(missing_ok=True)  # a run with one has finished, and this one goes on
        writers[i] = EventsWriter(str(folders[i] / "events"), filename_suffix=f".{update}")
        restart = SessionLog(status=SessionLog.START)  # readers drop what was logged after the last checkpoint
        writers[i].write_event(Event(step=step + (update > 0), wall_time=time.time(), session_log=restart))
        for summary in (*hparams(vars(args), ["eval/episodic_return"]), text("flags", table)):
            writers[i].write_event(Event(step=step, wall_time=time.time(), summary=summary))
    start = time.perf_counter()
    shardings = {"in_shardings": (layout,), "out_shardings": (layout, everywhere)}
    train_iteration = jax.jit(across(train.train_iteration), donate_argnums=0, **shardings).lower(state).compile()
    compile_seconds = time.perf_counter() - start
    say(f"compile time   {compile_seconds:.1f} s")

    start, saved_at, shown_at, mean_return = time.perf_counter() - seconds, -math.inf, -math.inf, math.nan
    while True:
        due = time.perf_counter() - saved_at >= args.checkpoint_every
        wishes = np.array([signals[0] if signals else 0, due], np.int32)
        number, due = process_allgather(wishes[None], tiled=True).max(0).tolist()  # processes stop and save together
        if number or due or done or best_update == update:
            save("checkpoint.msgpack")
            saved_at = time.perf_counter()
        if best_update == update:  # if killed before this, the resumed run writes it
            save("best.msgpack")
        if number:
            say(f"stopped        go on with --resume {folders[0]}")
            process_allgather(np.zeros(1, np.int32))  # nobody ends before the checkpoint is written
            sys.exit(128 + number)
        if done:
            break
        state, metrics = train_iteration(state)
        while not metrics["charts/episodes"].is_ready():
            time.sleep(0.001)  # signals are answered here
        metrics, done, now = jax.device_get(metrics), bool(all_finished(state)), time.perf_counter()
        update, step, seconds = update + 1, step + steps_per_update, now - start
        for name, values in metrics.items():
            if name.startswith("losses/") and not np.isfinite(values).all():
                for writer in writers.values():
                    writer.flush()
                fail(f"{name} is not finite after update {update}; the checkpoint in {folders[0]} is older", code=1)
        sps = step * args.num_seeds / seconds
        log(metrics | {"charts/SPS": np.full(args.num_seeds, sps)})
        if metrics["charts/episodes"].any():
            mean_return = np.average(metrics["charts/episodic_return"], weights=metrics["charts/episodes"])
        if args.eval_every and step // args.eval_every > (step - steps_per_update) // args.eval_every:
            returns = jax.device_get(evaluate(state)["mean_return"])
            if not done:  # the last agent's is logged by its evaluation
                log({"eval/episodic_return": returns})
            if args.keep_best and returns.mean() > best:
                best, best_update = float(returns.mean()), update
        if now - shown_at > (0.1 if sys.stdout.isatty() else 10) or signals or done:
            shown_at, postfix = now, f"step {step:,}, SPS {sps:,.0f}, return {mean_return:.3f}"
            bar = tqdm.format_meter(update, num_updates, seconds, unit="update", postfix=postfix)
            say(bar, end="\r" if sys.stdout.isatty() and not done else "\n")
    evaluation("eval.json", train_seconds=seconds, compile_seconds=compile_seconds, SPS=step * args.num_seeds / seconds)
    for writer in writers.values():
        writer.close()


# --- end shared block: runs ---


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until training starts, Ctrl-C ends the program at once
    try:
        main()
    except OSError as error:
        fail(f"cannot read or write: {error}", code=1)
    except Exception as error:
        if not jax.distributed.is_initialized():
            raise
        if "Gloo" in str(error) or "NCCL" in str(error):  # by which the devices of several processes communicate
            fail(f"another process has ended, and with it this one; --resume goes on ({error})", code=1)
        sys.excepthook(*sys.exc_info())
        os._exit(1)
