"""Learning curves, final evaluations and parameter counts from run folders, with confidence intervals over seeds.

    python plot_results.py --run-dir runs
    python plot_results.py --run-dir runs --kind heatmap --out evaluations.png
    python plot_results.py --run-dir runs --kind recall
    python plot_results.py --run-dir runs --kind table
    python plot_results.py --run-dir runs --kind parameters

Runs that differ in nothing but their seed are one line of a panel, or one cell of a table. Beside the picture or the
table, a json file of the same name holds the numbers that it shows.
"""

import collections
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import matplotlib
import numpy as np
import scipy.stats
import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

# Flags that may differ between the seeds of one setting.
NOT_A_SETTING = {"seed", "num_seeds", "eval_episodes", "capture_video", "run_dir", "checkpoint_every"}
NOT_A_SETTING |= {"resume", "evaluate", "track"}
# Metrics that a run need not have yet.
LATE_METRICS = {"charts/episodic_return", "charts/episodic_length", "charts/success_rate", "eval/episodic_return"}
# Experiments that need no name in a legend: the scripts as they are.
SCRIPTS = ("pqn_ffm", "pqn_frozen_rnn", "ppo_memorychain", "ppo_playground", "pqn_arcade_cnn")


@dataclass
class Args:
    """Plots the runs of a folder."""

    run_dir: str = "runs"
    """folder of run folders"""
    out: str | None = None
    """picture (png, pdf, svg) or table (md) to write; None is the kind and its ending: curves.png"""
    kind: Literal["curves", "heatmap", "table", "parameters", "recall"] = "curves"
    """curves: a metric against environment steps, a panel for each task; heatmap: final evaluations, tasks by agents;
    table: the same in Markdown, with steps per second; parameters: of each agent and task, trained and frozen;
    recall: success rate against the delay of MemoryChain"""
    metric: str = "charts/episodic_return"
    """what the curves show, by its TensorBoard name"""
    points: int = 60
    """points of a curve; each is the mean over an equal share of the steps"""
    confidence: float = 0.95
    """level of the Student t interval over seeds"""


def find_runs(run_dir: Path) -> dict[tuple[str, str], list[Path]]:
    """Run folders by (task, agent), the newest of each seed. Ends the program where one name means several settings."""
    groups, settings = collections.defaultdict(dict), {}
    for file in sorted(run_dir.glob("*/config.json"), key=lambda file: file.stat().st_mtime):
        try:
            config = json.loads(file.read_text())
            setting = {name: value for name, value in config["args"].items() if name not in NOT_A_SETTING}
            memory = setting["memory"] + ("-frozen" if setting["frozen"] else "")
            agent = memory if setting["exp_name"] in SCRIPTS else f"{setting['exp_name']} {memory}"
            key, seed = (setting["env"], agent), config["seed"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            fail(f"--run-dir {run_dir}: {file} is damaged: {error!r}")
        other = settings.setdefault(key, setting)
        if different := [name for name in setting if setting[name] != other.get(name)]:
            name = " ".join(key)
            fail(f"--run-dir {run_dir}: runs of {name} differ in {', '.join(different)}; tell them by --exp-name")
        groups[key][seed] = file.parent
    return {key: [by_seed[seed] for seed in sorted(by_seed)] for key, by_seed in groups.items()}


def read_curve(run: Path, metric: str, edges: np.ndarray) -> np.ndarray:
    """Mean of a metric between each two edges (environment steps); NaN where the run has no point."""
    events = EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()
    if metric not in (known := events.Tags()["scalars"]):
        if known and metric not in LATE_METRICS:
            fail(f"--metric {metric}: not in {run}, which has {', '.join(known)}")
        return np.full(len(edges) - 1, np.nan)
    steps, values = np.array([(event.step, event.value) for event in events.Scalars(metric)]).T
    bins = np.digitize(steps, edges, right=True) - 1
    return np.array([values[bins == i].mean() if (bins == i).any() else np.nan for i in range(len(edges) - 1)])


def interval(values: np.ndarray, confidence: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean over seeds [S, ...] and the ends of its Student t interval; a single seed has no interval."""
    mean, n = values.mean(0), len(values)
    if n == 1:
        return mean, mean, mean
    half = scipy.stats.t.ppf((1 + confidence) / 2, n - 1) * values.std(0, ddof=1) / np.sqrt(n)
    return mean, mean - half, mean + half


def plot_curves(args: Args, groups: dict[tuple[str, str], list[Path]]) -> dict:
    tasks = sorted({task for task, _ in groups})
    agents = sorted({agent for _, agent in groups})
    columns = min(3, len(tasks))
    rows = -(-len(tasks) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(5.5 * columns, 3.6 * rows), squeeze=False)
    numbers = {}
    for axis, task in zip(axes.flat, tasks, strict=False):
        bands = []
        for i, agent in enumerate(agents):
            if (task, agent) not in groups:
                continue
            runs = groups[task, agent]
            configs = [json.loads((run / "config.json").read_text()) for run in runs]
            edges = np.linspace(0, max(config["args"]["total_timesteps"] for config in configs), args.points + 1)
            curves = np.stack([read_curve(run, args.metric, edges) for run in runs])
            curves = curves[~np.isnan(curves).all(1)]  # a run that has just started shows nothing yet
            there = ~np.isnan(curves).any(0)  # only where all seeds have a value
            steps = ((edges[1:] + edges[:-1]) / 2)[there]
            mean, low, high = interval(curves[:, there], args.confidence)
            axis.plot(steps, mean, color=f"C{i}", label=f"{agent} ({len(runs)} seed{'s' * (len(runs) > 1)})")
            axis.plot(steps, curves[:, there].T, color=f"C{i}", alpha=0.4, linewidth=0.7)  # each seed
            bands.append((steps, low, high, f"C{i}"))
            numbers[f"{task} {agent}"] = {
                "seeds": [config["seed"] for config in configs],
                "steps": steps.tolist(),
                "mean": mean.round(4).tolist(),
                "low": low.round(4).tolist(),
                "high": high.round(4).tolist(),
            }
        axis.set_ylim(axis.get_ylim())  # ends where the seeds do: the interval of three is often far wider
        for steps, low, high, color in bands:
            axis.fill_between(steps, low, high, color=color, alpha=0.1, linewidth=0)
        axis.set(title=task, xlabel="environment steps", ylabel=args.metric.split("/")[-1].replace("_", " "))
        axis.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))  # 400k
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small", loc="best")
    for axis in axes.flat[len(tasks) :]:
        axis.remove()
    figure.tight_layout()
    figure.savefig(args.out, dpi=120)
    return numbers


def evaluations(groups: dict[tuple[str, str], list[Path]]) -> dict:
    """Mean and sample standard deviation over seeds of each seed's mean return (as FRN, appendix D), and steps/s."""
    numbers = {}
    for (task, agent), runs in groups.items():
        results = [json.loads(file.read_text()) for file in (run / "eval.json" for run in runs) if file.exists()]
        if results:
            seeds = [result["mean_return"] for result in results]
            std, sps = np.std(seeds, ddof=1) if len(seeds) > 1 else None, np.median([r["SPS"] for r in results])
            numbers[f"{task} {agent}"] = {"seeds": seeds, "mean": np.mean(seeds), "std": std, "SPS": sps}
    return numbers


def cell(x: dict | None) -> str:
    return "" if x is None else f"{x['mean']:.2f}" + ("" if x["std"] is None else f" ± {x['std']:.2f}")


def plot_heatmap(args: Args, groups: dict[tuple[str, str], list[Path]]) -> dict:
    tasks, agents = sorted({task for task, _ in groups}), sorted({agent for _, agent in groups})
    numbers = evaluations(groups)
    cells = [[numbers.get(f"{task} {agent}") for agent in agents] for task in tasks]
    means = np.array([[np.nan if x is None else x["mean"] for x in row] for row in cells])
    figure, axis = plt.subplots(figsize=(2 + 1.5 * len(agents), 1.2 + 0.45 * len(tasks)))
    limit = max(1e-9, np.nanmax(np.abs(means))) if numbers else 1
    axis.imshow(means, cmap="RdBu", vmin=-limit, vmax=limit, aspect="auto")
    axis.set_xticks(range(len(agents)), agents, rotation=20, ha="right")
    axis.set_yticks(range(len(tasks)), tasks)
    for (row, column), mean in np.ndenumerate(means):
        color = "white" if abs(mean) > 0.6 * limit else "black"
        axis.text(column, row, cell(cells[row][column]), ha="center", va="center", fontsize="small", color=color)
    figure.tight_layout()
    figure.savefig(args.out, dpi=120)
    return numbers


def plot_recall(args: Args, groups: dict[tuple[str, str], list[Path]]) -> dict:
    """Success rate of the final evaluations against MemoryChain's delay: mean and range over seeds (as FRN, Fig. 2)."""
    numbers = collections.defaultdict(lambda: collections.defaultdict(list))
    chains = {int(task.split("-")[1]): task for task, _ in groups if task.startswith("MemoryChain-")}
    for delay, agent in sorted((delay, agent) for delay in chains for task, agent in groups if task == chains[delay]):
        files = [file for file in (run / "eval.json" for run in groups[chains[delay], agent]) if file.exists()]
        if results := [json.loads(file.read_text()) for file in files]:
            row, seeds = numbers[agent], [result["success_rate"] for result in results]
            row["delays"].append(delay)
            row["seeds"].append(seeds)
            row["mean"].append(round(np.mean(seeds), 4))
            row["mean_128"].append(round(np.mean([result["success_rate_128"] for result in results]), 4))
            row["steps"].append([result["environment_steps"] for result in results])
    if not numbers:
        fail(f"--run-dir {args.run_dir}: no finished run of ppo_memorychain.py in it")
    figure, axis = plt.subplots(figsize=(8, 4.5))
    units = sorted({agent.removesuffix("-frozen") for agent in numbers})
    for i, (agent, row) in enumerate(sorted(numbers.items())):
        delays = np.array(row["delays"]) * 1.03**i  # side by side, where all succeed
        color, line = f"C{units.index(agent.removesuffix('-frozen'))}", "--" if agent.endswith("-frozen") else "-"
        axis.plot(delays, row["mean"], line, color=color, marker="o", markersize=4, label=agent)
        low, high = ([of(seeds) for seeds in row["seeds"]] for of in (min, max))
        axis.fill_between(delays, low, high, color=color, alpha=0.12, linewidth=0)
    axis.axhline(0.5, color="gray", linestyle=":", linewidth=1, label="guessing")
    axis.set_xscale("log", base=2)
    axis.set_xticks(sorted(chains), sorted(chains))
    axis.minorticks_off()
    axis.set(xlabel="delay", ylabel="success rate", ylim=(-0.03, 1.03))
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(args.out, dpi=120)
    return numbers


def write_table(args: Args, groups: dict[tuple[str, str], list[Path]]) -> dict:
    """Agents by tasks, and the environment steps per second of all seeds of a program: the median over tasks."""
    tasks, agents = sorted({task for task, _ in groups}), sorted({agent for _, agent in groups})
    numbers, rows = evaluations(groups), [["", *tasks, "SPS"]]
    for agent in agents:
        cells = [numbers.get(f"{task} {agent}") for task in tasks]
        speeds = [x["SPS"] for x in cells if x is not None]
        rows.append([agent, *map(cell, cells), f"{np.median(speeds):,.0f}" if speeds else ""])
    write_markdown(args, rows)
    return numbers


def write_parameters(args: Args, groups: dict[tuple[str, str], list[Path]]) -> dict:
    """Of each agent: all parameters, those that are trained, those that are not, and their share (FRN, Table 1)."""
    rows, numbers = [["", "total", "trainable", "frozen", "reduction"]], {}
    for (task, agent), (run, *_) in sorted(groups.items()):
        config = json.loads((run / "config.json").read_text())
        n = numbers[f"{config['script']} {task} {agent}"] = config["parameters"]["all"]
        counts = [f"{n[kind]:,}" for kind in ("total", "trainable", "frozen")]
        rows.append([f"{config['script']} {task} {agent}", *counts, f"{n['frozen'] / n['total']:.2%}"])
    write_markdown(args, rows)
    return numbers


def write_markdown(args: Args, rows: list[list[str]]):
    lines = ["| " + " | ".join(row) + " |" for row in [rows[0], ["---"] * len(rows[0]), *rows[1:]]]
    Path(args.out).write_text("\n".join(lines) + "\n")
    print(*lines, sep="\n")


def fail(message: str):
    print(f"plot_results.py: error: {message}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    args = tyro.cli(Args)
    if not 0 < args.confidence < 1:
        fail(f"--confidence {args.confidence}: must be between 0 and 1")
    if args.points < 1:
        fail(f"--points {args.points}: must be positive")
    if args.points > 10_000:
        fail(f"--points {args.points}: at most 10000")
    draw, endings = {
        "curves": (plot_curves, (".png", ".pdf", ".svg")),
        "heatmap": (plot_heatmap, (".png", ".pdf", ".svg")),
        "recall": (plot_recall, (".png", ".pdf", ".svg")),
        "table": (write_table, (".md",)),
        "parameters": (write_parameters, (".md",)),
    }[args.kind]
    args.out = args.out or args.kind + endings[0]
    if not Path(args.out).absolute().parent.is_dir():
        fail(f"--out {args.out}: its folder does not exist")
    if Path(args.out).suffix not in endings:
        fail(f"--out {args.out}: must end in {' or '.join(endings)} for --kind {args.kind}")
    groups = find_runs(Path(args.run_dir))
    if not groups:
        fail(f"--run-dir {args.run_dir}: no run folder in it")
    numbers = draw(args, groups)
    json_file = Path(args.out).with_suffix(".json")
    json_file.write_text(json.dumps(numbers, indent=1) + "\n")
    print(f"{args.out} and {json_file}: {len(groups)} groups of runs")
