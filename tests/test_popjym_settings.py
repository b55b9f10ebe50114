"""popjym under the settings that JAX's users put into their environment: the same games, number for number."""

import os
import subprocess
import sys

import jax
import numpy as np
import popjym_settings
import pytest

import popjym

EASY = [env_id for env_id in popjym.registered_envs if env_id.endswith("Easy")]
OTHERS = [env_id for env_id in popjym.registered_envs if not env_id.endswith("Easy")]
WIDE = ["JAX_ENABLE_X64"]
CHECKS = ["JAX_DEBUG_NANS", "JAX_DEBUG_KEY_REUSE", "JAX_ENABLE_CUSTOM_PRNG"]


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "settings, env_ids",
    [slow(WIDE + CHECKS, EASY), slow(WIDE, EASY), slow(CHECKS, EASY), slow(WIDE, OTHERS), slow(CHECKS, OTHERS)],
    ids=["all at once", "64 bits", "checks", "64 bits, Medium and Hard", "checks, Medium and Hard"],
)
def test_a_setting_of_jax_changes_nothing(settings, env_ids, tmp_path):
    """Reset, steps and auto-reset, inside a scan: no NaN, no key used twice, and every type and number is the same."""
    command = [sys.executable, popjym_settings.__file__, tmp_path / "trajectories.npz", *env_ids]
    process = subprocess.run(command, env=os.environ | dict.fromkeys(settings, "1"), capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    with np.load(tmp_path / "trajectories.npz") as file:
        found = dict(file)

    expected = {}
    for env_id in env_ids:
        expected |= popjym_settings.trajectory(env_id)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].dtype == values.dtype, name
        np.testing.assert_array_equal(found[name], values, err_msg=name)


def test_the_checker_sees_the_keys_that_a_game_uses():
    env, params = popjym.make("RepeatFirstEasy")
    with jax.debug_key_reuse(True):
        key = jax.random.key(0)
        _, state = env.reset(key, params)
        with pytest.raises(jax.errors.KeyReuseError):
            env.step(key, state, 0, params)
