"""StatelessPendulum: swing up and hold a pendulum without seeing its velocity. (POPGym's PositionOnlyPendulum.)

gymnasium's Pendulum: a rod of mass 1 and length 1, gravity 10, Euler steps of 0.05 s, a torque too weak to lift the rod
in one go.

observation   cosine and sine of the angle from upright [2]
actions       torque, a Box [1]; clipped to [-2, 2]
reward        (1 - cost / 8.1368) / max_steps_in_episode, where the cost of a state before its step is
              angle² + 0.1 velocity² + 0.001 torque², at most 16.2736; return in [-1, 1]
episode       max_steps_in_episode steps, then truncated; shorter at higher difficulty
remember      the previous angle, which gives the velocity
"""

import jax.numpy as jnp
from flax import struct

from popjym import prng, spaces
from popjym.environment import Environment

GRAVITY, MASS, LENGTH, TIME_STEP = 10.0, 1.0, 1.0, 0.05
MAX_SPEED, MAX_TORQUE = 8.0, 2.0
WORST_COST = 16.2736044  # pi² + 0.1 MAX_SPEED² + 0.001 MAX_TORQUE²


@struct.dataclass
class StatelessPendulumParams:
    max_steps_in_episode: int = 200


@struct.dataclass
class PendulumState:
    time: jnp.ndarray  # int32: steps played
    angle: jnp.ndarray  # float32, radians from upright, in [-pi, pi)
    velocity: jnp.ndarray  # float32


def hanging_anywhere(words):
    """A start state from two random words: the angle uniform in [-pi, pi), the velocity in [-1, 1)."""
    angle, velocity = (prng.uniform(word) * 2 - 1 for word in words)
    return PendulumState(jnp.int32(0), angle * jnp.pi, velocity)


def swing(state, action, max_steps):
    """One Euler step: the new state, and the reward."""
    torque = jnp.clip(jnp.reshape(action, ()).astype(jnp.float32), -MAX_TORQUE, MAX_TORQUE)
    cost = state.angle**2 + 0.1 * state.velocity**2 + 0.001 * torque**2
    reward = (WORST_COST / 2 - cost) / (WORST_COST / 2) / max_steps

    gravity_acceleration = 3 * GRAVITY / (2 * LENGTH) * jnp.sin(state.angle)
    torque_acceleration = 3 / (MASS * LENGTH**2) * torque
    velocity = state.velocity + (gravity_acceleration + torque_acceleration) * TIME_STEP
    velocity = jnp.clip(velocity, -MAX_SPEED, MAX_SPEED)
    # Wrapped, unlike the original's: float32 would lose digits with every turn. Nothing else depends on it.
    angle = (state.angle + velocity * TIME_STEP + jnp.pi) % (2 * jnp.pi) - jnp.pi
    return PendulumState(state.time + 1, angle, velocity), reward


class StatelessPendulum(Environment):
    start_words = 2

    def start(self, words, params):
        state = hanging_anywhere(words)
        return jnp.stack([jnp.cos(state.angle), jnp.sin(state.angle)]), state

    def move(self, words, state, action, params):
        state, reward = swing(state, action, params.max_steps_in_episode)
        obs = jnp.stack([jnp.cos(state.angle), jnp.sin(state.angle)])
        return obs, state, reward, False, state.time >= params.max_steps_in_episode

    def observation_space(self, params=None):
        return spaces.Box(-1, 1, (2,))

    def action_space(self, params=None):
        return spaces.Box(-MAX_TORQUE, MAX_TORQUE, (1,))
