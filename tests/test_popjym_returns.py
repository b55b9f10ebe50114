"""Every task can be solved from its observations with memory, and not without: scripted players show it."""

import jax
import numpy as np
import pytest
from popjym_players import episode_returns
from popjym_returns import standards

import popjym

EPISODES = 400


def returns(env_id, standard):
    env, params = popjym.make(env_id)
    return episode_returns(env, params, standard.player(env, params), jax.random.split(jax.random.key(0), EPISODES))


def assert_as_expected(sample, standard):
    if standard.exact:
        np.testing.assert_allclose(sample, standard.expected, atol=2e-5)
    elif standard.expected is not None:
        assert abs(sample.mean() - standard.expected) < 4.5 * sample.std() / np.sqrt(EPISODES)


@pytest.mark.parametrize("env_id", popjym.registered_envs)
def test_memory_pays(env_id):
    """Players get what the rules say they get, and the one who remembers gets more than the one who does not."""
    _, params = popjym.make(env_id)
    ceiling, memory, memoryless = standards(env_id, params)
    with_memory, without = returns(env_id, memory), returns(env_id, memoryless)
    assert_as_expected(with_memory, memory)
    assert_as_expected(without, memoryless)
    if ceiling is not memory and ceiling.player is not None:
        highest = returns(env_id, ceiling)
        assert_as_expected(highest, ceiling)
        if ceiling.expected is not None:  # the pendulum's is only the same controller with the true state
            assert with_memory.mean() <= highest.mean()
    gain = with_memory - without  # the same keys, so where actions do not matter to chance also the same cards
    assert gain.mean() > 4.5 * gain.std() / np.sqrt(EPISODES)
