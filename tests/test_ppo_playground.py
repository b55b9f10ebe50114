"""ppo_playground.py from the inside: what is hidden, time limits, the policy, statistics, a film; and a whole run."""

import functools
import inspect
import io
import json
import os
import re
import signal
import subprocess
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import optax
import pytest
import scipy.stats
from brax.training.agents.ppo.losses import compute_ppo_loss
from mujoco import mjx
from mujoco_playground import dm_control_suite
from mujoco_playground.config.dm_control_suite_params import brax_ppo_config
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_ppo_memorychain import advantages_loop
from test_runs import checkpoint, points

import ppo_playground
from memory import count_parameters, merge

TINY = dict(
    env="PendulumSwingup", hidden_size=16, num_envs=4, num_steps=16, num_minibatches=2, update_epochs=2,
    total_timesteps=4 * 16 * 8,
)  # fmt: skip
FRN_TASKS = ["BallInCup", "CheetahRun", "ReacherHard", "WalkerWalk"]


def make_args(**changes) -> ppo_playground.Args:
    args = ppo_playground.Args(**changes)
    ppo_playground.check_args(args)
    return args


# ------------------------------------------------------------------------------------------------- what is hidden
class Simulated:
    """A task in MuJoCo's own C engine, where any pose with any velocity can be looked at without a step."""

    def __init__(self, name: str):
        self.env = dm_control_suite.load(name, config_overrides={"impl": "jax"})
        self.model = self.env.mj_model
        self.model.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_CONTACT  # any pose is allowed
        self.rng = np.random.default_rng(0)

    def draw(self):
        qpos = np.array(self.model.qpos0)
        mujoco.mj_integratePos(self.model, qpos, self.rng.normal(size=self.model.nv), 1.0)
        return qpos, self.rng.normal(size=self.model.nv)

    def observe(self, qpos, qvel):
        """MuJoCo's data and what the task would show of it."""
        data = mujoco.MjData(self.model)
        data.qpos[:], data.qvel[:] = qpos, qvel
        mujoco.mj_forward(self.model, data)
        return data, np.asarray(self.env._get_obs(mjx.put_data(self.model, data, impl="jax"), {}))


simulated = functools.cache(Simulated)


def quick(names, *chosen):
    """All of them as parameters; those that are not chosen are slow."""
    return [name if name in chosen else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", quick(ppo_playground.POSITIONS, *FRN_TASKS))
def test_positions_are_what_the_pose_decides_and_velocities_are_0_at_rest(name):
    task, number = simulated(name), ppo_playground.POSITIONS[name]
    (qpos, qvel), (other, _) = task.draw(), task.draw()
    _, still = task.observe(qpos, 0 * qvel)
    _, moving = task.observe(qpos, qvel)
    _, elsewhere = task.observe(other, 0 * qvel)
    assert (still[:number] == moving[:number]).all() and (still[:number] != elsewhere[:number]).all()
    assert (moving[number:] != 0).all() and (still[number:] == 0).all() and (elsewhere[number:] == 0).all()


@pytest.mark.parametrize("name", FRN_TASKS)
def test_the_tasks_of_frn_show_these_parts_of_the_simulation(name):
    task, number = simulated(name), ppo_playground.POSITIONS[name]
    data, obs = task.observe(*task.draw())
    if name == "BallInCup":
        positions = data.qpos
    elif name == "CheetahRun":
        positions = data.qpos[1:]
    elif name == "ReacherHard":
        finger, target = data.geom("finger").xpos, data.geom("target").xpos
        positions = np.concatenate([data.qpos, (target - finger)[:2]])
    else:
        matrix = data.xmat.reshape(-1, 3, 3)[1:]
        height = data.body("torso").xmat.reshape(3, 3)[2, 2]
        positions = np.concatenate([np.stack([matrix[:, 0, 0], matrix[:, 0, 2]], -1).ravel(), [height]])
    np.testing.assert_allclose(obs[:number], positions, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(obs[number:], data.qvel, rtol=1e-5)


OTHERS = ["FingerSpin", "FingerTurnEasy", "FingerTurnHard", "HopperHop", "HopperStand"]


def test_every_task_is_in_the_table_or_mixes_in_what_is_neither(capfd):
    assert ppo_playground.POSITIONS.keys() | set(OTHERS) == set(dm_control_suite.ALL_ENVS)
    for name in OTHERS:
        make_args(env=name, observe="all")
        with pytest.raises(SystemExit):
            make_args(env=name, observe="velocities")
        assert f"--observe velocities: {name}" in capfd.readouterr().err
    assert all(dm_control_suite.get_default_config(name).action_repeat == 1 for name in dm_control_suite.ALL_ENVS)


@pytest.mark.parametrize("name", quick(OTHERS, "HopperHop"))
def test_what_is_neither_is_touch(name):
    task = simulated(name)
    touch = sum(task.model.sensor_type == mujoco.mjtSensor.mjSENS_TOUCH)
    _, obs = task.observe(*task.draw())
    assert touch > 0 and (obs == 0).sum() >= touch  # without contacts, what is touched is 0


SIZES = dict(BallInCup=(8, 4, 4), CheetahRun=(17, 8, 9), ReacherHard=(6, 4, 2), WalkerWalk=(24, 15, 9))


@pytest.mark.parametrize("name", quick(SIZES, "ReacherHard"))
def test_hidden_entries_are_removed(name, monkeypatch):
    number, positions, velocities = SIZES[name]

    class Numbers:  # an observation of 0, 1, 2, …, without physics
        def __init__(self, env):
            self.env, self.mj_model, self.action_size = env, env.mj_model, env.action_size

        def reset(self, key):
            data = mjx.make_data(self.mj_model, impl="jax")
            return ppo_playground.State(data, jnp.arange(1.0 * number), 0.0, 0.0, {}, {})

        def step(self, state, action):
            return state.replace(obs=10 + jnp.arange(1.0 * number), reward=0.0, done=0.0)

    assert simulated(name).observe(*simulated(name).draw())[1].shape == (number,)
    env = simulated(name).env
    monkeypatch.setattr(dm_control_suite, "load", lambda *x: Numbers(env))
    for observe, entries in (
        ("all", np.arange(number)),
        ("positions", np.arange(positions)),
        ("velocities", np.arange(positions, positions + velocities)),
    ):
        action_size, reset, step = ppo_playground.make_env(make_args(env=name, observe=observe))
        keys = jax.random.split(jax.random.key(0), 2)
        obs, state = reset(keys)
        after, *_, final_obs = step(keys, state, jnp.zeros((2, action_size)))
        np.testing.assert_array_equal(obs, np.tile(entries, (2, 1)))
        np.testing.assert_array_equal(after, np.tile(10 + entries, (2, 1)))
        np.testing.assert_array_equal(final_obs, after)


# ---------------------------------------------------------------------------------------------- physics and resets
LIMIT, B = 7, 3


@pytest.fixture(scope="module")
def cartpole():
    """Ours with a time limit of 7 steps, and playground's own functions; compiled once."""
    with pytest.MonkeyPatch.context() as patch:
        config = dm_control_suite.get_default_config("CartpoleSwingup")
        config.episode_length = LIMIT
        patch.setattr(dm_control_suite, "get_default_config", lambda name: config)
        args = make_args(env="CartpoleSwingup", observe="all")
        _, reset, step = ppo_playground.make_env(args)
        env, _ = ppo_playground.make_task(args)
    choose = jax.jit(jax.vmap(lambda end, new, old: jax.tree.map(lambda *x: jnp.where(end, *x), new, old)))
    own = SimpleNamespace(reset=jax.jit(jax.vmap(env.reset)), step=jax.jit(jax.vmap(env.step)), choose=choose)
    return SimpleNamespace(reset=jax.jit(reset), step=jax.jit(step), own=own)


@pytest.mark.slow
def test_an_environment_ends_at_its_time_limit_shows_its_last_state_and_starts_anew_from_a_key_of_its_own(cartpole):
    keys = jax.random.split(jax.random.key(0), B)
    obs, state = cartpole.reset(keys)
    theirs = cartpole.own.reset(keys)
    np.testing.assert_array_equal(obs, theirs.obs)
    steps = np.array([0, 2, 5])  # they do not end together
    state["steps"] = jnp.asarray(steps, jnp.int32)
    rng, starts = np.random.default_rng(0), [np.asarray(obs)]
    for i in range(2 * LIMIT):
        action = jnp.asarray(rng.uniform(-1, 1, size=(B, 1)), jnp.float32)
        keys = jax.random.split(jax.random.key(i), B)
        obs, state, reward, terminated, truncated, final_obs = cartpole.step(keys, state, action)
        theirs = cartpole.own.step(theirs, action)
        steps += 1
        np.testing.assert_array_equal(truncated, steps == LIMIT)
        np.testing.assert_allclose(final_obs, theirs.obs, rtol=1e-5, atol=1e-6)  # also of the step that ended it
        np.testing.assert_allclose(reward, theirs.reward, rtol=1e-5)
        assert not terminated.any()
        end = steps == LIMIT
        fresh = cartpole.own.reset(jax.vmap(jax.random.split)(keys)[:, 1])
        theirs, steps = cartpole.own.choose(end, fresh, theirs), np.where(end, 0, steps)
        np.testing.assert_allclose(obs, theirs.obs, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(state["steps"], steps)
        starts += [np.asarray(obs)[end]]
    starts = np.concatenate(starts)
    assert len(starts) == 3 * B and len(np.unique(starts[:, 0])) == len(starts)  # cart positions


@pytest.mark.slow
def test_a_simulation_that_diverged_ends_in_a_terminal_state_alone(cartpole):
    keys = jax.random.split(jax.random.key(0), B)
    _, state = cartpole.reset(keys)
    state["qpos"] = state["qpos"].at[1].set(jnp.nan)
    state["steps"] = state["steps"] + LIMIT - 1  # its time limit as well
    obs, state, reward, terminated, truncated, final_obs = cartpole.step(keys, state, jnp.zeros((B, 1)))
    assert terminated.tolist() == [False, True, False] and truncated.all()
    assert reward[1] == 0 and jnp.isfinite(reward).all() and jnp.isfinite(obs).all()
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(state)) and jnp.isnan(final_obs[1]).any()


@pytest.mark.slow
def test_an_action_is_clipped_where_it_meets_the_environment(cartpole):
    keys = jax.random.split(jax.random.key(0), B)
    _, state = cartpole.reset(keys)
    after = [
        cartpole.step(keys, state, jnp.full((B, 1), action, jnp.float32))[1]["qvel"]
        for action in (5.0, 1.0, 0.5, -1.0, -9.0)
    ]
    np.testing.assert_array_equal(after[0], after[1])
    np.testing.assert_array_equal(after[3], after[4])
    assert (after[1] != after[2]).all() and (after[1] != after[3]).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", FRN_TASKS)
def test_what_is_kept_between_steps_is_all_that_the_physics_needs(name):
    """Contacts and warm starts too: 200 steps are those of playground with all of its data."""
    action_size, reset, step = ppo_playground.make_env(args := make_args(env=name, observe="all"))
    env, _ = ppo_playground.make_task(args)
    keys = jax.random.split(jax.random.key(0), B)

    def both(x, action):
        state, theirs = x
        obs, state, reward, *_ = step(keys, state, action)
        theirs = jax.vmap(env.step)(theirs, action)
        return (state, theirs), (obs, theirs.obs, reward, theirs.reward)

    @jax.jit
    def play(actions):
        return jax.lax.scan(both, (reset(keys)[1], jax.vmap(env.reset)(keys)), actions)[1]

    actions = jax.random.uniform(jax.random.key(1), (200, B, action_size), minval=-1, maxval=1)
    obs, own_obs, reward, own_reward = play(actions)
    np.testing.assert_allclose(obs, own_obs, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(reward, own_reward, rtol=1e-3, atol=1e-3)


def test_with_64_bits_by_default_types_are_32_bits_wide_and_no_key_is_used_twice():
    """Those of the physics too. Nothing is compiled."""
    with jax.enable_x64(True), jax.debug_key_reuse(True):
        train = ppo_playground.make_train(make_args(**TINY))
        state = jax.eval_shape(train.init, jax.ShapeDtypeStruct((), jnp.int32))
        results = jax.jit(train.train_iteration).lower(state).out_info  # raises KeyReuseError
    assert {str(x.dtype) for x in jax.tree.leaves((state, results))} == {"float32", "int32", "bool"}


# ------------------------------------------------------------------------------------------- the algorithm, scripted
def scripted_env(args):
    """Episodes of 3, 4 and 5 steps that end by a time limit, a terminal state, and both; the observation tells all."""

    def observe(state):
        one_hot = jax.nn.one_hot(state["episode"] % 3, 3)
        return jnp.concatenate([one_hot, jnp.sin(state["t"][..., None] + jnp.arange(3.0))], axis=-1)

    def reset(keys):
        state = {"episode": jnp.arange(len(keys)), "t": jnp.zeros(len(keys), jnp.int32)}
        state["qpos"] = 1.0 * state["episode"][:, None]
        return observe(state), state

    def step(keys, state, action):
        state = {"episode": state["episode"], "t": state["t"] + 1, "qpos": state["qpos"]}
        end = state["t"] == 3 + state["episode"] % 3
        episode = jnp.where(end, state["episode"] + 1, state["episode"])
        after = {"episode": episode, "t": jnp.where(end, 0, state["t"]), "qpos": state["qpos"] + 10}
        reward = jnp.cos(action).sum(-1) + state["t"]
        terminated, truncated = end & (state["episode"] % 3 != 0), end & (state["episode"] % 3 != 1)
        return observe(after), after, reward, terminated, truncated, observe(state)

    return 2, reset, step


SCRIPTED = {
    "frozen-gru-normalized": dict(memory="gru", frozen=True),
    "lru-clipped": dict(memory="lru", normalize_observations=False, clip_vloss=True, max_grad_norm=0.1),
}


@pytest.fixture(params=quick(SCRIPTED, "frozen-gru-normalized"), scope="module")
def scripted(request):
    """Three rollouts with the same parameters: the states before them, their transitions, and the compiled parts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ppo_playground, "make_env", scripted_env)
        args = make_args(**TINY | dict(clip_coef=0.1, ent_coef=0.3) | SCRIPTED[request.param])
        train = ppo_playground.make_train(args)
    names = ("init", "rollout", "network", "compute_advantages", "loss", "train_iteration", "evaluate")
    run = SimpleNamespace(args=args, train=train, **{name: jax.jit(getattr(train, name)) for name in names})
    state, run.states, run.transitions = run.init(jnp.int32(0)), [], []
    state.params["log_std"] = jnp.array([0.3, -0.5])
    state.params["mean"]["kernel"] = 30 * state.params["mean"]["kernel"]  # the first ones are near 0
    for i in range(3):
        runner, transitions = run.rollout(state, jax.random.key(i))
        run.states.append(state)
        run.transitions.append(transitions)
        statistics = state.statistics.update(transitions["obs"]) if args.normalize_observations else None
        state = state.replace(runner=runner, statistics=statistics)
    run.runner = state.runner
    return run


def agent_of(state):
    return state.params, state.frozen, state.statistics


def test_advantages_bootstrap_a_time_limit_from_the_last_observation_and_the_memory_before_its_reset(scripted):
    before, t = scripted.states[-1], scripted.transitions[-1]  # begins in the middle of episodes
    assert not t["reset"][0].all()
    found = scripted.compute_advantages(*agent_of(before), scripted.runner, t)
    assert bool((t["truncated"] & ~t["terminated"]).any() & (t["truncated"] & t["terminated"]).any())
    t = jax.device_get(t)
    for b in range(4):  # one environment and one step at a time, with the memory carried by hand
        carry = jax.tree.map(lambda x, b=b: x[b : b + 1], before.runner.carry)
        value, next_value = np.zeros((2, 16))
        for i in range(16):
            obs, reset = (jnp.asarray(t[name][i, b])[None, None] for name in ("obs", "reset"))
            carry, _, v = scripted.network(*agent_of(before), carry, obs, reset)
            led_to = jnp.asarray(t["final_obs"][i, b])[None, None]
            _, _, next_v = scripted.network(*agent_of(before), carry, led_to, jnp.zeros((1, 1), bool))
            value[i], next_value[i] = v[0, 0], next_v[0, 0]
        x = (t["reward"][:, b], t["terminated"][:, b], t["done"][:, b], value, next_value)
        expected = advantages_loop(*x, scripted.args.gamma, scripted.args.gae_lambda)
        np.testing.assert_allclose(found[:, b], expected, rtol=1e-4, atol=1e-4)


def test_the_ratio_of_the_first_minibatch_is_1(scripted):
    state, t = scripted.states[-1], scripted.transitions[-1]
    _, losses = scripted.loss(*agent_of(state), state.runner.carry, t, t["reward"], t["value"] + 0.5)
    assert abs(losses["approx_kl"]) < 1e-6 and losses["clipfrac"] == 0
    np.testing.assert_allclose(losses["policy_loss"], 0, atol=1e-5)  # minus the mean of normalised advantages
    np.testing.assert_allclose(losses["value_loss"], 0.5 * 0.25, rtol=1e-3)


def test_actions_are_drawn_from_the_policy_and_their_log_probability_is_scipys(scripted):
    state, t = scripted.states[-1], scripted.transitions[-1]
    _, (mean, log_std), _ = scripted.network(*agent_of(state), state.runner.carry, t["obs"], t["reset"])
    std = np.exp(np.asarray(log_std, np.float64))
    expected = scipy.stats.norm(np.asarray(mean, np.float64), std).logpdf(t["action"]).sum(-1)
    np.testing.assert_allclose(t["log_prob"], expected, rtol=1e-4, atol=1e-4)
    noise = ((t["action"] - mean) / std).reshape(-1, 2)
    assert scipy.stats.kstest(noise.ravel(), "norm").pvalue > 1e-3 and abs(np.corrcoef(noise.T)[0, 1]) < 0.4
    assert (np.abs(t["action"]) > 1).any(), "stored as drawn, not as clipped"


def test_the_loss_is_cleanrls(scripted):
    args, state, t = scripted.args, scripted.states[-1], dict(scripted.transitions[-1])
    rng, shape = np.random.default_rng(0), t["value"].shape
    t["log_prob"] = t["log_prob"] + 0.3 * rng.normal(size=shape)  # as if the network had moved since
    t["value"] = t["value"] + 0.3 * rng.normal(size=shape)
    advantages, returns = jnp.asarray(rng.normal(size=(2, *shape)), jnp.float32)
    total, losses = scripted.loss(*agent_of(state), state.runner.carry, t, advantages, returns)
    _, policy, value = scripted.network(*agent_of(state), state.runner.carry, t["obs"], t["reset"])
    mean, log_std = (np.asarray(x, np.float64) for x in policy)
    policy = scipy.stats.norm(mean, np.exp(log_std))
    ratio = np.exp(policy.logpdf(t["action"]).sum(-1) - t["log_prob"])
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    policy_loss = np.maximum(-advantages * ratio, -advantages * np.clip(ratio, 0.9, 1.1)).mean()
    clipped = t["value"] + np.clip(value - t["value"], -0.1, 0.1)
    error, clipped_error = (value - returns) ** 2, (clipped - returns) ** 2
    assert (clipped_error > error).any()
    value_loss = 0.5 * (np.maximum(error, clipped_error) if args.clip_vloss else error).mean()
    entropy = policy.entropy()[0, 0].sum()
    expected = {
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy": entropy,
        "approx_kl": (ratio - 1 - np.log(ratio)).mean(),
        "clipfrac": (np.abs(ratio - 1) > 0.1).mean(),
    }
    assert losses.keys() == expected.keys() and 0.1 < expected["clipfrac"] < 0.95
    for name in expected:
        np.testing.assert_allclose(losses[name], expected[name], rtol=1e-3, atol=1e-5, err_msg=name)
    np.testing.assert_allclose(total, policy_loss - 0.3 * entropy + args.vf_coef * value_loss, rtol=1e-3)


def test_an_update_trains_what_is_not_frozen_and_tells_of_the_episodes_that_ended_in_it(scripted):
    state = scripted.states[0]
    after, metrics = scripted.train_iteration(state)
    for module, before in merge(state.params, state.frozen).items():
        same = jax.tree.map(np.array_equal, before, merge(after.params, after.frozen)[module])
        still = scripted.args.frozen and module.startswith("memory")
        assert all(jax.tree.leaves(same)) if still else not any(jax.tree.leaves(same)), module
    training_key = jax.random.split(jax.random.key(0), 4)[2]
    rollout_key, _ = jax.random.split(jax.random.fold_in(training_key, 0))
    _, t = scripted.rollout(state, rollout_key)
    assert metrics["charts/episodes"] == t["done"].sum() > 10
    for name in ("return", "length"):
        expected = np.asarray(t[f"episode_{name}"])[np.asarray(t["done"])].mean()
        np.testing.assert_allclose(metrics[f"charts/episodic_{name}"], expected, rtol=1e-5)
    assert all(np.isfinite(value) for value in metrics.values())


def test_statistics_are_those_of_all_observations_so_far_and_change_between_rollouts_only(scripted):
    states, transitions = scripted.states, scripted.transitions
    if not scripted.args.normalize_observations:
        assert all(state.statistics is None for state in states)
        return
    seen = np.concatenate([np.asarray(t["obs"], np.float64).reshape(-1, 6) for t in transitions[:2]])
    statistics = states[2].statistics
    assert statistics.count == len(seen) == 2 * 64
    np.testing.assert_allclose(statistics.mean, seen.mean(0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(statistics.var, seen.var(0), rtol=1e-4, atol=1e-5)
    obs = transitions[2]["obs"]
    expected = np.clip((obs - seen.mean(0)) / np.sqrt(seen.var(0) + 1e-8), -10, 10)
    np.testing.assert_allclose(statistics.normalize(obs), expected, rtol=1e-3, atol=1e-3)
    after, _ = scripted.train_iteration(states[0])
    assert after.statistics.count == 64 and (states[0].statistics.var == 1).all()
    np.testing.assert_array_equal(states[0].statistics.normalize(obs), obs)  # at first, as they are


def test_no_key_is_used_twice_in_an_evaluation(scripted):
    with jax.debug_key_reuse(True):
        jax.jit(lambda state: scripted.train.evaluate(state)).lower(scripted.states[0])  # raises KeyReuseError


def test_evaluation_takes_the_mean_action_to_the_end_of_each_first_episode(scripted):
    result = scripted.evaluate(scripted.states[-1])
    again = scripted.evaluate(scripted.states[-1].replace(seed=jnp.int32(1)))
    np.testing.assert_array_equal(result["returns"], again["returns"])  # neither actions nor, here, starts are drawn
    assert result["lengths"].tolist() == [3 + i % 3 for i in range(10)] and result["mean_length"] == 3.9
    steps = np.array([sum(range(1, n + 1)) for n in result["lengths"]])
    assert (np.abs(result["returns"] - steps) <= 2 * result["lengths"]).all()  # a cosine for each action
    np.testing.assert_allclose(result["mean_return"], np.mean(result["returns"]), rtol=1e-6)
    np.testing.assert_allclose(result["std_return"], np.std(result["returns"]), rtol=1e-5)


# ------------------------------------------------------------------------------------------------------- the agent
@functools.cache
def ball_in_cup():
    """Its environments, whose reset is traced once."""
    action_size, reset, step = ppo_playground.make_env(make_args(env="BallInCup"))
    return action_size, jax.jit(reset), step


@pytest.mark.parametrize("memory, total, unit", [("gru", 1_385_221, 787_968), ("lru", 1_123_589, 526_336)])
def test_table_1_of_frn(memory, total, unit, monkeypatch):
    env = ball_in_cup()
    monkeypatch.setattr(ppo_playground, "make_env", lambda args: env)
    for frozen in (False, True):
        train = ppo_playground.make_train(make_args(env="BallInCup", memory=memory, frozen=frozen))
        state = jax.eval_shape(train.init, jnp.int32(0))
        numbers = count_parameters(state.params, state.frozen)
        assert numbers["all"] == {"total": total, "trainable": total - unit * frozen, "frozen": unit * frozen}
        assert numbers["log_std"]["total"] == 2 and numbers["all"]["trainable"] == (597_253 if frozen else total)


def small_agent(memory: str, obs):
    """An agent, its parameters, and what it is applied to: three steps of four environments."""
    agent = ppo_playground.Agent(make_args(memory=memory, hidden_size=32, num_blocks=1), 2)
    carry, reset = agent.initialize_carry(4), jnp.arange(12).reshape(3, 4) < 4
    return agent, jax.jit(agent.init)(jax.random.key(0), carry, obs, reset)["params"], (carry, obs, reset)


@pytest.mark.parametrize("memory", quick(["gru", "lru", "mlp"], "gru"))
def test_an_observation_of_zeros_does_not_blow_up_the_gradient(memory):
    """BallInCup by positions and most tasks by velocities start with one. With biases of 0, up to 1e12."""
    agent, params, inputs = small_agent(memory, jnp.zeros((3, 4, 5)))

    def output(params):
        _, (mean, _), value = agent.apply({"params": params}, *inputs)
        return (mean.sum(-1) + value).mean()

    assert optax.tree.norm(jax.jit(jax.grad(output))(params)) < 100


def test_the_output_projection_is_affine_and_both_readouts_read_it():
    """Linear(256) without an activation (FRN Table A1)."""
    rng = np.random.default_rng(0)
    agent, params, inputs = small_agent("mlp", jnp.asarray(rng.normal(size=(3, 4, 5)), jnp.float32))
    _, seen = jax.jit(functools.partial(agent.apply, capture_intermediates=True))({"params": params}, *inputs)
    seen = {name: calls["__call__"][0] for name, calls in seen["intermediates"].items() if "__call__" in calls}
    normed = np.asarray(seen["LayerNorm_0"], np.float64)  # the mixer's
    mixed = np.where(normed > 0, normed, 0.01 * normed)
    projected = mixed @ params["output"]["kernel"] + params["output"]["bias"]
    assert (projected < -0.1).any()
    np.testing.assert_allclose(seen["output"], projected, rtol=1e-4, atol=1e-5)
    for name in ("actor_0", "critic_0"):
        expected = projected @ params[name]["kernel"] + params[name]["bias"]
        np.testing.assert_allclose(seen[name], expected, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------------------------- the flags
def test_the_defaults_are_those_of_table_a6():
    published = dict(
        final_learning_rate=1e-8, gamma=0.995, gae_lambda=0.95, max_grad_norm=None, clip_coef=0.3, ent_coef=0.01,
        vf_coef=0.5, num_envs=16, num_steps=128, num_minibatches=4, update_epochs=4, total_timesteps=60_000_000,
        num_blocks=2, num_readout_blocks=3, hidden_size=256, impl="jax",
    )  # fmt: skip
    for flags in ({}, {"frozen": True}, {"memory": "mlp"}, {"memory": "lru"}):
        args = vars(make_args(**flags))
        assert args["env"] == "BallInCup-positions"
        assert {name: args[name] for name in published} == published and 1e-5 <= args["learning_rate"] <= 5e-5


def test_where_table_a6_agrees_with_playgrounds_own_settings_what_it_does_not_name_is_theirs():
    theirs, args = brax_ppo_config("WalkerWalk"), make_args(env="WalkerWalk")
    same = (theirs.discounting, theirs.entropy_cost, theirs.num_timesteps)
    assert same == (args.gamma, args.ent_coef, args.total_timesteps)
    brax = {name: x.default for name, x in inspect.signature(compute_ppo_loss).parameters.items()}
    same = (brax["clipping_epsilon"], brax["gae_lambda"], brax["vf_coefficient"], brax["normalize_advantage"])
    assert same == (args.clip_coef, args.gae_lambda, args.vf_coef, args.norm_adv)
    assert theirs.normalize_observations == args.normalize_observations
    assert (brax["clipping_epsilon_value"] is not None) == args.clip_vloss


@pytest.mark.parametrize("frozen", [False, True])
def test_flags_filled_in_are_the_same_again_when_resumed_and_a_unit_has_the_same_defaults_frozen(frozen):
    args = make_args(env="WalkerWalk", observe="velocities", memory="lru", frozen=frozen)
    again = ppo_playground.Args(**vars(args))
    ppo_playground.check_args(again)
    assert again == args and args.env == "WalkerWalk-velocities"
    unit = ppo_playground.make_unit(args)
    assert (unit.r_min, unit.r_max, unit.freeze) == (0.9, 0.999, frozen)
    unit = ppo_playground.make_unit(make_args(memory="lru", frozen=frozen, r_min=0.99, r_max=0.9999, max_phase=0.1))
    assert (unit.r_min, unit.r_max, unit.max_phase) == (0.99, 0.9999, 0.1)
    assert ppo_playground.make_unit(make_args(frozen=frozen, update_bias=-2.0)).update_bias == -2


@pytest.mark.parametrize(
    "spelling, name",
    [
        ("cartpole_balance", "CartpoleBalance-positions"),
        ("CartPoleBalanceSparse", "CartpoleBalanceSparse-positions"),
        ("ball-in-cup", "BallInCup-positions"),
        ("walkerwalk_positions", "WalkerWalk-positions"),
    ],
)
def test_a_spelling_that_means_one_task_is_taken(spelling, name):
    assert make_args(env=spelling).env == name


@pytest.mark.parametrize(
    "flags, words",
    [
        ({"env": "WalkerWalks"}, ["--env WalkerWalks:", "WalkerWalk,"]),
        ({"env": "MemoryChain"}, ["--env MemoryChain:", "BallInCup"]),
        ({"env": "cartpole"}, ["--env cartpole:", "CartpoleBalance"]),
        ({"env": "BallInCup-velocities"}, ["--env BallInCup-velocities:", "--observe positions"]),
        ({"env": "HopperHop"}, ["--observe positions:", "HopperHop", "touch", "--observe all"]),
        ({"max_grad_norm": 0.0}, ["--max-grad-norm 0.0:"]),
        ({"learning_rate": -1.0}, ["--learning-rate -1.0:"]),
        ({"gamma": 1.1}, ["--gamma 1.1:", "0 to 1"]),
        ({"num_envs": 6}, ["--num-envs 6:", "4"]),
        ({"num_envs": 4, "num_steps": 1}, ["--num-minibatches 4:", "one sample"]),
        ({"total_timesteps": 2047}, ["--total-timesteps 2047:", "2048"]),
        ({"total_timesteps": 1e6 + 0.5}, ["--total-timesteps 1000000.5:", "whole number"]),
        ({"memory": "mlp", "frozen": True}, ["--frozen True:", "mlp"]),
        ({"memory": "gru", "r_min": 0.9}, ["--r-min 0.9:", "gru"]),
        ({"memory": "lru", "update_bias": 0.0}, ["--update-bias 0.0:", "lru"]),
        ({"memory": "lru", "r_min": 0.9995}, ["--r-min must", "0.9995", "0.999"]),
    ],
)
def test_a_bad_flag_is_one_line(flags, words, capfd):
    with pytest.raises(SystemExit) as ended:
        make_args(**flags)
    (line,) = capfd.readouterr().err.strip().splitlines()
    assert ended.value.code == 2 and all(word in line for word in words), line


# ---------------------------------------------------------------------------------------------------------- a film
@pytest.fixture(scope="module")
def opengl() -> bool:
    """Whether this machine can draw at all: what else a test states holds on any."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MUJOCO_GL", raising=False)
        yield ppo_playground.choose_gl()


def durations(gif: bytes) -> list[int]:
    """Milliseconds of each picture of a film. Equal ones are merged."""
    found = []
    with Image.open(io.BytesIO(gif)) as film:
        for i in range(film.n_frames):
            film.seek(i)
            found.append(film.info["duration"])
    return found


def pendulum(angles) -> list[dict[str, np.ndarray]]:
    """The poses of a film."""
    return [{"qpos": np.array([angle]), "steps": np.int32(3)} for angle in angles]


def test_a_film_shows_every_fourth_pose_and_is_not_black(opengl):
    if not opengl:
        pytest.skip("no OpenGL draws here without a screen")
    gif = ppo_playground.film(make_args(env="PendulumSwingup"), pendulum(np.linspace(0, 3, 39)))  # of 20 ms each
    assert durations(gif) == [80] * 10
    with Image.open(io.BytesIO(gif)) as film:
        assert film.size == (320, 240)
        pictures = []
        for i in range(10):
            film.seek(i)
            pictures.append(np.asarray(film.convert("L"), float))
    assert all(picture.mean() > 10 and picture.std() > 10 for picture in pictures)
    changes = [np.abs(a - b).max() for a, b in zip(pictures[1:], pictures, strict=False)]
    assert min(changes) > 50, "the pole is elsewhere in each"


@pytest.mark.parametrize("dt, every, duration", [(0.01, 8, 40), (0.025, 3, 42)])
def test_a_film_takes_as_long_as_the_episode(opengl, monkeypatch, dt, every, duration):
    """A gif counts hundredths of a second: pictures of 75 ms take 80 and 70 in turn."""
    if not opengl:
        pytest.skip("no OpenGL draws here without a screen")
    args = make_args(env="PendulumSwingup")
    task = SimpleNamespace(dt=dt, mj_model=ppo_playground.make_task(args)[0].mj_model)
    monkeypatch.setattr(ppo_playground, "make_task", lambda args: (task, None))
    gif = ppo_playground.film(args, pendulum(np.linspace(0, 3, every * duration)))
    assert sum(durations(gif)) == round(1000 * dt * every * duration)


def test_the_film_is_of_the_first_evaluated_episode_in_the_run_folder_and_in_the_log(scripted, monkeypatch, tmp_path):
    filmed = []

    def film(args, poses):
        filmed.append(poses)
        return b"a film"

    monkeypatch.setattr(ppo_playground, "film", film)
    state = scripted.states[-1].replace(update=jnp.int32(3))
    scripted.train.after(state, tmp_path)
    assert not filmed and not list(tmp_path.iterdir()), "nobody asked"
    monkeypatch.setattr(scripted.args, "capture_video", True)
    scripted.train.after(state, tmp_path)
    assert [pose["qpos"].tolist() for pose in filmed[0]] == [[0], [10], [20]], "of the first, before each of its steps"
    assert (tmp_path / "film.gif").read_bytes() == b"a film"
    (shown,) = EventAccumulator(str(tmp_path)).Reload().Images("eval/film")
    assert shown.encoded_image_string == b"a film" and shown.step == 3 * 64
    monkeypatch.setattr(scripted.args, "evaluate", "a run")
    scripted.train.after(state, tmp_path)
    assert len(filmed) == 1, "an evaluation leaves training's film as it is"


def test_a_film_is_not_needed_to_evaluate_a_run(monkeypatch):
    monkeypatch.setattr(ppo_playground, "choose_gl", lambda: False)
    assert make_args(capture_video=True, evaluate="a run").capture_video


def test_a_wrong_mujoco_gl_is_one_line(script, tmp_path):
    done = script("ppo_playground.py --env BallInCup", env={"MUJOCO_GL": "nonsense"})
    (line,) = done.stderr.strip().splitlines()
    assert done.returncode == 2 and "MUJOCO_GL" in line and "nonsense" in line and "osmesa" in line
    assert done.stdout == "" and not list(tmp_path.iterdir())


def test_without_opengl_a_film_is_refused_before_training(monkeypatch, capfd):
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    tried = []

    def refuse(command, env, **options):
        tried.append(env["MUJOCO_GL"])
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(subprocess, "run", refuse)
    with pytest.raises(SystemExit) as ended:
        make_args(capture_video=True)
    (line,) = capfd.readouterr().err.strip().splitlines()
    assert ended.value.code == 2 and "--capture-video True: no OpenGL" in line
    assert tried == ["egl", "osmesa", "glfw"] and "MUJOCO_GL" not in os.environ


# --------------------------------------------------------------------------------------------------------- a whole run
@pytest.mark.slow
def test_two_seeds_from_the_command_line_stopped_resumed_and_filmed(script, opengl, tmp_path):
    """Stopped after its first updates and resumed, a run is the one that was never stopped, with its statistics."""
    small = "--env PendulumSwingup --hidden-size 16 --num-envs 4 --num-steps 16 --num-minibatches 2 --eval-episodes 3"
    command = f"ppo_playground.py {small} --frozen --num-seeds 2 --total-timesteps {64 * 400}"
    whole = script(f"{command} --run-dir whole {'--capture-video' * opengl}")
    assert whole.returncode == 0 and whole.stderr == "", whole.stderr
    stopped = script(f"{command} --run-dir parts", stop=(signal.SIGINT, "step"))
    assert stopped.returncode == 130 and stopped.stderr == "", stopped.stderr
    runs = [sorted((tmp_path / name).iterdir()) for name in ("whole", "parts")]
    assert 0 < checkpoint(runs[1][0]).update < 400
    resumed = script(f"ppo_playground.py --resume {runs[1][1]}")
    assert resumed.returncode == 0 and resumed.stderr == "", resumed.stderr
    states = [checkpoint(run[0]).state for run in runs]
    assert states[0].keys() == states[1].keys()
    for path, x in states[0].items():
        np.testing.assert_array_equal(states[1][path], x, err_msg=path)
    assert (states[0][".statistics.count"] == 64 * 400).all()
    for one, other in zip(*runs, strict=True):
        assert re.fullmatch(r"PendulumSwingup-positions__ppo_playground__gru-frozen__[12]__\d+\.\d+", one.name)
        results = [json.loads((run / "eval.json").read_text()) for run in (one, other)]
        assert results[0]["returns"] == results[1]["returns"] and results[0]["lengths"] == [1000] * 3
        ended = [step for step, _ in points(one)["charts/episodic_return"]]
        assert ended == [64 * -(-1000 * i // 16) for i in range(1, 7)]  # where episodes of 1000 steps ended
        assert not (other / "film.gif").exists()
        if opengl:
            assert EventAccumulator(str(one)).Reload().Images("eval/film")
            assert sum(durations((one / "film.gif").read_bytes())) == 1000 * 20, "milliseconds of an episode"
