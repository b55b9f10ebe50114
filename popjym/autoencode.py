"""Autoencode: watch a deck of cards, then name their suits in reverse order. (POPGym, Morad et al. 2023.)

First all cards of `num_decks` shuffled decks are shown, one at a time; the actions are ignored. With the last card the
mode flag changes to "play". From then on every action must name a suit: the last card's first, the first card's last.

observation   mode, one-hot [2]: play, watch; suit of the card just shown, one-hot [4]. In play, after the first answer,
              there is no card to show, and the suit is 0.
actions       4, a suit
reward        ±1 / (52 num_decks) for a right or wrong suit in play, 0 while watching; return in [-1, 1]
episode       52 num_decks - 1 steps of watching, 52 num_decks of play, then terminated
remember      every suit, in order
"""

import jax.numpy as jnp
from flax import struct

from popjym import deck, spaces
from popjym.environment import Environment

PLAY, WATCH = 0, 1


@struct.dataclass
class AutoencodeParams:
    num_decks: int = struct.field(pytree_node=False, default=1)

    @property
    def num_cards(self):
        return deck.CARDS * self.num_decks

    @property
    def max_steps_in_episode(self):
        return 2 * self.num_cards - 1


@struct.dataclass
class AutoencodeState:
    time: jnp.ndarray  # int32: steps played
    deck: jnp.ndarray  # int32 [4]: see deck.py
    suits: jnp.ndarray  # int8 [num_cards]: the suits shown so far, in order


def observe(mode, suit):
    return deck.two_one_hots(mode, 2, suit, deck.SUITS)


class Autoencode(Environment):
    start_words = 1
    move_words = 1

    def start(self, words, params):
        suit, cards = deck.deal(words[0], deck.full(deck.SUITS, params.num_decks))
        suits = jnp.full(params.num_cards, suit.astype(jnp.int8))
        return observe(WATCH, suit), AutoencodeState(jnp.int32(0), cards, suits)

    def move(self, words, state, action, params):
        time = state.time + 1
        watching = time < params.num_cards
        suit, cards = deck.deal(words[0], state.deck)
        suit, cards = jnp.where(watching, suit, 0), jnp.where(watching, cards, 0)

        is_new = jnp.arange(params.num_cards, dtype=jnp.int32) == time  # never true in play
        suits = jnp.where(is_new, suit.astype(jnp.int8), state.suits)

        answer = state.suits[params.max_steps_in_episode - time]  # from the last card, at time num_cards, to the first
        scale = 1 / params.num_cards
        reward = jnp.where(watching, 0.0, jnp.where(action == answer, scale, -scale))
        mode = jnp.where(time < params.num_cards - 1, WATCH, PLAY)
        terminated = time == params.max_steps_in_episode
        return observe(mode, suit), AutoencodeState(time, cards, suits), reward, terminated, False

    def observation_space(self, params=None):
        return spaces.Box(0, 1, (2 + deck.SUITS,))

    def action_space(self, params=None):
        return spaces.Discrete(deck.SUITS)
