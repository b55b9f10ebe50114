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
from flax import struct

from popjym import prng, spaces
from popjym.environment import Environment

GRAVITY, CART_MASS, POLE_MASS, HALF_LENGTH, FORCE, TIME_STEP = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02
MAX_POSITION, MAX_ANGLE = 2.4, 12 * 2 * jnp.pi / 360
OBSERVATION_BOUND = (2 * MAX_POSITION, 2 * MAX_ANGLE)


@struct.dataclass
class StatelessCartPoleParams:
    max_steps_in_episode: int = 200


@struct.dataclass
class CartPoleState:
    time: jnp.ndarray  # int32: steps played
    physics: jnp.ndarray  # float32 [4]: cart position and velocity, pole angle and angular velocity


def initial_physics(words):
    """Four random words -> a state close to upright and at rest, each entry uniform in [-0.05, 0.05)."""
    return prng.uniform(words) * 0.1 - 0.05


def push(physics, action):
    """One Euler step: the new physics, and whether the pole or the cart is out of bounds."""
    position, velocity, angle, angular_velocity = physics
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    mass, pole_moment = CART_MASS + POLE_MASS, POLE_MASS * HALF_LENGTH

    force = jnp.where(action == 1, FORCE, -FORCE)
    push_acceleration = (force + pole_moment * angular_velocity**2 * sin) / mass
    angular_acceleration = (GRAVITY * sin - cos * push_acceleration) / (
        HALF_LENGTH * (4 / 3 - POLE_MASS * cos**2 / mass)
    )
    acceleration = push_acceleration - pole_moment * angular_acceleration * cos / mass

    position = position + TIME_STEP * velocity
    velocity = velocity + TIME_STEP * acceleration
    angle = angle + TIME_STEP * angular_velocity
    angular_velocity = angular_velocity + TIME_STEP * angular_acceleration
    fell = (jnp.abs(position) > MAX_POSITION) | (jnp.abs(angle) > MAX_ANGLE)
    return jnp.stack([position, velocity, angle, angular_velocity]), fell


class StatelessCartPole(Environment):
    def start(self, key, params):
        physics = initial_physics(prng.bits(key, 4))
        return physics[0::2], CartPoleState(jnp.int32(0), physics)

    def move(self, key, state, action, params):
        time = state.time + 1
        physics, fell = push(state.physics, action)
        reward = 1 / params.max_steps_in_episode
        return physics[0::2], CartPoleState(time, physics), reward, fell, time >= params.max_steps_in_episode

    def observation_space(self, params=None):
        bound = jnp.array(OBSERVATION_BOUND)
        return spaces.Box(-bound, bound, (2,))

    def action_space(self, params=None):
        return spaces.Discrete(2)
