"""Minesweeper: click on every cell without a mine, on a board that is never shown. (POPGym, Morad et al. 2023.)

A click on a clear cell views it, and tells how many mines there are in the 3 x 3 cells around it, itself included. All
viewed is a win, a mine a loss. The observation is that one number: neither the cell nor the board.

observation   mines around the clicked cell, one-hot [mines + 1, at most 10]. The first observation is 0 mines.
actions       size², a cell, row-major: action = row * size + column; numbers off the board are clipped to it
reward        1 / clear cells for a new cell; -0.5 / (clear cells - 2) for one already viewed;
              -0.5 - 1 / clear cells for a mine. The return of a win without repeats is 1.
episode       terminated by a win or a mine; truncated after as many steps as there are clear cells, unless terminated
remember      every cell clicked and every number seen. The observation does not say where: the agent has to know its
              previous action.
"""

import jax.numpy as jnp
from flax import struct

from popjym import deck, prng, spaces
from popjym.environment import Environment


@struct.dataclass
class MinesweeperParams:
    size: int = struct.field(pytree_node=False, default=4)
    num_mines: int = struct.field(pytree_node=False, default=2)

    @property
    def clear_cells(self):
        return self.size**2 - self.num_mines

    @property
    def max_steps_in_episode(self):
        return self.clear_cells

    @property
    def numbers(self):
        """How many different numbers a click can show."""
        return min(self.num_mines + 1, 10)


@struct.dataclass
class MinesweeperState:
    time: jnp.ndarray  # int32: steps played
    mines: jnp.ndarray  # int32 [num_mines]: their cells
    viewed: jnp.ndarray  # bool [size²]


def distinct_cells(words, num_cells):
    """One cell for every word, all different, and every such set equally likely: Floyd's algorithm.

    The i-th of k picks is among the first num_cells - k + i cells; if it is taken, the last of these is not.
    """
    chosen = []
    for word, last in zip(words, range(num_cells - len(words), num_cells), strict=True):
        pick = prng.below(word, last + 1)
        taken = jnp.bool_(False)
        for other in chosen:
            taken |= pick == other
        chosen.append(jnp.where(taken, last, pick))
    return jnp.stack(chosen)


class Minesweeper(Environment):
    start_words = 2

    def start(self, words, params):
        mine_words, _ = prng.threefry(words, jnp.arange(params.num_mines, dtype=jnp.uint32))
        mines = distinct_cells(mine_words, params.size**2)
        state = MinesweeperState(jnp.int32(0), mines, jnp.zeros(params.size**2, bool))
        return deck.one_hot(0, params.numbers), state

    def move(self, words, state, action, params):
        time = state.time + 1
        cell = jnp.clip(action, 0, params.size**2 - 1)
        clicked = jnp.arange(params.size**2, dtype=jnp.int32) == cell  # [size²]
        exploded = jnp.any(state.mines == cell)
        again = jnp.any(state.viewed & clicked)
        viewed = state.viewed | (clicked & ~exploded)

        new, repeat, loss = 1 / params.clear_cells, -0.5 / (params.clear_cells - 2), -0.5 - 1 / params.clear_cells
        reward = jnp.where(exploded, loss, jnp.where(again, repeat, new))

        rows_apart = jnp.abs(state.mines // params.size - cell // params.size)  # [num_mines]
        columns_apart = jnp.abs(state.mines % params.size - cell % params.size)
        number = jnp.sum((rows_apart <= 1) & (columns_apart <= 1), dtype=jnp.int32)

        terminated = exploded | (jnp.sum(viewed, dtype=jnp.int32) == params.clear_cells)
        truncated = (time == params.max_steps_in_episode) & ~terminated
        state = MinesweeperState(time, state.mines, viewed)
        return deck.one_hot(number, params.numbers), state, reward, terminated, truncated

    def observation_space(self, params=None):
        return spaces.Box(0, 1, ((params or self.default_params).numbers,))

    def action_space(self, params=None):
        return spaces.Discrete((params or self.default_params).size ** 2)
