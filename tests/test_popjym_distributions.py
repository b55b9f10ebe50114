"""What is random has the original's distribution: two-sample tests against the original's own resets, fixed seeds.

There are some three hundred comparisons in this file. At ALPHA = 1e-6 for each, a right program fails with fewer than
one set of seeds in a thousand, and the samples are large enough for a wrong one to be far beyond that.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import popgym.envs
import pytest
from popjym_players import (
    QUICK_TO_COMPILE,
    all_knowing_gunner,
    constant_player,
    draw_keys,
    play,
    random_player,
    sweeping_player,
)
from scipy import stats

import popjym
from popjym.multi_armed_bandit import pay_probability

ALPHA = 1e-6


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def assert_same_categories(ours, theirs):
    """Chi-square test that two samples of categories (rows) have one distribution."""
    categories, index = np.unique(np.concatenate([ours, theirs]), axis=0, return_inverse=True)
    index = index.reshape(-1)
    table = np.stack([np.bincount(part, minlength=len(categories)) for part in np.split(index, [len(ours)])])
    rare = table.sum(axis=0) < 10  # too few for the test's approximation: lumped together
    table = np.column_stack([table[:, ~rare], table[:, rare].sum(axis=1)]) if rare.any() else table
    table = table[:, table.sum(axis=0) > 0]
    assert table.shape[1] > 1 and stats.chi2_contingency(table).pvalue > ALPHA


def assert_same_numbers(ours, theirs):
    assert stats.ks_2samp(ours, theirs).pvalue > ALPHA


def kinds_dealt(env_id):
    """Every card of many episodes, in the order in which they come: ints [episodes, cards]."""
    env, params = popjym.make(env_id)
    if env_id.startswith("Concentration"):
        [sweep] = play(env, params, [sweeping_player(env, params)], 3000, params.num_cards)
        return sweep.state.table[:, -1]
    [trace] = play(env, params, [constant_player(0)], 3000, params.max_steps_in_episode)
    obs = np.concatenate([trace.first_obs[:, None], trace.obs], axis=1)
    if env_id.startswith("Autoencode"):
        return obs[:, : params.num_cards, 2:].argmax(-1)
    if env_id.startswith("CountRecall"):
        values, queries = obs[..., : params.kinds].argmax(-1), obs[..., params.kinds :].argmax(-1)
        return np.concatenate([values, queries], axis=1)
    return obs.argmax(-1)


def original_kinds_dealt(env_id):
    env = getattr(popgym.envs, env_id)()

    def deal():
        env.reset()
        if env_id.startswith("CountRecall"):
            return np.concatenate([env.deck_idx_type[deck.idx[::-1]] for deck in (env.value_deck, env.query_deck)])
        if env_id.startswith("Concentration"):
            return env.state.copy()
        return (env.deck.ranks_idx if env_id.startswith("HigherLower") else env.deck.suits_idx)[env.deck.idx[::-1]]

    env.reset(seed=1)
    return np.stack([deal() for _ in range(3000)])


@pytest.mark.parametrize(
    "env_id",
    [
        "RepeatPreviousEasy",
        "RepeatFirstEasy",
        "HigherLowerEasy",
        "AutoencodeEasy",
        "CountRecallEasy",
        slow("CountRecallMedium"),
        slow("CountRecallHard"),
        "ConcentrationEasy",
        slow("ConcentrationHard"),
    ],
)
def test_decks_are_shuffled(env_id):
    ours, theirs = kinds_dealt(env_id), original_kinds_dealt(env_id)
    assert ours.shape == theirs.shape
    last = ours.shape[1] - 1
    # Single cards, neighbours, and cards far apart: in a shuffled deck they depend on each other a little.
    for places in [(0,), (last,), (0, 1), (1, 2), (last // 2, last // 2 + 1), (0, last), (last - 1, last)]:
        assert_same_categories(ours[:, places], theirs[:, places])
    # Whatever order does to a sequence shows in how often a card equals its neighbour.
    repeats = [(sample[:, 1:] == sample[:, :-1]).sum(axis=1) for sample in (ours, theirs)]
    assert_same_categories(*[count[:, None] for count in repeats])


def original_fleets(level, n):
    """Fleets of the original's resets, as the first and the last cell of every ship, row-major [n, 8]."""
    env = getattr(popgym.envs, "Battleship" + level)()
    env.reset(seed=1)
    place_ship, ends = env.place_ship, []

    def recording_place_ship(board, ship_size):
        before = board.copy()
        board = place_ship(board, ship_size)
        cells = np.flatnonzero((board != before).reshape(-1))
        ends.extend([cells[0], cells[-1]])
        return board

    env.place_ship = recording_place_ship
    for _ in range(n):
        env.reset()
    return np.array(ends).reshape(n, 8)


def ship_ends(fleets):
    return fleets[:, [0, 1, 2, 4, 5, 7, 8, 11]]


@pytest.mark.parametrize("level", [slow("Easy"), slow("Medium"), slow("Hard")])
def test_ships_are_placed_like_the_originals(level):
    """In fresh games, and in the games that auto-reset starts, whose fleets are placed while the last one is sunk."""
    env, params = popjym.make("Battleship" + level)
    n = 20000

    @partial(jax.jit, compiler_options=QUICK_TO_COMPILE)
    @jax.vmap
    def fleets(key):
        key_reset, key_steps = jax.random.split(key)
        obs, first = env.reset(key_reset, params)
        gunner = all_knowing_gunner(env, params)

        def step(carry, key):
            obs, state = carry
            action, _ = gunner.act((), obs, state)
            obs, state, _, done, _ = env.step(key, state, action, params)
            return (obs, state), done

        # Twelve hits end an episode: the shortest there is, so that some of the next fleets are finished in a hurry.
        (_, second), done = jax.lax.scan(step, (obs, first), jax.random.split(key_steps, params.ship_cells))
        return first.fleet, second.fleet, done

    first, second, done = jax.device_get(fleets(draw_keys(n)))
    assert done[:, -1].all() and done.sum() == n
    theirs = original_fleets(level, n)
    for ours in (ship_ends(first), ship_ends(second)):
        for ship in range(4):
            both_ends = [2 * ship, 2 * ship + 1]
            assert_same_categories(ours[:, both_ends], theirs[:, both_ends])
        # How the ships lie to each other: distances between their first cells, in rows and in columns.
        for one, other in [(0, 2), (0, 6), (2, 4), (2, 6), (4, 6)]:
            for coordinate in (lambda cell: cell // params.size, lambda cell: cell % params.size):
                apart = [coordinate(sample[:, one]) - coordinate(sample[:, other]) for sample in (ours, theirs)]
                assert_same_categories(*[difference[:, None] for difference in apart])
    # And the next game knows nothing of this one.
    halves = [ship_ends(first)[:, 6] < params.size**2 // 2, ship_ends(second)[:, 6] < params.size**2 // 2]
    table = np.histogram2d(*halves, bins=2)[0]
    assert stats.chi2_contingency(table).pvalue > ALPHA


@pytest.mark.parametrize("level", ["Easy", slow("Medium"), slow("Hard")])
def test_mines_are_laid_like_the_originals(level):
    env, params = popjym.make("Minesweeper" + level)
    n = 8000
    _, state = jax.vmap(env.reset, (0, None))(draw_keys(n), params)
    ours = np.sort(np.asarray(state.mines), axis=1)

    original = getattr(popgym.envs, "MineSweeper" + level)()
    original.reset(seed=1)

    def lay():
        original.reset()
        return np.flatnonzero(original.hidden_grid.reshape(-1) == 1)

    theirs = np.stack([lay() for _ in range(n)])
    if level == "Easy":  # few enough to count every set of mines
        sets = np.unique(ours, axis=0, return_counts=True)[1]
        assert len(sets) == 120 and stats.chisquare(sets).pvalue > ALPHA
    last = params.num_mines - 1
    for places in [(0,), (last,), (last // 2,), (0, 1), (0, last)]:
        assert_same_categories(ours[:, places], theirs[:, places])


@pytest.mark.parametrize("level", ["Easy", slow("Hard")])
def test_arms_pay_like_the_originals(level):
    env, params = popjym.make("MultiArmedBandit" + level)
    n = 2000
    _, state = jax.vmap(env.reset, (0, None))(draw_keys(n), params)
    ours = np.asarray(jax.vmap(pay_probability, (0, None))(state, jnp.arange(params.num_arms)))
    original = getattr(popgym.envs, "MultiarmedBandit" + level)()
    original.reset(seed=1)
    theirs = np.stack([original.reset()[1]["bandits"] for _ in range(n)])
    assert ours.shape == theirs.shape
    assert_same_numbers(ours.reshape(-1), theirs.reshape(-1))
    for arm in (0, 1, params.num_arms - 1):
        assert_same_numbers(ours[:, arm], theirs[:, arm])
    assert_same_numbers(ours.max(axis=1), theirs.max(axis=1))
    correlation = np.corrcoef(ours, rowvar=False)[np.triu_indices(params.num_arms, 1)] * np.sqrt(n)
    assert stats.kstest(correlation, "norm").pvalue > ALPHA  # arms are independent of each other

    # And the arms keep their promise: over an episode, the payments of one arm are as many as its probability says.
    [trace] = play(env, params, [constant_player(3)], n, params.max_steps_in_episode)
    state = jax.tree.map(jnp.asarray, trace.first_state)
    promised = np.asarray(jax.vmap(pay_probability, (0, None))(state, jnp.array([3])))[:, 0]
    paid = (trace.reward > 0).sum(axis=1)
    steps = params.max_steps_in_episode
    middle = (promised > 0.02) & (promised < 0.98)
    surplus = (paid - steps * promised)[middle] / np.sqrt(steps * promised * (1 - promised))[middle]
    assert abs(surplus.mean()) * np.sqrt(middle.sum()) < 5 and abs(surplus.std() - 1) < 0.06


@pytest.mark.parametrize(
    "family, original_family, names",
    [
        ("StatelessCartPole", "PositionOnlyCartPole", ("position", "velocity", "angle", "angular_velocity")),
        ("NoisyStatelessCartPole", "NoisyPositionOnlyCartPole", ("position", "velocity", "angle", "angular_velocity")),
        ("VelocityOnlyCartPole", "VelocityOnlyCartPole", ("position", "velocity", "angle", "angular_velocity")),
        ("StatelessPendulum", "PositionOnlyPendulum", ("angle", "velocity")),
        ("NoisyStatelessPendulum", "NoisyPositionOnlyPendulum", ("angle", "velocity")),
    ],
)
def test_start_states(family, original_family, names):
    env, params = popjym.make(family + "Easy")
    n = 4000
    _, state = jax.vmap(env.reset, (0, None))(draw_keys(n), params)
    ours = np.stack([np.asarray(getattr(state, name)) for name in names], axis=1)
    original = getattr(popgym.envs, original_family + "Easy")()
    original.reset(seed=1)

    def start():
        original.reset()
        return np.array(original.state)

    theirs = np.stack([start() for _ in range(n)])
    for i in range(len(names)):
        assert_same_numbers(ours[:, i], theirs[:, i])
        for j in range(i):
            assert_same_numbers(ours[:, i] * ours[:, j], theirs[:, i] * theirs[:, j])
            assert abs(np.corrcoef(ours[:, i], ours[:, j])[0, 1]) < 5 / np.sqrt(n)


@pytest.mark.parametrize("level, sigma", [("Easy", 0.1), slow("Medium", 0.2), slow("Hard", 0.3)])
@pytest.mark.parametrize("family", ["NoisyStatelessCartPole", "NoisyStatelessPendulum"])
def test_noise(family, level, sigma):
    """The observation is the noise-free one plus N(0, sigma²), independent everywhere, then clipped to the space."""
    env, params = popjym.make(family + level)
    n, steps = 4000, 3
    [trace] = play(env, params, [random_player(env, params)], n, steps)
    obs = np.concatenate([trace.first_obs[:, None], trace.obs], axis=1)  # [n, 1 + steps, 2]
    path = partial(np.append, axis=1)
    state = jax.tree.map(lambda first, later: path(first[:, None], later), trace.first_state, trace.state)
    if family == "NoisyStatelessCartPole":
        clean = np.stack([state.position, state.angle], axis=-1)
    else:
        clean = np.stack([np.cos(state.angle), np.sin(state.angle)], axis=-1)

    space = env.observation_space(params)
    assert (obs >= space.low).all() and (obs <= space.high).all()
    # Clipping moves probability to the bounds: compare with clipped noise of numpy's.
    numpy_noise = np.random.default_rng(0).normal(0, sigma, clean.shape)
    expected = np.clip(clean + numpy_noise, space.low, space.high)
    for t in range(1 + steps):
        for i in range(2):
            assert_same_numbers((obs - clean)[:, t, i], (expected - clean)[:, t, i])
            assert abs((obs == space.high)[:, t, i].mean() - (expected == space.high)[:, t, i].mean()) < 0.04
    noise = (obs - clean).reshape(n, -1)
    pairs = np.corrcoef(noise, rowvar=False)[np.triu_indices(noise.shape[1], 1)]
    if family == "NoisyStatelessCartPole" and level == "Easy":  # never clipped: exactly normal and uncorrelated
        assert stats.kstest(noise.reshape(-1) / sigma, "norm").pvalue > ALPHA
        assert np.abs(pairs).max() < 5.5 / np.sqrt(n)


@pytest.mark.parametrize("family", ["NoisyStatelessCartPole", "NoisyStatelessPendulum"])
def test_without_noise_only_the_clean_observation_is_left(family):
    env, params = popjym.make(family + "Easy")
    clean_env, clean_params = popjym.make(family.removeprefix("Noisy") + "Easy")
    [trace] = play(env, params.replace(noise_sigma=0.0), [random_player(env, params)], 20, 50)
    for t in range(10):
        if family == "NoisyStatelessCartPole":
            clean = np.stack([trace.state.position[:, t], trace.state.angle[:, t]], axis=-1)
            np.testing.assert_array_equal(trace.obs[:, t], clean)
        else:
            angle = trace.state.angle[:, t]
            np.testing.assert_allclose(trace.obs[:, t], np.stack([np.cos(angle), np.sin(angle)], -1), atol=1e-6)
    # The same physics and rewards as the family without noise.
    state = jax.tree.map(lambda leaf: jnp.asarray(leaf[:, 4]), trace.state)
    action, key = jnp.asarray(trace.action[:, 5]), draw_keys(20)
    step_env = jax.jit(jax.vmap(partial(clean_env.step_env, params=clean_params)), compiler_options=QUICK_TO_COMPILE)
    _, state, reward, *_ = step_env(key, state, action)
    np.testing.assert_allclose(reward, trace.reward[:, 5], rtol=1e-6)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), state, jax.tree.map(lambda x: x[:, 5], trace.state))
