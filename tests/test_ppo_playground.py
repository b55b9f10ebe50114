"""ppo_playground.py from the inside: what is hidden, time limits, the policy, statistics, a film; and a whole run."""

import functools
import inspect
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
from test_ppo_memorychain import advantages_loop
from test_runs import raw_points, raw_state

import ppo_playground
from memory import count_parameters

TINY = dict(env="PendulumSwingup", hidden_size=16, num_envs=4, num_steps=16, num_minibatches=2, update_epochs=2)
FRN_TASKS = ["BallInCup", "CheetahRun", "ReacherHard", "WalkerWalk"]


def make_args(**changes) -> SimpleNamespace:
    flags = {name: value for group in vars(ppo_playground.Args()).values() for name, value in vars(group).items()}
    args = SimpleNamespace(**flags | changes)
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


@pytest.mark.parametrize("name", ppo_playground.POSITIONS)
def test_positions_are_what_the_pose_decides_and_velocities_are_0_at_rest(name):
    task, number = Simulated(name), ppo_playground.POSITIONS[name]
    (qpos, qvel), (other, _) = task.draw(), task.draw()
    (_, still), (_, moving), (_, elsewhere) = (
        task.observe(*x) for x in ((qpos, 0 * qvel), (qpos, qvel), (other, 0 * qvel))
    )
    assert (still[:number] == moving[:number]).all() and (still[:number] != elsewhere[:number]).all()
    assert (moving[number:] != 0).all() and (still[number:] == 0).all() and (elsewhere[number:] == 0).all()


@pytest.mark.parametrize("name", FRN_TASKS)
def test_the_tasks_of_frn_show_these_parts_of_the_simulation(name):
    task, number = Simulated(name), ppo_playground.POSITIONS[name]
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


def test_every_task_is_in_the_table_or_mixes_in_what_is_neither(capfd):
    assert ppo_playground.POSITIONS.keys() <= set(dm_control_suite.ALL_ENVS)
    others = set(dm_control_suite.ALL_ENVS) - ppo_playground.POSITIONS.keys()
    assert others == {"FingerSpin", "FingerTurnEasy", "FingerTurnHard", "HopperHop", "HopperStand"}
    for name in sorted(others):
        task = Simulated(name)
        touch = sum(task.model.sensor_type == mujoco.mjtSensor.mjSENS_TOUCH)
        _, obs = task.observe(*task.draw())
        assert touch > 0 and (obs == 0).sum() >= touch  # without contacts, what is touched is 0
        make_args(env=name, observe="all")
        with pytest.raises(SystemExit):
            make_args(env=name, observe="velocities")
        assert f"--observe velocities: {name}" in capfd.readouterr().err
    assert all(dm_control_suite.get_default_config(name).action_repeat == 1 for name in dm_control_suite.ALL_ENVS)


@pytest.mark.parametrize(
    "name, sizes", list(zip(FRN_TASKS, [(8, 4, 4), (17, 8, 9), (6, 4, 2), (24, 15, 9)], strict=True))
)
def test_hidden_entries_are_removed(name, sizes, monkeypatch):
    class Numbers:  # an observation of 0, 1, 2, …, without physics
        def __init__(self, env):
            self.env, self.mj_model, self.action_size = env, env.mj_model, env.action_size

        def reset(self, key):
            data = mjx.make_data(self.mj_model, impl="jax")
            return ppo_playground.State(data, jnp.arange(1.0 * sizes[0]), 0.0, 0.0, {}, {})

        def step(self, state, action):
            return state.replace(obs=10 + jnp.arange(1.0 * sizes[0]), reward=0.0, done=0.0)

    load = dm_control_suite.load
    assert Simulated(name).observe(*Simulated(name).draw())[1].shape == (sizes[0],)
    monkeypatch.setattr(dm_control_suite, "load", lambda *x: Numbers(load(*x)))
    _, positions, velocities = sizes
    for observe, entries in (
        ("all", np.arange(sizes[0])),
        ("positions", np.arange(positions)),
        ("velocities", np.arange(positions, positions + velocities)),
    ):
        action_size, _, reset, step = ppo_playground.make_env(make_args(env=name, observe=observe))
        keys = jax.random.split(jax.random.PRNGKey(0), 2)
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
        _, limit, reset, step = ppo_playground.make_env(args)
        env, _ = ppo_playground.make_task(args)
    assert limit == LIMIT
    own = SimpleNamespace(reset=jax.jit(jax.vmap(env.reset)), step=jax.jit(jax.vmap(env.step)))
    return SimpleNamespace(reset=jax.jit(reset), step=jax.jit(step), own=own)


def test_an_environment_ends_at_its_time_limit_shows_its_last_state_and_starts_anew_from_a_key_of_its_own(cartpole):
    keys = jax.random.split(jax.random.PRNGKey(0), B)
    obs, state = cartpole.reset(keys)
    theirs = cartpole.own.reset(keys)
    np.testing.assert_array_equal(obs, theirs.obs)
    steps = np.array([0, 2, 5])  # they do not end together
    state["steps"] = jnp.asarray(steps)
    rng, starts = np.random.default_rng(0), [np.asarray(obs)]
    for _ in range(2 * LIMIT):
        action = jnp.asarray(rng.uniform(-1, 1, size=(B, 1)), jnp.float32)
        keys = jax.random.split(jax.random.PRNGKey(rng.integers(2**31)), B)
        obs, state, reward, terminated, truncated, final_obs = cartpole.step(keys, state, action)
        theirs = cartpole.own.step(theirs, action)
        steps += 1
        np.testing.assert_array_equal(truncated, steps == LIMIT)
        np.testing.assert_allclose(final_obs, theirs.obs, rtol=1e-5, atol=1e-6)  # also of the step that ended it
        np.testing.assert_allclose(reward, theirs.reward, rtol=1e-5)
        assert not terminated.any()
        fresh, end = cartpole.own.reset(keys), steps == LIMIT

        def choose(new, old, end=end):
            return jnp.where(end.reshape(-1, *[1] * (old.ndim - 1)), new, old)

        theirs, steps = jax.tree.map(choose, fresh, theirs), np.where(end, 0, steps)
        np.testing.assert_allclose(obs, theirs.obs, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(state["steps"], steps)
        starts += [np.asarray(obs)[end]]
    starts = np.concatenate(starts)
    assert len(starts) == 3 * B and len(np.unique(starts[:, 0])) == len(starts)  # cart positions


def test_a_simulation_that_diverged_ends_in_a_terminal_state_alone(cartpole):
    keys = jax.random.split(jax.random.PRNGKey(0), B)
    _, state = cartpole.reset(keys)
    state["qpos"] = state["qpos"].at[1].set(jnp.nan)
    state["steps"] = state["steps"] + LIMIT - 1  # its time limit as well
    obs, state, reward, terminated, truncated, final_obs = cartpole.step(keys, state, jnp.zeros((B, 1)))
    assert terminated.tolist() == [False, True, False] and truncated.all()
    assert reward[1] == 0 and jnp.isfinite(reward).all() and jnp.isfinite(obs).all()
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(state)) and jnp.isnan(final_obs[1]).any()


def test_an_action_is_clipped_where_it_meets_the_environment(cartpole):
    keys = jax.random.split(jax.random.PRNGKey(0), B)
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
    action_size, _, reset, step = ppo_playground.make_env(args := make_args(env=name, observe="all"))
    env, _ = ppo_playground.make_task(args)
    keys = jax.random.split(jax.random.PRNGKey(0), B)

    def both(x, action):
        state, theirs = x
        obs, state, reward, *_ = step(keys, state, action)
        theirs = jax.vmap(env.step)(theirs, action)
        return (state, theirs), (obs, theirs.obs, reward, theirs.reward)

    @jax.jit
    def play(actions):
        return jax.lax.scan(both, (reset(keys)[1], jax.vmap(env.reset)(keys)), actions)[1]

    actions = jax.random.uniform(jax.random.PRNGKey(1), (200, B, action_size), minval=-1, maxval=1)
    obs, own_obs, reward, own_reward = play(actions)
    np.testing.assert_allclose(obs, own_obs, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(reward, own_reward, rtol=1e-3, atol=1e-3)


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

    return 2, 6, reset, step


@pytest.fixture(params=[("gru", True), ("lru", False)], ids=["gru-normalized", "lru-clipped"], scope="module")
def scripted(request):
    """Three rollouts with the same parameters: the states before them, their transitions, and the compiled parts."""
    memory, normalize = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ppo_playground, "make_env", scripted_env)
        flags = dict(memory=memory, normalize_observations=normalize, clip_vloss=not normalize)
        args = make_args(**TINY | flags | dict(clip_coef=0.1, ent_coef=0.3))
        train = ppo_playground.make_train(args)
    state, states, transitions = jax.jit(train.init)(jax.random.PRNGKey(0)), [], []
    state.params["log_std"] = jnp.array([0.3, -0.5])
    state.params["mean"]["kernel"] = 30 * state.params["mean"]["kernel"]  # the first ones are near 0
    rollout = jax.jit(train.rollout)
    for i in range(3):
        actor, t = rollout(state, jax.random.PRNGKey(i))
        states.append(state)
        transitions.append(t)
        statistics = state.statistics.update(t["obs"]) if normalize else None
        state = state.replace(actor=actor, statistics=statistics)
    network, advantages, loss = (jax.jit(f) for f in (train.network, train.compute_advantages, train.loss))
    parts = SimpleNamespace(network=network, advantages=advantages, loss=loss, train=train)
    return args, states, transitions, state.actor, parts


def test_advantages_bootstrap_a_time_limit_from_the_last_observation_and_the_memory_before_its_reset(scripted):
    args, states, transitions, actor, parts = scripted
    before, t = states[-1], transitions[-1]  # begins in the middle of episodes
    assert not t["reset"][0].all()
    found = parts.advantages(before, actor, t)
    assert bool((t["truncated"] & ~t["terminated"]).any() & (t["truncated"] & t["terminated"]).any())
    t = jax.device_get(t)
    for b in range(args.num_envs):  # one environment and one step at a time, with the memory carried by hand
        carry = jax.tree.map(lambda x, b=b: x[b : b + 1], before.actor.carry)
        value, next_value = np.zeros((2, args.num_steps))
        for i in range(args.num_steps):
            obs, reset = (jnp.asarray(t[name][i, b])[None, None] for name in ("obs", "reset"))
            carry, _, _, v = parts.network(before.params, before, carry, obs, reset)
            led_to = jnp.asarray(t["final_obs"][i, b])[None, None]
            *_, next_v = parts.network(before.params, before, carry, led_to, jnp.zeros((1, 1), bool))
            value[i], next_value[i] = v[0, 0], next_v[0, 0]
        x = (t["reward"][:, b], t["terminated"][:, b], t["done"][:, b], value, next_value)
        expected = advantages_loop(*x, args.gamma, args.gae_lambda)
        np.testing.assert_allclose(found[:, b], expected, rtol=1e-4, atol=1e-4)


def test_the_ratio_of_the_first_minibatch_is_1(scripted):
    _, states, transitions, _, parts = scripted
    state, t = states[-1], dict(transitions[-1])
    t["advantage"] = t["reward"]
    t["return"] = t["value"] + 0.5
    _, scalars = parts.loss(state.params, state, state.actor.carry, t)
    assert abs(scalars["approx_kl"]) < 1e-6 and scalars["clipfrac"] == 0
    np.testing.assert_allclose(scalars["policy_loss"], 0, atol=1e-5)  # minus the mean of normalised advantages
    np.testing.assert_allclose(scalars["value_loss"], 0.5 * 0.25, rtol=1e-3)


def test_actions_are_drawn_from_the_policy_and_their_log_probability_is_scipys(scripted):
    _, states, transitions, _, parts = scripted
    state, t = states[-1], transitions[-1]
    _, mean, log_std, _ = parts.network(state.params, state, state.actor.carry, t["obs"], t["reset"])
    std = np.exp(np.asarray(log_std, np.float64))
    expected = scipy.stats.norm(np.asarray(mean, np.float64), std).logpdf(t["action"]).sum(-1)
    np.testing.assert_allclose(t["log_prob"], expected, rtol=1e-4, atol=1e-4)
    noise = ((t["action"] - mean) / std).reshape(-1, 2)
    assert scipy.stats.kstest(noise.ravel(), "norm").pvalue > 1e-3 and abs(np.corrcoef(noise.T)[0, 1]) < 0.4
    assert (np.abs(t["action"]) > 1).any(), "stored as drawn, not as clipped"


def test_the_loss_is_cleanrls(scripted):
    args, states, transitions, _, parts = scripted
    state, t = states[-1], dict(transitions[-1])
    rng, shape = np.random.default_rng(0), t["value"].shape
    t["log_prob"] = t["log_prob"] + 0.3 * rng.normal(size=shape)  # as if the network had moved since
    t["value"] = t["value"] + 0.3 * rng.normal(size=shape)
    t["advantage"], t["return"] = jnp.asarray(rng.normal(size=(2, *shape)), jnp.float32)
    total, scalars = parts.loss(state.params, state, state.actor.carry, t)
    _, mean, log_std, value = parts.network(state.params, state, state.actor.carry, t["obs"], t["reset"])
    policy = scipy.stats.norm(np.asarray(mean, np.float64), np.exp(np.asarray(log_std, np.float64)))
    ratio = np.exp(policy.logpdf(t["action"]).sum(-1) - t["log_prob"])
    advantage = (t["advantage"] - t["advantage"].mean()) / (t["advantage"].std() + 1e-8)
    policy_loss = np.maximum(-advantage * ratio, -advantage * np.clip(ratio, 0.9, 1.1)).mean()
    clipped = t["value"] + np.clip(value - t["value"], -0.1, 0.1)
    error, clipped_error = (value - t["return"]) ** 2, (clipped - t["return"]) ** 2
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
    assert scalars.keys() == expected.keys() and 0.1 < expected["clipfrac"] < 0.95
    for name in expected:
        np.testing.assert_allclose(scalars[name], expected[name], rtol=1e-3, atol=1e-5, err_msg=name)
    np.testing.assert_allclose(total, policy_loss - 0.3 * entropy + args.vf_coef * value_loss, rtol=1e-3)


def test_statistics_are_those_of_all_observations_so_far_and_change_between_rollouts_only(scripted):
    args, states, transitions, _, parts = scripted
    if not args.normalize_observations:
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
    after, _ = jax.jit(parts.train.train_iteration)(states[0])
    assert after.statistics.count == 64 and (states[0].statistics.var == 1).all()
    np.testing.assert_array_equal(states[0].statistics.normalize(obs), obs)  # at first, as they are


def test_evaluation_takes_the_mean_action_to_the_end_of_each_first_episode(scripted):
    args, states, _, _, parts = scripted
    returns, lengths, poses = jax.jit(parts.train.play)(states[-1], jax.random.PRNGKey(5))
    again, _, scores = jax.jit(parts.train.evaluate)(states[-1], jax.random.PRNGKey(6))
    np.testing.assert_array_equal(returns, again)  # nothing is drawn: neither actions nor, here, starts
    assert lengths.tolist() == [3 + i % 3 for i in range(10)] and scores == {}
    t = np.array([sum(range(1, n + 1)) for n in lengths])
    assert (np.abs(returns - t) <= 2 * lengths).all()  # a cosine for each action
    np.testing.assert_array_equal(
        poses["qpos"][:, 0], 10.0 * np.arange(6)
    )  # of the first environment, before each step


# ------------------------------------------------------------------------------------------------------- the agent
@pytest.mark.parametrize("memory, total, unit", [("gru", 1_385_221, 787_968), ("lru", 1_123_589, 526_336)])
def test_table_1_of_frn(memory, total, unit):
    for frozen in (False, True):
        train = ppo_playground.make_train(make_args(env="BallInCup", memory=memory, frozen=frozen))
        state = jax.eval_shape(train.init, jax.random.PRNGKey(0))
        numbers = count_parameters(state.params, state.frozen)
        assert numbers["all"] == {"total": total, "trainable": total - unit * frozen, "frozen": unit * frozen}
        assert numbers["log_std"]["total"] == 2 and numbers["all"]["trainable"] == (597_253 if frozen else total)


@pytest.mark.parametrize("memory", ppo_playground.UNITS)
def test_an_observation_of_zeros_does_not_blow_up_the_gradient(memory):
    """BallInCup by positions and most tasks by velocities start with one. With biases of 0, up to 1e12."""
    unit = functools.partial(ppo_playground.UNITS[memory], features=32)
    agent = ppo_playground.Agent(2, unit, memory in ppo_playground.RESERVOIRS, 32, 1, 3)
    carry, obs, reset = agent.initialize_carry(4), jnp.zeros((3, 4, 5)), jnp.arange(12).reshape(3, 4) < 4

    def output(params):
        _, mean, _, value = agent.apply({"params": params}, carry, obs, reset)
        return (mean.sum(-1) + value).mean()

    params = jax.jit(agent.init)(jax.random.PRNGKey(0), carry, obs, reset)["params"]
    assert optax.tree.norm(jax.jit(jax.grad(output))(params)) < 100


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


def test_flags_filled_in_are_the_same_again_when_resumed():
    args = make_args(env="WalkerWalk", observe="velocities", memory="lru", frozen=True)
    again = SimpleNamespace(**vars(args))
    ppo_playground.check_args(again)
    assert again == args and args.env == "WalkerWalk-velocities" and (args.r_min, args.r_max) == (0.99, 0.9999)


@pytest.mark.parametrize(
    "flags, words",
    [
        ({"env": "WalkerWalks"}, ["--env WalkerWalks:", "WalkerWalk,"]),
        ({"env": "MemoryChain"}, ["--env MemoryChain:", "BallInCup"]),
        ({"env": "BallInCup-velocities"}, ["--env BallInCup-velocities:", "--observe positions"]),
        ({"env": "BallInCup-"}, ["--env BallInCup-:", "BallInCup;"]),
        ({"env": "HopperHop"}, ["--observe positions:", "HopperHop", "touch", "--observe all"]),
        ({"max_grad_norm": 0.0}, ["--max-grad-norm 0.0:", "None"]),
        ({"learning_rate": -1.0}, ["--learning-rate -1.0:"]),
        ({"gamma": 1.1}, ["--gamma 1.1:", "0 to 1"]),
        ({"num_envs": 6}, ["--num-envs 6:", "4"]),
        ({"total_timesteps": 2047}, ["--total-timesteps 2047:", "2048"]),
        ({"memory": "mlp", "frozen": True}, ["--frozen True:", "mlp"]),
        ({"memory": "gru", "r_min": 0.9}, ["--r-min 0.9:", "gru"]),
    ],
)
def test_a_bad_flag_is_one_line(flags, words, capfd):
    with pytest.raises(SystemExit) as ended:
        make_args(**flags)
    (line,) = capfd.readouterr().err.strip().splitlines()
    assert ended.value.code == 2 and all(word in line for word in words), line


# ---------------------------------------------------------------------------------------------------------- a film
@pytest.fixture
def opengl(monkeypatch) -> bool:
    """Whether this machine can draw at all: what else a test states holds on any."""
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    return ppo_playground.choose_gl()


def test_a_film_shows_every_fourth_pose_and_is_not_black(opengl, tmp_path):
    if not opengl:
        pytest.skip("no OpenGL draws here without a screen")
    args = make_args(env="PendulumSwingup", capture_video=True)
    angles = np.linspace(0, 3, 39)[:, None]
    ppo_playground.film(args, {"qpos": angles}, tmp_path / "a.gif")  # of 20 ms each
    with Image.open(tmp_path / "a.gif") as film:
        assert film.n_frames == 10 and film.info["duration"] == 80 and film.size == (320, 240)
        pictures = []
        for i in range(10):
            film.seek(i)
            pictures.append(np.asarray(film.convert("L"), float))
    assert all(picture.mean() > 10 and picture.std() > 10 for picture in pictures)
    changes = [np.abs(a - b).max() for a, b in zip(pictures[1:], pictures, strict=False)]
    assert min(changes) > 50, "the pole is elsewhere in each"


@pytest.mark.parametrize("dt, every, duration", [(0.01, 8, 40), (0.025, 3, 42)])
def test_a_film_takes_as_long_as_the_episode(opengl, monkeypatch, tmp_path, dt, every, duration):
    """A gif counts hundredths of a second: pictures of 75 ms take 80 and 70 in turn. With equal pictures merged."""
    if not opengl:
        pytest.skip("no OpenGL draws here without a screen")
    args = make_args(env="PendulumSwingup", capture_video=True)
    task = SimpleNamespace(dt=dt, mj_model=ppo_playground.make_task(args)[0].mj_model)
    monkeypatch.setattr(ppo_playground, "make_task", lambda args: (task, None))
    ppo_playground.film(args, {"qpos": np.linspace(0, 3, every * duration)[:, None]}, tmp_path / "a.gif")
    with Image.open(tmp_path / "a.gif") as film:
        shown = sum((film.seek(i), film.info["duration"])[1] for i in range(film.n_frames))
    assert shown == round(1000 * dt * every * duration)


def test_a_film_is_not_needed_to_evaluate_a_run(monkeypatch):
    monkeypatch.setattr(ppo_playground, "choose_gl", lambda: False)
    assert make_args(capture_video=True, evaluate="a run").capture_video


def test_a_wrong_mujoco_gl_is_one_line(script, tmp_path):
    done = script("ppo_playground.py --env BallInCup", env=os.environ | {"MUJOCO_GL": "nonsense"})
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
def test_two_seeds_from_the_command_line_stopped_resumed_and_filmed(script, opengl, tmp_path):
    """Stopped after its first updates and resumed, a run is the one that was never stopped, with its statistics."""
    small = "--env PendulumSwingup --hidden-size 16 --num-envs 4 --num-steps 16 --num-minibatches 2 --eval-episodes 3"
    command = f"ppo_playground.py {small} --frozen --num-seeds 2 --total-timesteps {64 * 400}"
    whole = script(f"{command} --run-dir whole {'--capture-video' * opengl}")
    assert whole.returncode == 0 and whole.stderr == "", whole.stderr
    stopped = script(f"{command} --run-dir parts", stop=(signal.SIGINT, "step"))
    assert stopped.returncode == 130 and stopped.stderr == "", stopped.stderr
    runs = [sorted((tmp_path / name).iterdir()) for name in ("whole", "parts")]
    (kept,) = (int(p.name) for p in (runs[1][0] / "checkpoints").iterdir())
    assert 0 < kept < 400
    resumed = script(f"ppo_playground.py --resume {runs[1][1]}")
    assert resumed.returncode == 0 and resumed.stderr == "", resumed.stderr
    for one, other in zip(*runs, strict=True):
        assert re.fullmatch(r"PendulumSwingup-positions__ppo_playground__gru-frozen__[12]__\d+", one.name)
        states = [raw_state(run, 400) for run in (one, other)]
        assert any((x == 64 * 400).all() for x in states[0]), "the number of observations in the statistics"
        for x, y in zip(*states, strict=True):
            np.testing.assert_array_equal(x, y)
        results = [json.loads((run / "eval.json").read_text()) for run in (one, other)]
        assert results[0]["returns"] == results[1]["returns"] and results[0]["lengths"] == [1000] * 3
        returns = {step: value for tag, step, value in raw_points(one) if tag == "charts/episodic_return"}
        assert sorted(returns) == [64 * -(-1000 * i // 16) for i in range(1, 7)]  # where episodes of 1000 steps ended
        assert not (other / "film.gif").exists()
        if opengl:
            assert ("eval/film", 64 * 400, 0.0) in raw_points(one)
            with Image.open(one / "film.gif") as film:  # pillow merges pictures that are equal
                duration = sum((film.seek(i), film.info["duration"])[1] for i in range(film.n_frames))
            assert duration == 1000 * 20, "milliseconds of an episode"
