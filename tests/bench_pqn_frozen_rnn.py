"""Where the time of pqn_frozen_rnn.py goes, at the published setting, and what it saves to keep a memory's features.

    python tests/bench_pqn_frozen_rnn.py parts    # compile seconds, SPS, rollout against update, of each memory
    python tests/bench_pqn_frozen_rnn.py kept     # features kept from the rollout against a memory that runs again

All agents are timed in turn, so that whatever else the machine does hits all of them; medians count.
"""

import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax

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


class Agent:
    def __init__(self, memory: str, flags: dict, recompute: bool = False):
        given = {name: value for group in vars(pqn_frozen_rnn.Args()).values() for name, value in vars(group).items()}
        args = SimpleNamespace(**given | {"memory": memory} | flags)
        pqn_frozen_rnn.check_args(args)
        train = pqn_frozen_rnn.make_train(args, recompute)
        self.name = " ".join([memory, *(name.replace("_", " ") for name, on in flags.items() if on)])
        self.state = jax.jit(train.init)(jax.random.PRNGKey(args.seed))
        self.iteration, self.compile_seconds = compiled(train.train_iteration, self.state)
        self.rollout, _ = compiled(train.rollout, self.state, self.state.key)
        self.steps, self.whole, self.acting = args.num_envs * args.num_steps, [], []

    def turn(self):
        for times, function, x in (
            (self.whole, self.iteration, (self.state,)),
            (self.acting, self.rollout, (self.state, self.state.key)),
        ):
            start = time.perf_counter()
            jax.block_until_ready(function(*x))
            times.append(time.perf_counter() - start)

    def medians(self) -> tuple[float, float]:
        """Seconds of a whole iteration, and of its rollout; the first turn warms up."""
        return statistics.median(self.whole[1:]), statistics.median(self.acting[1:])


def parts():
    agents = [Agent(memory, flags) for memory, flags in PARTS]
    for _ in range(8):
        for agent in agents:
            agent.turn()
    print("| memory | compile s | iteration s | SPS | rollout | update |\n|---|---|---|---|---|---|")
    for agent in agents:
        whole, acting = agent.medians()
        row = f"| {agent.name} | {agent.compile_seconds:.1f} | {whole:.3f} | {agent.steps / whole:,.0f} "
        print(row + f"| {acting / whole:.0%} | {1 - acting / whole:.0%} |")


def kept():
    pairs = [(Agent(*setting), Agent(*setting, recompute=True)) for setting in KEPT]
    for _ in range(8):
        for pair in pairs:
            for agent in pair:
                agent.turn()
    print("| memory | SPS, kept | SPS, run again | ratio | ratio of the update alone |\n|---|---|---|---|---|")
    for one, other in pairs:
        (whole, acting), (other_whole, other_acting) = one.medians(), other.medians()
        row = f"| {one.name} | {one.steps / whole:,.0f} | {one.steps / other_whole:,.0f} | {other_whole / whole:.1f} "
        print(row + f"| {(other_whole - other_acting) / (whole - acting):.1f} |")


if __name__ == "__main__":
    {"parts": parts, "kept": kept}[sys.argv[1]]()
