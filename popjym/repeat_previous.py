"""RepeatPrevious: name the suit seen k-1 observations ago. (POPGym, Morad et al. 2023.)

Cards are dealt one at a time from `num_decks` shuffled decks. From the k-th step on, the action must be the suit that
was shown k-1 observations before the current one: k = 1 would be the card on the table.

observation   suit of the card just dealt, one-hot [4]
actions       4, a suit
reward        ±1 / (52 num_decks - k) for a right or wrong answer, 0 in the first k-1 steps; return in [-1, 1]
episode       52 num_decks - 1 steps, then terminated
remember      the last k suits, in order
"""

import jax.numpy as jnp
from flax import struct

from popjym import deck, spaces
from popjym.environment import Environment


@struct.dataclass
class RepeatPreviousParams:
    num_decks: int = struct.field(pytree_node=False, default=1)
    k: int = struct.field(pytree_node=False, default=4)

    @property
    def max_steps_in_episode(self):
        return deck.CARDS * self.num_decks - 1


@struct.dataclass
class RepeatPreviousState:
    time: jnp.ndarray  # int32: steps played
    deck: jnp.ndarray  # int32 [4]: see deck.py
    recent: jnp.ndarray  # int32 [k]: the last k suits; the one dealt at time t is at t % k


class RepeatPrevious(Environment):
    start_words = 1
    move_words = 1

    def start(self, words, params):
        suit, cards = deck.deal(words[0], deck.full(deck.SUITS, params.num_decks))
        recent = jnp.full(params.k, suit)
        return deck.one_hot(suit, deck.SUITS), RepeatPreviousState(jnp.int32(0), cards, recent)

    def move(self, words, state, action, params):
        time = state.time + 1
        right = action == state.recent[time % params.k]
        scale = 1 / (deck.CARDS * params.num_decks - params.k)
        reward = jnp.where(time < params.k, 0.0, jnp.where(right, scale, -scale))

        suit, cards = deck.deal(words[0], state.deck)
        is_oldest = jnp.arange(params.k, dtype=jnp.int32) == time % params.k
        recent = jnp.where(is_oldest, suit, state.recent)
        terminated = time == params.max_steps_in_episode
        return deck.one_hot(suit, deck.SUITS), RepeatPreviousState(time, cards, recent), reward, terminated, False

    def observation_space(self, params=None):
        return spaces.Box(0, 1, (deck.SUITS,))

    def action_space(self, params=None):
        return spaces.Discrete(deck.SUITS)
