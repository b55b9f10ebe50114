"""The POPGym vector tasks in JAX. See README.md in this folder.

env, params = popjym.make("RepeatPreviousEasy")
obs, state = env.reset(key, params)
obs, state, reward, done, info = env.step(key, state, action, params)
"""

from popjym.registration import REGISTERED_ENVS as registered_envs
from popjym.registration import make, resolve

__all__ = ["make", "registered_envs", "resolve"]
