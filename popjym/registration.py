"""The ids: what each difficulty of each family means."""

import difflib

from popjym.autoencode import Autoencode, AutoencodeParams
from popjym.battleship import Battleship, BattleshipParams
from popjym.concentration import Concentration, ConcentrationParams
from popjym.count_recall import CountRecall, CountRecallParams
from popjym.deck import COLORS, RANKS, SUITS
from popjym.higher_lower import HigherLower, HigherLowerParams
from popjym.minesweeper import Minesweeper, MinesweeperParams
from popjym.multi_armed_bandit import MultiArmedBandit, MultiArmedBanditParams
from popjym.noisy_stateless_cartpole import NoisyStatelessCartPole, NoisyStatelessCartPoleParams
from popjym.noisy_stateless_pendulum import NoisyStatelessPendulum, NoisyStatelessPendulumParams
from popjym.repeat_first import RepeatFirst, RepeatFirstParams
from popjym.repeat_previous import RepeatPrevious, RepeatPreviousParams
from popjym.stateless_cartpole import StatelessCartPole, StatelessCartPoleParams
from popjym.stateless_pendulum import StatelessPendulum, StatelessPendulumParams
from popjym.velocity_only_cartpole import VelocityOnlyCartPole, VelocityOnlyCartPoleParams

# For every game its params at Easy, Medium and Hard.
FAMILIES = {
    Autoencode: (
        AutoencodeParams(num_decks=1),
        AutoencodeParams(num_decks=2),
        AutoencodeParams(num_decks=3),
    ),
    Battleship: (
        BattleshipParams(size=8),
        BattleshipParams(size=10),
        BattleshipParams(size=12),
    ),
    StatelessCartPole: (
        StatelessCartPoleParams(max_steps_in_episode=200),
        StatelessCartPoleParams(max_steps_in_episode=400),
        StatelessCartPoleParams(max_steps_in_episode=600),
    ),
    NoisyStatelessCartPole: (
        NoisyStatelessCartPoleParams(noise_sigma=0.1),
        NoisyStatelessCartPoleParams(noise_sigma=0.2),
        NoisyStatelessCartPoleParams(noise_sigma=0.3),
    ),
    VelocityOnlyCartPole: (
        VelocityOnlyCartPoleParams(max_steps_in_episode=200),
        VelocityOnlyCartPoleParams(max_steps_in_episode=400),
        VelocityOnlyCartPoleParams(max_steps_in_episode=600),
    ),
    Concentration: (
        ConcentrationParams(num_decks=1, kinds=COLORS),
        ConcentrationParams(num_decks=2, kinds=COLORS),
        ConcentrationParams(num_decks=1, kinds=RANKS),
    ),
    CountRecall: (
        CountRecallParams(num_decks=1, kinds=COLORS),
        CountRecallParams(num_decks=2, kinds=SUITS),
        CountRecallParams(num_decks=4, kinds=RANKS),
    ),
    HigherLower: (
        HigherLowerParams(num_decks=1),
        HigherLowerParams(num_decks=2),
        HigherLowerParams(num_decks=3),
    ),
    Minesweeper: (
        MinesweeperParams(size=4, num_mines=2),
        MinesweeperParams(size=6, num_mines=6),
        MinesweeperParams(size=8, num_mines=10),
    ),
    MultiArmedBandit: (
        MultiArmedBanditParams(num_arms=10, max_steps_in_episode=200),
        MultiArmedBanditParams(num_arms=20, max_steps_in_episode=400),
        MultiArmedBanditParams(num_arms=30, max_steps_in_episode=600),
    ),
    StatelessPendulum: (
        StatelessPendulumParams(max_steps_in_episode=200),
        StatelessPendulumParams(max_steps_in_episode=150),
        StatelessPendulumParams(max_steps_in_episode=100),
    ),
    NoisyStatelessPendulum: (
        NoisyStatelessPendulumParams(noise_sigma=0.1),
        NoisyStatelessPendulumParams(noise_sigma=0.2),
        NoisyStatelessPendulumParams(noise_sigma=0.3),
    ),
    RepeatFirst: (
        RepeatFirstParams(num_decks=1),
        RepeatFirstParams(num_decks=8),
        RepeatFirstParams(num_decks=16),
    ),
    RepeatPrevious: (
        RepeatPreviousParams(num_decks=1, k=4),
        RepeatPreviousParams(num_decks=2, k=32),
        RepeatPreviousParams(num_decks=3, k=64),
    ),
}

ENVIRONMENTS = {
    game.__name__ + difficulty: game(game.__name__ + difficulty, params)
    for game, levels in FAMILIES.items()
    for difficulty, params in zip(("Easy", "Medium", "Hard"), levels, strict=True)
}
REGISTERED_ENVS = list(ENVIRONMENTS)


def make(env_id):
    """The environment with this id, and its params. Raises ValueError, with the closest ids, if there is none."""
    if env_id not in ENVIRONMENTS:
        raise ValueError(unknown(env_id))
    env = ENVIRONMENTS[env_id]
    return env, env.default_params


def resolve(name):
    """The id that a name means, whatever its case, `_` and `-`: "Repeat-First_hard" is RepeatFirstHard.

    A bare family is its Easy. Raises ValueError, with the closest ids, if there is none.
    """
    plain = plain_spelling(name)
    for spelling in (plain, plain + "easy"):
        if spelling in IDS:
            return IDS[spelling]
    raise ValueError(unknown(name))


def plain_spelling(name):
    return name.lower().replace("_", "").replace("-", "")


IDS = {plain_spelling(env_id): env_id for env_id in REGISTERED_ENVS}


def unknown(name):
    closest = difflib.get_close_matches(plain_spelling(str(name)), IDS, n=3, cutoff=0.0)
    return f"no environment is called {name!r}; the closest are {', '.join(IDS[spelling] for spelling in closest)}"
