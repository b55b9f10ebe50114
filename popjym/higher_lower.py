"""HigherLower: is the next card's rank higher or lower than this one's? (POPGym, Morad et al. 2023.)

Cards are dealt one at a time from `num_decks` shuffled decks. Counting the cards that are gone improves the guess.

observation   rank of the card on the table, one-hot [13], lowest first
actions       2: higher (0), lower (1; also anything that is not 0)
reward        1 / (52 num_decks) for a right guess, minus that for a wrong one, 0 when the ranks are equal
episode       52 num_decks - 1 steps, then terminated
remember      how many cards of every rank have been dealt
"""

import jax.numpy as jnp
from flax import struct

from popjym import deck, spaces
from popjym.environment import Environment


@struct.dataclass
class HigherLowerParams:
    num_decks: int = struct.field(pytree_node=False, default=1)

    @property
    def max_steps_in_episode(self):
        return deck.CARDS * self.num_decks - 1


@struct.dataclass
class HigherLowerState:
    time: jnp.ndarray  # int32: steps played
    deck: jnp.ndarray  # int32 [13]: see deck.py
    rank: jnp.ndarray  # int32: rank of the card on the table


class HigherLower(Environment):
    start_words = 1
    move_words = 1

    def start(self, words, params):
        rank, cards = deck.deal(words[0], deck.full(deck.RANKS, params.num_decks))
        return deck.one_hot(rank, deck.RANKS), HigherLowerState(jnp.int32(0), cards, rank)

    def move(self, words, state, action, params):
        time = state.time + 1
        rank, cards = deck.deal(words[0], state.deck)

        right = (rank > state.rank) == (action == 0)
        scale = 1 / (deck.CARDS * params.num_decks)
        reward = jnp.where(rank == state.rank, 0.0, jnp.where(right, scale, -scale))

        terminated = time == params.max_steps_in_episode
        return deck.one_hot(rank, deck.RANKS), HigherLowerState(time, cards, rank), reward, terminated, False

    def observation_space(self, params=None):
        return spaces.Box(0, 1, (deck.RANKS,))

    def action_space(self, params=None):
        return spaces.Discrete(2)
