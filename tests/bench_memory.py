"""Times every unit of memory.py beside its peers, in one process, on the same inputs, resets and loss.

    python tests/bench_memory.py                                # everything: hours on two cores
    python tests/bench_memory.py --batch 16 --steps 1024        # a part of it; parts add up in the JSON file
    python tests/bench_memory.py --units LRU --batch 16 --steps 128 1024 8192
    python tests/bench_memory.py --report                       # docs/memory_benchmark.json -> docs/memory_benchmark.md

The peers are flax.linen's GRUCell in a scan, and the LRU and FFM of memax and memorax, where they are installed:
`pip install memax==0.1.1 memorax==1.0.1 equinox`. All contenders of one size take turns, so that whatever else the
machine does slows all of them; what is reported is each one's fastest turn, and what is promised is ratios. "cpu_ms" is
the processor time of the turn that needed least, over all threads: it depends less on what else the machine does.

Forward is the loss mean(y²). Forward+backward is its gradient for the parameters and the input; for a frozen unit, for
the input alone. Each contender gets its own memory layout (time or batch first), so nobody pays for a transposition.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import memory  # noqa: E402

FEATURES = 256
DOCS = ROOT / "docs"


# ----------------------------------------------------------------------------------------------------------------------
# Contenders: name -> (parameters, apply(parameters, x, reset) -> y, is time first?)
# ----------------------------------------------------------------------------------------------------------------------


def ours(cell):
    def make(x, reset):
        carry = cell.initialize_carry(x.shape[1])
        params = cell.init(jax.random.key(0), carry, x[:1], reset[:1])
        return params, lambda params, x, reset: cell.apply(params, carry, x, reset)[1], True

    return make


def flax_gru(x, reset):
    cell = nn.GRUCell(FEATURES)
    h = jnp.zeros((x.shape[1], FEATURES))

    def apply(params, x, reset):
        def step(h, now):
            x, reset = now
            return cell.apply(params, jnp.where(reset[:, None], 0.0, h), x)

        return jax.lax.scan(step, h, (x, reset))[1]

    return cell.init(jax.random.key(0), h, x[0]), apply, True


def memax_lru(x, reset):
    from memax.linen.semigroups.lru import LRU

    algebra = LRU.default_algebra(recurrent_size=FEATURES)
    model = LRU(algebra, LRU.default_scan(), hidden_size=FEATURES, recurrent_size=FEATURES)
    carry = model.zero_carry()
    params = model.init(jax.random.key(0), carry, (x[:2, 0], reset[:2, 0]))
    one = lambda params, x, reset: model.apply(params, carry, (x, reset))[1]  # noqa: E731
    return params, jax.vmap(one, in_axes=(None, 0, 0)), False


def memax_ffm(trace_size, context_size):
    def make(x, reset):
        import equinox
        from memax.equinox.semigroups.ffm import FFM

        model = FFM(FEATURES, trace_size, context_size, key=jax.random.key(0))
        params, static = equinox.partition(model, equinox.is_inexact_array)

        def one(params, x, reset):
            model = equinox.combine(params, static)
            return model(model.initialize_carry(), (x, reset))[1]

        return params, jax.vmap(one, in_axes=(None, 0, 0)), False

    return make


def memorax(cell_name, **sizes):
    def make(x, reset):
        from memorax.networks.sequence_models import ffm, lru
        from memorax.networks.sequence_models.memoroid import Memoroid

        model = Memoroid({"lru": lru.LRUCell, "ffm": ffm.FFMCell}[cell_name](features=FEATURES, **sizes))
        x, reset = jnp.swapaxes(x, 0, 1), jnp.swapaxes(reset, 0, 1)
        params = model.init(jax.random.key(0), x[:, :2], reset[:, :2].astype(jnp.float32))
        return params, lambda params, x, reset: model.apply(params, x, reset.astype(jnp.float32))[1], False

    return make


CHAIN = 8


def products(x, reset):
    """x W W W …, the yardstick: the arithmetic of a unit is a known number of such products (see PRODUCTS)."""
    W = jax.random.normal(jax.random.key(0), (FEATURES, FEATURES)) / FEATURES**0.5

    def chain(carry, x, reset):
        for _ in range(CHAIN):
            x = memory.product(x, W)
        return carry, x

    return W, lambda W, x, reset: memory.through_time(chain, 0.0, x, reset)[1], True


PRODUCTS = {"GRU": (6, 18, 12), "LRU": (4, 12, 8), "FFM": (3.25, 9.75, 6.5), "FFM 4x64": (4, 12, 8)}
"""Products of [T · B, 256] with [256, 256] in forward, forward+backward, and forward+backward of a frozen unit."""

CONTENDERS = {
    "FFM against GRU": {
        "FFM": ours(memory.FFM(FEATURES)),
        "GRU": ours(memory.GRU(FEATURES)),
        "flax GRU": flax_gru,
    },
    "GRU": {
        "trained": ours(memory.GRU(FEATURES)),
        "frozen": ours(memory.GRU(FEATURES, freeze=True)),
        "flax": flax_gru,
    },
    "LRU": {
        "trained": ours(memory.LRU(FEATURES)),
        "frozen": ours(memory.LRU(FEATURES, freeze=True)),
        "memax": memax_lru,
        "memorax": memorax("lru", hidden_dim=FEATURES),
    },
    "FFM": {  # the default size
        "trained": ours(memory.FFM(FEATURES)),
        "frozen": ours(memory.FFM(FEATURES, freeze=True)),
        "memax": memax_ffm(32, 4),
        "memorax": memorax("ffm", memory_size=32, context_size=4),
    },
    "FFM 4x64": {
        "trained": ours(memory.FFM(FEATURES, trace_size=4, context_size=64)),
        "frozen": ours(memory.FFM(FEATURES, trace_size=4, context_size=64, freeze=True)),
        "memax": memax_ffm(4, 64),
        "memorax": memorax("ffm", memory_size=4, context_size=64),
    },
} | {
    name: {"trained": ours(cell(FEATURES)), "frozen": ours(cell(FEATURES, freeze=True))}
    for name, cell in {"DeepESN": memory.DeepESN, "SRC": memory.SRC, "ParalESN": memory.ParalESN}.items()
}


# ----------------------------------------------------------------------------------------------------------------------
# Measurement
# ----------------------------------------------------------------------------------------------------------------------


def programs(name, make, x, reset):
    """The two compiled programs of a contender, their arguments, and the seconds it took to compile them."""
    params, apply, time_first = make(x, reset)
    if not time_first:
        x, reset = jnp.swapaxes(x, 0, 1), jnp.swapaxes(reset, 0, 1)
    loss = lambda params, x: jnp.square(apply(params, x, reset)).mean()  # noqa: E731
    differentiated = 1 if name == "frozen" else (0, 1)
    for pass_name, function in [("forward", loss), ("forward+backward", jax.grad(loss, differentiated))]:
        start = time.perf_counter()
        compiled = jax.jit(function).lower(params, x).compile()
        yield pass_name, compiled, (params, x), time.perf_counter() - start


def measure(contenders, batch, steps, seconds):
    """Milliseconds of each contender's fastest turn, compile seconds, and gigaflops of the compiled program."""
    x = jax.random.normal(jax.random.key(1), (steps, batch, FEATURES))
    reset = jax.random.bernoulli(jax.random.key(2), 1 / 100, (steps, batch))
    runs = {}
    for name, make in ({"products": products} | contenders).items():
        try:
            for pass_name, compiled, arguments, compile_seconds in programs(name, make, x, reset):
                runs[name, pass_name] = {"compile_s": round(compile_seconds, 2)}, compiled, arguments, []
        except ImportError as error:
            print(f"    {name} is left out: {error}")
    for _, compiled, arguments, _ in runs.values():
        jax.block_until_ready(compiled(*arguments))
    deadline, rounds = time.perf_counter() + seconds, 0
    while rounds < 3 or (time.perf_counter() < deadline and rounds < 30):
        for _, compiled, arguments, times in runs.values():
            wall, cpu = time.perf_counter(), time.process_time()
            jax.block_until_ready(compiled(*arguments))
            times.append((time.perf_counter() - wall, time.process_time() - cpu))
        rounds += 1
    results = {}
    for (name, pass_name), (result, _, _, times) in runs.items():
        wall, cpu = (sorted(1e3 * t for t in column) for column in zip(*times, strict=True))
        result |= {"ms": round(wall[0], 2), "median_ms": round(wall[len(wall) // 2], 2), "cpu_ms": round(cpu[0], 2)}
        results.setdefault(name, {})[pass_name] = result | {"turns": len(times)}
    return results


FLOORS = [  # unit, batch, steps, pass, what, against, at least
    *[("LRU", 16, 1024, "forward", "trained", peer, 3.5) for peer in ("memax", "memorax")],
    *[("LRU", 16, 1024, "forward+backward", "trained", peer, 2.4) for peer in ("memax", "memorax")],
    *[("LRU", 16, 8192, "forward+backward", "trained", peer, 2.8) for peer in ("memax", "memorax")],
    *[("FFM 4x64", 16, 1024, "forward", "trained", peer, 1.8) for peer in ("memax", "memorax")],
    *[("FFM 4x64", 16, 1024, "forward+backward", "trained", peer, 1.5) for peer in ("memax", "memorax")],
    ("GRU", 1, 128, "forward+backward", "trained", "flax", 2.0),
    ("GRU", 16, 1024, "forward+backward", "trained", "flax", 1.2),
    ("GRU", 16, 1024, "forward+backward", "frozen", "trained", 1.25),
    ("LRU", 16, 1024, "forward+backward", "frozen", "trained", 1.5),
    ("FFM 4x64", 16, 1024, "forward+backward", "frozen", "trained", 1.5),
    ("FFM", 16, 1024, "forward+backward", "frozen", "trained", 1.5),
]


def report(stored: dict) -> str:
    """The measurements as a page of Markdown: what was promised, then everything."""
    lines = ["# Speed of memory.py", "", "Made by `python tests/bench_memory.py` (its docstring says how).", ""]
    lines += ["| | against | ratio (wall) | ratio (processor time) | floor |", "|---|---|---|---|---|"]
    for unit, batch, steps, pass_name, what, against, floor in FLOORS:
        results = stored.get(f"{unit}, batch {batch}, T = {steps}", {})
        if {what, against} <= set(results):
            ours, theirs = results[what][pass_name], results[against][pass_name]
            ratios = [f"{theirs[key] / ours[key]:.2f}" for key in ("ms", "cpu_ms")]
            case = f"{unit} {what}, {pass_name}, batch {batch}, T = {steps}"
            lines.append(f"| {case} | {against} | {ratios[0]} | {ratios[1]} | {floor} |")
    lines += [
        "",
        "Milliseconds of the fastest turn, and seconds to compile. The last column divides the processor time",
    ]
    lines += ["by that of the unit's matrix products alone: what exceeds 1 remains to the arithmetic limit."]
    lines += ["", "| | forward | forward+backward | compile | over the products alone |", "|---|---|---|---|---|"]
    for case, results in stored.items():
        unit = case.split(",")[0]
        for name, passes in results.items():
            forward, both = passes["forward"], passes["forward+backward"]
            over = ""
            if unit in PRODUCTS and name in ("trained", "frozen") and "products" in results:
                limits = PRODUCTS[unit][0], PRODUCTS[unit][2 if name == "frozen" else 1]
                yardstick = results["products"]["forward"]["cpu_ms"] / CHAIN
                times = zip((forward["cpu_ms"], both["cpu_ms"]), limits, strict=True)
                over = " / ".join(f"{ms / count / yardstick:.2f}" for ms, count in times)
            compiling = f"{forward['compile_s']} / {both['compile_s']}"
            lines.append(f"| {case}: {name} | {forward['ms']} | {both['ms']} | {compiling} | {over} |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--units", nargs="+", default=list(CONTENDERS), choices=CONTENDERS)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--steps", nargs="+", type=int, default=[128, 1024, 8192])
    parser.add_argument("--seconds", type=float, default=20, help="how long the contenders of one size take turns")
    parser.add_argument("--only", nargs="+", help="time these contenders alone, e.g. trained frozen")
    parser.add_argument("--json", type=Path, default=DOCS / "memory_benchmark.json")
    parser.add_argument("--report", action="store_true", help="write the Markdown page beside the JSON file, and stop")
    args = parser.parse_args()
    if args.report:
        args.json.with_suffix(".md").write_text(report(json.loads(args.json.read_text())))
        return
    for unit in args.units:
        for batch in args.batch:
            for steps in args.steps:
                print(f"{unit}, batch {batch}, T = {steps}", flush=True)
                contenders = {k: v for k, v in CONTENDERS[unit].items() if not args.only or k in args.only}
                results = measure(contenders, batch, steps, args.seconds)
                for name, passes in results.items():
                    for pass_name, result in passes.items():
                        print(f"    {name:8} {pass_name:16} " + "  ".join(f"{k} {v}" for k, v in result.items()))
                stored = json.loads(args.json.read_text()) if args.json.exists() else {}
                stored[f"{unit}, batch {batch}, T = {steps}"] = results
                args.json.write_text(json.dumps(stored, indent=1))


if __name__ == "__main__":
    main()
