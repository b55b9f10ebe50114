"""MultiArmedBandit: find the arm that pays most often, and keep pulling it. (POPGym, Morad et al. 2023.)

Every episode has new arms; each pays with a probability of its own, uniform in [0, 1).

observation   did the last pull pay, one-hot [2]: no, yes. The first observation is "no".
actions       num_arms, the arm to pull; numbers beyond the last arm pull the last
reward        1 / max_steps_in_episode if the arm pays, minus that if not; return in [-1, 1]
episode       max_steps_in_episode steps, then truncated
remember      pulls and payments of every arm. The observation does not say which arm was pulled: the agent has to know
              its previous action.
"""

import jax.numpy as jnp
from flax import struct

from popjym import deck, prng, spaces
from popjym.environment import Environment


@struct.dataclass
class MultiArmedBanditParams:
    num_arms: int = struct.field(pytree_node=False, default=10)
    max_steps_in_episode: int = 200


@struct.dataclass
class MultiArmedBanditState:
    time: jnp.ndarray  # int32: steps played
    seed: tuple  # two uint32 words: what the arms' probabilities are hashed from


def pay_probability(state, arm):
    """How often an arm pays, in [0, 1). Looked up when needed: auto-reset would draw every arm's at every step."""
    word, _ = prng.threefry(state.seed, arm.astype(jnp.uint32))
    return prng.uniform(word)


class MultiArmedBandit(Environment):
    start_words = 2
    move_words = 1

    def start(self, words, params):
        return deck.one_hot(0, 2), MultiArmedBanditState(jnp.int32(0), tuple(words))

    def move(self, words, state, action, params):
        time = state.time + 1
        arm = jnp.clip(action, 0, params.num_arms - 1)
        paid = prng.uniform(words[0]) < pay_probability(state, arm)

        scale = 1 / params.max_steps_in_episode
        reward = jnp.where(paid, scale, -scale)
        truncated = time >= params.max_steps_in_episode
        return deck.one_hot(paid, 2), state.replace(time=time), reward, False, truncated

    def observation_space(self, params=None):
        return spaces.Box(0, 1, (2,))

    def action_space(self, params=None):
        return spaces.Discrete((params or self.default_params).num_arms)
