"""VelocityOnlyCartPole: balance the pole without seeing where it is. (In POPGym's code, not in its paper.)

The physics, rewards and episode ends of StatelessCartPole; the other half of its state is shown. The first observation
of an episode is an exception: it holds the position and the angle, so the velocities that follow can be summed up from
a known start. (All four are within ±0.05 then.)

observation   cart velocity and pole angular velocity [2]; in the first observation cart position and pole angle
actions       2: push left (0; also anything that is not 1), push right (1)
reward        1 / max_steps_in_episode at every step, the last one included; return in (0, 1]
episode       terminated when |position| > 2.4 or |angle| > 12 degrees; truncated after max_steps_in_episode steps.
              Both can happen in the same step.
remember      the sum of all velocities since the start, which gives the positions
"""

import jax.numpy as jnp
from flax import struct

from popjym import spaces
from popjym.environment import Environment
from popjym.stateless_cartpole import push, upright


@struct.dataclass
class VelocityOnlyCartPoleParams:
    max_steps_in_episode: int = 200


class VelocityOnlyCartPole(Environment):
    start_words = 4

    def start(self, words, params):
        state = upright(words)
        return jnp.stack([state.position, state.angle]), state

    def move(self, words, state, action, params):
        state, fell = push(state, action)
        obs = jnp.stack([state.velocity, state.angular_velocity])
        return obs, state, 1 / params.max_steps_in_episode, fell, state.time >= params.max_steps_in_episode

    def observation_space(self, params=None):
        return spaces.Box(-jnp.inf, jnp.inf, (2,))

    def action_space(self, params=None):
        return spaces.Discrete(2)
