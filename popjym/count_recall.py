"""CountRecall: how many cards of the queried kind have been dealt so far? (POPGym, Morad et al. 2023.)

Two decks are shuffled. Every observation shows the next card of the one, which counts, and of the other, the query. The
answer is the number of cards of the queried kind dealt since the start, the one shown beside the query included.
What tells kinds apart is the color (Easy), the suit (Medium) or the rank (Hard).

observation   kind of the card dealt, kind of the query, both one-hot [2 kinds]
actions       0 ... cards of one kind in the deck: 27, 27 and 17 actions
reward        ±1 / (52 num_decks - 1) for a right or wrong answer; return in [-1, 1]
episode       52 num_decks - 1 steps, then terminated
remember      a count for every kind
"""

import jax.numpy as jnp
from flax import struct

from popjym import deck, spaces
from popjym.environment import Environment


@struct.dataclass
class CountRecallParams:
    num_decks: int = struct.field(pytree_node=False, default=1)
    kinds: int = struct.field(pytree_node=False, default=deck.COLORS)

    @property
    def cards_of_a_kind(self):
        return deck.CARDS * self.num_decks // self.kinds

    @property
    def max_steps_in_episode(self):
        return deck.CARDS * self.num_decks - 1


@struct.dataclass
class CountRecallState:
    time: jnp.ndarray  # int32: steps played
    deck: jnp.ndarray  # int32 [kinds]: the cards that are counted; see deck.py
    query_deck: jnp.ndarray  # int32 [kinds]
    answer: jnp.ndarray  # int32: how many cards of the queried kind have been dealt


def deal(words, time, cards, queries, params):
    """Deal from both decks: the observation, and the state that knows the answer."""
    kind, cards = deck.deal(words[0], cards)
    query, queries = deck.deal(words[1], queries)
    answer = params.cards_of_a_kind - deck.count(cards, query)
    obs = deck.two_one_hots(kind, params.kinds, query, params.kinds)
    return obs, CountRecallState(time, cards, queries, answer)


class CountRecall(Environment):
    start_words = 2
    move_words = 2

    def start(self, words, params):
        cards = deck.full(params.kinds, params.num_decks)
        return deal(words, jnp.int32(0), cards, cards, params)

    def move(self, words, state, action, params):
        scale = 1 / params.max_steps_in_episode
        reward = jnp.where(action == state.answer, scale, -scale)

        obs, state = deal(words, state.time + 1, state.deck, state.query_deck, params)
        return obs, state, reward, state.time == params.max_steps_in_episode, False

    def observation_space(self, params=None):
        return spaces.Box(0, 1, (2 * (params or self.default_params).kinds,))

    def action_space(self, params=None):
        return spaces.Discrete((params or self.default_params).cards_of_a_kind + 1)
