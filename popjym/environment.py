"""The base class: a game says how it starts and how it moves; this adds auto-reset, checks and fixed types."""

import abc
import math
from functools import partial

import jax
import jax.numpy as jnp

from popjym import prng, spaces


class Environment(abc.ABC):
    """A partially observable game as pure functions of (key, state, action, params).

    A game implements `start`, `move` and the two spaces. Everything that tells one difficulty from another is in
    `params`: what sets an array's shape is a static field of it, the rest are leaves. A game does not see keys; it says
    how many random words it needs to start and to move, and gets them (see prng.py).
    """

    start_words = 0  # a game that needs many takes two as the key of further ones
    move_words = 0

    @property
    def restart_words(self):
        return self.start_words

    @property
    def num_actions(self):
        """gymnax's property, for the default params: how many discrete actions, or entries of a continuous one."""
        space = self.action_space()
        return space.n if isinstance(space, spaces.Discrete) else math.prod(space.shape)

    def __init__(self, name, default_params):
        self.name = name
        self.default_params = default_params

    @abc.abstractmethod
    def start(self, words, params):
        """First observation and state of an episode: obs, state."""

    @abc.abstractmethod
    def move(self, words, state, action, params):
        """One step of the game: obs, state, reward, terminated, truncated."""

    def restart(self, words, state, params):
        """First observation and state of the episode that follows a finished one: what auto-reset uses."""
        return self.start(words, params)

    @abc.abstractmethod
    def observation_space(self, params=None):
        """A Box; one-hot codes where the original's observation is discrete."""

    @abc.abstractmethod
    def action_space(self, params=None):
        """Discrete, or a Box for the pendulums."""

    def reset(self, key, params=None):
        """Start an episode: obs, state."""
        return self._reset(key, self._checked(params))

    def step(self, key, state, action, params=None):
        """Play one step, and start the next episode when this one ends: obs, state, reward, done, info.

        At an end, `obs` and `state` are the next episode's first. `info["final_observation"]` is always the observation
        this step produced, before any reset; `info["terminated"]` and `info["truncated"]` say why the episode ended
        and can both be set.
        """
        return self._step(key, state, action, self._checked(params))

    def reset_env(self, key, params=None):
        """gymnax's name for `reset`."""
        return self.reset(key, params)

    def step_env(self, key, state, action, params=None):
        """Play one step without auto-reset: obs, state, reward, done, info."""
        return self._step_env(key, state, action, self._checked(params))

    @partial(jax.jit, static_argnums=0)
    def _reset(self, key, params):
        return self.start(prng.words(key, self.start_words), params)

    @partial(jax.jit, static_argnums=0)
    def _step_env(self, key, state, action, params):
        return self._move(prng.words(key, self.move_words), state, action, params)

    @partial(jax.jit, static_argnums=0)
    def _step(self, key, state, action, params):
        words = prng.words(key, self.move_words + self.restart_words)
        obs, state, reward, done, info = self._move(words[: self.move_words], state, action, params)
        # Under vmap both branches of a cond are computed for every environment, so a select says the same in fewer
        # words. It also means that `restart` runs at every step: it has to be cheap.
        first = self.restart(words[self.move_words :], state, params)
        obs, state = jax.tree.map(partial(jnp.where, prng.stored(done)), first, (obs, state))
        return obs, state, reward, done, info

    def _move(self, words, state, action, params):
        obs, state, reward, terminated, truncated = self.move(words, state, action, params)
        terminated, truncated = jnp.asarray(terminated, bool), jnp.asarray(truncated, bool)
        info = {"terminated": terminated, "truncated": truncated, "final_observation": obs}
        return obs, state, jnp.asarray(reward, jnp.float32), terminated | truncated, info

    def _checked(self, params):
        if params is None:
            return self.default_params
        if type(params) is not type(self.default_params):
            expected = type(self.default_params).__name__
            raise TypeError(
                f"{self.name} takes {expected} as params, not {type(params).__name__}; "
                f'`env, params = popjym.make("{self.name}")` returns the right ones'
            )
        return params

    def __repr__(self):
        return f"<{self.name}>"
