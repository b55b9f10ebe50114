"""NoisyStatelessCartPole: balance the pole from noisy positions. (POPGym's NoisyPositionOnlyCartPole.)

StatelessCartPole with independent Gaussian noise on every observation, the first one included. The noise has the same
standard deviation for the position (metres) and for the angle (radians), where it is larger than the angle at which the
pole counts as fallen. The noisy observation is clipped to the observation space; the physics stay exact.

observation   cart position and pole angle plus noise, clipped to ±4.8 and ±24 degrees [2]
actions       2: push left (0; also anything that is not 1), push right (1)
reward        1 / max_steps_in_episode at every step, the last one included; return in (0, 1]
episode       as in StatelessCartPole, 200 steps at every difficulty
remember      enough positions to average the noise out of positions and velocities
"""

import jax.numpy as jnp
from flax import struct

from popjym import prng, spaces
from popjym.environment import Environment
from popjym.stateless_cartpole import OBSERVATION_BOUND, push, upright


@struct.dataclass
class NoisyStatelessCartPoleParams:
    noise_sigma: float = 0.1
    max_steps_in_episode: int = 200


def observe(words, state, params):
    clean = jnp.stack([state.position, state.angle])
    noise = jnp.asarray(params.noise_sigma, jnp.float32) * jnp.stack([prng.normal(word) for word in words])
    return jnp.clip(clean + noise, -OBSERVATION_BOUND, OBSERVATION_BOUND)


class NoisyStatelessCartPole(Environment):
    start_words = 6
    move_words = 2

    def start(self, words, params):
        state = upright(words[:4])
        return observe(words[4:], state, params), state

    def move(self, words, state, action, params):
        state, fell = push(state, action)
        obs = observe(words, state, params)
        return obs, state, 1 / params.max_steps_in_episode, fell, state.time >= params.max_steps_in_episode

    def observation_space(self, params=None):
        return spaces.Box(-OBSERVATION_BOUND, OBSERVATION_BOUND, (2,))

    def action_space(self, params=None):
        return spaces.Discrete(2)
