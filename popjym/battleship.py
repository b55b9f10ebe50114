"""Battleship: sink a hidden fleet on a board that is never shown. (POPGym, Morad et al. 2023.)

The ships lie on rows or columns of the board and do not overlap; they may touch. They are placed one after the other,
each uniformly among the places that are free for it. Every step shoots at a cell; to hit is to shoot at a cell of a
ship for the first time.

observation   was the last shot a hit, one-hot [2]: no, yes. The first observation is "no".
actions       size², a cell, row-major: action = row * size + column; numbers off the board are clipped to it
reward        1 / 12 for a hit, -1 / (size² - 12) for a miss. Return in [-size² / (size² - 12), 1]; 0 for shooting at
              every cell once.
episode       terminated when all 12 cells of the ships are hit; truncated after size² steps. Both can happen at once.
remember      every shot and what it hit. The observation does not say where: the agent has to know its previous action.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from popjym import deck, prng, spaces
from popjym.environment import Environment

EMPTY = -1


@struct.dataclass
class BattleshipParams:
    size: int = struct.field(pytree_node=False, default=8)
    ship_sizes: tuple = struct.field(pytree_node=False, default=(2, 3, 3, 4))

    @property
    def ship_cells(self):
        return sum(self.ship_sizes)

    @property
    def max_steps_in_episode(self):
        return self.size**2


@struct.dataclass
class BattleshipState:
    time: jnp.ndarray  # int32: steps played
    fleet: jnp.ndarray  # int32 [12]: the cells of the ships, ship by ship
    sunk: jnp.ndarray  # bool [12]: which of them have been hit
    next_fleet: jnp.ndarray  # int32 [12]: the next episode's fleet, -1 for ships that are not placed yet
    next_placed: jnp.ndarray  # int32: how many ships of it are placed


def try_to_place(word, fleet, placed, params):
    """Place one more ship at random; if it overlaps another, leave the fleet as it is.

    To repeat this until it fits is what the original does. Its tries that leave the board are left out here: they are
    independent of where a ship ends up.
    """
    sizes = params.ship_sizes
    ship_of_cell = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)  # [12]: 0 0 1 1 1 2 2 2 3 3 3 3
    cell_of_ship = np.concatenate([np.arange(size, dtype=np.int32) for size in sizes])  # [12]: 0 1 0 1 2 0 1 2 0 1 2 3
    is_new = ship_of_cell == placed  # [12]; nowhere true when all are placed
    ship_size = jnp.sum(is_new, dtype=jnp.int32)

    # Three random numbers from one word: the fraction of word * n / 2^32 is random, too.
    places = jnp.uint32(params.size - ship_size + 1)
    line = prng.below(word, params.size)
    begin = prng.below(word * params.size, places)
    along_row = word * params.size * places < jnp.uint32(2**31)

    row, column = fleet // params.size, fleet % params.size  # [12]; row -1 for ships that are not placed
    across, along = jnp.where(along_row, row, column), jnp.where(along_row, column, row)
    overlaps = jnp.any((across == line) & (along >= begin) & (along < begin + ship_size) & (fleet != EMPTY))
    fits = (ship_size > 0) & ~overlaps

    first, step = (
        jnp.where(along_row, line * params.size + begin, begin * params.size + line),
        jnp.where(along_row, 1, params.size),
    )
    return jnp.where(is_new & fits, first + step * cell_of_ship, fleet), placed + fits


def place_all(seed, fleet, placed, wanted, params):
    """Place ships until the fleet is complete, if it is wanted at all."""

    def incomplete(carry):
        return wanted & (carry[1] < len(params.ship_sizes))

    def place(carry):
        fleet, placed, tries = carry
        word, _ = prng.threefry(seed, tries)
        return *try_to_place(word, fleet, placed, params), tries + jnp.uint32(1)

    return jax.lax.while_loop(incomplete, place, (fleet, placed, jnp.uint32(0)))[:2]


def new_episode(fleet, params):
    no_ships, nothing_sunk = jnp.full(params.ship_cells, EMPTY, jnp.int32), jnp.zeros(params.ship_cells, bool)
    return deck.one_hot(0, 2), BattleshipState(jnp.int32(0), fleet, nothing_sunk, no_ships, jnp.int32(0))


class Battleship(Environment):
    start_words = 2
    move_words = 3
    restart_words = 0

    def start(self, words, params):
        no_ships = jnp.full(params.ship_cells, EMPTY, jnp.int32)
        fleet, _ = place_all(words, no_ships, jnp.int32(0), True, params)
        return new_episode(fleet, params)

    def restart(self, words, state, params):
        return new_episode(state.next_fleet, params)

    def move(self, words, state, action, params):
        time = state.time + 1
        cell = jnp.clip(action, 0, params.size**2 - 1)
        hits = (state.fleet == cell) & ~state.sunk  # [12]
        sunk = state.sunk | hits
        hit = jnp.any(hits)
        terminated, truncated = jnp.all(sunk), time >= params.max_steps_in_episode
        reward = jnp.where(hit, 1 / params.ship_cells, -1 / (params.size**2 - params.ship_cells))

        # A whole fleet at every auto-reset would be placed at every step of every environment, to be used once in an
        # episode. So every step tries to place one ship of the next fleet, and the last step places what is left.
        next_fleet, next_placed = try_to_place(words[0], state.next_fleet, state.next_placed, params)
        next_fleet, next_placed = place_all(words[1:], next_fleet, next_placed, terminated | truncated, params)

        state = BattleshipState(time, state.fleet, sunk, next_fleet, next_placed)
        return deck.one_hot(hit, 2), state, reward, terminated, truncated

    def observation_space(self, params=None):
        return spaces.Box(0, 1, (2,))

    def action_space(self, params=None):
        return spaces.Discrete((params or self.default_params).size ** 2)
