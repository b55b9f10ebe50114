"""Plays environments under the JAX settings of its environment variables, and keeps what happened.

JAX_ENABLE_X64=1 python tests/popjym_settings.py trajectories.npz RepeatFirstEasy ...
"""

import sys
from pathlib import Path

import jax
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from popjym_players import with_and_without_reset  # noqa: E402


def trajectory(env_id):
    """Every array that reset and step returned, by its place: {"RepeatFirstEasy[0][1].time": [seeds, steps]}."""
    leaves = jax.tree_util.tree_leaves_with_path(with_and_without_reset(env_id))
    return {env_id + jax.tree_util.keystr(path): leaf for path, leaf in leaves}


if __name__ == "__main__":
    path, *env_ids = sys.argv[1:]
    results = {}
    for env_id in env_ids:
        results |= trajectory(env_id)
    np.savez(path, **results)
