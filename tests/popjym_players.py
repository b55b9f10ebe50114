"""Scripted players for the popjym tests and for the table of returns, and the loop that lets them play.

A player is a pair of functions: `begin(key) -> memory` and `act(memory, obs) -> (action, memory)`. It sees what an
agent sees, and remembers what it likes; its own actions are among that.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Player(NamedTuple):
    begin: Callable
    act: Callable


def random_player(env, params):
    space = env.action_space(params)

    def act(key, obs):
        key, key_action = jax.random.split(key)
        return space.sample(key_action), key

    return Player(begin=lambda key: key, act=act)


def balancing_player(env, params):
    """CartPole: velocities from differences of positions, then a linear rule that keeps the pole up and the cart in."""

    def begin(key):
        return jnp.zeros(2), jnp.bool_(False)

    def act(memory, obs):
        last, has_last = memory
        position, angle = obs
        velocity, angular_velocity = jnp.where(has_last, (obs - last) / 0.02, 0.0)
        lean = 0.05 * position + 0.1 * velocity + angle + 0.3 * angular_velocity
        return (lean > 0).astype(jnp.int32), (obs, jnp.bool_(True))

    return Player(begin, act)


class Trace(NamedTuple):
    """What happened in a rollout. Index t is step t: the action, and what came back."""

    first_obs: jax.Array
    first_state: object
    action: jax.Array
    obs: jax.Array
    state: object
    reward: jax.Array
    done: jax.Array
    terminated: jax.Array
    truncated: jax.Array


def play(env, params, player, keys, steps):
    """One rollout per key without auto-reset, `steps` long; a Trace of numpy arrays [keys, steps, ...].

    What follows an episode's end means nothing and is for the caller to cut off.
    """

    @jax.jit
    @jax.vmap
    def rollout(key):
        key_reset, key_player, key_steps = jax.random.split(key, 3)
        first_obs, first_state = env.reset(key_reset, params)

        def step(carry, key):
            obs, state, memory = carry
            action, memory = player.act(memory, obs)
            obs, state, reward, done, info = env.step_env(key, state, action, params)
            carry = (obs, state, memory)
            return carry, (action, obs, state, reward, done, info["terminated"], info["truncated"])

        carry = (first_obs, first_state, player.begin(key_player))
        _, steps_taken = jax.lax.scan(step, carry, jax.random.split(key_steps, steps))
        return Trace(first_obs, first_state, *steps_taken)

    return jax.device_get(rollout(keys))


def first_end(trace):
    """Length of each rollout's first episode [keys]; every rollout must contain an end."""
    assert trace.done.any(axis=1).all(), "an episode is longer than the rollout"
    return trace.done.argmax(axis=1) + 1
