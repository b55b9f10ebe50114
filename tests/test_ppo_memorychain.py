"""ppo_memorychain.py from the inside: the task, advantages, the loss, memory across rollouts, early stop.

What all scripts share is in test_scripts.py; the loss and its gradient at the published width in test_losses_256.py.
"""

import functools
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
from test_runs import points

import ppo_memorychain
from memory import count_parameters, merge

# Episodes of 6 steps, which go on from one rollout to the next. Eight updates.
TINY = dict(
    memory="gru", hidden_size=16, delay=5, num_envs=4, num_steps=20, num_minibatches=2, update_epochs=2,
    total_timesteps=4 * 20 * 8, learning_rate=1e-3,
)  # fmt: skip


def make_args(**changes) -> ppo_memorychain.Args:
    args = ppo_memorychain.Args(**changes)
    ppo_memorychain.check_args(args)
    return args


@functools.cache
def tiny(**changes) -> SimpleNamespace:
    """The functions of a small run, each compiled once."""
    args = make_args(**TINY | changes)
    functions = {name: jax.jit(function) for name, function in vars(ppo_memorychain.make_train(args)).items()}
    return SimpleNamespace(args=args, **functions)


@functools.cache
def trained() -> SimpleNamespace:
    """All states of a run, and what it tells of each update: its metrics, and its rollout played once more."""
    states, metrics, rollouts = [tiny().init(jnp.int32(5))], [], []
    key = jax.random.split(jax.random.key(5), 4)[2]
    for update in range(8):
        rollout_key, _ = jax.random.split(jax.random.fold_in(key, update))
        rollouts.append(jax.device_get(tiny().rollout(states[-1], rollout_key)[1]))
        state, told = tiny().train_iteration(states[-1])
        states.append(state)
        metrics.append(jax.device_get(told))
    return SimpleNamespace(states=states, metrics=metrics, rollouts=rollouts)


def play(run, number: int):
    """The states before each of some rollouts with the same parameters, their transitions, and the last runner."""
    states, transitions = [run.init(jnp.int32(0))], []
    for i in range(number):
        runner, t = run.rollout(states[-1], jax.random.key(i))
        transitions.append(t)
        states.append(states[-1].replace(runner=runner))
    return states[:-1], transitions, runner


def softmax(policy):
    return np.exp(policy) / np.exp(policy).sum(-1, keepdims=True)


# -------------------------------------------------------------------------------------------------------- the task
@pytest.mark.parametrize(
    "delay", [2, 1000, 4096, *(pytest.param(delay, marks=pytest.mark.slow) for delay in (64, 999, 2048))]
)
def test_an_episode_pays_once_at_its_last_step_and_who_remembers_the_first_cue_gets_1(delay):
    num_actions, reset, step = ppo_memorychain.make_env(make_args(delay=delay))
    assert num_actions == 2
    obs, state = reset(jax.random.split(jax.random.key(0), 16))
    honest = jnp.arange(16) < 8  # the others answer the opposite

    def answer(x, key):
        obs, state, first, cue = x
        cue = jnp.where(first, obs[:, 2], cue)
        right = (cue > 0).astype(jnp.int32)
        action = jnp.where(honest, right, 1 - right)
        next_obs, state, reward, terminated, truncated, _ = step(jax.random.split(key, 16), state, action)
        return (next_obs, state, terminated | truncated, cue), (obs, reward, terminated, truncated, cue)

    start = (obs, state, jnp.ones(16, bool), jnp.zeros(16))
    keys = jax.random.split(jax.random.key(1), 2 * (delay + 1))
    obs, reward, terminated, truncated, cue = jax.device_get(jax.jit(lambda x: jax.lax.scan(answer, x, keys)[1])(start))
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


generalized_advantages = jax.jit(ppo_memorychain.generalized_advantages)


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
    found = generalized_advantages(*(jnp.asarray(x)[:, None] for x in x), gamma, gae_lambda)[:, 0]
    np.testing.assert_allclose(found, advantages_loop(*x, gamma, gae_lambda), rtol=1e-5, atol=1e-5)


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


@pytest.mark.parametrize("memory", ["gru", pytest.param("lru", marks=pytest.mark.slow)])
def test_advantages_bootstrap_a_time_limit_from_the_last_observation_and_the_memory_before_its_reset(
    memory, monkeypatch
):
    monkeypatch.setattr(ppo_memorychain, "make_env", scripted_env)
    run = tiny.__wrapped__(num_steps=16, memory=memory)
    states, transitions, runner = play(run, 2)  # the second begins in the middle of episodes
    before, t = states[1], transitions[1]
    found = run.compute_advantages(before.params, before.frozen, runner, t)
    assert bool((t["truncated"] & ~t["terminated"]).any() & (t["truncated"] & t["terminated"]).any())

    # The same again one environment and one step at a time, with the memory carried by hand.
    t = jax.device_get(t)
    for b in range(run.args.num_envs):
        carry = jax.tree.map(lambda x, b=b: x[b : b + 1], before.runner.carry)
        value, next_value = np.zeros((2, run.args.num_steps))
        for i in range(run.args.num_steps):
            now = [jnp.asarray(t[name][i, b])[None, None] for name in ("obs", "reset")]
            carry, _, v = run.network(before.params, before.frozen, carry, *now)
            led_to = jnp.asarray(t["final_obs"][i, b])[None, None]
            _, _, next_v = run.network(before.params, before.frozen, carry, led_to, jnp.zeros((1, 1), bool))
            value[i], next_value[i] = v[0, 0], next_v[0, 0]
        x = (t["reward"][:, b], t["terminated"][:, b], t["done"][:, b], value, next_value)
        expected = advantages_loop(*x, run.args.gamma, run.args.gae_lambda)
        np.testing.assert_allclose(found[:, b], expected, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------- acting against training
MEMORIES = ("gru", "lru", "ffm", "mlp")
IN_BRIEF = ("gru",)


@pytest.mark.parametrize(
    "memory", [name if name in IN_BRIEF else pytest.param(name, marks=pytest.mark.slow) for name in MEMORIES]
)
def test_one_pass_over_three_rollouts_has_their_values_and_a_ratio_of_1(memory):
    run = tiny(memory=memory, num_blocks=2, delay=50)
    states, transitions, _ = play(run, 3)
    whole = {name: jnp.concatenate([t[name] for t in transitions]) for name in transitions[0] if name != "carry"}
    starts = np.flatnonzero(whole["reset"][:, 0])
    assert starts.tolist() == [0, 51]  # the first episode ends in the third rollout, and the next one begins
    start, reset = states[0], whole["reset"]
    _, policy, value = run.network(start.params, start.frozen, start.runner.carry, whole["obs"], reset)
    np.testing.assert_allclose(value, whole["value"], rtol=1e-4, atol=1e-5)
    ratio = jnp.exp(ppo_memorychain.log_probability(policy, whole["action"]) - whole["log_prob"])
    np.testing.assert_allclose(ratio, 1, atol=1e-6)
    # An empty memory in place of the one carried over to the third rollout does not.
    forgetful = run.network(start.params, start.frozen, start.runner.carry, whole["obs"], reset.at[40].set(True))[2]
    np.testing.assert_allclose(forgetful[:40], value[:40], atol=1e-6)
    assert (np.abs(forgetful[40:51] - value[40:51]).max() > 1e-3) == (memory != "mlp")


@pytest.mark.slow
def test_the_epochs_of_an_update_learn_from_every_environment_with_its_own_memory():
    """With a network that does not move, every minibatch has a ratio of 1, and the epochs have each sample once."""
    state = trained().states[4]  # in the middle of episodes
    logits = {"kernel": jnp.sin(jnp.arange(32.0)).reshape(16, 2), "bias": jnp.zeros(2)}  # a policy far from uniform
    # The schedule counts its own steps. At its end, the learning rate is 1e-10.
    at_the_end = jax.tree.map(lambda x: jnp.full_like(x, 10**6) if x.shape == () else x, state.opt_state)
    state = state.replace(params=state.params | {"logits": logits}, opt_state=at_the_end)
    after, metrics = tiny().train_iteration(state)
    key = jax.random.fold_in(jax.random.split(jax.random.key(5), 4)[2], 4)
    runner, t = tiny().rollout(state, jax.random.split(key)[0])
    assert not t["reset"][0].any() and np.exp(t["log_prob"]).std() > 0.05
    advantage = np.asarray(tiny().compute_advantages(state.params, state.frozen, runner, t), np.float64)
    assert abs(metrics["losses/approx_kl"]) < 1e-6 and metrics["losses/clipfrac"] == 0
    np.testing.assert_allclose(metrics["losses/policy_loss"], 0, atol=1e-6)  # of normalised advantages
    np.testing.assert_allclose(metrics["losses/value_loss"], 0.5 * (advantage**2).mean(), rtol=1e-4)
    explained = 1 - advantage.var() / (advantage + t["value"]).var()
    np.testing.assert_allclose(metrics["losses/explained_variance"], explained, rtol=1e-4, atol=1e-5)
    leaves = jax.tree.leaves(jax.device_get(after.params))
    norm = np.sqrt(sum((x.astype(np.float64) ** 2).sum() for x in leaves))
    np.testing.assert_allclose(metrics["losses/parameter_norm"], norm, rtol=1e-5)


def test_episode_statistics_are_those_of_the_episodes_that_ended_in_an_update():
    """An episode goes on from one rollout to the next."""
    returns, lengths, all_returns = np.zeros(4), np.zeros(4), set()
    for t, metrics in zip(trained().rollouts, trained().metrics, strict=True):
        ended = []
        for reward, done in zip(t["reward"], t["done"], strict=True):
            returns, lengths = returns + reward, lengths + 1
            ended += list(zip(returns[done], lengths[done], returns[done] == 1, strict=True))
            returns, lengths = np.where(done, 0, returns), np.where(done, 0, lengths)
        assert metrics["charts/episodes"] == len(ended) and {length for _, length, _ in ended} == {6}
        found = [metrics[f"charts/episodic_{name}"] for name in ("return", "length", "success_rate")]
        np.testing.assert_allclose(found, np.mean(ended, axis=0), rtol=1e-5, atol=1e-6)
        all_returns |= {episode_return for episode_return, _, _ in ended}
    assert all_returns == {-1, 1}
    assert {int(metrics["charts/episodes"]) for metrics in trained().metrics} == {12, 16}  # of 20 steps


# -------------------------------------------------------------------------------------------------------- the loss
@pytest.mark.parametrize("norm_adv, clip_vloss", [(True, True), (False, False)])
def test_the_loss_and_what_it_tells_are_cleanrls(norm_adv, clip_vloss):
    coefficients = dict(clip_coef=0.1, ent_coef=0.3, vf_coef=0.7)
    run = tiny(memory="mlp", norm_adv=norm_adv, clip_vloss=clip_vloss, **coefficients)
    rng, state = np.random.default_rng(0), run.init(jnp.int32(0))
    params = state.params | {"logits": jax.tree.map(lambda x: 100 * x, state.params["logits"])}  # not near uniform
    log_prob, value, advantage, returns = 0.3 * rng.normal(size=(4, 20, 4))  # as if the network had moved since
    t = {
        "obs": jnp.asarray(rng.normal(size=(20, 4, 3)), jnp.float32),
        "reset": jnp.zeros((20, 4), bool),
        "action": jnp.asarray(rng.integers(2, size=(20, 4)), jnp.int32),
        "log_prob": jnp.asarray(np.log(0.5) + log_prob, jnp.float32),
        "value": jnp.asarray(value, jnp.float32),
    }
    of_state = params, state.frozen, state.runner.carry
    total, found = run.loss(*of_state, t, jnp.asarray(advantage, jnp.float32), jnp.asarray(returns, jnp.float32))
    _, policy, value = run.network(*of_state, t["obs"], t["reset"])

    policy, value, t = (jax.tree.map(lambda x: np.asarray(x, np.float64), x) for x in (policy, value, t))
    policy = softmax(policy)
    ratio = np.where(t["action"] == 1, policy[..., 1], policy[..., 0]) / np.exp(t["log_prob"])
    if norm_adv:
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    policy_loss = np.maximum(-advantage * ratio, -advantage * np.clip(ratio, 0.9, 1.1)).mean()
    value_loss = (value - returns) ** 2
    if clip_vloss:
        value_loss = np.maximum(value_loss, (t["value"] + np.clip(value - t["value"], -0.1, 0.1) - returns) ** 2)
    value_loss, entropy = 0.5 * value_loss.mean(), -(policy * np.log(policy)).sum(-1).mean()
    expected = {
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy": entropy,
        "approx_kl": (ratio - 1 - np.log(ratio)).mean(),
        "clipfrac": (np.abs(ratio - 1) > 0.1).mean(),
    }
    assert found.keys() == expected.keys() and 0.1 < expected["clipfrac"] < 0.9
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(total, policy_loss - 0.3 * entropy + 0.7 * value_loss, rtol=1e-4)


def test_the_learning_rate_reaches_its_end_after_the_last_update():
    rates = [metrics["charts/learning_rate"] for metrics in trained().metrics]
    np.testing.assert_allclose(rates, np.linspace(1e-3, 1e-10, 9)[:8], rtol=1e-4)
    counts = [x for x in jax.tree.leaves(trained().states[-1].opt_state) if x.shape == ()]
    assert counts and all(int(count) == 8 * 2 * 2 for count in counts)  # updates × epochs × minibatches
    assert [bool(tiny().finished(state)) for state in trained().states] == [False] * 8 + [True]


# ------------------------------------------------------------------------------------------------------- the agent
def episodes():
    """Observations [6, 4, 3] and resets [6, 4] of whole episodes at delay 5, two of each cue: -1, 1, -1, 1."""
    obs = np.zeros((6, 4, 3), np.float32)
    obs[..., 0] = 1 - np.array([0, 0, 1, 2, 3, 4])[:, None] / 5
    obs[:2, :, 2] = [-1, 1, -1, 1]
    return jnp.asarray(obs), jnp.zeros((6, 4), bool).at[0].set(True)


def test_the_output_projection_is_affine_and_both_readouts_read_it():
    """Linear(256) without an activation (FRN Table A1), after the last mixer."""
    run = tiny(memory="mlp", num_blocks=2, delay=50)
    state, rng, agent = run.init(jnp.int32(0)), np.random.default_rng(0), ppo_memorychain.Agent(run.args, 2)
    params = merge(state.params, state.frozen)
    params = jax.tree.map(lambda x: x + rng.normal(size=x.shape, scale=0.1).astype(np.float32), params)
    apply = jax.jit(functools.partial(agent.apply, capture_intermediates=True))
    _, seen = apply({"params": params}, state.runner.carry, *episodes())
    seen = jax.tree.map(lambda calls: calls[0], seen["intermediates"], is_leaf=lambda x: isinstance(x, tuple))
    normed = np.asarray(seen["LayerNorm_1"]["__call__"], np.float64)
    x = np.where(normed > 0, normed, 0.01 * normed)  # LeakyReLU
    projected = x @ params["output"]["kernel"] + params["output"]["bias"]
    assert (projected < -0.1).any()
    np.testing.assert_allclose(seen["output"]["__call__"], projected, rtol=1e-4, atol=1e-5)
    for name in ("actor_0", "critic_0"):
        expected = projected @ params[name]["kernel"] + params[name]["bias"]
        np.testing.assert_allclose(seen[name]["__call__"], expected, rtol=1e-4, atol=1e-5)


def test_actor_and_critic_share_the_trunk_and_nothing_else():
    state, moves = trained().states[-1], {"policy": set(), "value": set()}
    before = tiny().network(state.params, state.frozen, state.runner.carry, *episodes())[1:]
    for module, leaves in state.params.items():
        other = state.params | {
            module: jax.tree.map(lambda x: x + jnp.sin(jnp.arange(x.size)).reshape(x.shape), leaves)
        }
        after = tiny().network(other, state.frozen, state.runner.carry, *episodes())[1:]
        for name, old, new in zip(moves, before, after, strict=True):
            if not np.array_equal(old, new):
                moves[name].add(module)
    trunk = {"input", "memory_0", "mixer_0", "output"}
    assert moves["policy"] == trunk | {"actor_0", "actor_norm_0", "logits"}
    assert moves["value"] == trunk | {"critic_0", "critic_norm_0", "value"}


@pytest.mark.parametrize("memory, total, unit", [("gru", 1_385_221, 787_968), ("lru", 1_123_589, 526_336)])
def test_table_1_of_frn(memory, total, unit):
    """Its PPO rows are of Playground's L = 2, K = 3, with 4 observations (here 3) and 2 standard deviations (none)."""
    for frozen in (False, True):
        train = ppo_memorychain.make_train(make_args(memory=memory, frozen=frozen, num_blocks=2, num_readout_blocks=3))
        state = jax.eval_shape(train.init, jnp.int32(0))
        numbers, here = count_parameters(state.params, state.frozen)["all"], total - 256 - 2
        assert numbers == {"total": here, "trainable": here - unit * frozen, "frozen": unit * frozen}


# ------------------------------------------------------------------------------------------------------- the flags
def test_the_defaults_are_those_of_table_a3():
    published = dict(
        learning_rate=3e-4, final_learning_rate=1e-10, gamma=0.99, gae_lambda=0.9, max_grad_norm=0.5, clip_coef=0.2,
        ent_coef=0, vf_coef=0.5, num_envs=64, num_steps=1024, num_minibatches=16, update_epochs=4,
        total_timesteps=10_000_000, num_blocks=1, num_readout_blocks=1, hidden_size=256,
    )  # fmt: skip
    for frozen in (False, True):
        args = vars(make_args(frozen=frozen))
        assert {name: args[name] for name in published} == published and args["env"] == "MemoryChain-128"


# Of every unit, the flags that are its settings, and the values they have where they are not given.
SETTINGS = {
    "gru": dict(update_bias=0.0),
    "lru": dict(r_min=0.9, r_max=0.999, max_phase=2 * np.pi),
    "ffm": dict(trace_size=32, context_size=4),
    "mlp": {},
}
OTHER = dict(trace_size=8, context_size=2, r_min=0.25)  # a value of each setting; 0.95 of the others


@pytest.mark.parametrize("memory", MEMORIES)
def test_the_settings_of_a_unit_reach_it_and_have_the_same_defaults_trained_and_frozen(memory):
    def settings(**changes):
        args = make_args(memory=memory, **changes)
        again = ppo_memorychain.Args(**vars(args))  # as when a run is resumed
        ppo_memorychain.check_args(again)
        assert again == args
        unit = vars(ppo_memorychain.make_unit(args))
        return {
            name: unit[name] for name, default in vars(ppo_memorychain.Args).items() if name in unit and default is None
        }

    assert settings() == pytest.approx(SETTINGS[memory])
    if memory != "mlp":
        assert settings(frozen=True) == settings()
    for name in SETTINGS[memory]:
        value = OTHER.get(name, 0.95)
        assert settings(**{name: value}) == pytest.approx(SETTINGS[memory] | {name: value})


@pytest.mark.parametrize(
    "flags, words",
    [
        ({"delay": 1}, ["--delay 1:", "2 to 4096"]),
        ({"delay": 4097}, ["--delay 4097:"]),
        ({"env": "CartPole"}, ["--env CartPole:", "MemoryChain"]),
        ({"env": "MemoryChain-4"}, ["--env MemoryChain-4:", "--delay", "MemoryChain-128"]),
        ({"stop_at_success": 1.5}, ["--stop-at-success 1.5:"]),
        ({"stop_at_success": 0.0}, ["--stop-at-success 0.0:"]),
        ({"gae_lambda": 1.1}, ["--gae-lambda 1.1:", "0 to 1"]),
        ({"clip_coef": -0.1}, ["--clip-coef -0.1:"]),
        ({"ent_coef": float("nan")}, ["--ent-coef nan:"]),
        ({"max_grad_norm": 0.0}, ["--max-grad-norm 0.0:", "positive"]),
        ({"num_envs": 24}, ["--num-envs 24:", "16"]),
        ({"num_envs": 16, "num_steps": 1}, ["--num-minibatches 16:", "one sample", "--norm-adv"]),
        ({"total_timesteps": 65_535}, ["--total-timesteps 65535:", "65536"]),
        ({"memory": "mlp", "frozen": True}, ["--frozen True:", "mlp"]),
        ({"memory": "gru", "r_min": 0.9}, ["--r-min 0.9:", "gru"]),
        ({"memory": "lru", "trace_size": 4}, ["--trace-size 4:", "lru"]),
        ({"memory": "ffm", "trace_size": 0}, ["--trace-size must", "0"]),
        ({"memory": "lru", "max_phase": 7.0}, ["--max-phase must", "7.0"]),
        ({"r_min": 0.9995}, ["--r-min must", "0.9995", "0.999"]),
        ({"r_max": 1.5}, ["--r-max must", "1.5", "at most 1"]),
    ],
)
def test_a_bad_flag_is_one_line(flags, words, capfd):
    with pytest.raises(SystemExit) as ended:
        make_args(**flags)
    printed = capfd.readouterr()
    (line,) = printed.err.strip().splitlines()
    assert line.startswith("ppo_memorychain.py: error: ") and printed.out == ""
    assert ended.value.code == 2 and all(word in line for word in words), line


def test_one_sample_a_minibatch_is_fine_where_advantages_are_not_normalised():
    assert make_args(num_envs=16, num_steps=1, norm_adv=False).num_minibatches == 16


# ------------------------------------------------------------------------------------------------------ evaluation
def test_evaluation_is_greedy_and_gives_success_over_its_episodes_and_over_128():
    state = trained().states[-1]
    result = jax.device_get(tiny().evaluate(state))
    returns, lengths = result["returns"], result["lengths"]
    assert returns.shape == lengths.shape == (10,) and set(lengths) == {6} and set(np.abs(returns)) == {1}

    # The answers of the likelier action after the two possible episodes, and the share of each cue among 128.
    _, runner_key = jax.random.split(jax.random.split(jax.random.key(5), 4)[3])
    _, reset, _ = ppo_memorychain.make_env(tiny().args)
    cue = np.asarray(reset(jax.random.split(runner_key, 128))[0][:, 2])
    carry = jax.tree.map(jnp.zeros_like, state.runner.carry)
    answer = tiny().network(state.params, state.frozen, carry, *episodes())[1][-1].argmax(-1)  # to cue -1, to cue 1, …
    right = np.where(cue > 0, answer[1] == 1, answer[0] == 0)
    assert ((returns > 0) == right[:10]).all()
    means = [result[name] for name in ("mean_return", "std_return", "mean_length", "success_rate", "success_rate_128")]
    np.testing.assert_allclose(means, [returns.mean(), returns.std(), 6, right[:10].mean(), right.mean()], rtol=1e-6)


def test_more_than_128_episodes():
    result = jax.device_get(tiny(eval_episodes=200).evaluate(trained().states[-1]))
    success = result["returns"] > 0
    assert success.shape == (200,) and success.mean() != success[:128].mean()
    np.testing.assert_allclose(result["success_rate"], success.mean(), rtol=1e-6)
    np.testing.assert_allclose(result["success_rate_128"], success[:128].mean(), rtol=1e-6)


# ------------------------------------------------------------------------------------------------------ early stop
def test_a_seed_that_succeeded_keeps_the_agent_that_did_it():
    run = tiny(
        memory="mlp", stop_at_success=0.75, num_steps=4
    )  # of episodes of 6 steps, which end in some updates only
    state, seen = run.init(jnp.int32(1)), []
    for _ in range(12):
        before, (state, metrics) = state, run.train_iteration(state)
        learner = [jax.tree.leaves((x.params, x.opt_state)) for x in (before, state)]
        kept = all(np.array_equal(old, new) for old, new in zip(*learner, strict=True))
        assert kept == bool(state.succeeded) == bool(run.finished(state))
        seen.append((int(metrics["charts/episodes"]), float(metrics["charts/episodic_success_rate"]), kept))
    first = next(i for i, (_, rate, _) in enumerate(seen) if rate >= 0.75)
    assert [kept for *_, kept in seen] == [i >= first for i in range(12)]
    assert any(episodes == 0 for episodes, *_ in seen[:first]), seen  # which is no success
    assert any(episodes > 0 and rate < 0.75 for episodes, rate, _ in seen[:first]), seen
    assert any(rate < 0.75 for _, rate, _ in seen[first:]), seen  # nor does it begin to learn again


@pytest.mark.slow
def test_a_run_learns_to_recall_and_ends_with_the_update_that_did(script, tmp_path):
    """End to end. When it ends does not depend on when checkpoints are written, nor on a stop in between."""
    small = "--delay 4 --hidden-size 32 --num-envs 16 --num-steps 64 --num-minibatches 4 --learning-rate 3e-3"
    command = f"ppo_memorychain.py {small} --memory gru --frozen --stop-at-success 0.99 --total-timesteps 300000"
    results, timing = [], ("train_seconds", "compile_seconds", "SPS")
    for every in (600, 0):
        done = script(f"{command} --run-dir {every} --checkpoint-every {every}")
        assert done.returncode == 0 and done.stderr == "", done.stderr
        (run,) = (tmp_path / str(every)).iterdir()
        assert re.fullmatch(r"MemoryChain-4__ppo_memorychain__gru-frozen__1__\d+\.\d+", run.name)
        results.append(json.loads((run / "eval.json").read_text()))
    assert results[0]["environment_steps"] < 300_000 // 2
    assert results[0]["success_rate"] == results[0]["success_rate_128"] == results[0]["mean_return"] == 1
    shutil.copy(run / "checkpoint.previous", run / "checkpoint.msgpack")  # of the update before
    (run / "eval.json").unlink()
    resumed = script(f"ppo_memorychain.py --resume {run}")
    assert resumed.returncode == 0, resumed.stderr
    results.append(json.loads((run / "eval.json").read_text()))
    for result in results[1:]:
        assert result.keys() == results[0].keys()
        assert all(result[name] == results[0][name] for name in result if name not in timing)
    rates = points(run)["charts/episodic_success_rate"]
    assert rates[-1][0] == results[0]["environment_steps"]
    assert [rate >= 0.99 for _, rate in rates] == [False] * (len(rates) - 1) + [True]
