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
    shown: jnp.ndarray  # bool [num_cards (kinds + 1)]: the table as it is observed between two tries, only pairs up
    pairs: jnp.ndarray  # int32: how many have been found
    first: jnp.ndarray  # int32: place of the first card of this try, or -1


class Concentration(Environment):
    move_words = 1

    def start(self, words, params):
        state = ConcentrationState(
            time=jnp.int32(0),
            deck=deck.full(params.kinds, params.num_decks),
            table=jnp.full(params.num_cards, NO_CARD, jnp.int8),
            shown=jnp.tile(jnp.arange(params.kinds + 1, dtype=jnp.int32) == params.kinds, params.num_cards),
            pairs=jnp.int32(0),
            first=jnp.int32(NO_CARD),
        )
        return state.shown.astype(jnp.float32), state

    def move(self, words, state, action, params):
        time = state.time + 1
        here = jnp.clip(action, 0, params.num_cards - 1).astype(jnp.int32)
        is_second = state.first != NO_CARD
        already_up = ~state.shown[here * (params.kinds + 1) + params.kinds]

        # A card that nobody has seen can be any of the unseen cards: it is dealt when it is turned for the first time.
        kind, fewer_cards = deck.deal(words[0], state.deck)
        seen_kind = state.table[here].astype(jnp.int32)
        unseen = seen_kind == NO_CARD
        kind = jnp.where(unseen, kind, seen_kind)
        cards = jnp.where(unseen, fewer_cards, state.deck)
        first_kind = state.table[state.first].astype(jnp.int32)  # means nothing for the first card of a try

        matches = is_second & (kind == first_kind) & (here != state.first)
        pair = matches & ~already_up
        failed = already_up | (is_second & ~matches)
        cards_of_try = jnp.where(is_second, 2, 1)
        reward = jnp.where(failed, -cards_of_try / params.max_steps_in_episode, 0.0)
        reward = jnp.where(pair, 1 / (params.num_cards // 2), reward)

        is_here = jnp.arange(params.num_cards, dtype=jnp.int32) == here
        table = jnp.where(is_here, kind.astype(jnp.int8), state.table)
        pairs = state.pairs + pair

        # The kinds + 1 entries of the two turned cards show their kinds; the others are as they were.
        entry = jnp.arange(params.num_cards * (params.kinds + 1), dtype=jnp.int32)
        of_here = (entry - here * (params.kinds + 1)).astype(jnp.uint32)  # above kinds for the other cards
        of_first = (entry - state.first * (params.kinds + 1)).astype(jnp.uint32)
        obs = jnp.where(of_first <= params.kinds, of_first == first_kind.astype(jnp.uint32), state.shown)
        obs = jnp.where(of_here <= params.kinds, of_here == kind.astype(jnp.uint32), obs)
        shown = jnp.where(pair, obs, state.shown)

        first = jnp.where(is_second | already_up, NO_CARD, here)
        state = ConcentrationState(time, cards, table, shown, pairs, first)
        terminated, truncated = pairs == params.num_cards // 2, time >= params.max_steps_in_episode
        return obs.astype(jnp.float32), state, reward, terminated, truncated

    def observation_space(self, params=None):
        params = params or self.default_params
        return spaces.Box(0, 1, (params.num_cards * (params.kinds + 1),))

    def action_space(self, params=None):
        return spaces.Discrete((params or self.default_params).num_cards)
