"""Every task can be solved from its observations with memory, and not without: scripted players show it."""

import numpy as np
import pytest
from popjym_players import by_level, returns
from popjym_returns import standards, traces


def assert_as_expected(sample, standard):
    if standard.exact:
        np.testing.assert_allclose(sample, standard.expected, atol=2e-5)
    elif standard.expected is not None:
        assert abs(sample.mean() - standard.expected) < 4.5 * sample.std() / np.sqrt(len(sample))


@pytest.mark.parametrize("env_id", by_level())
def test_memory_pays(env_id):
    """Players get what the rules say they get, and the one who remembers gets more than the one who does not."""
    ceiling, memory, memoryless = standards(env_id)
    played = traces(env_id)
    with_memory, without = returns(played[memory.player]), returns(played[memoryless.player])
    assert_as_expected(with_memory, memory)
    assert_as_expected(without, memoryless)
    if ceiling is not memory and ceiling.player is not None:
        highest = returns(played[ceiling.player])
        assert_as_expected(highest, ceiling)
        if ceiling.expected is not None:  # the pendulum's is only the same controller with the true state
            assert with_memory.mean() <= highest.mean()
    gain = with_memory - without  # the same keys, so where actions do not matter to chance also the same cards
    assert gain.mean() > 4.5 * gain.std() / np.sqrt(len(gain))
