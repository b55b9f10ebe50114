"""Every id against the numpy original, step by step.

Our environment plays first. Then the original plays the same actions in the same hidden world: its random generator is
replaced by loaded dice, which make its own reset and step code deal our cards, place our mines and start in our states.
"""

import jax
import jax.numpy as jnp
import numpy as np
import popgym.envs
import popjym_players as players
import pytest
from popjym_players import by_level, first_end, original_name
from popjym_returns import traces

import popjym
from popjym import prng
from popjym.multi_armed_bandit import pay_probability

SEEDS = 20


class LoadedDice:
    """Stands in for numpy's Generator: every method returns the next of the answers it was given, and then no more."""

    def __init__(self, **answers):
        self.answers = {method: list(values) for method, values in answers.items()}

    def shuffle(self, array):
        array[:] = self.answers["shuffle"].pop(0)

    def choice(self, cells, size, replace):
        chosen = np.array(self.answers["choice"].pop(0))
        assert chosen.shape == (size,) and len(set(chosen)) == size and not replace
        return chosen

    def integers(self, high, size):
        return np.array(self.answers["integers"].pop(0))

    def random(self, size=None, dtype=np.float64):
        return self.answers["random"].pop(0) if size is None else np.array(self.answers["random"].pop(0), dtype)

    def uniform(self, low, high, size=None):
        return np.array(self.answers["uniform"].pop(0), np.float64)

    def normal(self, mean, sigma):
        return np.zeros_like(sigma)  # noise is compared as a distribution: test_popjym_distributions.py

    def assert_used_up(self):
        assert not any(self.answers.values()), "the original asked for less than it was given"


def rollouts(env_id):
    """The first episode of some seeds of every player."""
    _, params = popjym.make(env_id)
    for player, trace in traces(env_id).items():
        for seed, length in enumerate(first_end(trace)[:SEEDS]):
            original = getattr(popgym.envs, original_name(env_id))()
            yield player, trace, seed, length, original, params


def compare(trace, seed, length, original, dice, expected_obs, to_action=int, obs_tolerance=0.0, physics=None):
    """Replay one episode in the original. `expected_obs` [1 + length, ...] is our account of it, in its encoding.

    `physics` [1 + length, ...] are our physical states: the original starts every step in ours. Its own would drift
    off, because it computes in float64 and an inverted pendulum doubles the difference every few steps.
    """
    original.np_random = dice
    obs, _ = original.reset()
    seen, rewards, ends = [obs], [], []
    for t in range(length):
        if physics is not None:
            original.state = physics[t].astype(np.float64)
        obs, reward, terminated, truncated, _ = original.step(to_action(trace.action[seed, t]))
        seen.append(obs)
        rewards.append(reward)
        ends.append((terminated, truncated))
        if terminated or truncated:
            break
    dice.assert_used_up()

    where = f"seed {seed}"
    ours = np.stack([trace.terminated[seed, :length], trace.truncated[seed, :length]], axis=1)
    np.testing.assert_array_equal(ours, ends, err_msg=where)
    np.testing.assert_array_equal(trace.done[seed, :length], ours.any(axis=1), err_msg=where)
    np.testing.assert_allclose(trace.reward[seed, :length], rewards, rtol=1e-6, atol=1e-8, err_msg=where)
    np.testing.assert_allclose(expected_obs, np.stack(seen), rtol=0, atol=obs_tolerance, err_msg=where)


def observations(trace, seed, length):
    return np.concatenate([trace.first_obs[seed][None], trace.obs[seed, :length]])


def hidden(trace, name, seed, length):
    """One variable of our state, from the start of an episode to its end [1 + length]."""
    return np.append(getattr(trace.first_state, name)[seed], getattr(trace.state, name)[seed, :length])


def decode(one_hot):
    assert ((one_hot == 0) | (one_hot == 1)).all() and (one_hot.sum(-1) == 1).all()
    return one_hot.argmax(-1)


def row_and_column(size):
    return lambda action: np.unravel_index(action, (size, size))


def dealing_order(kinds_dealt, kind_of_card):
    """The original's `deck.idx` that deals these kinds; it deals from the end. They must be exactly a deck's cards."""
    assert sorted(kinds_dealt) == sorted(kind_of_card), "what was dealt is not a deck"
    cards = {kind: list(np.flatnonzero(kind_of_card == kind)) for kind in np.unique(kind_of_card)}
    return np.array([cards[kind].pop() for kind in kinds_dealt])[::-1]


@pytest.mark.parametrize("env_id", by_level("RepeatFirst", "RepeatPrevious", "HigherLower"))
def test_one_card_at_a_time(env_id):
    attribute = "ranks_idx" if env_id.startswith("HigherLower") else "suits_idx"
    for _, trace, seed, length, original, _ in rollouts(env_id):
        kinds = decode(observations(trace, seed, length))
        dice = LoadedDice(shuffle=[dealing_order(kinds, getattr(original.deck, attribute))])
        compare(trace, seed, length, original, dice, kinds)


@pytest.mark.parametrize("env_id", by_level("Autoencode"))
def test_autoencode(env_id):
    for _, trace, seed, length, original, params in rollouts(env_id):
        obs = observations(trace, seed, length)
        mode, suits = decode(obs[:, :2]), decode(obs[:, 2:])
        dice = LoadedDice(shuffle=[dealing_order(suits[: params.num_cards], original.deck.suits_idx)])
        compare(trace, seed, length, original, dice, np.stack([mode, suits], axis=1))


@pytest.mark.parametrize("env_id", by_level("CountRecall"))
def test_count_recall(env_id):
    for _, trace, seed, length, original, params in rollouts(env_id):
        obs = observations(trace, seed, length)
        values, queries = decode(obs[:, : params.kinds]), decode(obs[:, params.kinds :])
        dice = LoadedDice(shuffle=[dealing_order(kinds, original.deck_idx_type) for kinds in (values, queries)])
        compare(trace, seed, length, original, dice, np.stack([values, queries], axis=1))


@pytest.mark.parametrize("env_id", by_level("Concentration"))
def test_concentration(env_id):
    for player, trace, seed, length, original, params in rollouts(env_id):
        kind_of_card = original.deck_idx_type
        table = trace.state.table[seed, length - 1]  # what is known at the end; the rest of the deck goes to the rest
        cards = {kind: list(np.flatnonzero(kind_of_card == kind)) for kind in np.unique(kind_of_card)}
        order = np.array([cards[kind].pop() if kind >= 0 else -1 for kind in table])
        order[order < 0] = [card for rest in cards.values() for card in rest]
        if player is players.pairs_player:
            assert trace.terminated[seed, length - 1], "a perfect memory finds all pairs"

        shape = (1 + length, params.num_cards, params.kinds + 1)
        expected = decode(observations(trace, seed, length).reshape(shape))
        compare(trace, seed, length, original, LoadedDice(shuffle=[order]), expected)


@pytest.mark.parametrize("env_id", by_level("Minesweeper"))
def test_minesweeper(env_id):
    for player, trace, seed, length, original, params in rollouts(env_id):
        if player is players.all_knowing_clicker:
            assert length == params.clear_cells and trace.terminated[seed, length - 1]
        dice = LoadedDice(choice=[trace.first_state.mines[seed]])
        to_action = row_and_column(params.size)
        compare(trace, seed, length, original, dice, decode(observations(trace, seed, length)), to_action)


@pytest.mark.parametrize("env_id", by_level("Battleship"))
def test_battleship(env_id):
    for _, trace, seed, length, original, params in rollouts(env_id):
        # The original asks for the first cell of a ship and a direction (axis, sign), and checks that the ship fits.
        ships = np.split(trace.first_state.fleet[seed], np.cumsum(params.ship_sizes)[:-1])
        integers = []
        for ship, size in zip(ships, params.ship_sizes, strict=True):
            rows, columns = np.divmod(ship, params.size)
            vertical = columns[0] == columns[1]
            assert (
                len(ship) == size and (np.diff(rows) == vertical).all() and (np.diff(columns) == (not vertical)).all()
            )
            integers += [(rows[0], columns[0]), (0 if vertical else 1, 0)]
        to_action = row_and_column(params.size)
        dice = LoadedDice(integers=integers)
        compare(trace, seed, length, original, dice, decode(observations(trace, seed, length)), to_action)


@jax.jit
def bandit_numbers(state, keys, params):
    """What the arms pay with, and the number that decides at every step whether the pulled arm pays."""
    arms = pay_probability(state, jnp.arange(params.num_arms))
    return arms, jax.vmap(lambda key: prng.uniform(prng.words(key, 1)[0]))(keys)


@pytest.mark.parametrize("env_id", by_level("MultiArmedBandit"))
def test_multi_armed_bandit(env_id):
    for _, trace, seed, length, original, params in rollouts(env_id):
        state = jax.tree.map(lambda leaf, seed=seed: leaf[seed], trace.first_state)
        arms, luck = bandit_numbers(state, trace.key[seed], params)
        dice = LoadedDice(random=[arms, *np.asarray(luck[:length], np.float64)])
        compare(trace, seed, length, original, dice, decode(observations(trace, seed, length)))


@pytest.mark.parametrize("env_id", by_level("StatelessCartPole", "NoisyStatelessCartPole", "VelocityOnlyCartPole"))
def test_cartpole(env_id):
    for _, trace, seed, length, original, _ in rollouts(env_id):
        names = ("position", "velocity", "angle", "angular_velocity")
        physics = np.stack([hidden(trace, name, seed, length) for name in names], axis=-1)
        clean = physics[:, 0::2]  # the observation without noise
        if env_id.startswith("VelocityOnly"):
            clean = np.concatenate([physics[:1, 0::2], physics[1:, 1::2]])
        if not env_id.startswith("Noisy"):
            np.testing.assert_array_equal(observations(trace, seed, length), clean)
        dice = LoadedDice(uniform=[physics[0]])
        compare(trace, seed, length, original, dice, clean, obs_tolerance=2e-6, physics=physics)


@pytest.mark.parametrize("env_id", by_level("StatelessPendulum", "NoisyStatelessPendulum"))
def test_pendulum(env_id):
    for _, trace, seed, length, original, _ in rollouts(env_id):
        physics = np.stack([hidden(trace, name, seed, length) for name in ("angle", "velocity")], axis=-1)
        clean = np.stack([np.cos(physics[:, 0]), np.sin(physics[:, 0])], axis=-1)
        if not env_id.startswith("Noisy"):
            np.testing.assert_allclose(observations(trace, seed, length), clean, rtol=0, atol=1e-6)
        dice = LoadedDice(uniform=[physics[0]])
        to_action = np.asarray
        compare(trace, seed, length, original, dice, clean, to_action, obs_tolerance=2e-6, physics=physics)
