"""NoisyStatelessPendulum: swing up a pendulum seen through noise. (POPGym's NoisyPositionOnlyPendulum.)

StatelessPendulum with independent Gaussian noise on the cosine and the sine in every observation, the first one
included. The noisy observation is clipped to [-1, 1]; the physics stay exact.

observation   cosine and sine of the angle from upright, plus noise, clipped [2]
actions       torque, a Box [1]; clipped to [-2, 2]
reward        as in StatelessPendulum; return in [-1, 1]
episode       200 steps at every difficulty, then truncated
remember      enough angles to average the noise out of angle and velocity
"""

import jax.numpy as jnp
from flax import struct

from popjym import prng, spaces
from popjym.environment import Environment
from popjym.stateless_pendulum import MAX_TORQUE, hanging_anywhere, swing


@struct.dataclass
class NoisyStatelessPendulumParams:
    noise_sigma: float = 0.1
    max_steps_in_episode: int = 200


def observe(words, state, params):
    clean = jnp.stack([jnp.cos(state.angle), jnp.sin(state.angle)])
    noise = jnp.asarray(params.noise_sigma, jnp.float32) * jnp.stack([prng.normal(word) for word in words])
    return jnp.clip(clean + noise, -1, 1)


class NoisyStatelessPendulum(Environment):
    start_words = 4
    move_words = 2

    def start(self, words, params):
        state = hanging_anywhere(words[:2])
        return observe(words[2:], state, params), state

    def move(self, words, state, action, params):
        state, reward = swing(state, action, params.max_steps_in_episode)
        return observe(words, state, params), state, reward, False, state.time >= params.max_steps_in_episode

    def observation_space(self, params=None):
        return spaces.Box(-1, 1, (2,))

    def action_space(self, params=None):
        return spaces.Box(-MAX_TORQUE, MAX_TORQUE, (1,))
