"""Where the time of pqn_frozen_rnn.py goes, at the published setting, and what it saves to keep a memory's features.

    python tests/bench_pqn_frozen_rnn.py parts    # compile seconds, SPS, rollout against update, of each memory
    python tests/bench_pqn_frozen_rnn.py kept     # features kept from the rollout against a memory that runs again
    python tests/bench_pqn_frozen_rnn.py seeds    # seeds by vmap, and one after the other, against a single one
    python tests/bench_pqn_frozen_rnn.py rows     # a readout's gradient over [T, 1, F] and over [T, F]

All agents are timed in turn, so that whatever else the machine does hits all of them; medians count.
"""

import statistics
import sys
import time
from pathlib import Path
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import pqn_frozen_rnn  # noqa: E402

RESERVOIRS = ("deepesn", "src", "paralesn")
EVERYTHING_FROZEN = {"frozen": True, "frozen_input": True, "frozen_mixers": True}
PARTS = [(memory, {"frozen": frozen}) for memory in ("gru", "lru", *RESERVOIRS) for frozen in (False, True)]
PARTS += [("gru", EVERYTHING_FROZEN), ("lru", EVERYTHING_FROZEN), ("mlp", {})]
KEPT = [("gru", EVERYTHING_FROZEN), ("lru", EVERYTHING_FROZEN), *((memory, {"frozen": True}) for memory in RESERVOIRS)]


def compiled(function, *x):
    start = time.perf_counter()
    program = jax.jit(function).lower(*x).compile()
    return program, time.perf_counter() - start


class RunAgain(pqn_frozen_rnn.Agent):
    """The agent that makes all features again, whatever was kept."""

    def __call__(self, carry, obs, previous_action, reset, features=None):
        return super().__call__(carry, obs, previous_action, reset)


class Contender:
    """A setting's compiled programs, and the seconds that they took in each turn."""

    def __init__(self, memory: str, flags: dict, agent: type[pqn_frozen_rnn.Agent] = pqn_frozen_rnn.Agent):
        args = pqn_frozen_rnn.Args(memory=memory, **flags)
        pqn_frozen_rnn.check_args(args)
        with mock.patch.object(pqn_frozen_rnn, "Agent", agent):
            train = pqn_frozen_rnn.make_train(args)
        self.name = " ".join([memory, *(name.replace("_", " ") for name, on in flags.items() if on)])
        self.state, self.key = jax.jit(train.init)(jnp.int32(args.seed)), jax.random.key(0)
        self.train_iteration = train.train_iteration
        self.iteration, self.compile_seconds = compiled(train.train_iteration, self.state)
        self.rollout, _ = compiled(train.rollout, self.state, self.key)
        self.steps, self.whole, self.acting = args.num_envs * args.num_steps, [], []

    def turn(self):
        for times, function, x in (
            (self.whole, self.iteration, (self.state,)),
            (self.acting, self.rollout, (self.state, self.key)),
        ):
            start = time.perf_counter()
            jax.block_until_ready(function(*x))
            times.append(time.perf_counter() - start)

    def medians(self) -> tuple[float, float]:
        """Seconds of a whole iteration, and of its rollout; the first turn warms up."""
        return statistics.median(self.whole[1:]), statistics.median(self.acting[1:])


def parts():
    agents = [Contender(memory, flags) for memory, flags in PARTS]
    for _ in range(8):
        for agent in agents:
            agent.turn()
    print("| memory | compile s | iteration s | SPS | rollout | update |\n|---|---|---|---|---|---|")
    for agent in agents:
        whole, acting = agent.medians()
        row = f"| {agent.name} | {agent.compile_seconds:.1f} | {whole:.3f} | {agent.steps / whole:,.0f} "
        print(row + f"| {acting / whole:.0%} | {1 - acting / whole:.0%} |")


def kept():
    pairs = [(Contender(*setting), Contender(*setting, RunAgain)) for setting in KEPT]
    for _ in range(8):
        for pair in pairs:
            for agent in pair:
                agent.turn()
    print("| memory | SPS, kept | SPS, run again | ratio | ratio of the update alone |\n|---|---|---|---|---|")
    for one, other in pairs:
        (whole, acting), (other_whole, other_acting) = one.medians(), other.medians()
        row = f"| {one.name} | {one.steps / whole:,.0f} | {one.steps / other_whole:,.0f} | {other_whole / whole:.1f} "
        print(row + f"| {(other_whole - other_acting) / (whole - acting):.1f} |")


def in_turn(programs: dict, turns: int) -> dict[str, float]:
    """Median seconds of each (compiled program, *arguments); the first turn warms up."""
    times = {name: [] for name in programs}
    for _ in range(turns):
        for name, (program, *x) in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program(*x))
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(measured[1:]) for name, measured in times.items()}


def seeds():
    print("| memory | seeds | one alone s | vmap s a seed | one by one s a seed |\n|---|---|---|---|---|")
    for memory, flags in [("gru", {}), ("lru", {"frozen": True}), ("deepesn", {"frozen": True}), ("mlp", {})]:
        agent = Contender(memory, flags)
        for count in (1, 3):
            state = jax.tree.map(lambda x, n=count: jnp.stack([x] * n), agent.state)
            functions = {
                "vmap": jax.vmap(agent.train_iteration),
                "map": lambda state, one=agent.train_iteration: jax.lax.map(one, state),
            }
            programs = {name: (compiled(function, state)[0], state) for name, function in functions.items()}
            s = in_turn(programs | {"one": (agent.iteration, agent.state)}, turns=6)
            print(f"| {agent.name} | {count} | {s['one']:.3f} | {s['vmap'] / count:.3f} | {s['map'] / count:.3f} |")


def rows():
    readout = nn.Sequential([layer for _ in range(3) for layer in (nn.Dense(256), nn.LayerNorm(), nn.leaky_relu)])
    x = jax.random.normal(jax.random.key(0), (128, 256))
    params = readout.init(jax.random.key(1), x)
    grad = jax.grad(lambda params, x: jnp.square(readout.apply(params, x)).mean())
    programs = {name: (compiled(grad, params, y)[0], params, y) for name, y in (("T1F", x[:, None]), ("TF", x))}
    s = in_turn(programs, turns=200)
    print(f"[T, 1, F] {1e3 * s['T1F']:.2f} ms, [T, F] {1e3 * s['TF']:.2f} ms, ratio {s['TF'] / s['T1F']:.2f}")


if __name__ == "__main__":
    {"parts": parts, "kept": kept, "seeds": seeds, "rows": rows}[sys.argv[1]]()
