"""How the time of a checkpoint grows with its size: every script's state at the published setting, then larger ones.

    python tests/bench_checkpoint.py

Prints, for each state, its size, the seconds to write it as a run does (gathered, serialised, written beside, flushed
to the disk, renamed) and to load it. Each is the median of five.
"""

import importlib
import statistics
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import serialization
from jax.tree_util import keystr

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

STATES = [
    ("pqn_ffm", {}, 1),
    ("pqn_frozen_rnn", {"memory": "gru"}, 1),
    ("ppo_memorychain", {"memory": "gru"}, 1),
    ("ppo_playground", {"memory": "gru", "impl": "jax"}, 1),
    ("pqn_arcade_cnn", {"memory": "gru"}, 1),
    ("pqn_arcade_cnn", {"memory": "gru"}, 10),
    ("pqn_ffm", {}, 100),
]


def main():
    print("| script | seeds | MB | write s | load s |\n|---|---|---|---|---|")
    for name, flags, num_seeds in STATES:
        script = importlib.import_module(name)
        args = script.Args(**flags)
        script.check_args(args)
        like = jax.eval_shape(jax.vmap(script.make_train(args).init), jnp.zeros(num_seeds, jnp.int32))
        state = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), like)
        writing, loading = [], []
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "checkpoint.msgpack"
            for _ in range(5):
                start = time.perf_counter()
                leaves = {keystr(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(state)}
                script.write(file, serialization.msgpack_serialize({"state": leaves}))
                writing.append(time.perf_counter() - start)
                start = time.perf_counter()
                script.load(file, like)
                loading.append(time.perf_counter() - start)
            size = file.stat().st_size
        seconds = f"{statistics.median(writing):.3f} | {statistics.median(loading):.3f}"
        print(f"| {name} | {num_seeds} | {size / 1e6:.1f} | {seconds} |", flush=True)


if __name__ == "__main__":
    main()
