"""pqn_ffm.py from the inside: targets, exploration, what is frozen, and acting against training."""

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
from memory import count_parameters, merge
from popjym import spaces

TINY = dict(hidden_size=16, trace_size=4, context_size=2, num_envs=4, num_steps=60, num_minibatches=2, update_epochs=2)


def make_args(**changes) -> SimpleNamespace:
    flags = {name: value for group in vars(pqn_ffm.Args()).values() for name, value in vars(group).items()}
    args = SimpleNamespace(**flags | changes)
    pqn_ffm.check_args(args)
    return args


def tiny(**changes) -> SimpleNamespace:
    return pqn_ffm.make_train(make_args(**TINY | dict(total_timesteps=240 * 8, learning_rate=1e-3) | changes))


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
    targets = pqn_ffm.lambda_returns(*x, gamma, td_lambda)[:, 0]
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


@pytest.mark.parametrize("memory", ["ffm", "gru"])
def test_targets_bootstrap_a_time_limit_from_the_last_observation_and_the_memory_before_its_reset(memory, monkeypatch):
    monkeypatch.setattr(popjym, "make", lambda name: (Scripted(), None))
    args = make_args(**TINY | dict(num_steps=16, memory=memory, trace_size=32, context_size=4))
    train = pqn_ffm.make_train(args)
    state = jax.jit(train.init)(jax.random.PRNGKey(0))
    for i in range(2):  # the second rollout begins in the middle of episodes
        actor, t = jax.jit(train.rollout)(state, jax.random.PRNGKey(i))
        before, state = state, state.replace(actor=actor)
    targets = jax.jit(train.compute_targets)(state.params, state.frozen, actor, t)
    assert bool((t["truncated"] & ~t["terminated"]).any() & (t["truncated"] & t["terminated"]).any())

    # The same again one environment and one step at a time, with the memory carried by hand.
    q_network = jax.jit(train.q_network)
    t = jax.device_get(t)
    for b in range(args.num_envs):
        carry = jax.tree.map(lambda x, b=b: x[b : b + 1], before.actor.carry)
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
    train = pqn_ffm.make_train(make_args(**TINY))
    _, t = train.rollout(train.init(jax.random.PRNGKey(0)), jax.random.PRNGKey(1))
    assert t["done"].any() and (t["terminated"] == t["done"]).all() and not t["truncated"].any()


# ------------------------------------------------------------------------------------- acting against training
@pytest.mark.parametrize("memory", ["ffm", "gru", "mlp"])
@pytest.mark.parametrize("env", ["RepeatPreviousEasy", "NoisyStatelessCartPoleEasy"])
def test_q_values_of_the_first_minibatch_are_those_of_the_rollout(memory, env):
    changes = dict(TINY, trace_size=32, context_size=4) if memory != "ffm" else TINY
    train = pqn_ffm.make_train(make_args(**changes | dict(memory=memory, env=env, total_timesteps=240 * 8)))
    state = jax.jit(train.init)(jax.random.PRNGKey(0))
    for _ in range(2):  # the memory at the rollout's start is not the initial one
        state, _ = jax.jit(train.train_iteration)(state)
    _, t = jax.jit(train.rollout)(state, jax.random.PRNGKey(1))
    assert t["reset"][1:].any() and not t["reset"].all()
    inputs = (t["obs"], t["previous_action"], t["reset"])
    _, q_values = jax.jit(train.q_network)(state.params, state.frozen, state.actor.carry, *inputs)
    np.testing.assert_allclose(q_values, t["q_values"], rtol=1e-4, atol=1e-5)
    chosen = np.take_along_axis(np.asarray(t["q_values"]), np.asarray(t["action"])[..., None], -1)[..., 0]
    t["target"] = jnp.asarray(chosen + 1)  # so the loss is ½ where acting and training agree
    td_loss, mean_q = jax.jit(train.loss)(state.params, state.frozen, state.actor.carry, t)
    np.testing.assert_allclose([td_loss, mean_q], [0.5, chosen.mean()], rtol=1e-4, atol=1e-5)


def test_the_previous_action_is_forgotten_when_an_episode_starts():
    train = tiny()
    _, t = jax.jit(train.rollout)(train.init(jax.random.PRNGKey(0)), jax.random.PRNGKey(1))
    t = jax.device_get(t)
    assert (t["previous_action"][t["reset"]] == -1).all()
    later = ~t["reset"][1:]
    assert (t["previous_action"][1:][later] == t["action"][:-1][later]).all()
    assert (t["reset"][1:] == t["done"][:-1]).all() and t["reset"][0].all()


def test_episode_statistics_are_those_of_finished_episodes():
    train = tiny(num_steps=128, env="RepeatPrevious", total_timesteps=128 * 4 * 4)  # episodes of 51 steps
    state = train.init(jax.random.PRNGKey(0))
    key = jax.random.split(state.key, 3)[1]
    _, t = jax.jit(train.rollout)(state, key)
    t = jax.device_get(t)
    returns, lengths = [], []
    for b in range(t["done"].shape[1]):
        start = 0
        for end in np.flatnonzero(t["done"][:, b]) + 1:
            returns.append(t["reward"][start:end, b].sum())
            lengths.append(end - start)
            start = end
    _, metrics = jax.jit(train.train_iteration)(state)
    assert len(returns) == 2 * 4 and set(lengths) == {51}
    np.testing.assert_allclose(metrics["charts/episodic_return"], np.mean(returns), rtol=1e-5)
    np.testing.assert_allclose(metrics["charts/episodic_length"], 51)


def test_no_statistics_without_a_finished_episode():
    train = tiny(num_steps=20)
    _, metrics = jax.jit(train.train_iteration)(train.init(jax.random.PRNGKey(0)))
    assert np.isnan(metrics["charts/episodic_return"])


# ------------------------------------------------------------------------------------------------------- schedules
def test_epsilon_is_a_function_of_environment_steps():
    train = pqn_ffm.make_train(make_args(total_timesteps=1_000_000, exploration_fraction=0.25))
    steps = np.array([0, 125_000, 250_000, 250_001, 999_999])
    np.testing.assert_allclose([train.epsilon(s) for s in steps], [1, 0.525, 0.05, 0.05, 0.05], rtol=1e-6)


def test_the_policy_explores_at_the_rate_epsilon():
    """ε = 1: actions are uniform; ε = 0: they are greedy."""
    for start_e, end_e in ((1.0, 1.0), (0.0, 0.0)):
        train = tiny(start_e=start_e, end_e=end_e, num_envs=64, num_minibatches=1, total_timesteps=64 * 60)
        _, t = jax.jit(train.rollout)(train.init(jax.random.PRNGKey(0)), jax.random.PRNGKey(1))
        greedy = (t["action"] == t["q_values"].argmax(-1)).mean()
        # 3840 draws of 4 actions: the share of greedy ones among uniform ones has a standard deviation of 0.007.
        assert abs(greedy - 0.25) < 0.03 if start_e else greedy == 1


def test_learning_rate_and_epsilon_reach_their_ends_after_the_last_update():
    train = tiny(num_steps=20, total_timesteps=4 * 20 * 8, final_learning_rate=1e-5)
    state, step, rates, epsilons = train.init(jax.random.PRNGKey(0)), jax.jit(train.train_iteration), [], []
    for _ in range(8):
        state, metrics = step(state)
        rates.append(float(metrics["charts/learning_rate"]))
        epsilons.append(float(metrics["charts/epsilon"]))
    np.testing.assert_allclose(rates, np.linspace(1e-3, 1e-5, 9)[:8], rtol=1e-4)
    np.testing.assert_allclose(epsilons, [1.0, 0.525, *[0.05] * 6], rtol=1e-5)
    counts = [x for x in jax.tree.leaves(state.opt_state) if x.shape == ()]
    assert counts and all(int(count) == 8 * 2 * 2 for count in counts)  # updates × epochs × minibatches


@pytest.mark.parametrize(
    "flags, rate", [({}, 1e-5), ({"frozen": True}, 5e-5), ({"memory": "gru"}, 1e-5), ({"memory": "mlp"}, 5e-7)]
)
def test_the_published_learning_rate_follows_memory_and_frozen(flags, rate):
    assert make_args(**flags).learning_rate == rate
    assert make_args(**flags, learning_rate=0.1).learning_rate == 0.1


# ---------------------------------------------------------------------------------------------------------- frozen
def trained(train, updates=2):
    start = jax.jit(train.init)(jax.random.PRNGKey(0))
    state = start
    for _ in range(updates):
        state, _ = jax.jit(train.train_iteration)(state)
    return jax.device_get(merge(start.params, start.frozen)), jax.device_get(merge(state.params, state.frozen)), state


@pytest.mark.parametrize("memory", ["ffm", "gru"])
@pytest.mark.parametrize("frozen, frozen_mixers", [(True, False), (False, True), (True, True), (False, False)])
def test_frozen_leaves_stay_bit_for_bit_and_everything_else_moves(memory, frozen, frozen_mixers):
    changes = {} if memory == "ffm" else dict(trace_size=32, context_size=4)
    train = tiny(memory=memory, frozen=frozen, frozen_mixers=frozen_mixers, **changes)
    before, after, state = trained(train)
    for module in before:
        still = frozen and module.startswith("memory") or frozen_mixers and module.startswith("mixer")
        same = jax.tree.map(np.array_equal, before[module], after[module])
        assert all(jax.tree.leaves(same)) if still else not all(jax.tree.leaves(same)), module
    assert not np.array_equal(before["input"]["kernel"], after["input"]["kernel"])  # upstream of the memory
    # Adam keeps two moments of each trainable parameter, and nothing of a frozen one.
    trainable = sum(x.size for x in jax.tree.leaves(state.params))
    assert sum(x.size for x in jax.tree.leaves(state.opt_state) if x.ndim) == 2 * trainable
    numbers = count_parameters(state.params, state.frozen)
    assert numbers["all"]["trainable"] == trainable
    assert (numbers["memory_0"]["trainable"] == 0) == frozen and (numbers["mixer_1"]["trainable"] == 0) == frozen_mixers


def test_a_frozen_unit_costs_no_gradient():
    def flops(frozen):
        train = tiny(memory="gru", trace_size=32, context_size=4, hidden_size=64, frozen=frozen)
        state = train.init(jax.random.PRNGKey(0))
        _, t = train.rollout(state, jax.random.PRNGKey(1))
        t["target"] = t["reward"]
        grad = jax.jit(jax.grad(train.loss, has_aux=True))
        return grad.lower(state.params, state.frozen, state.actor.carry, t).compile().cost_analysis()["flops"]

    assert flops(frozen=True) < 0.9 * flops(frozen=False)


def test_table_1_of_frn():
    """PQN on StatelessCartPole: GRU 1,119,746 parameters, of which 331,778 are trained when the units are frozen."""

    def numbers(frozen):
        train = pqn_ffm.make_train(make_args(env="StatelessCartPole", memory="gru", frozen=frozen))
        state = jax.eval_shape(train.init, jax.random.PRNGKey(0))
        return count_parameters(state.params, state.frozen)["all"]

    assert numbers(False) == {"total": 1_119_746, "trainable": 1_119_746, "frozen": 0}
    assert numbers(True) == {"total": 1_119_746, "trainable": 331_778, "frozen": 787_968}


# ------------------------------------------------------------------------------------------------------ evaluation
def test_evaluation_plays_greedy_episodes_to_their_ends():
    train = tiny(eval_episodes=5)
    state = train.init(jax.random.PRNGKey(0))
    returns, lengths, _ = jax.jit(train.evaluate)(state, jax.random.PRNGKey(3))
    assert lengths.tolist() == [51] * 5 and len(set(returns.tolist())) > 1

    # The same episodes one step at a time.
    env, params = popjym.make("RepeatPreviousEasy")
    key, actor_key = jax.random.split(jax.random.PRNGKey(3))
    reset_keys = jax.random.split(actor_key, 5)
    obs, env_state = jax.vmap(env.reset, in_axes=(0, None))(reset_keys, params)
    carry = pqn_ffm.FFM(features=16, trace_size=4, context_size=2).initialize_carry(5)
    carry, action, reset, total = (carry, carry), jnp.full(5, -1), jnp.ones(5, bool), np.zeros(5)
    q_network, step = jax.jit(train.q_network), jax.jit(jax.vmap(env.step, in_axes=(0, 0, 0, None)))
    for _ in range(51):
        key, step_key = jax.random.split(key)
        carry, q_values = q_network(state.params, state.frozen, carry, obs[None], action[None], reset[None])
        action, reset = q_values[0].argmax(-1), jnp.zeros(5, bool)
        env_keys = jax.random.split(jax.random.split(step_key, 3)[2], 5)
        obs, env_state, reward, _, _ = step(env_keys, env_state, action, params)
        total += np.asarray(reward)
    np.testing.assert_allclose(returns, total, atol=1e-5)


def test_training_lowers_the_td_error():
    """On a fixed batch of transitions, a gradient step along the loss makes it smaller."""
    train = tiny()
    state = train.init(jax.random.PRNGKey(0))
    actor, t = train.rollout(state, jax.random.PRNGKey(1))
    t["target"] = train.compute_targets(state.params, state.frozen, actor, t)
    value_and_grad = jax.jit(jax.value_and_grad(train.loss, has_aux=True))
    (loss, _), grads = value_and_grad(state.params, state.frozen, state.actor.carry, t)
    params = optax.apply_updates(state.params, jax.tree.map(lambda g: -0.01 * g, grads))
    assert value_and_grad(params, state.frozen, state.actor.carry, t)[0][0] < loss
