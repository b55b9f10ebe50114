"""What can be won in every game: by a player who remembers everything, by one who remembers nothing, and at most.

Where the rules give a number, it is computed here from the rules alone, without the environment.
"""

from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
import popjym_players as p
from scipy import stats

import popjym


class Standard(NamedTuple):
    player: object  # (env, params) -> Player
    expected: float | None  # the mean return, where it can be computed; None where it can only be measured
    exact: bool = False  # every episode returns the expected


class Standards(NamedTuple):
    ceiling: Standard  # perfect luck or knowledge of the hidden state, where memory alone does not get everything
    memory: Standard  # the best of our players who see only observations
    memoryless: Standard  # a player whose action depends on the present observation alone


def always(player, value=1.0):
    return Standard(player, value, exact=True)


def repeat_first(params):
    n = params.max_steps_in_episode + 1  # cards
    # Say what you see: right at the first step, and when a later card has the first one's suit.
    right = 1 + (n - 2) * (n / 4 - 1) / (n - 1)
    memory = always(p.first_suit_player)
    return Standards(memory, memory, Standard(p.echo_player, (2 * right - (n - 1)) / (n - 1)))


def repeat_previous(params):
    n = params.max_steps_in_episode + 1
    # Another suit than the one you see: of the n - 1 other cards, n/4 have it, and only n/4 - 1 the one you see.
    memory = always(p.kth_last_suit_player)
    return Standards(memory, memory, Standard(p.other_suit_player, 2 * (n / 4) / (n - 1) - 1))


def autoencode(params):
    n = params.num_cards
    # The last card is still visible at the first answer; afterwards the blank 0 is right for a quarter of the cards.
    right = 1 + (n - 1) / 4
    memory = always(p.reciting_player)
    return Standards(memory, memory, Standard(p.suit_echo_player, (2 * right - n) / n))


def count_recall(params):
    n, of_a_kind, kinds = params.max_steps_in_episode + 1, params.cards_of_a_kind, params.kinds
    # How many of the queried kind have been dealt, given the card shown: hypergeometric, at every time 1 ... n - 1.
    counts, times = np.arange(of_a_kind + 1), np.arange(1, n)[:, None]
    if_same = stats.hypergeom.pmf(counts - 1, n - 1, of_a_kind - 1, times - 1).mean(axis=0)
    if_different = stats.hypergeom.pmf(counts, n - 1, of_a_kind, times - 1).mean(axis=0)
    right = if_same.max() / kinds + if_different.max() * (kinds - 1) / kinds
    memory = always(p.counting_player)
    player = p.lookup_player(int(if_same.argmax()), int(if_different.argmax()))
    return Standards(memory, memory, Standard(player, 2 * right - 1))


def higher_lower(params):
    n, of_a_rank = 52 * params.num_decks, 4 * params.num_decks
    # With `left` cards left, a random subset of the n - 1 others: the better side wins by its surplus, on average.
    total = 0.0
    for rank in range(13):
        above, below = (12 - rank) * of_a_rank, rank * of_a_rank
        for left in range(1, n):
            # Cards of the two sides among those left, then how they split.
            sides = np.arange(min(above + below, left) + 1)
            weight = stats.hypergeom.pmf(sides, n - 1, above + below, left)
            higher = np.arange(above + 1)
            split = stats.hypergeom.pmf(higher, (above + below), above, sides[:, None])
            total += (weight * (split * abs(2 * higher - sides[:, None])).sum(axis=1)).sum() / left
    memory = Standard(p.card_counting_player, total / 13 / n)
    # Without memory: the surplus of a full deck. It is |12 - 2 rank| of 13 ranks, 84 / 13 on average.
    return Standards(memory, memory, Standard(p.middle_rank_player, 84 / 169))


def concentration(params):
    # A perfect memory fails only with two new cards that do not match. Played here with a deck, not the environment.
    rng, failures = np.random.default_rng(0), []
    for _ in range(2000):
        deck = list(rng.permutation(np.arange(params.num_cards) % params.kinds))
        known, failed = np.zeros(params.kinds, int), 0
        while deck:
            kind = deck.pop()
            if known[kind] % 2:
                known[kind] += 1
            elif deck:
                other = deck.pop()
                failed += other != kind  # if the second card's mate is known, that pair is next, without a failure
                known[kind] += 1
                known[other] += 1
        failures.append(failed)
    expected = 1 - 2 / params.max_steps_in_episode * np.mean(failures)
    return Standards(Standard(None, 1.0), Standard(p.pairs_player, expected), Standard(p.random_player, None))


def random_shots(cells, targets, steps, reward_new, reward_other, ends_on_other=False, other_new=0, reward_again=0.0):
    """Mean return of uniform shots: a new target, or something else; it ends with the last target."""
    value = np.zeros(targets + 1)  # of 0 ... targets hit already, with no steps left
    for _ in range(steps):
        hit = np.arange(targets)
        new = (targets - hit) / cells
        bad, again = (other_new / cells, hit / cells) if ends_on_other else (0.0, 1 - new)
        stay = again * (reward_again + value[:-1])
        value[:-1] = new * (reward_new + value[1:]) + bad * reward_other + stay
    return value[0]


def battleship(params):
    cells, targets = params.size**2, params.ship_cells
    miss = -1 / (cells - targets)
    expected = random_shots(cells, targets, cells, 1 / targets, 0.0, reward_again=miss)
    return Standards(
        always(p.all_knowing_gunner), Standard(p.hunting_player, None), Standard(p.random_player, expected)
    )


def minesweeper(params):
    clear, cells = params.clear_cells, params.size**2
    loss, again = -0.5 - 1 / clear, -0.5 / (clear - 2)
    expected = random_shots(cells, clear, clear, 1 / clear, loss, True, params.num_mines, again)
    return Standards(
        always(p.all_knowing_clicker), Standard(p.safe_clicking_player, None), Standard(p.random_player, expected)
    )


def multi_armed_bandit(params):
    n = params.num_arms
    # The best of n uniform arms pays n / (n + 1) of the time; any fixed arm half of the time.
    best = Standard(p.all_knowing_gambler, (n - 1) / (n + 1))
    fixed = Standard(lambda env, params: p.constant_player(0), 0.0)
    return Standards(best, Standard(p.optimistic_player, None), fixed)


def stateless_cartpole(params):
    memory = always(p.differencing_player)
    return Standards(memory, memory, Standard(p.leaning_player, None))


def velocity_only_cartpole(params):
    memory = always(p.summing_player)
    return Standards(memory, memory, Standard(p.turning_player, None))


def noisy_stateless_cartpole(params):
    return Standards(always(p.all_knowing_balancer), Standard(p.kalman_player, None), Standard(p.leaning_player, None))


def still(env, params):
    return p.constant_player(np.zeros(1, np.float32))


def stateless_pendulum(params):
    swinger = Standard(p.all_knowing_swinger, None)
    return Standards(swinger, Standard(p.swinging_player, None), Standard(still, None))


def noisy_stateless_pendulum(params):
    swinger = Standard(p.all_knowing_swinger, None)
    return Standards(swinger, Standard(p.observing_player, None), Standard(still, None))


STANDARDS = {
    "Autoencode": autoencode,
    "Battleship": battleship,
    "StatelessCartPole": stateless_cartpole,
    "NoisyStatelessCartPole": noisy_stateless_cartpole,
    "VelocityOnlyCartPole": velocity_only_cartpole,
    "Concentration": concentration,
    "CountRecall": count_recall,
    "HigherLower": higher_lower,
    "Minesweeper": minesweeper,
    "MultiArmedBandit": multi_armed_bandit,
    "StatelessPendulum": stateless_pendulum,
    "NoisyStatelessPendulum": noisy_stateless_pendulum,
    "RepeatFirst": repeat_first,
    "RepeatPrevious": repeat_previous,
}


@cache
def standards(env_id):
    _, params = popjym.make(env_id)
    return STANDARDS[env_id.removesuffix("Easy").removesuffix("Medium").removesuffix("Hard")](params)


@lru_cache(maxsize=20)
def traces(env_id, episodes=400):
    """Episodes of every player of a game: {player: Trace}, where a player is what a Standard calls so."""
    env, params = popjym.make(env_id)
    others = [p.random_player] + ([p.sweeping_player] if env_id.startswith("Battleship") else [])
    known = [standard.player for standard in standards(env_id) if standard.player is not None]
    players = list(dict.fromkeys(others + known))
    made = [player(env, params) for player in players]
    played = p.play(env, params, made, episodes, params.max_steps_in_episode)
    return dict(zip(players, played, strict=True))
