"""popjym's interface: ids, spaces, errors, types, auto-reset, and the random words behind it all."""

import copy
import inspect
import pickle
import re
import subprocess
import sys
from functools import partial

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import popgym.envs
import pytest
from conftest import ROOT
from gymnax.wrappers import FlattenObservationWrapper, LogWrapper
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.random import threefry_2x32
from popjym_players import QUICK_TO_COMPILE, by_level, original_name, with_and_without_reset

import popjym
from popjym import deck, prng, spaces
from popjym.environment import Environment
from popjym.minesweeper import distinct_cells

FAMILIES = (
    "Autoencode Battleship StatelessCartPole NoisyStatelessCartPole VelocityOnlyCartPole Concentration CountRecall "
    "HigherLower Minesweeper MultiArmedBandit StatelessPendulum NoisyStatelessPendulum RepeatFirst RepeatPrevious"
).split()


def test_ids():
    assert sorted(popjym.registered_envs) == sorted(f + d for f in FAMILIES for d in ("Easy", "Medium", "Hard"))
    for env_id in popjym.registered_envs:
        env, params = popjym.make(env_id)
        assert env.name == env_id and env.default_params == params


@pytest.mark.parametrize(
    "wrong, right",
    [
        ("RepeatPrevious", "RepeatPreviousEasy"),
        ("repeatpreviouseasy", "RepeatPreviousEasy"),
        ("STATELESS_CARTPOLES", "StatelessCartPoleEasy"),
        ("Pong", "[A-Z]"),
        ("", "[A-Z]"),
    ],
)
def test_an_unknown_id_names_the_closest(wrong, right):
    """`make` takes ids and nothing else, like upstream's."""
    with pytest.raises(ValueError, match=f"no environment is called '{wrong}'; the closest are .*{right}"):
        popjym.make(wrong)


def test_a_name_is_resolved_whatever_its_case_and_underscores():
    for env_id in popjym.registered_envs:
        family, difficulty = re.fullmatch("(.+)(Easy|Medium|Hard)", env_id).groups()
        words = re.findall("[A-Z][a-z]+", family)  # Repeat, Previous
        for spelling in (family, "".join(words).lower(), "_".join(words), "-".join(words).upper()):
            assert popjym.resolve(spelling) == family + "Easy"
        for spelling in (env_id, env_id.lower(), "_".join([*words, difficulty]), f"{family}-{difficulty}".upper()):
            assert popjym.resolve(spelling) == env_id


@pytest.mark.parametrize("wrong", ["repeatprevious2", "repeat previous", "Easy", ""])
def test_a_name_that_means_nothing_names_the_closest(wrong):
    right = "RepeatPreviousEasy" if "previous" in wrong else "[A-Z]"
    with pytest.raises(ValueError, match=f"no environment is called '{wrong}'; the closest are .*{right}"):
        popjym.resolve(wrong)


def test_upstream_names_the_list_of_ids_like_this():
    """A script that needs the ids imports them from here, so that it also runs with upstream's package."""
    assert popjym.registration.REGISTERED_ENVS == popjym.registered_envs and popjym.make == popjym.registration.make


def test_wrong_params_are_a_clear_error():
    env, params = popjym.make("RepeatFirstEasy")
    _, others = popjym.make("RepeatPreviousEasy")
    key = jax.random.key(0)
    _, state = env.reset(key, params)
    message = "RepeatFirstEasy takes RepeatFirstParams as params, not RepeatPreviousParams"
    for call in (
        lambda: env.reset(key, others),
        lambda: env.step(key, state, 0, others),
        lambda: env.step_env(key, state, 0, others),
        lambda: env.reset_env(key, others),
    ):
        with pytest.raises(TypeError, match=message):
            call()


def test_no_params_means_the_default_ones():
    env, params = popjym.make("MinesweeperEasy")
    key = jax.random.key(3)
    chosen, default = env.reset(key, params), env.reset(key)
    assert jax.tree.all(jax.tree.map(np.array_equal, chosen, default))


def test_a_games_file_states_its_rules():
    for env_id in popjym.registered_envs:
        doc = inspect.getmodule(type(popjym.make(env_id)[0])).__doc__
        for heading in ("observation ", "actions ", "reward ", "episode ", "remember "):
            assert f"\n{heading}" in doc, (env_id, heading)


@pytest.mark.parametrize("env_id", popjym.registered_envs)
def test_spaces_are_the_originals(env_id):
    """One-hot where the original counts, row-major where it has rows and columns, and otherwise the same box."""
    env, params = popjym.make(env_id)
    original = getattr(popgym.envs, original_name(env_id))()

    ours, theirs = env.observation_space(params), original.observation_space
    sizes = {
        "Discrete": lambda s: int(s.n),
        "MultiDiscrete": lambda s: int(s.nvec.sum()),
        "Tuple": lambda s: sum(int(part.n) for part in s),
    }
    if type(theirs).__name__ == "Box":
        np.testing.assert_array_equal((ours.low, ours.high), (theirs.low, theirs.high))
    else:
        assert ours.shape == (sizes[type(theirs).__name__](theirs),)
        assert (ours.low == 0).all() and (ours.high == 1).all()
    assert ours.dtype == jnp.float32

    ours, theirs = env.action_space(params), original.action_space
    if type(theirs).__name__ == "Box":
        assert isinstance(ours, spaces.Box)
        np.testing.assert_array_equal((ours.low, ours.high), (theirs.low, theirs.high))
    else:
        assert isinstance(ours, spaces.Discrete) and ours.shape == ()
        assert ours.n == (int(theirs.n) if hasattr(theirs, "n") else int(theirs.nvec.prod()))


@pytest.mark.parametrize("old_style", [False, True])
@pytest.mark.parametrize("env_id", by_level())
def test_types_are_fixed(env_id, old_style):
    """Reset and step agree on every shape, dtype and weak type, so that scan, cond and select accept them."""
    env, params = popjym.make(env_id)
    key = jax.random.PRNGKey(0) if old_style else jax.random.key(0)
    action = env.action_space(params).sample(jax.random.key(1))

    @jax.jit
    def both_branches(key, action, is_over):
        obs, state = env.reset(key, params)
        step = lambda: env.step_env(key, state, action, params)[:2]  # noqa: E731
        return jax.lax.cond(is_over, lambda: env.reset(key, params), step)

    @jax.jit
    def scan(key, action):
        def body(carry, _):
            obs, state, key = carry
            obs, state, *rest = env.step(key, state, action, params)
            return (obs, state, key), rest

        return jax.lax.scan(body, (*env.reset(key, params), key), None, length=2)

    obs, state = jax.eval_shape(both_branches, key, action, True)
    (again_obs, again_state, _), (reward, done, info) = jax.eval_shape(scan, key, action)
    assert (obs, state) == (again_obs, again_state)
    assert obs.shape == env.observation_space(params).shape and obs.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(state)} <= {
        jnp.dtype(t) for t in ("int32", "uint32", "int8", "float32", "bool")
    }
    assert (reward.shape, reward.dtype) == ((2,), jnp.float32) and (done.shape, done.dtype) == ((2,), jnp.bool_)
    assert set(info) == {"terminated", "truncated", "final_observation"}
    assert info["terminated"].dtype == info["truncated"].dtype == jnp.bool_
    assert info["final_observation"].shape == (2, *obs.shape)


def test_old_and_new_keys_give_the_same_game():
    env, params = popjym.make("NoisyStatelessPendulumHard")
    new, old = jax.random.key(5), jax.random.PRNGKey(5)
    assert jax.tree.all(jax.tree.map(np.array_equal, env.reset(new, params), env.reset(old, params)))


def test_other_kinds_of_keys_work():
    env, params = popjym.make("RepeatFirstEasy")
    key = jax.random.key(5, impl="rbg")
    keys = jax.random.split(key, 400)
    obs, state = jax.vmap(env.reset, in_axes=(0, None))(keys, params)
    suits = np.asarray(obs).sum(axis=0)
    assert suits.sum() == 400 and suits.min() > 60
    obs, *_ = jax.vmap(env.step, in_axes=(0, 0, None, None))(keys, state, 0, params)
    assert (np.asarray(obs).sum(axis=1) == 1).all()


# --- Auto-reset -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_auto_reset(family):
    """A step is a step_env; at an end, and only there, observation and state are a new episode's first."""
    env, params = popjym.make(family + "Easy")
    (first_obs, first_state), plain, auto = with_and_without_reset(env.name)
    done = plain[3]
    assert (done.sum(axis=0) >= 2).all()
    for ours, theirs in zip(auto[2:], plain[2:], strict=True):  # reward, done, info with the last observation
        assert jax.tree.all(jax.tree.map(np.array_equal, ours, theirs))
    np.testing.assert_array_equal(auto[4]["final_observation"], plain[0])
    assert jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(a[~done], b[~done]), auto[:2], plain[:2]))

    assert (auto[1].time[done] == first_state.time[0]).all() and (plain[1].time[done] > 0).all()
    if family in ("Battleship", "Minesweeper", "MultiArmedBandit", "Concentration"):
        np.testing.assert_array_equal(auto[0][done], np.broadcast_to(first_obs[0], auto[0][done].shape))
    # Episodes differ from one another: what is hidden, or the first observation, is drawn anew.
    hidden = {"Battleship": "fleet", "Minesweeper": "mines", "MultiArmedBandit": "seed", "Concentration": "time"}
    if family in hidden and family != "Concentration":
        starts = np.asarray(jax.tree.leaves(getattr(auto[1], hidden[family]))[0])[done]
        assert len({start.tobytes() for start in starts}) > 0.8 * len(starts)
    elif family in ("StatelessCartPole", "NoisyStatelessCartPole", "StatelessPendulum", "NoisyStatelessPendulum"):
        assert len(np.unique(auto[0][done], axis=0)) == done.sum()


class Recorder(Environment):
    """A game of two steps that remembers every random word it was given."""

    start_words = 3
    move_words = 2

    def start(self, words, params):
        return jnp.zeros(1), (jnp.int32(0), jnp.stack(words), jnp.zeros(2, jnp.uint32))

    def move(self, words, state, action, params):
        time, started_with, _ = state
        return jnp.zeros(1), (time + 1, started_with, jnp.stack(words)), 0.0, time == 1, False

    def observation_space(self, params=None):
        return spaces.Box(0, 1, (1,))

    def action_space(self, params=None):
        return spaces.Discrete(1)


def test_no_random_word_is_used_twice():
    env = Recorder("Recorder", ())
    key = jax.random.key(0)
    _, state = env.reset(key)
    seen = list(np.asarray(state[1]))
    for i in range(20):
        key_step = jax.random.fold_in(key, i)
        _, moved, _, done, _ = env.step_env(key_step, state, 0)
        seen += list(np.asarray(moved[2]))
        _, state, *_ = env.step(key_step, state, 0)
        if done:
            seen += list(np.asarray(state[1]))
    assert len(seen) == 3 + 20 * 2 + 10 * 3 and len(set(map(int, seen))) == len(seen)


# --- Out-of-range actions: see README.md ------------------------------------------------------------------------------


@pytest.mark.parametrize("env_id", ["BattleshipEasy", "MinesweeperEasy", "MultiArmedBanditEasy", "ConcentrationEasy"])
def test_actions_off_the_board_are_clipped(env_id):
    env, params = popjym.make(env_id)
    n = env.action_space(params).n
    _, state = env.reset(jax.random.key(0), params)
    step = lambda action: env.step(jax.random.key(1), state, action, params)  # noqa: E731
    for outside, inside in ((n, n - 1), (n + 100, n - 1), (-1, 0), (-(2**31), 0)):
        assert jax.tree.all(jax.tree.map(np.array_equal, step(outside), step(inside)))


def test_pendulum_torque_is_clipped():
    env, params = popjym.make("StatelessPendulumEasy")
    _, state = env.reset(jax.random.key(0), params)
    step = lambda torque: env.step(jax.random.key(1), state, jnp.array([torque]), params)  # noqa: E731
    assert jax.tree.all(jax.tree.map(np.array_equal, step(50.0), step(2.0)))
    assert not np.array_equal(step(2.0)[0], step(1.0)[0])


# --- Random words -----------------------------------------------------------------------------------------------------


@given(st.integers(0, 2**32 - 1), st.integers(1, 9))
@settings(max_examples=30, deadline=None)
def test_words_are_threefrys(seed, n):
    key = jax.random.key(seed)
    blocks = (n + 1) // 2
    counters = jnp.concatenate([jnp.zeros(blocks, jnp.uint32), jnp.arange(blocks, dtype=jnp.uint32)])
    reference = np.asarray(threefry_2x32(jax.random.key_data(key), counters)).reshape(2, blocks).T.reshape(-1)
    np.testing.assert_array_equal(np.asarray(prng.words(key, n)), reference[:n])


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**16))
@settings(deadline=None)
def test_below_is_an_exact_product(word, n):
    assert int(prng.below(jnp.uint32(word), n)) == word * n >> 32


def test_extreme_words():
    low, high = jnp.uint32(0), jnp.uint32(2**32 - 1)
    assert prng.uniform(low) == 0 and prng.uniform(high) == np.float32(1 - 2**-24)
    assert -6 < prng.normal(low) < -5 and prng.normal(low) == -prng.normal(high)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=12), st.integers(0, 60))
@settings(deadline=None)
def test_mines_are_distinct_whatever_the_words(words, more):
    cells = np.asarray(distinct_cells(jnp.array(words, jnp.uint32), len(words) + more))
    assert len(set(cells.tolist())) == len(words) and cells.min() >= 0 and cells.max() < len(words) + more


@given(st.sampled_from([deck.COLORS, deck.SUITS, deck.RANKS]), st.integers(1, 4), st.randoms())
@settings(max_examples=10, deadline=None)
def test_a_deck_deals_exactly_its_cards(kinds, num_decks, random):
    cards, dealt = deck.full(kinds, num_decks), []
    deal = jax.jit(deck.deal)
    for _ in range(deck.CARDS * num_decks):
        kind, cards = deal(jnp.uint32(random.randrange(2**32)), cards)
        dealt.append(int(kind))
    assert (np.bincount(dealt) == deck.CARDS * num_decks // kinds).all() and (np.asarray(cards) == 0).all()


# --- Spaces -----------------------------------------------------------------------------------------------------------


def test_discrete_space():
    space = spaces.Discrete(5)
    samples = jax.vmap(space.sample)(jax.random.split(jax.random.key(0), 500))
    assert set(np.asarray(samples)) == set(range(5)) and samples.dtype == space.dtype
    assert [bool(space.contains(x)) for x in (0, 4, 5, -1, 2.0)] == [True, True, False, False, False]
    assert not space.contains(jnp.zeros(1, jnp.int32))


def test_box_space():
    space = spaces.Box(np.array([-1.0, -np.inf]), np.array([3.0, np.inf]), (2,))
    samples = np.asarray(jax.vmap(space.sample)(jax.random.split(jax.random.key(0), 500)))
    assert samples.dtype == np.float32 and samples[:, 0].min() < -0.9 and samples[:, 0].max() > 2.9
    assert np.isfinite(samples).all() and jax.vmap(space.contains)(samples).all()
    assert not space.contains(jnp.array([4.0, 0.0])) and not space.contains(jnp.zeros(3))


def test_a_space_is_none_of_gymnaxs_unless_gymnax_is_there():
    """And popjym does not import it: that takes longer than all the rest."""
    code = "import sys, popjym; env, params = popjym.make('RepeatFirstEasy'); print(env.action_space(params).__class__)"
    run = subprocess.run(
        [sys.executable, "-c", code + "; print('gymnax' in sys.modules)"], cwd=ROOT, capture_output=True, text=True
    )
    assert run.stdout.splitlines() == ["<class 'popjym.spaces.Discrete'>", "False"], run.stderr


@pytest.mark.parametrize("space", [spaces.Discrete(5), spaces.Box(-1, 1, (2,))], ids=str)
def test_a_space_can_be_copied_and_pickled(space):
    for again in (pickle.loads(pickle.dumps(space)), copy.deepcopy(space)):
        assert type(again) is type(space) and str(again) == str(space)
        assert space.contains(again.sample(jax.random.key(0)))


# --- gymnax -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("env_id", popjym.registered_envs)
def test_spaces_pass_for_gymnaxs(env_id):
    env, params = popjym.make(env_id)
    box, actions = env.observation_space(params), env.action_space(params)
    assert isinstance(box, gymnax.environments.spaces.Box) and isinstance(box, spaces.Box)
    is_pendulum = "Pendulum" in env_id
    assert isinstance(actions, gymnax.environments.spaces.Box if is_pendulum else gymnax.environments.spaces.Discrete)
    assert env.num_actions == (1 if is_pendulum else actions.n)


@pytest.mark.parametrize("env_id", ["ConcentrationEasy", "StatelessPendulumHard"])
def test_gymnaxs_wrappers(env_id):
    """FlattenObservationWrapper and LogWrapper, one around the other, step as the environment itself does."""
    env, params = popjym.make(env_id)
    wrapped = LogWrapper(FlattenObservationWrapper(env))
    space = wrapped.observation_space(params)
    assert space.shape == env.observation_space(params).shape and wrapped.num_actions == env.num_actions

    @partial(jax.jit, compiler_options=QUICK_TO_COMPILE)
    def rollout(key):
        def step(carry, key):
            logged, plain = carry
            key_action, key_step = jax.random.split(key)
            action = env.action_space(params).sample(key_action)
            obs, logged, reward, done, info = wrapped.step(key_step, logged, action, params)
            plain_obs, plain, *plain_rest = env.step(key_step, plain, action, params)
            return (logged, plain), ((obs, reward, done), (plain_obs, *plain_rest[:2]), info)

        key_reset, key_steps = jax.random.split(key)
        carry = (wrapped.reset(key_reset, params)[1], env.reset(key_reset, params)[1])
        return jax.lax.scan(step, carry, jax.random.split(key_steps, 250))[1]

    logged, plain, info = jax.device_get(rollout(jax.random.key(0)))
    assert jax.tree.all(jax.tree.map(np.array_equal, logged, plain))
    reward, done = plain[1:]
    ends = np.flatnonzero(done)
    assert len(ends) == 2 and (info["returned_episode_lengths"][ends] == params.max_steps_in_episode).all()
    returns = [episode.sum() for episode in np.split(reward, ends + 1)[:2]]
    np.testing.assert_allclose(info["returned_episode_returns"][ends], returns, rtol=1e-4)
