"""RepeatFirst: name the suit of the episode's first card, at every step. (POPGym, Morad et al. 2023.)

Cards are dealt one at a time from `num_decks` shuffled decks. Nothing marks the first card: the agent must know that an
episode has begun.

observation   suit of the card just dealt, one-hot [4]
actions       4, a suit
reward        ±1 / (52 num_decks - 1) for a right or wrong answer; return in [-1, 1]
episode       52 num_decks - 1 steps, then terminated
remember      one suit, to the end
"""

import jax.numpy as jnp
from flax import struct

from popjym import deck, spaces
from popjym.environment import Environment


@struct.dataclass
class RepeatFirstParams:
    num_decks: int = struct.field(pytree_node=False, default=1)

    @property
    def max_steps_in_episode(self):
        return deck.CARDS * self.num_decks - 1


@struct.dataclass
class RepeatFirstState:
    time: jnp.ndarray  # int32: steps played
    deck: jnp.ndarray  # int32 [4]: see deck.py
    first: jnp.ndarray  # int32: suit of the first card


class RepeatFirst(Environment):
    start_words = 1
    move_words = 1

    def start(self, words, params):
        suit, cards = deck.deal(words[0], deck.full(deck.SUITS, params.num_decks))
        return deck.one_hot(suit, deck.SUITS), RepeatFirstState(jnp.int32(0), cards, suit)

    def move(self, words, state, action, params):
        time = state.time + 1
        scale = 1 / params.max_steps_in_episode
        reward = jnp.where(action == state.first, scale, -scale)

        suit, cards = deck.deal(words[0], state.deck)
        terminated = time == params.max_steps_in_episode
        return deck.one_hot(suit, deck.SUITS), RepeatFirstState(time, cards, state.first), reward, terminated, False

    def observation_space(self, params=None):
        return spaces.Box(0, 1, (deck.SUITS,))

    def action_space(self, params=None):
        return spaces.Discrete(deck.SUITS)
