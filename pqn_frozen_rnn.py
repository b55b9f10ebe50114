"""PQN with frozen recurrent networks and reservoirs on POPGym's partially observable vector tasks.

The agent reads [observation, previous action], keeps what matters in a recurrent memory, and learns Q values from its
own rollouts with TD(λ): no replay buffer, no target network. `--memory` swaps the memory by one word; `--frozen` leaves
its weights as they were drawn and trains only what stands around it, on features that are kept from the rollout.

    python pqn_frozen_rnn.py --env RepeatFirstHard --memory lru --frozen
    python pqn_frozen_rnn.py --env StatelessCartPole --memory deepesn --frozen --num-seeds 10

FRN: Does Learning Recurrent Networks Matter in Partially Observable RL? (Wang et al., 2026).
PQN: Simplifying Deep Temporal Difference Learning (Gallici et al., 2025).
"""

import contextlib
import dataclasses
import fcntl
import functools
import importlib
import json
import math
import os
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
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.summary import hparams, text
from tqdm import tqdm

import popjym
from memory import RESERVOIRS, UNITS, count_parameters, describe_units, merge, parameter_table, partition, rows

jax.config.update("jax_default_matmul_precision", "highest")  # TF32 on GPUs changes results


# ------------------------------------------------------------------------------------------------------------- flags
@dataclasses.dataclass
class Args:
    """PQN with frozen recurrent networks and reservoirs on POPGym's vector tasks."""

    # The task.
    env: str = "RepeatPreviousEasy"  # POPGym task; without a difficulty, Easy is meant
    total_timesteps: float = 20_000_000  # environment steps of a seed (FRN Table A4)
    seed: int = 1  # seed of the first run
    num_seeds: int = 1  # seeds that train side by side in one program: seed, seed + 1, …; each has a run folder
    eval_episodes: int = 10  # greedy episodes after training (FRN section 4.1)

    # The agent (FRN Fig. 7, Table A1) and its memory (FRN section 3, appendix B); None is the unit's own default.
    memory: Literal["gru", "lru", "deepesn", "src", "paralesn", "mlp"] = "lru"  # mlp is the same agent without memory
    frozen: bool = False  # leave the memory units as initialised (FRN Algorithm 1)
    frozen_mixers: bool = False  # leave the mixers that follow the units as initialised (FRN section 4.6)
    frozen_input: bool = False  # leave the input projection as initialised (not in FRN)
    hidden_size: int = 256  # width of every hidden layer (FRN Table A1)
    num_blocks: int = 2  # L, recurrent blocks of a unit and a mixer, or layers of a reservoir (FRN appendix E)
    num_readout_blocks: int = 2  # K, hidden blocks of the readout (FRN appendix E)
    update_bias: float | None = None  # gru: bias of the update gate at the start; below 0, a unit forgets more slowly
    r_min: float | None = None  # lru, paralesn: smallest radius of a mode at the start
    r_max: float | None = None  # lru, paralesn: largest radius of a mode at the start
    max_phase: float | None = None  # lru, paralesn: largest phase of a mode at the start
    spectral_radius: float | None = None  # deepesn: largest |eigenvalue| of W_rec
    leak: float | None = None  # deepesn, paralesn: α, the part of the state that is replaced
    recurrent_scaling: float | None = None  # src: σ_r, scale of the state
    input_scaling: float | None = None  # reservoirs: scale of the input
    bias_scaling: float | None = None  # deepesn, paralesn: scale of the biases
    projection_scaling: float | None = None  # src: γ, scale of the random transform
    kernel_size: int | None = None  # paralesn: width of the convolution across the state

    # The algorithm.
    learning_rate: float | None = None  # at the start; None is FRN Table A4's: 1e-5, frozen 5e-5, mlp 5e-7
    final_learning_rate: float = 1e-10  # at the last step, linear in between (FRN Table A4)
    gamma: float = 0.99  # discount (FRN Table A4)
    td_lambda: float = 0.95  # λ of the λ-returns (FRN Table A4)
    max_grad_norm: float = 10.0  # gradients are clipped to this global norm (FRN Table A4)
    start_e: float = 1.0  # ε of the ε-greedy policy at the first step (FRN Table A4)
    end_e: float = 0.05  # ε at the end of the exploration, and after (FRN Table A4)
    exploration_fraction: float = 0.25  # part of total_timesteps in which ε falls, linearly (not in FRN)
    num_envs: int = 16  # parallel environments (FRN Table A4)
    num_steps: int = 128  # steps of each environment in a rollout (FRN Table A4)
    num_minibatches: int = 16  # minibatches of an epoch, each of whole sequences (FRN Table A4)
    update_epochs: int = 4  # passes over each rollout (FRN Table A4)

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
def make_env(args: Args):
    """The number of actions, reset(keys [B]) -> obs, state, and a step of B environments that reset themselves."""
    env, env_params = popjym.make(args.env)

    def step(key, state, action):
        """Also tells how an episode ended, and what the action led to before the environment reset itself."""
        obs, state, reward, done, info = env.step(key, state, action, env_params)
        # Upstream's POPJym knows none of these three: there, every end is terminal.
        terminated, truncated = info.get("terminated", done), info.get("truncated", jnp.zeros_like(done))
        return obs, state, reward, terminated, truncated, info.get("final_observation", obs)

    return env.action_space(env_params).n, jax.vmap(lambda key: env.reset(key, env_params)), jax.vmap(step)


# ------------------------------------------------------------------------------------------------------------- agent
def make_unit(args: Args, **options) -> nn.Module:
    """A memory unit with those of the flags that are its settings."""
    unit = UNITS[args.memory]
    given = {name: value for name, value in vars(args).items() if value is not None} | {"num_layers": args.num_blocks}
    settings = {name: given[name] for name in unit.__dataclass_fields__ if name in given}
    return unit(features=args.hidden_size, freeze=args.frozen, **settings, **options)


def make_stages(args: Args) -> dict[str, bool]:
    """The modules from the input to the output projection, and which of them stay as initialised."""
    if args.memory in RESERVOIRS:  # its layers are one module, which reads the input itself (FRN appendix B)
        return {"memory_0": args.frozen, "output": False}
    stages = {"input": args.frozen_input}
    for i in range(args.num_blocks):
        stages |= {f"memory_{i}": args.frozen, f"mixer_{i}": args.frozen_mixers}
    return stages | {"output": False}


class Agent(nn.Module):
    """[o_t, one-hot a_{t-1}] -> Linear -> L × [memory unit -> mixer] -> Linear -> K × readout -> Q (FRN Fig. 1, 7)."""

    args: Args
    num_actions: int

    @nn.compact
    def __call__(self, carry, obs, previous_action, reset, features=None):
        """obs [T, B, O], previous_action [T, B] (-1: none), reset [T, B] -> carry, Q values [T, B, A], features.

        The features [T, B, F] enter the first module that is trained. Where they are given, all below it is dead code.
        """
        action = jax.nn.one_hot(previous_action, self.num_actions, dtype=obs.dtype)  # no bit set at an episode's start
        x = jnp.concatenate([obs, action], axis=-1)  # [T, B, O + A]
        carry, stages = dict(carry), make_stages(self.args)
        first_trained = list(stages.values()).index(False)
        for i, stage in enumerate(stages):
            x = x.reshape(*reset.shape, -1)  # [T, B, H]
            if i == first_trained:
                x = features = x if features is None else features
            if stage.startswith("memory"):
                carry[stage], x = make_unit(self.args, name=stage)(carry[stage], x, reset)  # reservoirs: [T, B, L · H]
            else:
                x = nn.Dense(self.args.hidden_size, name=stage)(rows(x))  # [T · B, H]
            if stage.startswith("mixer"):
                x = nn.leaky_relu(nn.LayerNorm(use_scale=False, use_bias=False)(x))
        # "output" has no activation (FRN Table A1).
        for i in range(self.args.num_readout_blocks):
            x = nn.Dense(self.args.hidden_size, name=f"readout_{i}")(x)
            x = nn.leaky_relu(nn.LayerNorm(name=f"readout_norm_{i}")(x))
        q_values = nn.Dense(self.num_actions, name="q_values")(x).reshape(*reset.shape, -1)  # [T, B, A]
        return carry, q_values, features

    @nn.nowrap
    def initialize_carry(self, batch_size: int):
        unit, stages = make_unit(self.args), make_stages(self.args)
        return {name: unit.initialize_carry(batch_size) for name in stages if name.startswith("memory")}  # [B, ...]


# --------------------------------------------------------------------------------------------------------- algorithm
@struct.dataclass
class Runner:
    """The environments, and what the agent knows of them before its next action; leaves [B, ...]."""

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
    runner: Runner
    update: jax.Array  # updates so far
    seed: jax.Array  # every random number follows from the seed and the update


def lambda_returns(reward, terminated, done, next_value, gamma, td_lambda):
    """G_t = r_t + γ (1 - terminated_t) [λ G_{t+1} + (1 - λ) V_{t+1}]; at an episode's end, V_{t+1} in place of [].

    All [T, B]. next_value[t] is V_{t+1} = max_a Q(o_{t+1}, a) of the rollout's network, for the o_{t+1} that the action
    led to (never the first one of the next episode).
    """

    def step(next_return, now):
        reward, terminated, done, next_value = now
        future = jnp.where(done, next_value, td_lambda * next_return + (1 - td_lambda) * next_value)
        target = reward + gamma * jnp.where(terminated, 0.0, future)
        return target, target

    return jax.lax.scan(step, next_value[-1], (reward, terminated, done, next_value), reverse=True)[1]


def make_train(args: Args) -> SimpleNamespace:
    """The functions of a run, each of one seed."""
    num_actions, env_reset, env_step = make_env(args)
    agent = Agent(args, num_actions)
    apply = over_devices(agent.apply) if args.shard_envs else agent.apply
    num_updates = args.total_timesteps // (args.num_envs * args.num_steps)
    gradient_steps = args.update_epochs * args.num_minibatches  # of an update
    learning_rate = optax.linear_schedule(args.learning_rate, args.final_learning_rate, num_updates * gradient_steps)
    exploration_steps = max(1, int(args.exploration_fraction * args.total_timesteps))
    epsilon = optax.linear_schedule(args.start_e, args.end_e, exploration_steps)
    optimizer = optax.chain(optax.clip_by_global_norm(args.max_grad_norm), optax.adam(learning_rate))

    def is_frozen(path: tuple[str, ...]) -> bool:
        return make_stages(args).get(path[0], False)

    def q_network(params, frozen, carry, obs, previous_action, reset, features=None):
        return apply({"params": merge(params, frozen)}, carry, obs, previous_action, reset, features)

    def init_runner(key, num_envs: int) -> Runner:
        obs, env_state = env_reset(jax.random.split(key, num_envs))
        no_action, reset = jnp.full(num_envs, -1, jnp.int32), jnp.ones(num_envs, jnp.bool_)
        carry, zeros = agent.initialize_carry(num_envs), jnp.zeros(num_envs, jnp.float32)
        return Runner(env_state, obs, no_action, reset, carry, zeros, zeros.astype(jnp.int32))

    def init(seed) -> TrainState:
        runner_key, agent_key, _, _ = jax.random.split(jax.random.key(seed), 4)
        runner = init_runner(runner_key, args.num_envs)
        params, frozen = partition(agent.init(agent_key, runner.carry, *runner.inputs())["params"], is_frozen)
        return TrainState(params, frozen, optimizer.init(params), runner, jnp.zeros((), jnp.int32), seed)

    def interact(params, frozen, runner: Runner, key, epsilon) -> tuple[Runner, dict]:
        """One ε-greedy step of every environment: the runner after it, and what is to be learned from."""
        explore_key, action_key, env_key = jax.random.split(key, 3)
        carry, q_values, features = q_network(params, frozen, runner.carry, *runner.inputs())  # [1, B, A]
        greedy_action = q_values[0].argmax(-1).astype(jnp.int32)  # [B]
        random_action = jax.random.randint(action_key, greedy_action.shape, 0, num_actions, jnp.int32)
        explore = jax.random.uniform(explore_key, greedy_action.shape, jnp.float32) < epsilon
        action = jnp.where(explore, random_action, greedy_action)
        env_keys = jax.random.split(env_key, len(action))
        obs, env_state, reward, terminated, truncated, final_obs = env_step(env_keys, runner.env_state, action)
        done = terminated | truncated
        episode_return, episode_length = runner.episode_return + reward, runner.episode_length + 1
        transition = dict(
            obs=runner.obs, previous_action=runner.previous_action, reset=runner.reset, q_values=q_values[0],
            action=action, reward=reward, terminated=terminated, truncated=truncated, done=done, final_obs=final_obs,
            carry=carry, features=features[0], episode_return=episode_return, episode_length=episode_length,
        )  # fmt: skip
        runner = Runner(
            env_state=env_state,
            obs=obs,
            previous_action=jnp.where(done, -1, action),
            reset=done,  # the memory is not reset here, but when it reads the first observation of the next episode
            carry=carry,
            episode_return=jnp.where(done, 0, episode_return),
            episode_length=jnp.where(done, 0, episode_length),
        )
        return runner, transition

    def rollout(state: TrainState, key) -> tuple[Runner, dict]:
        """num_steps steps of every environment; transitions [T, B, ...]."""

        def step(runner, now):
            t, key = now
            steps_so_far = (state.update * args.num_steps + t) * args.num_envs
            return interact(state.params, state.frozen, runner, key, epsilon(steps_so_far))

        steps = jnp.arange(args.num_steps, dtype=jnp.int32), jax.random.split(key, args.num_steps)
        return jax.lax.scan(step, state.runner, steps)

    def compute_targets(params, frozen, runner: Runner, transitions: dict):
        """λ-returns [T, B] from the Q values of the rollout itself; `runner` is the one after it."""
        _, last_q_values, _ = q_network(params, frozen, runner.carry, *runner.inputs())  # [1, B, A]
        next_value = jnp.concatenate([transitions["q_values"], last_q_values])[1:].max(-1)  # [T, B]

        def at_time_limits():
            """A time limit is not an end: value what was seen last, with the memory as it was before its reset."""
            seen = (transitions["carry"], transitions["final_obs"], transitions["action"])
            carry, obs, action = jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(-1, *x.shape[2:]), seen)  # [B·T, ...]
            no_reset = jnp.zeros((1, len(action)), jnp.bool_)
            _, q_values, _ = q_network(params, frozen, carry, obs[None], action[None], no_reset)  # [1, B·T, A]
            return jnp.where(transitions["truncated"], q_values.max(-1).reshape(next_value.T.shape).T, next_value)

        next_value = jax.lax.cond(transitions["truncated"].any(), at_time_limits, lambda: next_value)
        ends = transitions["terminated"], transitions["done"]
        return lambda_returns(transitions["reward"], *ends, next_value, args.gamma, args.td_lambda)

    def loss(params, frozen, carry, transitions: dict, targets):
        """Squared TD error of whole sequences [T, b], from the memory [b] that the rollout began with."""
        inputs = transitions["obs"], transitions["previous_action"], transitions["reset"]
        _, q_values, _ = q_network(params, frozen, carry, *inputs, transitions["features"])  # [T, b, A]
        q_taken = jnp.take_along_axis(q_values, transitions["action"][..., None], axis=-1)[..., 0]  # [T, b]
        return 0.5 * jnp.square(q_taken - targets).mean(), q_taken.mean()

    def train_iteration(state: TrainState) -> tuple[TrainState, dict[str, jax.Array]]:
        """Rollout, targets, epochs."""
        _, _, training_key, _ = jax.random.split(jax.random.key(state.seed), 4)
        rollout_key, epoch_key = jax.random.split(jax.random.fold_in(training_key, state.update))
        runner, transitions = rollout(state, rollout_key)
        targets = compute_targets(state.params, state.frozen, runner, transitions)

        def minibatch_step(learner, envs):
            params, opt_state = learner
            carry = jax.tree.map(lambda x: pick(x, envs, axis=0), state.runner.carry)
            minibatch = jax.tree.map(lambda x: pick(x, envs, axis=1), (transitions, targets))  # [T, b, ...]
            value_and_grad = jax.value_and_grad(loss, has_aux=True)
            (td_loss, q_mean), grads = value_and_grad(params, state.frozen, carry, *minibatch)
            updates, opt_state = optimizer.update(grads, opt_state)
            losses = {"td_loss": td_loss, "q_values": q_mean, "grad_norm": optax.tree.norm(grads)}
            return (optax.apply_updates(params, updates), opt_state), losses

        minibatches = shuffle(args, epoch_key)
        (params, opt_state), losses = jax.lax.scan(minibatch_step, (state.params, state.opt_state), minibatches)
        done = transitions["done"]
        episodes = done.sum(dtype=jnp.int32)  # that ended in this rollout
        weights = done.astype(jnp.float32) / jnp.maximum(episodes, 1)  # of a mean over them
        metrics = {f"losses/{name}": values.mean() for name, values in losses.items()} | {
            "losses/parameter_norm": optax.tree.norm(params),  # finite only if all of them are
            "charts/learning_rate": learning_rate(state.update * gradient_steps),
            "charts/epsilon": epsilon(state.update * args.num_steps * args.num_envs),
            "charts/episodes": episodes,
            "charts/episodic_return": (transitions["episode_return"] * weights).sum(),
            "charts/episodic_length": (transitions["episode_length"] * weights).sum(),
        }
        metrics |= describe_units(functools.partial(make_unit, args), merge(state.params, state.frozen))
        return TrainState(params, state.frozen, opt_state, runner, state.update + 1, state.seed), metrics

    def finished(state: TrainState):
        return state.update >= num_updates

    # ---------------------------------------------------------------------------------------------------- evaluation
    def evaluate(state: TrainState) -> dict[str, jax.Array]:
        """Returns and lengths [E] of eval_episodes greedy episodes, played side by side, and what they come to."""

        def step(now):
            runner, key, finished, returns, lengths = now
            key, step_key = jax.random.split(key)
            runner = runner.replace(reset=runner.reset | args.forget)
            runner, transition = interact(state.params, state.frozen, runner, step_key, epsilon=0.0)
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

    return SimpleNamespace(
        init=init, q_network=q_network, epsilon=epsilon, rollout=rollout, compute_targets=compute_targets, loss=loss,
        train_iteration=train_iteration, finished=finished, evaluate=evaluate,
    )  # fmt: skip


# Flags that may differ from the run's when it is resumed, and when it is evaluated.
CHANGEABLE = {"resume", "total_timesteps", "checkpoint_every", "eval_episodes", "eval_every", "keep_best", "track"}
EVALUATE_WITH = {"resume", "evaluate", "env", "eval_episodes", "forget", "keep_best"}


def check_args(args: Args):
    """Fills in what depends on other flags; ends the program where a flag makes no sense."""

    def check(holds: bool, name: str, right: str):
        if not holds:
            fail(f"--{name.replace('_', '-')} {getattr(args, name)}: {right}")

    try:
        args.env = getattr(popjym, "resolve", str)(args.env)  # RepeatFirst is RepeatFirstEasy; upstream's has only make
        env, env_params = popjym.make(args.env)
    except ValueError as error:
        fail(f"--env {args.env}: {error}")
    check(hasattr(env.action_space(env_params), "n"), "env", "its actions are continuous, and PQN needs discrete ones")
    if args.learning_rate is None:
        args.learning_rate = 5e-7 if args.memory == "mlp" else 5e-5 if args.frozen else 1e-5
    check(float(args.total_timesteps).is_integer(), "total_timesteps", "must be a whole number")
    args.total_timesteps = int(args.total_timesteps)  # which may be given as 1e6
    settings = {name for unit in UNITS.values() for name in unit.__dataclass_fields__}  # which the units check
    for name, value in vars(args).items():
        if type(value) in (int, float) and name not in settings | {"seed"}:
            above = 0 if type(value) is int or name in ("max_grad_norm", "eval_every") else -1e-30  # 0 is allowed
            check(above < value < 2**31, name, "must be a positive number below 2^31")
    for name in ("gamma", "td_lambda", "start_e", "end_e", "exploration_fraction"):
        check(getattr(args, name) <= 1, name, "must be from 0 to 1")
    check(0 <= args.seed <= 2**31 - args.num_seeds, "seed", "must be from 0 to 2^31 - num_seeds")
    check(args.num_envs % args.num_minibatches == 0, "num_envs", f"no multiple of {args.num_minibatches} minibatches")
    rollout = args.num_envs * args.num_steps
    check(args.total_timesteps >= rollout, "total_timesteps", f"less than one rollout of {rollout} steps")
    check(not (args.frozen and args.memory == "mlp"), "frozen", "--memory mlp has no memory unit to freeze")
    around = {"frozen_mixers", "frozen_input"} if args.memory in RESERVOIRS else set()
    for name in vars(args).keys() & (settings - UNITS[args.memory].__dataclass_fields__.keys() | around):
        check(getattr(args, name) == getattr(Args, name), name, f"--memory {args.memory} has no such part")
    check(args.resume is None or args.evaluate is None, "resume", "give this or --evaluate")
    check(not args.forget or args.evaluate is not None, "forget", "only with --evaluate")
    check(not args.keep_best or args.eval_every is not None, "keep_best", "only with --eval-every")
    check("/" not in args.exp_name and "__" not in args.exp_name, "exp_name", "must have no / and no __")
    check("://" not in args.run_dir, "run_dir", "must be a folder of this machine")
    try:
        make_unit(args)
    except ValueError as error:
        fail("--" + str(error).partition(": ")[2].replace("features", "hidden_size").replace("_", "-"))


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
