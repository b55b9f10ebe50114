"""Scripted players for the popjym tests and for the table of returns, and the loop that lets them play.

A player is a pair of functions: `begin(key) -> memory` and `act(memory, obs, hidden) -> (action, memory)`. It remembers
what it likes, its own actions among that. `hidden` is the state of the game: only the all-knowing players look at it,
which tell how much could be won if memory and luck were perfect.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import popjym
from popjym import prng, spaces, stateless_cartpole, stateless_pendulum
from popjym.multi_armed_bandit import pay_probability

# Most of these tests' time is compilation, and XLA's optimisation most of that. Small games are fast without it.
QUICK_TO_COMPILE = {"xla_backend_optimization_level": 0}


def original_name(env_id):
    """The name of our id's class in the numpy package."""
    for ours, theirs in (
        ("StatelessCartPole", "PositionOnlyCartPole"),
        ("StatelessPendulum", "PositionOnlyPendulum"),
        ("Minesweeper", "MineSweeper"),
        ("MultiArmedBandit", "MultiarmedBandit"),
    ):
        env_id = env_id.replace(ours, theirs)
    return env_id


def by_level(*families):
    """Ids of some families, or of all, as parameters of a test: Medium and Hard are for the slow tests."""
    chosen = [env_id for env_id in popjym.registered_envs if env_id.startswith(families or "")]
    return [env_id if env_id.endswith("Easy") else pytest.param(env_id, marks=pytest.mark.slow) for env_id in chosen]


class Player(NamedTuple):
    begin: Callable
    act: Callable


class Trace(NamedTuple):
    """What happened in a rollout. Index t is step t: the action, the key, and what came back."""

    first_obs: jax.Array
    first_state: object
    action: jax.Array
    key: jax.Array
    obs: jax.Array
    state: object
    reward: jax.Array
    done: jax.Array
    terminated: jax.Array
    truncated: jax.Array


def draw_keys(*shape, seed=0):
    """Random keys. jax's own way, to split one, takes longer to compile than most of these games."""
    return jax.random.wrap_key_data(np.random.default_rng(seed).integers(2**32, size=(*shape, 2), dtype=np.uint32))


def play(env, params, players, episodes, steps):
    """Rollouts of every player without auto-reset; for each a Trace of numpy arrays [episodes, steps, ...].

    All players meet the same keys, and are compiled into one program. What follows an episode's end means nothing and
    is for the caller to cut off.
    """
    reset = jax.vmap(env.reset, (0, None))
    step_env = jax.vmap(jax.vmap(env.step_env, (0, 0, 0, None)), (None, 0, 0, None))

    @partial(jax.jit, compiler_options=QUICK_TO_COMPILE)
    def rollouts(key_reset, key_player, key_steps):  # [K], [K], [T, K]
        first = reset(key_reset, params)  # [K, ...]
        obs, state = jax.tree.map(lambda leaf: jnp.stack([leaf] * len(players)), first)  # [P, K, ...]
        memories = [jax.vmap(player.begin)(key_player) for player in players]

        def step(carry, keys):
            obs, state, memories = carry
            actions, memories_after = [], []
            for i, player in enumerate(players):
                hidden = jax.tree.map(lambda leaf, i=i: leaf[i], state)
                action, memory = jax.vmap(player.act)(memories[i], obs[i], hidden)
                actions.append(action)
                memories_after.append(memory)
            action = jnp.stack(actions)  # [P, K]
            obs, state, reward, done, info = step_env(keys, state, action, params)
            taken = (action, obs, state, reward, done, info["terminated"], info["truncated"])
            return (obs, state, memories_after), taken

        return first, jax.lax.scan(step, (obs, state, memories), key_steps)[1]

    key_steps = draw_keys(steps, episodes, seed=2)
    first, taken = jax.device_get(rollouts(draw_keys(episodes), draw_keys(episodes, seed=1), key_steps))
    key_steps = np.swapaxes(jax.random.key_data(key_steps), 0, 1)  # [K, T, 2]
    traces = []
    for i in range(len(players)):
        action, *results = jax.tree.map(lambda leaf, i=i: np.swapaxes(leaf[:, i], 0, 1), taken)  # [K, T, ...]
        traces.append(Trace(*first, action, key_steps, *results))
    return traces


def returns(trace):
    """The return of each rollout's first episode [keys]."""
    within = np.arange(trace.reward.shape[1]) < first_end(trace)[:, None]
    return np.sum(trace.reward, axis=1, where=within, dtype=np.float64)


@cache
def with_and_without_reset(env_id, seeds=8):
    """Two episodes and a step per seed: what reset returned, and at every step `step_env` and `step` [steps, seeds].

    The next step starts from what `step` returned. Actions have the types that argmax and a network give.
    """
    env, params = popjym.make(env_id)
    family = env_id.removesuffix("Easy").removesuffix("Medium").removesuffix("Hard")
    players_that_win = {"Battleship": all_knowing_gunner, "Minesweeper": all_knowing_clicker}
    player = players_that_win.get(family, random_player)(env, params)
    type_of_action = int if isinstance(env.action_space(params), spaces.Discrete) else float

    @partial(jax.jit, compiler_options=QUICK_TO_COMPILE)
    def rollout(key_reset, key_player, key_steps):  # [seeds], [seeds], [T, seeds]
        first = jax.vmap(env.reset, (0, None))(key_reset, params)
        memory = jax.vmap(player.begin)(key_player)

        def step(carry, keys):
            obs, state, memory = carry
            action, memory = jax.vmap(player.act)(memory, obs, state)
            action = action.astype(type_of_action)
            plain = jax.vmap(env.step_env, (0, 0, 0, None))(jax.random.clone(keys), state, action, params)
            auto = jax.vmap(env.step, (0, 0, 0, None))(keys, state, action, params)
            return (*auto[:2], memory), (plain, auto)

        return first, *jax.lax.scan(step, (*first, memory), key_steps)[1]

    key_steps = draw_keys(2 * params.max_steps_in_episode + 1, seeds, seed=2)
    return jax.device_get(rollout(draw_keys(seeds), draw_keys(seeds, seed=1), key_steps))


def first_end(trace):
    """Length of each rollout's first episode [keys]; every rollout must contain an end."""
    assert trace.done.any(axis=1).all(), "an episode is longer than the rollout"
    return trace.done.argmax(axis=1) + 1


# --- Players for every game -----------------------------------------------------------------------------------------


def random_player(env, params):
    space = env.action_space(params)

    def act(memory, obs, hidden):
        key, count = memory
        word, _ = prng.threefry(key, count)
        if isinstance(space, spaces.Discrete):
            action = prng.below(word, space.n)
        else:
            action = space.low + (space.high - space.low) * prng.uniform(word)
        return action, (key, count + 1)

    return Player(lambda key: (jax.random.key_data(key), jnp.uint32(0)), act)


def constant_player(action):
    return Player(lambda key: (), lambda memory, obs, hidden: (action, memory))


def echo_player(env, params):
    """Says what it sees."""
    return Player(lambda key: (), lambda memory, obs, hidden: (jnp.argmax(obs), memory))


# --- Cards ----------------------------------------------------------------------------------------------------------


def first_suit_player(env, params):
    def act(first, obs, hidden):
        first = jnp.where(first < 0, jnp.argmax(obs), first)
        return first, first

    return Player(lambda key: jnp.int32(-1), act)


def kth_last_suit_player(env, params):
    def act(recent, obs, hidden):
        recent = jnp.append(recent[1:], jnp.argmax(obs).astype(jnp.int32))
        return recent[0], recent

    return Player(lambda key: jnp.zeros(params.k, jnp.int32), act)


def other_suit_player(env, params):
    """RepeatPrevious without memory: any suit but the one it sees, which has a card less among the others."""
    return Player(lambda key: (), lambda memory, obs, hidden: ((jnp.argmax(obs) + 1) % 4, memory))


def reciting_player(env, params):
    """Autoencode: writes down the first num_cards observations and reads them out backwards."""

    def act(memory, obs, hidden):
        notes, seen, said = memory
        watching = seen < params.num_cards
        notes = jnp.where(watching & (jnp.arange(params.num_cards) == seen), jnp.argmax(obs[2:]), notes)
        seen = seen + watching
        speaking = seen == params.num_cards
        return notes[params.num_cards - 1 - said], (notes, seen, said + speaking)

    return Player(lambda key: (jnp.zeros(params.num_cards, jnp.int32), jnp.int32(0), jnp.int32(0)), act)


def suit_echo_player(env, params):
    """Autoencode without memory: says the suit it sees. The first answer is right then, the others are always 0."""
    return Player(lambda key: (), lambda memory, obs, hidden: (jnp.argmax(obs[2:]), memory))


def counting_player(env, params):
    """CountRecall: a count for every kind."""

    def act(counts, obs, hidden):
        counts = counts + obs[: params.kinds]
        return counts[jnp.argmax(obs[params.kinds :])].astype(jnp.int32), counts

    return Player(lambda key: jnp.zeros(params.kinds), act)


def lookup_player(answer_if_same, answer_if_different):
    """CountRecall without memory: one answer if the card shown is of the queried kind, one if not."""

    def make(env, params):
        def act(memory, obs, hidden):
            same = jnp.argmax(obs[: params.kinds]) == jnp.argmax(obs[params.kinds :])
            return jnp.where(same, answer_if_same, answer_if_different), memory

        return Player(lambda key: (), act)

    return make


def card_counting_player(env, params):
    """HigherLower: bets on the side on which more cards are left."""

    def act(left, obs, hidden):
        left = left - obs
        higher_than = jnp.arange(13) > jnp.argmax(obs)
        lower_than = jnp.arange(13) < jnp.argmax(obs)
        higher = jnp.sum(left * higher_than) >= jnp.sum(left * lower_than)
        return jnp.where(higher, 0, 1), left

    return Player(lambda key: jnp.full(13, 4.0 * params.num_decks), act)


def middle_rank_player(env, params):
    """HigherLower without memory: bets on the side on which a full deck has more cards."""
    return Player(lambda key: (), lambda memory, obs, hidden: (jnp.where(jnp.argmax(obs) <= 6, 0, 1), memory))


def pairs_player(env, params):
    """Concentration with a perfect memory: takes every pair it knows, otherwise turns cards it has not seen."""
    places = jnp.arange(params.num_cards)

    def act(memory, obs, hidden):
        table, found, first, second = memory
        shown = jnp.argmax(obs.reshape(params.num_cards, params.kinds + 1), axis=1)
        table = jnp.where(shown < params.kinds, shown, table)

        try_is_over = second >= 0
        pair = try_is_over & (table[first] == table[second])
        found = found | (pair & ((places == first) | (places == second)))
        first = jnp.where(try_is_over, -1, first)

        unseen, known = table < 0, (table >= 0) & ~found
        mates = known & (table == table[first]) & (places != first)
        has_mate = jnp.any(known[:, None] & known & (table[:, None] == table) & (places[:, None] != places), axis=1)
        opening = jnp.where(jnp.any(has_mate), jnp.argmax(has_mate), jnp.argmax(unseen))
        reply = jnp.where(jnp.any(mates), jnp.argmax(mates), jnp.argmax(unseen))

        opens = first < 0
        action = jnp.where(opens, opening, reply)
        memory = (table, found, jnp.where(opens, action, first), jnp.where(opens, -1, action))
        return action, memory

    def begin(key):
        return jnp.full(params.num_cards, -1), jnp.zeros(params.num_cards, bool), jnp.int32(-1), jnp.int32(-1)

    return Player(begin, act)


# --- Boards ---------------------------------------------------------------------------------------------------------


def sweeping_player(env, params):
    """Every cell once, in order."""
    return Player(lambda key: jnp.int32(0), lambda cell, obs, hidden: (cell, cell + 1))


def neighbours(size):
    """float [size², size²]: is a cell among the 3 x 3 around another?"""
    row, column = np.divmod(np.arange(size**2), size)
    return jnp.array((abs(row[:, None] - row) <= 1) & (abs(column[:, None] - column) <= 1), jnp.float32)


def hunting_player(env, params):
    """Battleship: shoots along hits, otherwise where the most ships still fit."""
    n = params.size

    def density(free):
        """For every cell, how many placements of a ship of three cover it, when only free cells can be covered."""
        total = jnp.zeros((n, n))
        for axis in (0, 1):
            after = jnp.pad(free, [(1, 1), (1, 1)])
            minus, plus = jnp.roll(after, 1, axis), jnp.roll(after, -1, axis)
            fits = minus * after * plus  # centred here
            total = total + (fits + jnp.roll(fits, 1, axis) + jnp.roll(fits, -1, axis))[1:-1, 1:-1]
        return total

    def act(memory, obs, hidden):
        missed, hit, last = memory
        was_last = jnp.arange(n * n) == last
        hit = hit | (was_last & (obs[1] == 1))
        missed = missed | (was_last & (obs[1] == 0))
        around = jnp.zeros((n, n))
        hits = jnp.pad(hit.reshape(n, n).astype(jnp.float32), 2)
        for axis in (0, 1):
            for step in (1, -1):
                near, far = jnp.roll(hits, step, axis), jnp.roll(hits, 2 * step, axis)
                around = around + (near + 2 * near * far)[2:-2, 2:-2]
        score = density(1.0 - missed.reshape(n, n)) + 100 * around
        score = jnp.where(missed | hit, -1.0, score.reshape(-1))
        action = jnp.argmax(score)
        return action, (missed, hit, action)

    return Player(lambda key: (jnp.zeros(n * n, bool), jnp.zeros(n * n, bool), jnp.int32(-1)), act)


def all_knowing_gunner(env, params):
    """Battleship: shoots at the ships."""
    return Player(lambda key: (), lambda memory, obs, hidden: (hidden.fleet[jnp.argmin(hidden.sunk)], memory))


def safe_clicking_player(env, params):
    """Minesweeper: marks what single numbers imply, clicks on safe cells, and where nothing is safe on the safest."""
    cells, near = params.size**2, neighbours(params.size)

    def act(memory, obs, hidden):
        number, last = memory
        number = jnp.where(jnp.arange(cells) == last, jnp.argmax(obs), number)
        viewed = number >= 0

        def mark(_, marks):
            mine, safe = marks
            missing = number - near @ mine  # mines around a viewed cell that are not marked
            open_cells = 1.0 - viewed - (mine + safe) * (1.0 - viewed)
            candidates = near @ open_cells
            safe = jnp.maximum(safe, (near @ (viewed & (missing == 0)).astype(jnp.float32) > 0) * open_cells)
            mine = jnp.maximum(mine, (near @ (viewed & (missing == candidates)).astype(jnp.float32) > 0) * open_cells)
            return mine, jnp.where(mine > 0, 0.0, safe)

        mine, safe = jax.lax.fori_loop(0, 6, mark, (jnp.zeros(cells), jnp.zeros(cells)))
        open_cells = 1.0 - viewed - mine
        share = (number - near @ mine) / jnp.maximum(near @ open_cells, 1)
        risk = jnp.max(jnp.where(viewed & (near > 0), share, -1.0), axis=1)
        elsewhere = (params.num_mines - jnp.sum(mine)) / jnp.maximum(jnp.sum(open_cells), 1)
        risk = jnp.where(risk < 0, elsewhere, risk)
        risk = jnp.where(safe > 0, -1.0, jnp.where(mine > 0, 2.0, risk))
        action = jnp.argmin(jnp.where(viewed, 3.0, risk))
        return action, (number, action)

    return Player(lambda key: (jnp.full(cells, -1), jnp.int32(-1)), act)


def all_knowing_clicker(env, params):
    """Minesweeper: clicks on every cell that is neither viewed nor a mine."""

    def act(memory, obs, hidden):
        is_mine = jnp.any(jnp.arange(params.size**2)[:, None] == hidden.mines, axis=1)
        return jnp.argmin(hidden.viewed | is_mine), memory

    return Player(lambda key: (), act)


# --- Arms -----------------------------------------------------------------------------------------------------------


def optimistic_player(env, params):
    """MultiArmedBandit: the arm with the highest plausible pay, by an upper confidence bound."""
    n = params.num_arms

    def act(memory, obs, hidden):
        pulls, paid, last = memory
        pulled = jnp.arange(n) == last
        pulls, paid = pulls + pulled, paid + pulled * obs[1]
        mean = (paid + 1) / (pulls + 2)
        action = jnp.argmax(mean + 1.2 * jnp.sqrt(mean * (1 - mean) / (pulls + 3)))
        return action, (pulls, paid, action)

    return Player(lambda key: (jnp.zeros(n), jnp.zeros(n), jnp.int32(-1)), act)


def all_knowing_gambler(env, params):
    arms = jnp.arange(params.num_arms)
    return Player(lambda key: (), lambda memory, obs, hidden: (jnp.argmax(pay_probability(hidden, arms)), memory))


# --- Poles and pendulums --------------------------------------------------------------------------------------------


def lean(position, velocity, angle, angular_velocity):
    """CartPole: push to the side to which the pole leans, now or soon, and the cart drifts."""
    return (0.05 * position + 0.1 * velocity + angle + 0.3 * angular_velocity > 0).astype(jnp.int32)


def differencing_player(env, params):
    """StatelessCartPole: velocities from two positions."""

    def act(memory, obs, hidden):
        last, has_last = memory
        velocity, angular_velocity = jnp.where(has_last, (obs - last) / stateless_cartpole.TIME_STEP, 0.0)
        return lean(obs[0], velocity, obs[1], angular_velocity), (obs, jnp.bool_(True))

    return Player(lambda key: (jnp.zeros(2), jnp.bool_(False)), act)


def leaning_player(env, params):
    """CartPole without memory: push to the side to which the pole leans."""
    return Player(lambda key: (), lambda memory, obs, hidden: ((obs[1] > 0).astype(jnp.int32), memory))


def summing_player(env, params):
    """VelocityOnlyCartPole: positions from the first observation and the sum of the velocities."""

    def act(memory, obs, hidden):
        positions, velocities, is_first = memory
        positions = jnp.where(is_first, obs, positions + stateless_cartpole.TIME_STEP * velocities)
        velocities = jnp.where(is_first, 0.0, obs)
        action = lean(positions[0], velocities[0], positions[1], velocities[1])
        return action, (positions, velocities, jnp.bool_(False))

    return Player(lambda key: (jnp.zeros(2), jnp.zeros(2), jnp.bool_(True)), act)


def turning_player(env, params):
    """VelocityOnlyCartPole without memory: push to the side to which the pole turns."""
    return Player(lambda key: (), lambda memory, obs, hidden: ((obs[1] > 0).astype(jnp.int32), memory))


def kalman_player(env, params):
    """NoisyStatelessCartPole: predicts with the physics, corrects with a Kalman gain."""

    def step(x, action):
        state, _ = stateless_cartpole.push(stateless_cartpole.CartPoleState(jnp.int32(0), *x), action)
        return jnp.stack([state.position, state.velocity, state.angle, state.angular_velocity])

    seen = jnp.array([[1.0, 0, 0, 0], [0, 0, 1, 0]])

    def act(memory, obs, hidden):
        x, covariance, action, is_first = memory
        jacobian = jax.jacfwd(step)(x, action)
        predicted, spread = step(x, action), jacobian @ covariance @ jacobian.T + 1e-9 * jnp.eye(4)
        x, covariance = jnp.where(is_first, x, predicted), jnp.where(is_first, covariance, spread)
        noise = params.noise_sigma**2 * jnp.eye(2)
        gain = covariance @ seen.T @ jnp.linalg.inv(seen @ covariance @ seen.T + noise)
        x, covariance = x + gain @ (obs - seen @ x), (jnp.eye(4) - gain @ seen) @ covariance
        action = lean(*x)
        return action, (x, covariance, action, jnp.bool_(False))

    def begin(key):
        return jnp.zeros(4), jnp.eye(4) * 0.1**2 / 12, jnp.int32(0), jnp.bool_(True)

    return Player(begin, act)


def all_knowing_balancer(env, params):
    def act(memory, obs, hidden):
        return lean(hidden.position, hidden.velocity, hidden.angle, hidden.angular_velocity), memory

    return Player(lambda key: (), act)


def swing_up(angle, velocity):
    """Pendulum: hold it near the top, otherwise give it the energy it needs to get there."""
    energy = velocity**2 / 2 + 15 * jnp.cos(angle)  # 15 at rest at the top
    hold = -(10 * angle + 3 * velocity)
    pump = 2 * jnp.where(velocity >= 0, 1.0, -1.0) * jnp.sign(15.2 - energy)
    near = (jnp.abs(angle) < 0.5) & (jnp.abs(velocity) < 3)
    return jnp.clip(jnp.where(near, hold, pump), -2, 2)[None]


def wrap(angle):
    return (angle + jnp.pi) % (2 * jnp.pi) - jnp.pi


def swinging_player(env, params):
    """StatelessPendulum: the velocity from two angles."""

    def act(memory, obs, hidden):
        last, has_last = memory
        angle = jnp.arctan2(obs[1], obs[0])
        velocity = jnp.where(has_last, wrap(angle - last) / stateless_pendulum.TIME_STEP, 0.0)
        return swing_up(angle, velocity), (angle, jnp.bool_(True))

    return Player(lambda key: (jnp.float32(0), jnp.bool_(False)), act)


def observing_player(env, params):
    """NoisyStatelessPendulum: predicts angle and velocity with the physics, corrects them with the noisy angle."""

    def act(memory, obs, hidden):
        state, action, gain = memory
        predicted, _ = stateless_pendulum.swing(state, action, 1)
        angle, velocity = predicted.angle, predicted.velocity
        error = wrap(jnp.arctan2(obs[1], obs[0]) - angle)
        angle, velocity = wrap(angle + gain * error), velocity + gain**2 / 2 / stateless_pendulum.TIME_STEP * error
        state = stateless_pendulum.PendulumState(jnp.int32(0), angle, velocity)
        action = swing_up(angle, velocity)
        return action, (state, action, jnp.maximum(0.85 * gain, 0.25))

    def begin(key):
        zero = jnp.float32(0)
        return stateless_pendulum.PendulumState(jnp.int32(0), zero, zero), jnp.zeros(1), jnp.float32(1)

    return Player(begin, act)


def all_knowing_swinger(env, params):
    return Player(lambda key: (), lambda memory, obs, hidden: (swing_up(hidden.angle, hidden.velocity), memory))
