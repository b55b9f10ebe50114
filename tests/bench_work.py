"""What a training iteration costs as its work grows: more environments, steps, width, larger minibatches, more seeds.

    python tests/bench_work.py --out docs/work.png

The published setting of pqn_ffm.py (16 environments × 128 steps, width 256, 16 minibatches in 4 epochs, one seed), with
one number changed at a time. Prints a table for docs/pqn_ffm.md, draws it as steps per second of all seeds together,
and writes the numbers beside the picture. An iteration is the faster of two.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pqn_ffm  # noqa: E402

AGENTS = {"ffm": {}, "gru": {"memory": "gru"}}
PUBLISHED = {"num_envs": 16, "num_steps": 128, "hidden_size": 256, "num_minibatches": 16, "num_seeds": 1}
VALUES = {
    "num_envs": (16, 64, 256, 1024),
    "num_steps": (128, 512, 2048),
    "hidden_size": (64, 128, 256, 512, 1024),
    "num_minibatches": (16, 8, 4, 2, 1),
    "num_seeds": (1, 4, 16),
}


def iteration_seconds(agent: dict, num_seeds: int, **settings) -> float:
    args = pqn_ffm.Args(**agent, **settings)
    pqn_ffm.check_args(args)
    train = pqn_ffm.make_train(args)
    state = jax.jit(lambda seeds: jax.lax.map(train.init, seeds))(jnp.arange(num_seeds, dtype=jnp.int32))
    iteration = jax.jit(lambda state: jax.lax.map(train.train_iteration, state), donate_argnums=0)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        state, _ = jax.block_until_ready(iteration(state))
        times.append(time.perf_counter() - start)
    return min(times[1:])  # the first one compiles


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="picture to write, with a .json of that name beside it")
    out = parser.parse_args().out
    found = {name: {} for name in AGENTS}
    print("| | " + " | ".join(f"{name}: s | SPS" for name in AGENTS) + " |\n|---" + "|---|---" * len(AGENTS) + "|")
    for setting, values in VALUES.items():
        for value in values:
            cells = []
            for name, agent in AGENTS.items():
                settings = PUBLISHED | {setting: value}
                key = " ".join(str(number) for number in settings.values())
                if key not in found[name]:
                    seconds = iteration_seconds(agent, **settings)
                    steps = settings["num_envs"] * settings["num_steps"] * settings["num_seeds"]
                    found[name][key] = settings | {"seconds": seconds, "SPS": steps / seconds}
                cells.append(f"{found[name][key]['seconds']:.3f} | {found[name][key]['SPS']:,.0f}")
            print(f"| {setting} {value} | {' | '.join(cells)} |", flush=True)

    figure, axes = plt.subplots(1, len(VALUES), figsize=(14, 3), sharey=True, layout="constrained")
    for ax, (setting, values) in zip(axes, VALUES.items(), strict=True):
        for (name, results), color in zip(found.items(), ("#0072B2", "#D55E00"), strict=True):
            points = []
            for value in values:
                key = " ".join(str(number) for number in (PUBLISHED | {setting: value}).values())
                points.append(results[key]["SPS"])
            ax.plot(values, points, "o-", color=color, label=name)
        ax.set(xlabel=setting, xscale="log", yscale="log", xticks=values, xticklabels=values)
        ax.minorticks_off()
    axes[0].set_ylabel("environment steps per second")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(AGENTS))
    figure.savefig(out, dpi=120)
    results = {name: list(rows.values()) for name, rows in found.items()}
    out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
