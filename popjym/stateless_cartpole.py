"""StatelessCartPole: balance the pole without seeing velocities. (POPGym's PositionOnlyCartPole, Morad et al. 2023.)

The cart-pole of Barto, Sutton and Anderson (1983), with gymnasium's constants and Euler steps of 0.02 s.

observation   cart position and pole angle [2]
actions       2: push left (0; also anything that is not 1), push right (1)
reward        1 / max_steps_in_episode at every step, the last one included; return in (0, 1]
episode       terminated when |position| > 2.4 or |angle| > 12 degrees; truncated after max_steps_in_episode steps.
              Both can happen in the same step.
remember      the previous positions, which give the velocities
"""

import jax.numpy as jnp
import numpy as np
from flax import struct

from popjym import prng, spaces
from popjym.environment import Environment

GRAVITY, CART_MASS, POLE_MASS, HALF_LENGTH, FORCE, TIME_STEP = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02
MAX_POSITION, MAX_ANGLE = 2.4, 12 * 2 * jnp.pi / 360
OBSERVATION_BOUND = np.array([2 * MAX_POSITION, 2 * MAX_ANGLE], np.float32)


@struct.dataclass
class StatelessCartPoleParams:
    max_steps_in_episode: int = 200


@struct.dataclass
class CartPoleState:
    time: jnp.ndarray  # int32: steps played
    position: jnp.ndarray  # float32, metres
    velocity: jnp.ndarray
    angle: jnp.ndarray  # float32, radians from upright
    angular_velocity: jnp.ndarray


def upright(words):
    """A state close to upright and at rest from four random words: each entry is uniform in [-0.05, 0.05)."""
    return CartPoleState(jnp.int32(0), *(prng.uniform(word) * 0.1 - 0.05 for word in words))


def push(state, action):
    """One Euler step: the new state, and whether it is out of bounds."""
    sin, cos = jnp.sin(state.angle), jnp.cos(state.angle)
    mass, pole_moment = CART_MASS + POLE_MASS, POLE_MASS * HALF_LENGTH

    force = jnp.where(action == 1, FORCE, -FORCE)
    thrust = (force + pole_moment * state.angular_velocity**2 * sin) / mass
    angular_acceleration = (GRAVITY * sin - cos * thrust) / (HALF_LENGTH * (4 / 3 - POLE_MASS * cos**2 / mass))
    acceleration = thrust - pole_moment * angular_acceleration * cos / mass

    state = CartPoleState(
        time=state.time + 1,
        position=state.position + TIME_STEP * state.velocity,
        velocity=state.velocity + TIME_STEP * acceleration,
        angle=state.angle + TIME_STEP * state.angular_velocity,
        angular_velocity=state.angular_velocity + TIME_STEP * angular_acceleration,
    )
    return state, (jnp.abs(state.position) > MAX_POSITION) | (jnp.abs(state.angle) > MAX_ANGLE)


class StatelessCartPole(Environment):
    start_words = 4

    def start(self, words, params):
        state = upright(words)
        return jnp.stack([state.position, state.angle]), state

    def move(self, words, state, action, params):
        state, fell = push(state, action)
        obs = jnp.stack([state.position, state.angle])
        return obs, state, 1 / params.max_steps_in_episode, fell, state.time >= params.max_steps_in_episode

    def observation_space(self, params=None):
        return spaces.Box(-OBSERVATION_BOUND, OBSERVATION_BOUND, (2,))

    def action_space(self, params=None):
        return spaces.Discrete(2)
