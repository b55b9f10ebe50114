"""pqn_ffm.py from the inside. What all scripts share is in test_scripts.py."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import popjym
import pqn_ffm
from memory import count_parameters
from popjym import spaces

# Episodes of a random player last about 20 steps and differ in length. Eight updates; ε falls in the first two.
TINY = dict(
    env="StatelessCartPoleEasy", hidden_size=16, trace_size=4, context_size=2, num_envs=4, num_steps=20,
    num_minibatches=2, update_epochs=2, total_timesteps=4 * 20 * 8, learning_rate=1e-3, final_learning_rate=1e-5,
    eval_episodes=5,
)  # fmt: skip


def make_args(**changes) -> pqn_ffm.Args:
    args = pqn_ffm.Args(**changes)
    pqn_ffm.check_args(args)
    return args


@functools.cache
def tiny() -> SimpleNamespace:
    """The functions of one small run, each compiled once."""
    functions = vars(pqn_ffm.make_train(make_args(**TINY)))
    return SimpleNamespace(**{name: jax.jit(function) for name, function in functions.items()})


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


# ------------------------------------------------------------------------------------------------------- λ-returns
def lambda_returns_loop(reward, terminated, done, next_value, gamma, td_lambda):
    """One environment, one episode after the other, in float64."""
    T = len(reward)
    targets = np.zeros(T)
    for t in reversed(range(T)):
        if terminated[t]:
            targets[t] = reward[t]
        elif done[t] or t == T - 1:
            targets[t] = reward[t] + gamma * next_value[t]
        else:
            targets[t] = reward[t] + gamma * (td_lambda * targets[t + 1] + (1 - td_lambda) * next_value[t])
    return targets


lambda_returns = jax.jit(pqn_ffm.lambda_returns)


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.sampled_from(["no", "terminal", "time limit", "both"]), min_size=6, max_size=6),
    st.floats(0, 1),
    st.floats(0, 1),
    st.integers(0, 1000),
)
def test_lambda_returns_equal_a_loop_over_episodes(ends, gamma, td_lambda, seed):
    rng = np.random.default_rng(seed)
    reward, next_value = rng.normal(size=(2, 6))
    terminated = np.array([end in ("terminal", "both") for end in ends])
    done = np.array([end != "no" for end in ends])
    x = [jnp.asarray(x)[:, None] for x in (reward, terminated, done, next_value)]
    targets = lambda_returns(*x, gamma, td_lambda)[:, 0]
    expected = lambda_returns_loop(reward, terminated, done, next_value, gamma, td_lambda)
    np.testing.assert_allclose(targets, expected, rtol=1e-5, atol=1e-5)


class Scripted:
    """Episodes of 3, 4 and 5 steps that end by a time limit, a terminal state, and both; the observation tells all."""

    def observation_space(self, params):
        return spaces.Box(0, 1, (6,))

    def action_space(self, params):
        return spaces.Discrete(3)

    def observe(self, state):
        return jnp.concatenate([jax.nn.one_hot(state["episode"] % 3, 3), jnp.sin(state["t"] + jnp.arange(3.0))])

    def reset(self, key, params):
        state = {"episode": jax.random.randint(key, (), 0, 3), "t": jnp.int32(0)}
        return self.observe(state), state

    def step(self, key, state, action, params):
        state = {"episode": state["episode"], "t": state["t"] + 1}
        end = state["t"] == 3 + state["episode"] % 3
        reward = jnp.cos(1.0 * action) + state["t"]
        info = {
            "terminated": end & (state["episode"] % 3 != 0),
            "truncated": end & (state["episode"] % 3 != 1),
            "final_observation": self.observe(state),
        }
        next_state = {
            "episode": jnp.where(end, state["episode"] + 1, state["episode"]),
            "t": jnp.where(end, 0, state["t"]),
        }
        return self.observe(next_state), next_state, reward, end, info


@pytest.mark.parametrize("memory", ["ffm", pytest.param("gru", marks=pytest.mark.slow)])
def test_targets_bootstrap_a_time_limit_from_the_last_observation_and_the_memory_before_its_reset(memory, monkeypatch):
    monkeypatch.setattr(popjym, "make", lambda name: (Scripted(), None))
    of_ffm = {} if memory == "ffm" else dict(trace_size=32, context_size=4)
    args = make_args(**TINY | dict(num_steps=16, memory=memory) | of_ffm)
    train = pqn_ffm.make_train(args)
    state, rollout = jax.jit(train.init)(jnp.int32(0)), jax.jit(train.rollout)
    for i in range(2):  # the second rollout begins in the middle of episodes
        runner, t = rollout(state, jax.random.key(i))
        before, state = state, state.replace(runner=runner)
    targets = jax.jit(train.compute_targets)(state.params, state.frozen, runner, t)
    assert bool((t["truncated"] & ~t["terminated"]).any() & (t["truncated"] & t["terminated"]).any())

    # The same again one environment and one step at a time, with the memory carried by hand.
    q_network = jax.jit(train.q_network)
    t = jax.device_get(t)
    for b in range(args.num_envs):
        carry = jax.tree.map(lambda x, b=b: x[b : b + 1], before.runner.carry)
        next_value = np.zeros(args.num_steps)
        for i in range(args.num_steps):
            now = [jnp.asarray(t[name][i, b])[None, None] for name in ("obs", "previous_action", "reset")]
            carry, q_values = q_network(state.params, state.frozen, carry, *now)
            np.testing.assert_allclose(q_values[0, 0], t["q_values"][i, b], atol=1e-5)
            led_to = jnp.asarray(t["final_obs"][i, b])[None, None]
            action = jnp.asarray(t["action"][i, b])[None, None]
            _, next_q = q_network(state.params, state.frozen, carry, led_to, action, jnp.zeros((1, 1), bool))
            next_value[i] = next_q.max()
        flags = (t["terminated"][:, b], t["done"][:, b])
        expected = lambda_returns_loop(t["reward"][:, b], *flags, next_value, args.gamma, args.td_lambda)
        np.testing.assert_allclose(targets[:, b], expected, rtol=1e-5, atol=1e-5)


def test_an_environment_that_tells_only_done_has_terminal_ends(monkeypatch):
    class Upstream(Scripted):
        def step(self, *x):
            return *super().step(*x)[:4], {"discount": 1.0}

    monkeypatch.setattr(popjym, "make", lambda name: (Upstream(), None))
    num_actions, reset, step = pqn_ffm.make_env(make_args())
    keys, ends, step = jax.random.split(jax.random.key(0), 6), [], jax.jit(step)
    _, state = reset(keys)
    for _ in range(5):
        _, state, _, terminated, truncated, _ = step(keys, state, jnp.zeros(6, jnp.int32))
        ends.append(terminated)
        assert not truncated.any()
    assert num_actions == 3 and np.all(np.sum(ends, axis=0) == 1)  # episodes last 3, 4 or 5 steps


# ------------------------------------------------------------------------------------------------------------ agent
def test_the_output_projection_is_affine():
    """Linear(256) without an activation (FRN Table A1) stands between the blocks and the readout."""
    agent = pqn_ffm.Agent(make_args(**TINY), 2)
    rng = np.random.default_rng(0)
    inputs = jnp.asarray(rng.normal(size=(3, 4, 2)), jnp.float32), jnp.zeros((3, 4), jnp.int32), jnp.zeros((3, 4), bool)
    variables = agent.init(jax.random.key(0), agent.initialize_carry(4), *inputs)
    params = jax.tree.map(lambda x: x + rng.normal(size=x.shape, scale=0.1), variables["params"])
    _, seen = agent.apply({"params": params}, agent.initialize_carry(4), *inputs, capture_intermediates=True)
    seen = jax.tree.map(lambda calls: calls[0], seen["intermediates"], is_leaf=lambda x: isinstance(x, tuple))
    normed = np.asarray(seen["LayerNorm_1"]["__call__"], np.float64)
    x = np.where(normed > 0, normed, 0.01 * normed)
    for name in ("output", "readout_0"):
        x = x @ params[name]["kernel"] + params[name]["bias"]
        assert (x < -0.1).any()
        np.testing.assert_allclose(seen[name]["__call__"], x, rtol=1e-4, atol=1e-5)


def test_the_previous_action_is_forgotten_when_an_episode_starts():
    for i, t in enumerate(trained().rollouts):
        assert (t["previous_action"][t["reset"]] == -1).all()
        later = ~t["reset"][1:]
        assert (t["previous_action"][1:][later] == t["action"][:-1][later]).all()
        assert (t["reset"][1:] == t["done"][:-1]).all()
        assert (t["reset"][0] == (trained().rollouts[i - 1]["done"][-1] if i else True)).all()
    assert sum(t["done"].sum() for t in trained().rollouts) > 10


def test_a_frozen_unit_costs_no_gradient():
    def flops(frozen):
        changes = dict(memory="gru", trace_size=32, context_size=4, hidden_size=64, frozen=frozen)
        train = pqn_ffm.make_train(make_args(**TINY | changes))
        state = jax.eval_shape(train.init, jnp.int32(0))
        _, t = jax.eval_shape(train.rollout, state, jax.eval_shape(jax.random.key, 0))
        grad = jax.jit(jax.grad(train.loss, has_aux=True))
        lowered = grad.lower(state.params, state.frozen, state.runner.carry, t, t["reward"])
        return lowered.compile().cost_analysis()["flops"]

    assert flops(frozen=True) < 0.9 * flops(frozen=False)


def test_table_1_of_frn():
    """PQN on StatelessCartPole: GRU 1,119,746 parameters, of which 331,778 are trained when the units are frozen."""

    def numbers(frozen):
        train = pqn_ffm.make_train(make_args(env="StatelessCartPoleEasy", memory="gru", frozen=frozen))
        state = jax.eval_shape(train.init, jnp.int32(0))
        return count_parameters(state.params, state.frozen)["all"]

    assert numbers(False) == {"total": 1_119_746, "trainable": 1_119_746, "frozen": 0}
    assert numbers(True) == {"total": 1_119_746, "trainable": 331_778, "frozen": 787_968}


# ---------------------------------------------------------------------------------------------------------- metrics
def test_episode_statistics_are_those_of_the_episodes_that_ended_in_an_update():
    """An episode goes on from one rollout to the next."""
    returns, lengths = np.zeros(4), np.zeros(4)
    for t, metrics in zip(trained().rollouts, trained().metrics, strict=True):
        ended = []
        for reward, done in zip(t["reward"], t["done"], strict=True):
            returns, lengths = returns + reward, lengths + 1
            ended += list(zip(returns[done], lengths[done], strict=True))
            returns, lengths = np.where(done, 0, returns), np.where(done, 0, lengths)
        assert metrics["charts/episodes"] == len(ended)
        means = np.mean(ended, axis=0) if ended else [0, 0]
        found = [metrics["charts/episodic_return"], metrics["charts/episodic_length"]]
        np.testing.assert_allclose(found, means, rtol=1e-5)
    lengths = {int(x) for t in trained().rollouts for x in t["episode_length"][t["done"]]}
    assert len(lengths) > 5 and max(lengths) > 20


# ------------------------------------------------------------------------------------------------------- schedules
def test_epsilon_is_a_function_of_environment_steps():
    train = pqn_ffm.make_train(make_args(total_timesteps=1_000_000, exploration_fraction=0.25))
    steps = np.array([0, 125_000, 250_000, 250_001, 999_999])
    np.testing.assert_allclose(jax.vmap(train.epsilon)(steps), [1, 0.525, 0.05, 0.05, 0.05], rtol=1e-6)


@pytest.mark.parametrize("update, epsilon", [(1000, 0.05), (1, None)])
def test_the_policy_explores_at_the_rate_epsilon(update, epsilon):
    """The rate falls within a rollout, too: at update 1 of this run, from 0.525 to 0.05."""
    state = trained().states[0].replace(update=jnp.int32(update))
    greedy = []
    for i in range(50):
        _, t = tiny().rollout(state, jax.random.key(i))
        greedy.append(t["action"] == t["q_values"].argmax(-1))
    # A random action of two is the greedy one in half of its draws. 200 draws a step have a deviation of at most 0.035.
    found = 2 * (1 - np.mean(greedy, axis=(0, 2)))
    expected = np.full(20, epsilon) if epsilon else np.linspace(0.525, 0.05, 21)[:20]
    np.testing.assert_allclose(found.mean(), expected.mean(), atol=0.03)
    np.testing.assert_allclose(found, expected, atol=4 * 2 * 0.035)


def test_learning_rate_and_epsilon_reach_their_ends_after_the_last_update():
    rates = [metrics["charts/learning_rate"] for metrics in trained().metrics]
    epsilons = [metrics["charts/epsilon"] for metrics in trained().metrics]
    np.testing.assert_allclose(rates, np.linspace(1e-3, 1e-5, 9)[:8], rtol=1e-4)
    np.testing.assert_allclose(epsilons, [1.0, 0.525, *[0.05] * 6], rtol=1e-5)
    last = trained().states[-1]
    counts = [x for x in jax.tree.leaves(last.opt_state) if x.shape == ()]
    assert counts and all(int(count) == 8 * 2 * 2 for count in counts)  # updates × epochs × minibatches
    assert [bool(tiny().finished(state)) for state in trained().states] == [False] * 8 + [True]


@pytest.mark.parametrize(
    "flags, rate", [({}, 1e-5), ({"frozen": True}, 5e-5), ({"memory": "gru"}, 1e-5), ({"memory": "mlp"}, 5e-7)]
)
def test_the_published_learning_rate_follows_memory_and_frozen(flags, rate):
    assert make_args(**flags).learning_rate == rate
    assert make_args(**flags, learning_rate=0.1).learning_rate == 0.1


# ------------------------------------------------------------------------------------------------------ evaluation
def test_evaluation_plays_greedy_episodes_to_their_ends():
    state = trained().states[-1]
    result = jax.device_get(tiny().evaluate(state))
    assert len(set(result["lengths"].tolist())) > 1

    # The same episodes one step at a time.
    env, params = popjym.make(TINY["env"])
    key, runner_key = jax.random.split(jax.random.split(jax.random.key(5), 4)[3])
    obs, env_state = jax.vmap(env.reset, in_axes=(0, None))(jax.random.split(runner_key, 5), params)
    carry = pqn_ffm.Agent(make_args(**TINY), 2).initialize_carry(5)
    action, reset, playing = jnp.full(5, -1, jnp.int32), jnp.ones(5, bool), np.ones(5, bool)
    returns, lengths = np.zeros(5), np.zeros(5, int)
    step = jax.jit(jax.vmap(env.step, in_axes=(0, 0, 0, None)))
    while playing.any():
        key, step_key = jax.random.split(key)
        carry, q_values = tiny().q_network(state.params, state.frozen, carry, obs[None], action[None], reset[None])
        action = q_values[0].argmax(-1).astype(jnp.int32)
        env_keys = jax.random.split(jax.random.split(step_key, 3)[2], 5)
        obs, env_state, reward, done, _ = step(env_keys, env_state, action, params)
        returns, lengths = returns + playing * np.asarray(reward), lengths + playing
        playing = playing & ~np.asarray(done)
        reset, action = done, jnp.where(done, -1, action)
    np.testing.assert_array_equal(result["lengths"], lengths)
    np.testing.assert_allclose(result["returns"], returns, rtol=1e-4)
    means = [result["mean_return"], result["std_return"], result["mean_length"]]
    np.testing.assert_allclose(means, [returns.mean(), returns.std(), lengths.mean()], rtol=1e-4)


def test_training_lowers_the_td_error():
    """On a fixed batch of transitions, a gradient step along the loss makes it smaller."""
    state = trained().states[0]
    runner, t = tiny().rollout(state, jax.random.key(1))
    targets = tiny().compute_targets(state.params, state.frozen, runner, t)
    value_and_grad = jax.jit(jax.value_and_grad(tiny().loss, has_aux=True))
    (loss, _), grads = value_and_grad(state.params, state.frozen, state.runner.carry, t, targets)
    params = optax.apply_updates(state.params, jax.tree.map(lambda g: -0.01 * g, grads))
    assert value_and_grad(params, state.frozen, state.runner.carry, t, targets)[0][0] < loss
