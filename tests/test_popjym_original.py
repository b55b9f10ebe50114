"""Every id against the numpy original, step by step.

Our environment plays first. Then the original plays the same actions in the same hidden world: its random generator is
replaced by loaded dice, which make its own reset and step code deal our cards, place our mines and start in our states.
"""

import jax
import numpy as np
import popgym.envs
import pytest
from popjym_players import balancing_player, first_end, play, random_player

import popjym

SEEDS = 20
LEVELS = ("Easy", "Medium", "Hard")
CARTPOLE_STATE = ("position", "velocity", "angle", "angular_velocity")


class LoadedDice:
    """Stands in for numpy's Generator and returns what it was told to."""

    def __init__(self, **answers):
        self.answers = {method: list(values) for method, values in answers.items()}

    def next_answer(self, method):
        return self.answers[method].pop(0)

    def shuffle(self, array):
        array[:] = self.next_answer("shuffle")

    def uniform(self, low, high, size=None):
        return np.array(self.next_answer("uniform"), np.float64)

    def normal(self, mean, sigma):
        return np.zeros_like(sigma)  # noise is compared as a distribution, elsewhere


def deck_order(kinds_dealt, kind_of_card):
    """The original's `deck.idx` that deals these kinds: it deals from the end. Fails if they are not a whole deck."""
    assert sorted(kinds_dealt) == sorted(kind_of_card), "the cards dealt are not exactly the cards of the deck"
    cards = {kind: list(np.flatnonzero(kind_of_card == kind)) for kind in np.unique(kind_of_card)}
    return np.array([cards[kind].pop() for kind in kinds_dealt])[::-1]


def original(name):
    upstream_to_original = {"StatelessCartPole": "PositionOnlyCartPole"}
    for ours, theirs in upstream_to_original.items():
        name = name.replace(ours, theirs)
    return getattr(popgym.envs, name)()


def compare(trace, seed, length, env, dice, expected_obs, to_action=int, obs_tolerance=0, physics=None):
    """Replay one episode in the original. `expected_obs` [1 + length, ...] is our account of it, in its encoding.

    `physics` [1 + length, ...] are our physical states: the original starts every step in ours. Its own would drift
    off, because it computes in float64 and an inverted pendulum doubles the difference every few steps.
    """
    env.np_random = dice
    obs, _ = env.reset()
    np.testing.assert_allclose(expected_obs[0], obs, rtol=0, atol=obs_tolerance, err_msg="first observation")
    for t in range(length):
        if physics is not None:
            env.state = physics[t].astype(np.float64)
        obs, reward, terminated, truncated, _ = env.step(to_action(trace.action[seed, t]))
        where = f"seed {seed}, step {t}"
        np.testing.assert_allclose(expected_obs[1 + t], obs, rtol=0, atol=obs_tolerance, err_msg=where)
        assert trace.reward[seed, t] == np.float32(reward), where
        assert (trace.terminated[seed, t], trace.truncated[seed, t]) == (terminated, truncated), where
        assert trace.done[seed, t] == (t == length - 1), where
    assert terminated or truncated


def observations(trace, seed, length):
    return np.concatenate([trace.first_obs[seed][None], trace.obs[seed, :length]])


def hidden(trace, name, seed, length):
    """One variable of our state, from the start of an episode to its end [1 + length]."""
    return np.append(getattr(trace.first_state, name)[seed], getattr(trace.state, name)[seed, :length])


def one_hot_to_index(one_hot):
    assert ((one_hot == 0) | (one_hot == 1)).all() and (one_hot.sum(-1) == 1).all()
    return one_hot.argmax(-1)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("family", ["RepeatFirst", "RepeatPrevious"])
def test_repeat(family, level):
    env, params = popjym.make(family + level)
    keys = jax.random.split(jax.random.key(0), SEEDS)
    trace = play(env, params, random_player(env, params), keys, params.max_steps_in_episode)
    for seed, length in enumerate(first_end(trace)):
        numpy_env = original(family + level)
        suits = one_hot_to_index(observations(trace, seed, length))
        dice = LoadedDice(shuffle=[deck_order(suits, numpy_env.deck.suits_idx)])
        compare(trace, seed, length, numpy_env, dice, suits)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("family", ["StatelessCartPole", "NoisyStatelessCartPole"])
@pytest.mark.parametrize("player", [random_player, balancing_player])
def test_cartpole(family, level, player):
    env, params = popjym.make(family + level)
    keys = jax.random.split(jax.random.key(1), SEEDS)
    trace = play(env, params, player(env, params), keys, params.max_steps_in_episode)
    lengths = first_end(trace)
    if player is balancing_player and family == "StatelessCartPole":
        assert (lengths == params.max_steps_in_episode).all()
    for seed, length in enumerate(lengths):
        # The observation without its noise, clipped as the original clips it.
        physics = np.stack([hidden(trace, name, seed, length) for name in CARTPOLE_STATE], axis=-1)
        clean = physics[:, 0::2]
        dice = LoadedDice(uniform=[physics[0]])
        if family == "StatelessCartPole":
            np.testing.assert_array_equal(observations(trace, seed, length), clean)
        compare(trace, seed, length, original(family + level), dice, clean, obs_tolerance=1e-6, physics=physics)
