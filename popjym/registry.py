"""The ids: what each difficulty of each family means."""

import difflib

from popjym.noisy_stateless_cartpole import NoisyStatelessCartPole, NoisyStatelessCartPoleParams
from popjym.repeat_first import RepeatFirst, RepeatFirstParams
from popjym.repeat_previous import RepeatPrevious, RepeatPreviousParams
from popjym.stateless_cartpole import StatelessCartPole, StatelessCartPoleParams

# Game: its params at Easy, Medium and Hard.
FAMILIES = {
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
registered_envs = tuple(ENVIRONMENTS)


def make(env_id):
    """The environment with this id, and its params."""
    if env_id not in ENVIRONMENTS:
        closest = difflib.get_close_matches(str(env_id), registered_envs, n=3, cutoff=0.0)
        raise ValueError(f"no environment is called {env_id!r}; the closest are {', '.join(closest)}")
    env = ENVIRONMENTS[env_id]
    return env, env.default_params
