"""A shuffled deck, dealt lazily.

The next card of a shuffled deck is equally likely to be any card not dealt yet. So a deck needs no order, only counts:
`deck[j]` is the number of undealt cards of the kinds 0 ... j. A random card is a random number below `deck[-1]`, and
its kind is the first j with `number < deck[j]`. Nothing is shuffled when an episode starts, and the state is tiny.
"""

import jax.numpy as jnp

from popjym import prng

SUITS, RANKS, COLORS = 4, 13, 2
CARDS = 52  # in one deck: a multiple of all three


def full(kinds, num_decks):
    """A full deck that tells `kinds` kinds of cards apart: int32 [kinds]."""
    return jnp.arange(1, kinds + 1, dtype=jnp.int32) * (CARDS // kinds * num_decks)


def deal(word, deck):
    """Deal one card with one random word: its kind (int32) and the deck without it."""
    card_is_at_most = prng.stored(prng.below(word, deck[-1])) < deck  # [kinds]; true from the card's kind on
    return jnp.sum(~card_is_at_most, dtype=jnp.int32), deck - card_is_at_most


def count(deck, kind):
    """How many cards of a kind have not been dealt."""
    return deck[kind] - jnp.where(kind == 0, 0, deck[kind - 1])


def one_hot(kind, kinds):
    return (kind == jnp.arange(kinds, dtype=jnp.int32)).astype(jnp.float32)


def two_one_hots(a, num_a, b, num_b):
    """one_hot(a) and one_hot(b), concatenated. (As a comparison, which XLA vectorises; it does not a concatenation.)"""
    place = jnp.arange(num_a + num_b, dtype=jnp.int32)
    return jnp.where(place < num_a, place == a, place - num_a == b).astype(jnp.float32)
