"""ppo_memorychain.py from the inside: the task, advantages, the loss, memory across rollouts, early stop."""

import json
import re
import shutil
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_runs import raw_points

import ppo_memorychain
from memory import count_parameters, merge

MEMORIES = ["mlp", "gru", "lru", "ffm", "deepesn", "src", "paralesn"]
TINY = dict(hidden_size=16, delay=5, num_envs=4, num_steps=20, num_minibatches=2, update_epochs=2)


def make_args(**changes) -> SimpleNamespace:
    flags = {name: value for group in vars(ppo_memorychain.Args()).values() for name, value in vars(group).items()}
    args = SimpleNamespace(**flags | changes)
    ppo_memorychain.check_args(args)
    return args


def tiny(**changes) -> SimpleNamespace:
    return ppo_memorychain.make_train(make_args(**TINY | dict(total_timesteps=80 * 8, learning_rate=1e-3) | changes))


def rollouts(train, number):
    """The states before each of some rollouts with the same parameters, the transitions of each, and the last actor."""
    state, states, transitions = jax.jit(train.init)(jax.random.PRNGKey(0)), [], []
    for i in range(number):
        actor, t = jax.jit(train.rollout)(state, jax.random.PRNGKey(i))
        states.append(state)
        transitions.append(t)
        state = state.replace(actor=actor)
    return states, transitions, state.actor


# -------------------------------------------------------------------------------------------------------- the task
@pytest.mark.parametrize("delay", [2, 64, 999, 1000, 2048, 4096])
def test_an_episode_pays_once_at_its_last_step_and_who_remembers_the_first_cue_gets_1(delay):
    num_actions, reset, step = ppo_memorychain.make_env(make_args(delay=delay))
    assert num_actions == 2
    obs, state = reset(jax.random.split(jax.random.PRNGKey(0), 16))
    honest = jnp.arange(16) < 8  # the others answer the opposite

    def play(x, key):
        obs, state, first, cue = x
        cue = jnp.where(first, obs[:, 2], cue)
        right = (cue > 0).astype(jnp.int32)
        action = jnp.where(honest, right, 1 - right)
        next_obs, state, reward, terminated, truncated, _ = step(jax.random.split(key, 16), state, action)
        return (next_obs, state, terminated | truncated, cue), (obs, reward, terminated, truncated, cue)

    start = (obs, state, jnp.ones(16, bool), jnp.zeros(16))
    keys = jax.random.split(jax.random.PRNGKey(1), 2 * (delay + 1))
    obs, reward, terminated, truncated, cue = jax.device_get(jax.jit(lambda x: jax.lax.scan(play, x, keys)[1])(start))
    ends = np.zeros(2 * (delay + 1), bool)
    ends[[delay, 2 * delay + 1]] = True  # two episodes of delay + 1 steps
    assert (terminated == ends[:, None]).all() and not truncated.any()
    assert (reward == np.where(ends[:, None], np.where(honest, 1, -1), 0)).all()
    assert len(np.unique(cue[0])) == 2 and (cue[0] != cue[-1]).any()
    # gymnax shows the first observation twice, and the cue never again.
    seen = np.arange(2 * (delay + 1)) % (delay + 1) < 2
    assert (obs[..., 2] == np.where(seen[:, None], cue, 0)).all() and (obs[..., 1] == 0).all()


# ------------------------------------------------------------------------------------------------------ advantages
def advantages_loop(reward, terminated, done, value, next_value, gamma, gae_lambda):
    """One environment, one episode after the other, in float64: the sum of (γλ)^k δ_{t+k} to the episode's end."""
    T = len(reward)
    result = np.zeros(T)
    for t in range(T):
        for k in range(t, T):
            future = 0 if terminated[k] else gamma * next_value[k]
            result[t] += (gamma * gae_lambda) ** (k - t) * (reward[k] + future - value[k])
            if done[k]:
                break
    return result


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.sampled_from(["no", "terminal", "time limit", "both"]), min_size=6, max_size=6),
    st.floats(0, 1),
    st.floats(0, 1),
    st.integers(0, 1000),
)
def test_advantages_equal_a_loop_over_episodes(ends, gamma, gae_lambda, seed):
    rng = np.random.default_rng(seed)
    reward, value, next_value = rng.normal(size=(3, 6))
    terminated = np.array([end in ("terminal", "both") for end in ends])
    done = np.array([end != "no" for end in ends])
    x = (reward, terminated, done, value, next_value)
    found = ppo_memorychain.advantages(*(jnp.asarray(x)[:, None] for x in x), gamma, gae_lambda)[:, 0]
    np.testing.assert_allclose(found, advantages_loop(*x, gamma, gae_lambda), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("end", range(6))
def test_advantages_with_an_end_at_every_position(end):
    reward, value, next_value = np.random.default_rng(end).normal(size=(3, 6))
    for terminal in (True, False):
        done = np.arange(6) == end
        x = (reward, done & terminal, done, value, next_value)
        found = ppo_memorychain.advantages(*(jnp.asarray(x)[:, None] for x in x), 0.9, 0.8)[:, 0]
        np.testing.assert_allclose(found, advantages_loop(*x, 0.9, 0.8), rtol=1e-5, atol=1e-5)


def scripted_env(args):
    """Episodes of 3, 4 and 5 steps that end by a time limit, a terminal state, and both; the observation tells all."""

    def observe(state):
        one_hot = jax.nn.one_hot(state["episode"] % 3, 3)
        return jnp.concatenate([one_hot, jnp.sin(state["t"][..., None] + jnp.arange(3.0))], axis=-1)

    def reset(keys):
        state = {"episode": jnp.arange(len(keys)), "t": jnp.zeros(len(keys), jnp.int32)}
        return observe(state), state

    def step(keys, state, action):
        state = {"episode": state["episode"], "t": state["t"] + 1}
        end = state["t"] == 3 + state["episode"] % 3
        after = {
            "episode": jnp.where(end, state["episode"] + 1, state["episode"]),
            "t": jnp.where(end, 0, state["t"]),
        }
        reward = jnp.cos(1.0 * action) + state["t"]
        terminated, truncated = end & (state["episode"] % 3 != 0), end & (state["episode"] % 3 != 1)
        return observe(after), after, reward, terminated, truncated, observe(state)

    return 3, reset, step


@pytest.mark.parametrize("memory", ["gru", "deepesn"])
def test_advantages_bootstrap_a_time_limit_from_the_last_observation_and_the_memory_before_its_reset(
    memory, monkeypatch
):
    monkeypatch.setattr(ppo_memorychain, "make_env", scripted_env)
    args = make_args(**TINY | dict(num_steps=16, memory=memory))
    train = ppo_memorychain.make_train(args)
    states, transitions, actor = rollouts(train, 2)  # the second begins in the middle of episodes
    before, t = states[1], transitions[1]
    found = jax.jit(train.compute_advantages)(before.params, before.frozen, actor, t)
    assert bool((t["truncated"] & ~t["terminated"]).any() & (t["truncated"] & t["terminated"]).any())

    # The same again one environment and one step at a time, with the memory carried by hand.
    network = jax.jit(train.network)
    t = jax.device_get(t)
    for b in range(args.num_envs):
        carry = jax.tree.map(lambda x, b=b: x[b : b + 1], before.actor.carry)
        value, next_value = np.zeros((2, args.num_steps))
        for i in range(args.num_steps):
            now = [jnp.asarray(t[name][i, b])[None, None] for name in ("obs", "reset")]
            carry, _, v = network(before.params, before.frozen, carry, *now)
            led_to = jnp.asarray(t["final_obs"][i, b])[None, None]
            _, _, next_v = network(before.params, before.frozen, carry, led_to, jnp.zeros((1, 1), bool))
            value[i], next_value[i] = v[0, 0], next_v[0, 0]
        x = (t["reward"][:, b], t["terminated"][:, b], t["done"][:, b], value, next_value)
        expected = advantages_loop(*x, args.gamma, args.gae_lambda)
        np.testing.assert_allclose(found[:, b], expected, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------- acting against training
@pytest.mark.parametrize("memory", MEMORIES)
def test_the_ratio_of_the_first_minibatch_is_1(memory):
    train = tiny(memory=memory, num_blocks=2)
    states, transitions, actor = rollouts(train, 3)  # the memory at the last one's start is not the initial one
    state, t = states[-1], transitions[-1]
    assert not t["reset"][0].any() and t["reset"][1:].any()
    t["advantage"] = train.compute_advantages(state.params, state.frozen, actor, t)
    t["return"] = t["advantage"] + t["value"]
    envs = jnp.array([2, 1])
    carry = jax.tree.map(lambda x: x[envs], state.actor.carry)
    minibatch = {name: t[name][:, envs] for name in t if name not in ("carry", "final_obs")}
    _, logits, value = jax.jit(train.network)(state.params, state.frozen, carry, minibatch["obs"], minibatch["reset"])
    ratio = jnp.exp(ppo_memorychain.log_probability(logits, minibatch["action"]) - minibatch["log_prob"])
    np.testing.assert_allclose(ratio, 1, atol=1e-6)
    np.testing.assert_allclose(value, minibatch["value"], rtol=1e-4, atol=1e-5)
    _, scalars = jax.jit(train.loss)(state.params, state.frozen, carry, minibatch)
    np.testing.assert_allclose(scalars["policy_loss"], 0, atol=1e-6)  # minus the mean of normalised advantages
    np.testing.assert_allclose(scalars["value_loss"], 0.5 * (minibatch["advantage"] ** 2).mean(), rtol=1e-4)
    assert abs(scalars["approx_kl"]) < 1e-6 and scalars["clipfrac"] == 0


@pytest.mark.parametrize("memory", ["gru", "lru", "ffm", "paralesn"])
def test_an_episode_of_three_rollouts_has_the_values_of_one_pass_over_it(memory):
    train = tiny(memory=memory, delay=47, num_steps=16)  # 48 steps
    states, transitions, actor = rollouts(train, 3)
    whole = {name: jnp.concatenate([t[name] for t in transitions]) for name in ("obs", "reset", "value", "log_prob")}
    action = jnp.concatenate([t["action"] for t in transitions])
    assert whole["reset"][0].all() and not whole["reset"][1:].any() and actor.reset.all()
    start = states[0]
    _, logits, value = jax.jit(train.network)(
        start.params, start.frozen, start.actor.carry, whole["obs"], whole["reset"]
    )
    np.testing.assert_allclose(value, whole["value"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(ppo_memorychain.log_probability(logits, action), whole["log_prob"], atol=1e-6)
    # An empty memory in place of the one carried over does not.
    last = transitions[-1]
    _, _, without = jax.jit(train.network)(start.params, start.frozen, start.actor.carry, last["obs"], last["reset"])
    assert np.abs(without - last["value"]).max() > 1e-3


def test_episode_statistics_are_those_of_finished_episodes():
    train = tiny()  # 20 steps of episodes of 6 steps
    state = jax.jit(train.init)(jax.random.PRNGKey(0))
    _, t = jax.jit(train.rollout)(state, jax.random.split(state.key, 3)[1])
    _, metrics = jax.jit(train.train_iteration)(state)
    assert t["done"].sum() == 4 * 3 and set(np.abs(t["reward"])[t["done"]]) == {1}
    np.testing.assert_allclose(metrics["charts/episodic_return"], t["reward"].sum() / 12, rtol=1e-5)
    np.testing.assert_allclose(metrics["charts/success_rate"], (t["reward"] > 0).sum() / 12, rtol=1e-5)
    np.testing.assert_allclose(metrics["charts/episodic_length"], 6)


# -------------------------------------------------------------------------------------------------------- the loss
@pytest.mark.parametrize("norm_adv, clip_vloss", [(True, True), (False, False)])
def test_the_loss_is_cleanrls(norm_adv, clip_vloss):
    coefficients = dict(clip_coef=0.1, ent_coef=0.3, vf_coef=0.7)
    train = tiny(norm_adv=norm_adv, clip_vloss=clip_vloss, **coefficients)
    (state,), (t,), _ = rollouts(train, 1)
    rng, shape = np.random.default_rng(0), t["value"].shape
    t["log_prob"] += 0.3 * rng.normal(size=shape)  # as if the network had moved since
    t["value"] += 0.3 * rng.normal(size=shape)
    t["advantage"], t["return"] = jnp.asarray(rng.normal(size=(2, *shape)), jnp.float32)
    total, scalars = jax.jit(train.loss)(state.params, state.frozen, state.actor.carry, t)
    _, logits, value = train.network(state.params, state.frozen, state.actor.carry, t["obs"], t["reset"])

    logits, value, t = (jax.tree.map(lambda x: np.asarray(x, np.float64), x) for x in (logits, value, t))
    policy = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    taken = np.where(t["action"] == 1, policy[..., 1], policy[..., 0])
    ratio = taken / np.exp(t["log_prob"])
    advantage = t["advantage"]
    if norm_adv:
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    policy_loss = np.maximum(-advantage * ratio, -advantage * np.clip(ratio, 0.9, 1.1)).mean()
    value_loss = (value - t["return"]) ** 2
    if clip_vloss:
        value_loss = np.maximum(value_loss, (t["value"] + np.clip(value - t["value"], -0.1, 0.1) - t["return"]) ** 2)
    value_loss, entropy = 0.5 * value_loss.mean(), -(policy * np.log(policy)).sum(-1).mean()
    expected = {
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy": entropy,
        "approx_kl": (ratio - 1 - np.log(ratio)).mean(),
        "clipfrac": (np.abs(ratio - 1) > 0.1).mean(),
    }
    assert scalars.keys() == expected.keys() and 0.1 < expected["clipfrac"] < 0.9
    for name in expected:
        np.testing.assert_allclose(scalars[name], expected[name], rtol=1e-4, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(total, policy_loss - 0.3 * entropy + 0.7 * value_loss, rtol=1e-4)


def test_actor_and_critic_share_the_trunk_and_nothing_else():
    train = tiny()
    (state,), (t,), actor = rollouts(train, 1)
    t["advantage"] = t["reward"] + jnp.arange(20.0)[:, None]
    t["return"] = t["advantage"]

    def gradient(of):
        loss = jax.jit(jax.grad(lambda p: train.loss(p, state.frozen, state.actor.carry, t)[1][of]))
        grads = loss(state.params)
        return {name for name, module in grads.items() if any(np.any(x) for x in jax.tree.leaves(module))}

    trunk = {"input", "memory_0", "mixer_0", "output"}
    assert gradient("policy_loss") == trunk | {"actor_0", "actor_norm_0", "logits"}
    assert gradient("value_loss") == trunk | {"critic_0", "critic_norm_0", "value"}


def test_the_learning_rate_reaches_its_end_after_the_last_update():
    train = tiny()
    state, step, rates = jax.jit(train.init)(jax.random.PRNGKey(0)), jax.jit(train.train_iteration), []
    for _ in range(8):
        state, metrics = step(state)
        rates.append(float(metrics["charts/learning_rate"]))
    np.testing.assert_allclose(rates, np.linspace(1e-3, 1e-10, 9)[:8], rtol=1e-4)
    counts = [x for x in jax.tree.leaves(state.opt_state) if x.shape == ()]
    assert counts and all(int(count) == 8 * 2 * 2 for count in counts)  # updates × epochs × minibatches


# ------------------------------------------------------------------------------------------------------- the agent
@pytest.mark.parametrize("memory, frozen", [("gru", True), ("src", True), ("lru", False)])
def test_frozen_leaves_stay_bit_for_bit_and_everything_else_moves(memory, frozen):
    train = tiny(memory=memory, frozen=frozen, num_blocks=2)
    start = state = jax.jit(train.init)(jax.random.PRNGKey(0))
    for _ in range(2):
        state, _ = jax.jit(train.train_iteration)(state)
    before, after = (jax.device_get(merge(s.params, s.frozen)) for s in (start, state))
    for module in before:
        same = jax.tree.leaves(jax.tree.map(np.array_equal, before[module], after[module]))
        assert all(same) if frozen and module.startswith("memory") else not all(same), module
    trainable = sum(x.size for x in jax.tree.leaves(state.params))
    assert sum(x.size for x in jax.tree.leaves(state.opt_state) if x.ndim) == 2 * trainable


@pytest.mark.parametrize("memory, total, unit", [("gru", 1_385_221, 787_968), ("lru", 1_123_589, 526_336)])
def test_table_1_of_frn(memory, total, unit):
    """Its PPO rows are of Playground's L = 2, K = 3, with 4 observations (here 3) and 2 standard deviations (none)."""
    for frozen in (False, True):
        train = ppo_memorychain.make_train(make_args(memory=memory, frozen=frozen, num_blocks=2, num_readout_blocks=3))
        state = jax.eval_shape(train.init, jax.random.PRNGKey(0))
        numbers, here = count_parameters(state.params, state.frozen)["all"], total - 256 - 2
        assert numbers == {"total": here, "trainable": here - unit * frozen, "frozen": unit * frozen}


@pytest.mark.parametrize("memory", ["deepesn", "src", "paralesn"])
def test_reservoirs_stack_on_the_input_and_the_readout_sees_all_layers(memory):
    train = ppo_memorychain.make_train(make_args(memory=memory, frozen=True, num_blocks=3, hidden_size=32))
    state = jax.eval_shape(train.init, jax.random.PRNGKey(0))
    assert set(state.frozen) == {"memory_0"} and not {"input", "mixer_0"} & set(state.params)
    assert state.params["output"]["kernel"].shape == (3 * 32, 32)
    layers = {name.rsplit("_", 1)[1] for name in state.frozen["memory_0"]}
    assert layers == {"0", "1", "2"}


def test_the_defaults_are_those_of_table_a3():
    published = dict(
        learning_rate=3e-4, final_learning_rate=1e-10, gamma=0.99, gae_lambda=0.9, max_grad_norm=0.5, clip_coef=0.2,
        ent_coef=0, vf_coef=0.5, num_envs=64, num_steps=1024, num_minibatches=16, update_epochs=4,
        total_timesteps=10_000_000, num_blocks=1, num_readout_blocks=1, hidden_size=256,
    )  # fmt: skip
    args = vars(make_args())
    assert {name: args[name] for name in published} == published


@pytest.mark.parametrize(
    "flags, filled",
    [
        ({"memory": "lru"}, {"r_min": 0.9, "r_max": 0.999, "leak": None, "trace_size": None}),
        ({"memory": "lru", "frozen": True}, {"r_min": 0.99, "r_max": 0.9999}),
        ({"memory": "lru", "frozen": True, "r_min": 0.5}, {"r_min": 0.5, "r_max": 0.9999}),
        ({"memory": "ffm"}, {"trace_size": 32, "context_size": 4, "r_min": None}),
        ({"memory": "src"}, {"input_scaling": 1.0, "recurrent_scaling": 1.0, "projection_scaling": 1.0}),
        ({"memory": "deepesn"}, {"spectral_radius": 0.99, "input_scaling": 0.1, "leak": 1.0, "kernel_size": None}),
        ({"memory": "paralesn", "kernel_size": 5}, {"kernel_size": 5, "r_min": 0.99, "bias_scaling": 0.01}),
        ({"memory": "mlp"}, dict.fromkeys(ppo_memorychain.UNIT_FLAGS)),
    ],
)
def test_settings_of_a_unit_are_filled_in_and_the_same_again_when_resumed(flags, filled):
    args = make_args(**flags)
    assert {name: getattr(args, name) for name in filled} == filled and args.env == "MemoryChain-128"
    again = SimpleNamespace(**vars(args))
    ppo_memorychain.check_args(again)
    assert again == args


@pytest.mark.parametrize(
    "flags, words",
    [
        ({"delay": 1}, ["--delay 1:", "2 to 4096"]),
        ({"delay": 4097}, ["--delay 4097:"]),
        ({"env": "CartPole"}, ["--env CartPole:", "MemoryChain"]),
        ({"env": "MemoryChain-4"}, ["--env MemoryChain-4:", "--delay 128"]),
        ({"stop_at_success": 1.5}, ["--stop-at-success 1.5:"]),
        ({"stop_at_success": 0.0}, ["--stop-at-success 0.0:"]),
        ({"gae_lambda": 1.1}, ["--gae-lambda 1.1:", "0 to 1"]),
        ({"clip_coef": -0.1}, ["--clip-coef -0.1:"]),
        ({"ent_coef": float("nan")}, ["--ent-coef nan:"]),
        ({"max_grad_norm": 0.0}, ["--max-grad-norm 0.0:", "above 0"]),
        ({"num_envs": 24}, ["--num-envs 24:", "16"]),
        ({"total_timesteps": 65_535}, ["--total-timesteps 65535:", "65536"]),
        ({"memory": "mlp", "frozen": True}, ["--frozen True:", "mlp"]),
        ({"memory": "gru", "r_min": 0.9}, ["--r-min 0.9:", "gru"]),
        ({"memory": "lru", "trace_size": 4}, ["--trace-size 4:", "lru"]),
        ({"memory": "src", "leak": 0.5}, ["--leak 0.5:", "src"]),
        ({"memory": "ffm", "trace_size": 0}, ["--trace-size 0:"]),
        ({"memory": "ffm", "context_size": 2**31}, ["--context-size 2147483648:", "below 2^31"]),
        ({"memory": "deepesn", "leak": 1.5}, ["--leak 1.5:", "at most 1"]),
        ({"memory": "deepesn", "spectral_radius": 0.0}, ["--spectral-radius 0.0:"]),
        ({"memory": "paralesn", "kernel_size": 0}, ["--kernel-size 0:"]),
        ({"memory": "paralesn", "kernel_size": 257}, ["--kernel-size 257", "hidden_size, 256"]),
        ({"memory": "paralesn", "max_phase": 7.0}, ["--max-phase 7.0:"]),
        ({"r_min": 0.9995}, ["--r-min 0.9995:", "0.999"]),
        ({"r_max": 1.5}, ["--r-max 1.5:", "at most 1"]),
    ],
)
def test_a_bad_flag_is_one_line(flags, words, capfd):
    with pytest.raises(SystemExit) as ended:
        make_args(**flags)
    (line,) = capfd.readouterr().err.strip().splitlines()
    assert ended.value.code == 2 and all(word in line for word in words), line


# ------------------------------------------------------------------------------------------------------ evaluation
def test_evaluation_is_greedy_and_gives_success_over_its_episodes_and_over_128():
    train = tiny(eval_episodes=10)
    state = jax.jit(train.init)(jax.random.PRNGKey(0))
    returns, lengths, scores = jax.jit(train.evaluate)(state, jax.random.PRNGKey(3))
    assert returns.shape == lengths.shape == (10,) and set(lengths.tolist()) == {6} and set(np.abs(returns)) == {1}
    np.testing.assert_allclose(scores["success_rate"], (returns > 0).mean(), rtol=1e-6)

    # The answers of the likelier action after the two possible episodes, and the share of each cue among 128.
    _, actor_key = jax.random.split(jax.random.PRNGKey(3))
    _, reset, _ = ppo_memorychain.make_env(make_args(**TINY))
    cue = np.asarray(reset(jax.random.split(actor_key, 128))[0][:, 2])
    time_left = 1 - np.array([0, 0, 1, 2, 3, 4]) / 5
    obs = np.zeros((6, 2, 3), np.float32)
    obs[..., 0], obs[:2, :, 2] = time_left[:, None], [-1, 1]
    start = jnp.zeros((6, 2), bool).at[0].set(True)
    carry = jax.tree.map(lambda x: x[:2], state.actor.carry)
    answer = train.network(state.params, state.frozen, carry, obs, start)[1][-1].argmax(-1)  # to cue -1, to cue 1
    right = np.where(cue > 0, answer[1] == 1, answer[0] == 0)
    np.testing.assert_allclose(scores["success_rate_128"], right.mean(), rtol=1e-6)
    assert ((returns > 0) == right[:10]).all()


def test_more_than_128_episodes():
    train = tiny(eval_episodes=200, memory="mlp")
    state = jax.jit(train.init)(jax.random.PRNGKey(0))
    returns, _, scores = jax.jit(train.evaluate)(state, jax.random.PRNGKey(3))
    success = np.asarray(returns) > 0
    np.testing.assert_allclose(scores["success_rate"], success.mean(), rtol=1e-6)
    np.testing.assert_allclose(scores["success_rate_128"], success[:128].mean(), rtol=1e-6)


# ------------------------------------------------------------------------------------------------------ early stop
def test_a_seed_is_solved_when_enough_of_its_episodes_are_and_then_keeps_the_agent_that_did_it():
    train = tiny(stop_at_success=0.5, num_steps=4)  # of episodes of 6 steps, which end in some updates only
    state, step, seen = jax.jit(train.init)(jax.random.PRNGKey(1)), jax.jit(train.train_iteration), []
    for _ in range(12):
        before, (state, metrics) = state, step(state)
        learner = [jax.tree.leaves((x.params, x.opt_state)) for x in (before, state)]
        kept = all(np.array_equal(old, new) for old, new in zip(*learner, strict=True))
        assert kept == bool(metrics["solved"]) == bool(state.solved)
        seen.append((float(metrics["charts/success_rate"]), kept))
    first = next(i for i, (rate, _) in enumerate(seen) if rate >= 0.5)
    assert [kept for _, kept in seen] == [i >= first for i in range(12)]  # and not when no episode ended
    assert first > 3 and any(np.isnan(rate) for rate, _ in seen[:first]) and any(rate < 0.5 for rate, _ in seen)
    assert "solved" not in jax.eval_shape(tiny().train_iteration, state)[1]


def test_a_run_learns_to_recall_and_ends_one_update_after_it_did(script, tmp_path):
    """End to end. When it ends does not depend on when checkpoints are written, nor on a kill in between."""
    small = "--delay 4 --hidden-size 32 --num-envs 16 --num-steps 64 --num-minibatches 4 --learning-rate 3e-3"
    command = f"ppo_memorychain.py {small} --memory gru --frozen --stop-at-success 0.99 --total-timesteps 300000"
    results, timing = [], ("train_seconds", "compile_seconds", "SPS")
    for every in (600, 0):
        done = script(f"{command} --run-dir {every} --checkpoint-every {every}")
        assert done.returncode == 0 and done.stderr == "", done.stderr
        (run,) = (tmp_path / str(every)).iterdir()
        assert re.fullmatch(r"MemoryChain-4__ppo_memorychain__gru-frozen__1__\d+", run.name)
        results.append(json.loads((run / "eval.json").read_text()))
    assert "success_rate_128 1.000" in done.stdout and results[0]["environment_steps"] < 300_000 // 2
    assert results[0]["success_rate"] == results[0]["success_rate_128"] == results[0]["mean_return"] == 1
    solved, last = sorted((run / "checkpoints").iterdir(), key=lambda path: int(path.name))
    shutil.rmtree(last)
    resumed = script(f"ppo_memorychain.py --resume {run}")
    assert resumed.returncode == 0, resumed.stderr
    results.append(json.loads((run / "eval.json").read_text()))
    for result in results[1:]:
        assert {name: result[name] for name in result if name not in timing} == {
            name: results[0][name] for name in result if name not in timing
        }
    tags = {tag for tag, *_ in raw_points(run)}
    assert tags >= {"charts/success_rate", "eval/success_rate", "eval/success_rate_128", "eval/episodic_return"}
    assert "solved" not in tags and int(solved.name) + 1 == int(last.name)


def test_a_bad_flag_ends_the_program_before_anything_is_written(script, tmp_path):
    done = script("ppo_memorychain.py --delay 1")
    assert done.returncode == 2 and done.stdout == "" and not list(tmp_path.iterdir())
    assert done.stderr == "ppo_memorychain.py: error: --delay 1: must be from 2 to 4096\n"
