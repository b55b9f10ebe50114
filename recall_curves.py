"""How long does an untrained memory remember? Recall curves of frozen units, without any reinforcement learning.

A unit with random, frozen parameters reads a sequence. A linear readout, fitted in closed form (ridge regression),
then names a bit that it read k steps ago. Two tasks:

    stream  a new random bit at every step: the memory capacity of the reservoir-computing field (Jaeger, 2001). Every
            bit competes with all others: the capacity, the sum of r^2 over all k, cannot exceed the number of real
            state variables.
    cue     one bit, then weak noise: what MemoryChain and other delayed-recall tasks ask for.

    python recall_curves.py                                              # all units: docs/memory_recall.{json,png}
    python recall_curves.py --units GRU LRU LRU:r_min=0.99,r_max=0.9999 --tasks cue --png lru.png

A unit is a class of memory.py, with any of its settings. The readout sees the unit's state (its carry), as a trained
one could through the layers after it. Curves that the json file already has and that are not asked for now are kept.
"""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np

import memory
from plot_results import MEMORIES

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

jax.config.update("jax_default_matmul_precision", "highest")

DOCS = Path(__file__).resolve().parent / "docs"
DELAYS = 2048  # the longest
WIDTH = 256  # of units that do not name their features
UNITS = [
    "GRU",
    "FFM",
    "LRU:r_min=0.0,r_max=1.0",
    "LRU:r_min=0.9,r_max=0.999",
    "LRU:r_min=0.99,r_max=0.9999",
    "DeepESN:input_scaling=1.0",
    "DeepESN",
    "SRC",
    "ParalESN:r_min=0.9,r_max=0.999",
    "ParalESN:r_min=0.99,r_max=0.9999",
]
CLASSES = ("GRU", "FFM", "LRU", "DeepESN", "SRC", "ParalESN")
LINE_STYLES = ["-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1))]


def unit_class(description: str) -> str:
    """ "LRU" of "LRU:r_min=0.99,r_max=0.9999"."""
    return description.partition(":")[0]


def make_unit(description: str) -> memory.Memory:
    """A frozen unit from e.g. "LRU:r_min=0.99,r_max=0.9999". Raises ValueError where there is no such unit."""
    name, _, settings = description.partition(":")
    if name not in CLASSES:
        raise ValueError(f"no unit is called {name!r}; there are {', '.join(CLASSES)}")
    unit = getattr(memory, name)
    types = {field.name: field.type for field in dataclasses.fields(unit)}
    for not_a_setting in ("name", "parent", "freeze"):
        del types[not_a_setting]
    values = {"features": WIDTH}
    for setting in settings.split(",") if settings else []:
        field, _, text = setting.partition("=")
        if field not in types:
            raise ValueError(f"{name} has no setting {field!r}; it has {', '.join(types)}")
        try:
            values[field] = {"true": True, "false": False}[text] if types[field] is bool else types[field](text)
        except (ValueError, KeyError):
            right = "true or false" if types[field] is bool else f"of type {types[field].__name__}"
            raise ValueError(f"{field} must be {right}, not {text!r}") from None
    return unit(freeze=True, **values)


def with_width(description: str, features: int) -> str:
    """Units of several widths may stand in one file: the name of one that has not the usual width tells it."""
    if features == WIDTH or "features=" in description:
        return description
    return f"{description}{',' if ':' in description else ':'}features={features}"


def stream_states(cell: memory.Memory, key: jax.Array, x: jax.Array) -> np.ndarray:
    """The states [T, B, D] of an untrained unit after every step."""
    reset = jnp.zeros((1, x.shape[1]), bool)
    carry = cell.initialize_carry(x.shape[1])
    variables = cell.init(key, carry, x[:1], reset)

    def step(carry, x):
        carry = cell.apply(variables, carry, x[None], reset)[0]
        return carry, jnp.concatenate(jax.tree.leaves(carry), axis=-1)

    return np.asarray(jax.jit(lambda carry, x: jax.lax.scan(step, carry, x)[1])(carry, x))


def decode(states: np.ndarray, bits: np.ndarray, train: int) -> tuple[np.ndarray, np.ndarray]:
    """Accuracy and r² of a ridge readout for every column of bits [samples, K], on the samples after the first `train`.

    The penalty is the best of five on the second half of the training samples, for each column.
    """
    scale = states[:train].std(0) + 1e-12
    S = np.concatenate([(states - states[:train].mean(0)) / scale, np.ones((len(states), 1))], 1).astype(np.float64)
    bits = bits.astype(np.float64)
    half, penalties = train // 2, [1e-9, 1e-7, 1e-5, 1e-3, 1e-1]

    def readouts(samples):
        gram, cross = S[:samples].T @ S[:samples], S[:samples].T @ bits[:samples]
        return [np.linalg.solve(gram + penalty * samples * np.eye(len(gram)), cross) for penalty in penalties]

    errors = [np.square(S[half:train] @ W - bits[half:train]).mean(0) for W in readouts(half)]
    best = np.argmin(errors, axis=0)  # for every column
    readout = np.take_along_axis(np.stack(readouts(train)), best[None, None], axis=0)[0]
    prediction, truth = S[train:] @ readout, bits[train:]
    return (np.sign(prediction) == truth).mean(0), np.maximum(0, 1 - np.square(prediction - truth).mean(0))


def recall(description: str, task: str, seed: int) -> dict:
    """Accuracy at the delays 1 … 2048, and for the stream the memory capacity."""
    cell, key = make_unit(description), jax.random.key(seed)
    rng = np.random.default_rng(seed)
    direction = rng.normal(size=cell.features).astype(np.float32)  # how a bit appears in the input
    if task == "stream":
        batch, steps = 3, 3 * DELAYS
        bits = rng.choice([-1.0, 1.0], size=(steps, batch)).astype(np.float32)
        states = stream_states(cell, key, jnp.asarray(bits[:, :, None] * direction))[DELAYS:]
        past = np.lib.stride_tricks.sliding_window_view(bits, DELAYS + 1, axis=0)[..., ::-1][..., 1:]  # [T - D, B, D]
        samples = np.swapaxes(states, 0, 1).reshape(-1, states.shape[-1])  # the last sequence is the test
        targets = np.swapaxes(past, 0, 1).reshape(-1, DELAYS)
        accuracy, r2 = decode(samples, targets, train=len(samples) * (batch - 1) // batch)
        delays = np.arange(1, DELAYS + 1)
        shown = np.unique(np.round(2 ** np.arange(0, np.log2(DELAYS) + 0.01, 0.25)).astype(int))
        # Single delays are noisy: show the mean over neighbours within a tenth of the delay.
        smooth = [accuracy[np.abs(delays - k) <= 0.1 * k].mean() for k in shown]
        return {
            "delays": shown.tolist(),
            "accuracy": np.round(smooth, 4).tolist(),
            "capacity": round(float(r2.sum()), 1),
        }
    delays = 2 ** np.arange(0, int(np.log2(DELAYS)) + 1)
    bits = rng.choice([-1.0, 1.0], size=384).astype(np.float32)
    accuracy = cue_accuracy(cell, *jax.random.split(key), direction, bits, delays, noise=0.1)
    return {"delays": delays.tolist(), "accuracy": np.round(accuracy, 4).tolist()}


def cue_accuracy(cell, key, noise_key, direction, bits, delays, noise) -> list[float]:
    """A bit at step 0 of every sequence, then noise of the given size: the accuracy after every delay."""
    batch = len(bits)
    reset = jnp.zeros((1, batch), bool)
    carry = cell.initialize_carry(batch)
    first = jnp.asarray(bits[None, :, None] * direction)
    variables = cell.init(key, carry, first, reset)

    @jax.jit
    def advance(carry, start, end):
        def step(t, carry):
            x = noise * jax.random.normal(jax.random.fold_in(noise_key, t), first.shape)
            return cell.apply(variables, carry, x, reset)[0]

        return jax.lax.fori_loop(start, end, step, carry)

    carry = cell.apply(variables, carry, first, reset)[0]
    accuracy, now = [], 0
    for delay in delays:
        carry, now = advance(carry, now, int(delay)), int(delay)
        states = np.concatenate([np.asarray(leaf) for leaf in jax.tree.leaves(carry)], axis=-1)
        accuracy.append(float(decode(states, bits[:, None], train=256)[0][0]))
    return accuracy


def plot(results: dict) -> plt.Figure:
    """A panel for each task. A unit has its colour of plot_results.py's figures, each setting a kind of line."""
    tasks = list(results)
    names = sorted({name for units in results.values() for name in units})
    figure, axes = plt.subplots(1, len(tasks), figsize=(6 * len(tasks), 5), squeeze=False, layout="constrained")
    for axis, task in zip(axes[0], tasks, strict=True):
        for name in names:
            if not (runs := results[task].get(name)):
                continue
            curves = np.array([run["accuracy"] for run in runs])
            color = MEMORIES[unit_class(name).lower()][1]
            same = [other for other in names if unit_class(other) == unit_class(name)]
            line_style = LINE_STYLES[same.index(name) % len(LINE_STYLES)]
            axis.plot(runs[0]["delays"], curves.mean(0), label=name, color=color, linestyle=line_style)
            axis.fill_between(runs[0]["delays"], curves.min(0), curves.max(0), alpha=0.15, color=color, lw=0)
        axis.set(xscale="log", xlabel="delay k (steps)", ylabel="accuracy of the bit k steps ago", ylim=(0.45, 1.02))
        axis.set_xscale("log", base=2)
        axis.axhline(0.5, color="grey", linewidth=0.8, linestyle=":")
        axis.set_title({"stream": "a new bit at every step", "cue": "one bit, then weak noise"}[task])
    lines = {line.get_label(): line for axis in axes[0] for line in axis.get_lines() if line.get_label() in names}
    handles = [lines[name] for name in names]
    figure.legend(
        handles, names, loc="outside lower center", ncols=2 * len(tasks), fontsize=8, frameon=False, handlelength=4
    )
    return figure


def fail(message: str) -> NoReturn:
    """Ends the program with one line."""
    print(f"recall_curves.py: {message}", file=sys.stderr)
    sys.exit(2)


def load(path: Path) -> dict:
    """The curves that are there already: {task: {unit: [a run for every seed]}}."""
    if not path.exists():
        return {}
    try:
        results = json.loads(path.read_text())
        for runs in (runs for units in results.values() for runs in units.values()):
            keys = {key for run in runs for key in run}
            if not {"delays", "accuracy"} <= keys <= {"delays", "accuracy", "capacity"}:
                raise ValueError("its runs do not have delays and accuracy")
    except OSError as error:
        fail(f"--json {path}: cannot read it: {error.strerror}")
    except (ValueError, AttributeError, TypeError) as error:
        fail(f"--json {path}: not a file of recall curves ({error}); move it away, or name another")
    return results


def save(path: Path, write: Callable) -> None:
    """write(file), beside and then renamed: at `path` there is always either the old file or the whole new one."""
    beside = path.with_name(path.name + ".new")
    try:
        with beside.open("wb") as file:
            write(file)
        os.replace(beside, path)
    except OSError as error:
        fail(f"cannot write {path}: {error.strerror}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--units", nargs="+", default=UNITS)
    parser.add_argument("--tasks", nargs="+", default=["stream", "cue"], choices=["stream", "cue"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--features", type=int, default=WIDTH)
    parser.add_argument("--json", type=Path, default=DOCS / "memory_recall.json")
    parser.add_argument("--png", type=Path, default=DOCS / "memory_recall.png")
    args = parser.parse_args()

    if args.seeds < 1:
        fail(f"--seeds {args.seeds}: must be a positive integer")
    if args.features < 1:
        fail(f"--features {args.features}: must be a positive integer")
    if args.png.suffix != ".png":
        fail(f"--png {args.png}: must end in .png")
    units = [with_width(unit, args.features) for unit in args.units]
    for unit in units:
        try:
            make_unit(unit)
        except ValueError as error:
            fail(f"--units {unit}: {error}")

    for flag, path in (("json", args.json), ("png", args.png)):
        if not os.access(path.parent, os.W_OK):
            fail(f"--{flag} {path}: its folder is not there, or cannot be written to; name another")

    results = load(args.json)
    for task in args.tasks:
        for unit in units:
            runs = [recall(unit, task, seed) for seed in range(args.seeds)]
            results.setdefault(task, {})[unit] = runs
            save(args.json, lambda file: file.write(json.dumps(results, indent=1).encode()))
            mean = np.mean([run["accuracy"] for run in runs], axis=0)
            far = [k for k, a in zip(runs[0]["delays"], mean, strict=True) if a >= 0.95]
            capacity = f", capacity {np.mean([run['capacity'] for run in runs]):.0f}" if task == "stream" else ""
            print(f"{task:6}  {unit:46}  95% up to {max(far, default=0):4} steps{capacity}", flush=True)
    figure = plot(results)
    save(args.png, lambda file: figure.savefig(file, dpi=130))


if __name__ == "__main__":
    main()
