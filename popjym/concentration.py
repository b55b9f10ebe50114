"""Concentration (memory, pairs): turn two cards; if they match, they stay face up. (POPGym, Morad et al. 2023.)

`num_decks` decks lie face down on the table. Every step turns one card. After the second card of a try both are judged:
a pair stays face up for good, anything else is turned back before the next step. Turning a card that is face up for
good ends the try. Cards match by color (Easy, Medium) or rank (Hard).

observation   for every place on the table a one-hot [kinds + 1]: its kind, or face down (the last); flattened
              [52 num_decks (kinds + 1)]. Shows the pairs found before this step, and the one or two cards of this try.
actions       52 num_decks, the place of the card to turn; numbers off the table are clipped to it
reward        first card of a try: 0. Second: 1 / pairs if they match, -2 / max_steps_in_episode if not or if it is the
              same card again. A card that is face up for good: -1 / max_steps_in_episode for every card of the try.
              Return in [-2, 1]; 1 only for a player who never errs, which takes luck.
episode       terminated when all cards are face up; truncated after 104 num_decks steps. Both can happen at once.
remember      what has been seen where. The observation shows a card that is not part of a pair for one or two steps.
"""

import math

import jax.numpy as jnp
from flax import struct

from popjym import deck, spaces
from popjym.environment import Environment

NO_CARD = -1


@struct.dataclass
class ConcentrationParams:
    num_decks: int = struct.field(pytree_node=False, default=1)
    kinds: int = struct.field(pytree_node=False, default=deck.COLORS)

    @property
    def num_cards(self):
        return deck.CARDS * self.num_decks

    @property
    def max_steps_in_episode(self):
        """POPGym's estimate of what a perfect player needs: 104 steps for one deck, 208 for two."""
        n = self.num_cards
        return math.ceil(2 * n - n / (2 * n - 1))


@struct.dataclass
class ConcentrationState:
    time: jnp.ndarray  # int32: steps played
    deck: jnp.ndarray  # int32 [kinds]: the cards nobody has turned yet; see deck.py
    table: jnp.ndarray  # int8 [num_cards]: the kind of every card that has been turned, -1 elsewhere
    found: jnp.ndarray  # bool [num_cards]: face up for good
    first: jnp.ndarray  # int32: place of the first card of this try, or -1


def look(table, is_here):
    """The kind of the card at the one place where is_here is true."""
    return jnp.sum(jnp.where(is_here, table, 0), dtype=jnp.int32)


def observe(table, face_up, params):
    shown = jnp.where(face_up, table, params.kinds)  # [num_cards]
    return (shown[:, None] == jnp.arange(params.kinds + 1)).astype(jnp.float32).reshape(-1)


class Concentration(Environment):
    move_words = 1

    def start(self, words, params):
        state = ConcentrationState(
            time=jnp.int32(0),
            deck=deck.full(params.kinds, params.num_decks),
            table=jnp.full(params.num_cards, NO_CARD, jnp.int8),
            found=jnp.zeros(params.num_cards, bool),
            first=jnp.int32(NO_CARD),
        )
        return observe(state.table, state.found, params), state

    def move(self, words, state, action, params):
        time = state.time + 1
        place = jnp.clip(action, 0, params.num_cards - 1)
        is_here = jnp.arange(params.num_cards) == place
        is_first = jnp.arange(params.num_cards) == state.first

        # A card that nobody has seen can be any of the unseen cards: it is dealt when it is turned for the first time.
        kind, fewer_cards = deck.deal(words[0], state.deck)
        seen_kind = look(state.table, is_here)
        unseen = seen_kind == NO_CARD
        kind = jnp.where(unseen, kind, seen_kind)
        cards = jnp.where(unseen, fewer_cards, state.deck)
        table = jnp.where(is_here, kind.astype(jnp.int8), state.table)

        is_second_of_try = state.first != NO_CARD
        already_up = jnp.any(state.found & is_here)
        matches = (look(table, is_first) == kind) & (place != state.first)
        pair = is_second_of_try & ~already_up & matches
        found = state.found | (pair & (is_here | is_first))

        failed = already_up | (is_second_of_try & ~matches)
        cards_of_try = jnp.where(is_second_of_try, 2, 1)
        reward = jnp.where(failed, -cards_of_try / params.max_steps_in_episode, 0.0)
        reward = jnp.where(pair, 1 / (params.num_cards // 2), reward)

        first = jnp.where(is_second_of_try | already_up, NO_CARD, place)
        obs = observe(table, state.found | is_here | is_first, params)
        state = ConcentrationState(time, cards, table, found, first)
        return obs, state, reward, jnp.all(found), time >= params.max_steps_in_episode

    def observation_space(self, params=None):
        params = params or self.default_params
        return spaces.Box(0, 1, (params.num_cards * (params.kinds + 1),))

    def action_space(self, params=None):
        return spaces.Discrete((params or self.default_params).num_cards)
