"""The figures and tables of both papers from run folders, with intervals over seeds.

    python plot_results.py --run-dir runs                                      # learning curves, a panel for each task
    python plot_results.py --run-dir runs --kind aggregate --out aggregate.pdf # means over tasks (FRN, Fig. 3b to 6)
    python plot_results.py --run-dir runs --only learning_rate=0.001 --exclude frozen=True
    python plot_results.py --run-dir runs --kind report                        # one Markdown page with all of it

Runs group themselves: by task and agent (memory, frozen or not), and whatever else differs among an agent's runs is a
part of its label, such as "GRU lr 3e-4". Of runs that differ in nothing but their time, the newest finished one counts.
What is unfinished, damaged or superseded is named on stderr and left out. Beside the picture or the table, a json file
of the same name holds the numbers that it shows.
"""

import dataclasses
import fnmatch
import io
import itertools
import json
import math
import os
import re
import shlex
import shutil
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import matplotlib
import numpy as np
import scipy.stats
import tyro
from matplotlib.lines import Line2D
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.tensorflow_stub import errors
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

# A memory's printed name, colour and marker, the same in every figure. Any two colours differ by at least 7 in
# lightness (CIELAB), for grey print, and stay apart in red-green and blue-yellow blindness.
MEMORIES = {
    "mlp": ("MLP", "#000000", "D"),
    "gru": ("GRU", "#332288", "o"),
    "lru": ("LRU", "#D55E00", "s"),
    "ffm": ("FFM", "#56B4E9", "^"),
    "deepesn": ("DeepESN", "#0072B2", "v"),
    "src": ("SRC", "#882255", "P"),
    "paralesn": ("ParalESN", "#F0C03F", "X"),
}
OTHER_COLORS, OTHER_MARKERS = ("#117733", "#999933", "#CC6677"), "<>hp*d8"
# Flags in which runs of one setting may differ, and those that are parts of the task's or the agent's name.
NOT_A_SETTING = {"seed", "num_seeds", "eval_episodes", "eval_every", "keep_best", "capture_video", "run_dir", "track"}
NOT_A_SETTING |= {"checkpoint_every", "resume", "evaluate", "forget"}
NOT_A_SETTING |= {"env", "delay", "observe", "exp_name", "memory", "frozen"}
SHORT = {"learning_rate": "lr"}
FEW_SEEDS = 5  # with fewer, the seeds themselves are drawn, and no interval
RESAMPLES = 2000
# FRN's mean returns over the tasks of Fig. 3b and 6, 4b and 5b, by (suite, memory, frozen, frozen mixers). That of the
# GRU on POPGym is not printed: the frozen one has 88.7 % of it.
FRN_TASKS = {
    "POPGym": "Minesweeper NoisyStatelessCartPole RepeatFirst RepeatPrevious StatelessCartPole".split(),
    "MuJoCo Playground": "BallInCup-positions BallInCup-velocities CheetahRun-positions CheetahRun-velocities "
    "ReacherHard-positions WalkerWalk-positions WalkerWalk-velocities".split(),
    "POPGym Arcade": "BattleShip CountRecall MineSweeper Navigator".split(),
}
FRN_RETURNS = {
    ("POPGym", "lru", False, False): 0.458,
    ("POPGym", "lru", True, False): 0.464,
    ("POPGym", "gru", False, False): 0.386 / 0.887,
    ("POPGym", "gru", True, False): 0.386,
    ("POPGym", "lru", True, True): 0.392,
    ("POPGym", "gru", True, True): 0.341,
    ("MuJoCo Playground", "lru", True, False): 791.8,
    ("MuJoCo Playground", "lru", False, False): 831.9,
    ("MuJoCo Playground", "gru", True, False): 772.9,
    ("MuJoCo Playground", "gru", False, False): 842.8,
    ("POPGym Arcade", "lru", True, False): 0.694,
    ("POPGym Arcade", "lru", False, False): 0.624,
    ("POPGym Arcade", "gru", True, False): 0.643,
    ("POPGym Arcade", "gru", False, False): 0.676,
}
plt.rcParams.update({"font.size": 8, "axes.titlesize": 8, "axes.labelsize": 8, "legend.fontsize": 8})
plt.rcParams.update(
    {"axes.spines.top": False, "axes.spines.right": False, "lines.linewidth": 1.4, "lines.markersize": 4}
)
plt.rcParams.update(
    {"pdf.fonttype": 42, "svg.fonttype": "none", "savefig.dpi": 200, "figure.constrained_layout.use": True}
)
plt.rcParams.update({"axes.grid": True, "grid.alpha": 0.25, "grid.linewidth": 0.6, "axes.axisbelow": True})


@dataclass
class Args:
    """Figures and tables from the runs of a folder."""

    run_dir: str = "runs"
    """folder of run folders, or of folders of them (as benchmark.sh makes), or one run folder, finished or not"""
    out: str | None = None
    """picture (png, pdf, svg) or page (md) to write; None is the kind and its ending: curves.png"""
    kind: Literal[
        "curves",
        "aggregate",
        "scatter",
        "frontier",
        "heatmap",
        "recall",
        "interpretation",
        "table",
        "parameters",
        "report",
    ] = "curves"
    """curves: a metric against environment steps, a panel for each task;
    aggregate: final returns, mean over tasks, and the probability that frozen beats trained (FRN Fig. 3b to 6, A2b);
    scatter: frozen against trained, a point for each task;
    frontier: return against trained parameters, and against steps per second;
    heatmap: final returns, tasks by agents (FRN Fig. A3 to A5);
    recall: success rate against the delay of MemoryChain (FRN Fig. 2);
    interpretation: FFM's trace durabilities and contextual periods, at the start and after training;
    table: final returns in Markdown, with steps per second;
    parameters: of each agent and task, trained and frozen (FRN Table 1);
    report: one Markdown page with all of these"""
    only: tuple[str, ...] = ()
    """only runs that match one of these: a part of the run folder's name, or flag=value; * and ? are wild"""
    exclude: tuple[str, ...] = ()
    """no runs that match one of these"""
    metric: str = "charts/episodic_return"
    """what the curves show, by its TensorBoard name"""
    points: int = 60
    """points of a curve; each is the mean over an equal share of the steps"""
    smooth: int = 0
    """each point of a curve is the mean of itself and this many points before and after it"""
    statistic: Literal["mean", "iqm"] = "mean"
    """over seeds and tasks: the mean, or the interquartile mean (Agarwal et al., 2021)"""
    confidence: float = 0.95
    """level of the stratified bootstrap interval over seeds; with fewer than five seeds, each is drawn instead"""


@dataclass
class Run:
    """A run folder that can be read. `evaluation` is eval.json; None while the run is unfinished."""

    folder: Path
    config: dict
    evaluation: dict | None
    label: str = ""  # of its agent, by label_runs
    order: tuple = ()  # of its agent among the others
    args: dict = field(init=False)

    def __post_init__(self):
        self.args = self.config["args"]
        self.seed, self.task = self.config["seed"], self.args["env"]
        self.memory, self.frozen = self.args["memory"], bool(self.args["frozen"])
        self.script = self.config["script"]
        self.variant = self.args["exp_name"].removeprefix(self.script).lstrip("-_")
        self.settings = {name: value for name, value in self.args.items() if name not in NOT_A_SETTING}
        self.suite = "POPGym" if self.task.endswith(("Easy", "Medium", "Hard")) else "other tasks"
        for flag, suite in (("delay", "MemoryChain"), ("observe", "MuJoCo Playground"), ("obs_size", "POPGym Arcade")):
            self.suite = suite if flag in self.args else self.suite  # by its flags, as a fork's name is not known
        time = re.search(r"__(\d+(\.\d+)?)$", self.folder.name)
        self.time = float(time[1]) if time else 0  # a file's own time changes when it is copied

    @property
    def result(self) -> float:
        return self.evaluation["mean_return"]


class Nothing(Exception):
    """There is nothing of this kind to draw."""


class Damaged(Exception):
    """A file of a run is missing or says something that it cannot say."""


# -------------------------------------------------------------------------------------------------------- run folders
def read_json(file: Path) -> dict:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Damaged(f"{file.name} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise Damaged(f"{file.name} is no table of names and values")
    return value


def read_run(folder: Path) -> Run:
    """The run in a folder with a config.json. Raises Damaged if it is another program's, or its files are not whole."""
    config, evaluation = read_json(folder / "config.json"), None
    try:
        run = Run(folder.absolute(), config, None)
        counts = config["parameters"]["all"]
        for value in (run.seed, counts["total"], counts["trainable"], counts["frozen"]):
            if not isinstance(value, int):
                raise ValueError(f"{value} is no integer")
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise Damaged(f"config.json is not that of a run: {error!r}") from None
    if (folder / "eval.json").exists():
        evaluation = read_json(folder / "eval.json")
        for name in ("mean_return", "SPS", "environment_steps", "success_rate"):
            value = evaluation.get(name, 0 if name == "success_rate" else None)  # not all tasks have that one
            if not isinstance(value, int | float) or not math.isfinite(value):
                raise Damaged(f"eval.json: {name} is {value}")
    run.evaluation = evaluation
    return run


def matches(run: Run, patterns: tuple[str, ...]) -> bool:
    """Does a pattern occur in the folder's name, or, as flag=value, name a flag's value?"""
    for pattern in patterns:
        flag, equals, wanted = pattern.partition("=")
        flag = flag.lstrip("-").replace("-", "_")
        if equals and flag in run.args and fnmatch.fnmatchcase(str(run.args[flag]), wanted):
            return True
        if not equals and fnmatch.fnmatchcase(run.folder.name, f"*{pattern}*"):
            return True
    return False


def find_runs(run_dir: Path, only: tuple[str, ...] = (), exclude: tuple[str, ...] = ()) -> tuple[list[Run], list[str]]:
    """The labelled runs to draw, one of each setting and seed, and a line about each that is left out."""
    if not run_dir.is_dir():
        fail(f"--run-dir {run_dir}: no such folder")
    single = (run_dir / "config.json").exists()
    files = []
    for depth in ("config.json", "*/config.json", "*/*/config.json"):
        files = files or sorted(run_dir.glob(depth))
    newest, left_out = {}, []
    for folder in (file.parent for file in files):
        try:
            run = read_run(folder)
        except Damaged as error:
            left_out.append(f"{folder}: {error}")
            continue
        if (only and not matches(run, only)) or matches(run, exclude):
            continue
        if run.evaluation is None and not single:
            left_out.append(f"{folder}: unfinished (as --run-dir, it is drawn alone)")
            continue
        setting = (run.task, run.script, run.args["exp_name"], run.memory, run.frozen, run.seed)
        setting += (json.dumps(run.settings, sort_keys=True),)
        older, run = sorted((newest.get(setting, run), run), key=lambda run: (run.time, run.folder.name))
        newest[setting] = run
        if older is not run:
            left_out.append(f"{older.folder}: {run.folder.name} is a newer run of its setting and seed")
    for line in left_out:
        warn(f"left out: {line}")
    runs = list(newest.values())
    if not runs:
        what = "no run folder in it" if not files else "no finished run in it that --only and --exclude leave"
        fail(f"--run-dir {run_dir}: {what}")
    label_runs(runs)
    return sorted(runs, key=lambda run: (run.suite, task_order(run.task), run.order, run.seed)), left_out


def label_runs(runs: list[Run]):
    """Names the agents: the memory, and what tells its runs in the folder from each other."""
    variants, scripts, suites, peers = defaultdict(set), defaultdict(set), defaultdict(set), defaultdict(list)
    for run in runs:
        variants[run.suite].add(run.variant)
        scripts[run.suite, run.memory, run.frozen].add(run.script)
        suites[run.task].add(run.suite)
        peers[run.suite, run.script, run.variant, run.memory, run.frozen].append(run)
    for same in peers.values():
        names = dict.fromkeys(itertools.chain(*(run.settings for run in same)))
        differing = [name for name in names if len({json.dumps(run.settings.get(name)) for run in same}) > 1]
        for run in same:
            parts = [describe(name, run.settings.get(name)) for name in differing]
            if run.variant and len(variants[run.suite]) > 1:
                parts.insert(0, run.variant)
            if len(scripts[run.suite, run.memory, run.frozen]) > 1:
                parts.insert(0, run.script)
            name = MEMORIES[run.memory][0] if run.memory in MEMORIES else run.memory
            run.label = f"{'Frozen ' if run.frozen else ''}{name} {', '.join(parts)}".rstrip()
            rank = list(MEMORIES).index(run.memory) if run.memory in MEMORIES else len(MEMORIES)
            run.order = (rank, run.memory, run.frozen, natural(run.label))
    for run in runs:  # POPGym and POPGym Arcade have tasks of one name
        run.task += f" ({run.suite})" if len(suites[run.task]) > 1 else ""


def describe(name: str, value) -> str:
    """A flag and its value as a part of a label: lr 3e-4, no norm_adv."""
    name = SHORT.get(name, name)
    if isinstance(value, bool):
        return name if value else f"no {name}"
    if isinstance(value, float) and not 1e-2 <= abs(value) < 1e4 and value:
        value = np.format_float_scientific(value, trim="-", exp_digits=1)
    return f"{name} {value}"


def natural(text: str) -> list:
    """A key by which 2 comes before 16, and 3e-5 before 1e-4."""
    parts = re.split(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)", text)
    return [float(part) if i % 2 else part for i, part in enumerate(parts)]


def task_order(task: str) -> list:
    return natural(task.replace("Easy", "0").replace("Medium", "1").replace("Hard", "2"))


def by_task(runs: list[Run]) -> dict[str, dict[str, list[Run]]]:
    """Runs by task and label, in the order of `find_runs`."""
    tasks = defaultdict(lambda: defaultdict(list))
    for run in runs:
        tasks[run.task][run.label].append(run)
    return tasks


def finished(runs: list[Run]) -> list[Run]:
    runs = [run for run in runs if run.evaluation is not None]
    if not runs:
        raise Nothing("no finished run")
    return runs


def read_scalars(run: Run) -> dict[str, np.ndarray]:
    """Points [N, 2] (environment step, value) of every metric of a run. Raises Damaged where a record is not whole.

    A resumed run writes TensorBoard's restart mark: what an earlier part logged at its step or later is void.
    """
    points, files = defaultdict(list), sorted(run.folder.glob("events.out.tfevents.*"), key=lambda f: natural(f.name))
    if not files:
        raise Damaged("no event file")
    for file in files:
        reader = PyRecordReader_New(str(file))
        while True:
            try:
                reader.GetNext()
                event = Event.FromString(reader.record())
            except errors.OutOfRangeError:  # the end of the file
                break
            except (errors.DataLossError, ValueError, OSError, MemoryError, OverflowError) as error:
                if run.evaluation is None and "truncated" in str(error):
                    break  # it may be writing the record just now
                raise Damaged(f"{file.name} is damaged") from None
            if event.session_log.status == SessionLog.START:
                for tag in points:
                    points[tag] = [point for point in points[tag] if point[0] < event.step]
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    points[value.tag].append((event.step, value.simple_value))
    return {tag: np.array(values) for tag, values in points.items() if values}


# --------------------------------------------------------------------------------------------------------- statistics
def combine(scores: list[np.ndarray], statistic: str) -> np.ndarray:
    """Mean or interquartile mean of the scores [S_k, ...] of the seeds of each task k; every task counts the same."""
    if statistic == "mean":
        return np.mean([task.mean(0) for task in scores], axis=0)
    return scipy.stats.trim_mean(np.concatenate(scores), 0.25, axis=0)


def improvement(ours: list[np.ndarray], theirs: list[np.ndarray]) -> np.ndarray:
    """Mean over tasks of P(a seed of ours beats one of theirs), ties count half (Agarwal et al., 2021, section 4.3)."""
    wins = []
    for x, y in zip(ours, theirs, strict=True):
        wins.append(((x[:, None] > y) + 0.5 * (x[:, None] == y)).mean((0, 1)))
    return np.mean(wins, axis=0)


def bootstrap(statistic: Callable, *samples: list[np.ndarray], confidence: float) -> np.ndarray | None:
    """Ends [2, ...] of the percentile interval of the stratified bootstrap; None with fewer than five seeds of a task.

    Agarwal et al. (2021), "Deep Reinforcement Learning at the Edge of the Statistical Precipice", section 4.1: of each
    task's scores [S_k, ...], S_k are drawn with replacement, 2000 times; the interval is between the quantiles of the
    statistic of the draws [S_k, 2000, ...]. Not by their package rliable: its dependency arch cannot be imported beside
    pandas 3, and it takes tasks of equally many seeds only.
    """
    if min(len(task) for scores in samples for task in scores) < FEW_SEEDS:
        return None
    rng, draws = np.random.default_rng(0), []
    for scores in samples:
        draws.append([task[rng.integers(len(task), size=(len(task), RESAMPLES))] for task in scores])
    return np.quantile(statistic(*draws), [(1 - confidence) / 2, (1 + confidence) / 2], axis=0)


def estimate(args: Args, scores: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray | None]:
    """The statistic of the scores [S_k, ...] of each task k that --statistic names, and its interval."""
    statistic = partial(combine, statistic=args.statistic)
    return statistic(scores), bootstrap(statistic, scores, confidence=args.confidence)


@dataclass
class Suite:
    """The final evaluations of one suite on the tasks that all its agents have."""

    name: str
    tasks: list[str]
    agents: dict[str, dict[str, list[Run]]]  # label -> task -> runs

    def scores(self, label: str) -> list[np.ndarray]:
        """Mean returns [S_k] of an agent's seeds on each task k."""
        return [np.array([run.result for run in self.agents[label][task]]) for task in self.tasks]

    def seed_means(self, label: str) -> list[float]:
        """For each seed that all tasks have: its mean over them."""
        by_seed = defaultdict(list)
        for run in itertools.chain(*(self.agents[label][task] for task in self.tasks)):
            by_seed[run.seed].append(run.result)
        return [float(np.mean(results)) for results in by_seed.values() if len(results) == len(self.tasks)]

    def runs(self, label: str) -> list[Run]:
        return list(itertools.chain(*(self.agents[label][task] for task in self.tasks)))

    def pairs(self) -> list[tuple[str, str]]:
        """Labels of the agents that are frozen and trained, and else the same."""
        return [(f"Frozen {label}", label) for label in self.agents if f"Frozen {label}" in self.agents]

    def published(self, label: str, statistic: str) -> float | None:
        """FRN's mean over its tasks for this agent, if this is such a mean: of its tasks, and no IQM."""
        run = self.runs(label)[0]
        mixers = bool(run.args.get("frozen_mixers"))
        same = statistic == "mean" and self.has_frn_tasks()
        return FRN_RETURNS.get((self.name, run.memory, run.frozen, mixers)) if same else None

    def has_frn_tasks(self) -> bool:
        tasks = [task.split(" (")[0] for task in self.tasks]
        if self.name == "POPGym Arcade":
            return sorted(tasks) == [f"{family}Easy" for family in FRN_TASKS[self.name]]
        if self.name == "POPGym":  # five families, and a sixth that the paper does not name
            families = sorted({re.sub("(Easy|Medium|Hard)$", "", task) for task in tasks})
            sixth = set(families) - set(FRN_TASKS[self.name])
            return len(tasks) == 18 and len(families) == 6 and sixth in ({"Battleship"}, {"HigherLower"})
        return tasks == FRN_TASKS.get(self.name)


def read_suites(runs: list[Run]) -> list[Suite]:
    """Agents are compared on the tasks that all of them have; what is not compared is named on stderr."""
    suites = []
    for name, members in itertools.groupby(finished(runs), key=lambda run: run.suite):
        agents = defaultdict(lambda: defaultdict(list))
        for run in members:
            agents[run.label][run.task].append(run)
        everywhere = sorted(set().union(*agents.values()), key=task_order)
        tasks = [task for task in everywhere if all(task in agent for agent in agents.values())]
        if len(tasks) < len(everywhere):
            left = ", ".join(task for task in everywhere if task not in tasks)
            warn(f"{name}: no mean over {left}: some agents have no finished run there (see --only and --exclude)")
        if name == "POPGym" and {f"{f}Easy" for f in ("Battleship", "HigherLower")} <= set(tasks):
            warn(
                "FRN's means are of 18 tasks, one family less: shown with --exclude Battleship or --exclude HigherLower"
            )
        if tasks:
            orders = {run.label: run.order for run in runs}
            suites.append(Suite(name, tasks, {label: agents[label] for label in sorted(agents, key=orders.get)}))
    if not suites:
        raise Nothing("no task that all agents have finished")
    return suites


# ------------------------------------------------------------------------------------------------------------ drawing
def styles(runs: list[Run]) -> dict[str, dict]:
    """How each agent is drawn: its memory's colour and marker, dashed and hollow if frozen; variants in shades."""
    known = {run.label: run for run in sorted(runs, key=lambda run: run.order)}
    others = sorted({run.memory for run in known.values()} - set(MEMORIES))
    result = {}
    for memory in {run.memory: None for run in known.values()}:
        i = others.index(memory) if memory in others else 0
        default = (memory, OTHER_COLORS[i % len(OTHER_COLORS)], OTHER_MARKERS[i % len(OTHER_MARKERS)])
        _, color, marker = MEMORIES.get(memory, default)
        labels = [label for label in known if known[label].memory == memory]
        variants = list(dict.fromkeys(label.removeprefix("Frozen ") for label in labels))
        dark = np.dot(matplotlib.colors.to_rgb(color), (0.21, 0.72, 0.07)) < 0.5
        for label in labels:
            k = variants.index(label.removeprefix("Frozen "))
            share = 0.5 * k / max(1, len(variants) - 1)
            shade = (1 - share) * np.array(matplotlib.colors.to_rgb(color)) + share * dark  # towards white or black
            style = {"color": tuple(shade.tolist()), "linestyle": "--" if known[label].frozen else "-"}
            style["marker"] = marker if k == 0 else OTHER_MARKERS[(k - 1) % len(OTHER_MARKERS)]
            result[label] = style | {"markerfacecolor": "white" if known[label].frozen else style["color"]}
    return result


def make_figure(panels: int, columns: int, height: float, width: float = 7.2):
    """A page's width (inches) of panels; those that are too many in the last row are removed."""
    columns = min(columns, panels)
    rows = -(-panels // columns)
    width = width if columns > 1 else min(width, 5.0)
    figure, axes = plt.subplots(rows, columns, figsize=(width, height * rows + 0.5), squeeze=False)
    for axis in axes.flat[panels:]:
        axis.remove()
    return figure, list(axes.flat[:panels])


def add_legend(figure, entries: dict[str, dict], columns: int = 4):
    """Below all panels, never over one."""
    handles = [Line2D([], [], label=label, **style) for label, style in entries.items()]
    longest = max(map(len, entries))
    columns = max(1, min(columns, len(entries), int(figure.get_figwidth() * 15 / (longest + 7))))
    legend = figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, handlelength=3)
    legend.set_in_layout(True)


DOTS = {"linestyle": "none", "marker": "o", "markersize": 2.5, "alpha": 0.55, "markeredgewidth": 0}
A_SEED = DOTS | {"color": "0.3", "markersize": 3.5}  # in a legend
FRN_MARK = {"color": "0.25", "linestyle": (0, (2, 1)), "linewidth": 1.4}


def plot_curves(args: Args, runs: list[Run]):
    """A metric against environment steps, a panel for each task that has it."""
    curves, known, lacking = defaultdict(dict), set(), defaultdict(list)
    for task, agents in by_task(runs).items():
        for label, members in agents.items():
            seeds = {}
            for run in members:
                try:
                    scalars = read_scalars(run)
                except Damaged as error:
                    warn(f"left out: {run.folder}: {error}")
                    continue
                known |= scalars.keys()
                if args.metric in scalars:
                    seeds[run.seed] = scalars[args.metric]
                else:
                    lacking[task, label].append(run.seed)
            if seeds:
                curves[task][label] = seeds
    if not curves:
        raise Nothing(f"--metric {args.metric}: no run has it; there are {', '.join(sorted(known)) or 'no others'}")
    for (task, label), seeds in lacking.items():
        warn(f"left out: {task} {label}, seed {', '.join(map(str, seeds))}: no {args.metric}")
    figure, axes = make_figure(len(curves), 3, 2.0)
    style, numbers, counts = styles(runs), {}, defaultdict(set)
    for axis, (task, agents) in zip(axes, curves.items(), strict=True):
        for i, (label, seeds) in enumerate(agents.items()):
            steps, values = binned(list(seeds.values()), args.points)
            values = np.stack([smooth(curve, args.smooth) for curve in values])  # [S, P]
            shared = ~np.isnan(values).any(0)  # where every seed has a value
            line, ends = estimate(args, [values[:, shared]])
            row = numbers[f"{task} {label}"] = {"seeds": list(seeds), "steps": steps[shared], args.statistic: line}
            counts[label].add(len(seeds))
            look = style[label]
            if ends is not None:
                axis.fill_between(steps[shared], *ends, color=look["color"], alpha=0.2, linewidth=0)
                row |= {"low": ends[0], "high": ends[1]}
            elif len(seeds) > 1:
                thin = {"color": look["color"], "linestyle": look["linestyle"], "linewidth": 0.5, "alpha": 0.5}
                for curve in values:
                    axis.plot(steps[~np.isnan(curve)], curve[~np.isnan(curve)], **thin)
                row["curves"] = values
            every = (i * shared.sum() // (5 * len(agents)), max(1, shared.sum() // 5))  # markers at different steps
            axis.plot(steps[shared], line, label=label, markevery=every if shared.sum() > 1 else None, **look)
        axis.set_title(task)
        axis.set_xlim(left=0)
        axis.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))  # 400k
        axis.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(5))
    for axis in axes[-3:]:  # the lowest of each column
        axis.set_xlabel("environment steps")
    for axis in axes[::3]:
        axis.set_ylabel(args.metric.split("/")[-1].replace("_", " "))
    entries = {}
    for label in (label for label in style if label in counts):
        least, most = min(counts[label]), max(counts[label])
        entries[f"{label} ({least if least == most else f'{least} to {most}'} seed{'s' * (most > 1)})"] = style[label]
    add_legend(figure, entries)
    return figure, numbers


def binned(seeds: list[np.ndarray], points: int) -> tuple[np.ndarray, np.ndarray]:
    """Steps [P] and values [S, P] of curves [N, 2]: means over P equal shares of the steps, NaN where a seed has none.

    P is at most `points`, and as many as the longest curve has.
    """
    points = min(points, max(len(curve) for curve in seeds))
    edges = np.linspace(0, max(curve[-1, 0] for curve in seeds), points + 1)
    means = np.full((2, len(seeds), points), np.nan)  # of steps and of values
    for s, curve in enumerate(seeds):
        share = np.clip(np.digitize(curve[:, 0], edges, right=True) - 1, 0, points - 1)
        for i in np.unique(share):
            means[:, s, i] = curve[share == i].mean(0)
    means = means[:, :, ~np.isnan(means[0]).all(0)]
    return np.nanmean(means[0], axis=0), means[1]


def smooth(curve: np.ndarray, reach: int) -> np.ndarray:
    """Running mean over `reach` points on either side; a point without a value keeps none."""
    means = np.full(len(curve), np.nan)
    for i in np.flatnonzero(~np.isnan(curve)):
        means[i] = np.nanmean(curve[max(0, i - reach) : i + reach + 1])
    return means


def draw_score(axis, at: float, seeds: list[float], value: float, ends, look: dict, upright: bool = False):
    """A score and its interval, or the seeds themselves where they are few; along x, or along y if upright."""
    look = look | {"linestyle": "-", "markersize": 5}
    lines = [([value], [at], look | {"zorder": 3})]
    if ends is not None:
        lines.append((list(ends), [at, at], {"color": look["color"], "linewidth": 1.2, "marker": "|"}))
    elif seeds:
        lines.append((seeds, [at] * len(seeds), DOTS | {"color": look["color"]}))
    for along, across, style in lines:
        axis.plot(*((across, along) if upright else (along, across)), **style)


def plot_aggregate(args: Args, runs: list[Run]):
    """Final returns, mean over tasks, and how probably a frozen memory is better than the trained one."""
    suites, style, numbers = read_suites(runs), styles(runs), {}
    figure, axes = make_figure(2 * len(suites), 2, 0.7 + 0.22 * max(len(suite.agents) for suite in suites))
    for left, right, suite in zip(axes[::2], axes[1::2], suites, strict=True):
        row = numbers[suite.name] = {"tasks": suite.tasks, "agents": {}, "improvement": {}}
        for y, label in enumerate(suite.agents):
            scores, seeds, published = (
                suite.scores(label),
                suite.seed_means(label),
                suite.published(label, args.statistic),
            )
            value, ends = estimate(args, scores)
            draw_score(left, y, seeds, value, ends, style[label])
            row["agents"][label] = {args.statistic: value, "interval": ends, "seeds": seeds, "published": published}
            if published is not None:
                left.plot([published] * 2, [y - 0.4, y + 0.4], **FRN_MARK | {"color": style[label]["color"]})
        left.set_yticks(range(len(suite.agents)), list(suite.agents))
        left.set(
            title=suite.name, xlabel=f"return, {args.statistic} over {len(suite.tasks)} tasks".replace("iqm", "IQM")
        )
        for y, (frozen, trained) in enumerate(suite.pairs()):
            ours, theirs = suite.scores(frozen), suite.scores(trained)
            value, ends = improvement(ours, theirs), bootstrap(improvement, ours, theirs, confidence=args.confidence)
            draw_score(right, y, [], value, ends, style[frozen])
            row["improvement"][frozen] = {"probability": value, "interval": ends}
        right.axvline(0.5, color="0.6", linewidth=0.8)
        right.set_yticks(range(len(suite.pairs())), [f"{frozen} >\n{trained}" for frozen, trained in suite.pairs()])
        right.set(xlim=(-0.03, 1.03), xlabel="probability of improvement")
        left.set_ylim(len(suite.agents) - 0.5, -0.5)
        if suite.pairs():
            right.set_ylim(len(suite.pairs()) - 0.5, -0.5)
        else:
            right.remove()
    add_legend(figure, score_entries(args, style, suites))
    return figure, numbers


def score_entries(args: Args, style: dict[str, dict], suites: list[Suite]) -> dict[str, dict]:
    """What a legend of scores explains: the agents, and the marks of seeds and of published values that are drawn."""
    labels = [label for label in style if any(label in suite.agents for suite in suites)]
    entries = {label: style[label] | {"linestyle": "none", "markersize": 6} for label in labels}
    every = list(itertools.chain(*(suite.scores(label) for suite in suites for label in suite.agents)))
    if min(map(len, every)) < FEW_SEEDS:
        entries["a seed"] = A_SEED
    if any(suite.published(label, args.statistic) is not None for suite in suites for label in suite.agents):
        entries["published (FRN)"] = FRN_MARK
    return entries


def plot_scatter(args: Args, runs: list[Run]):
    """Final returns of frozen agents against those of trained ones, a point for each task."""
    tasks, style, panels, numbers = by_task(finished(runs)), styles(runs), defaultdict(list), {}
    for task, agents in tasks.items():
        for label in (label for label in agents if f"Frozen {label}" in agents):
            panels[agents[label][0].suite].append((task, label, agents[label], agents[f"Frozen {label}"]))
    if not panels:
        raise Nothing("no task with a finished frozen agent and the same one trained")
    figure, axes = make_figure(len(panels), 2, 3.4)
    shown = {}
    for axis, (suite, points) in zip(axes, panels.items(), strict=True):
        for task, label, trained, frozen in points:
            look = shown[f"{label}, frozen against trained"] = style[f"Frozen {label}"] | {"linestyle": "none"}
            x, y = ([np.array([run.result for run in agent])] for agent in (trained, frozen))
            centers, ends = zip(estimate(args, x), estimate(args, y), strict=True)
            numbers[f"{task} {label}"] = {"trained": x[0], "frozen": y[0], args.statistic: centers, "intervals": ends}
            if ends[0] is not None and ends[1] is not None:
                axis.plot(ends[0], [centers[1]] * 2, [centers[0]] * 2, ends[1], color=look["color"], lw=0.8, alpha=0.6)
            else:
                by_seed = {run.seed: run.result for run in frozen}
                pairs = [(run.result, by_seed[run.seed]) for run in trained if run.seed in by_seed]
                axis.plot(*np.reshape(pairs, (-1, 2)).T, **DOTS, color=look["color"])
            axis.plot(*centers, **look | {"markersize": 6})
        low, high = min(axis.get_xlim()[0], axis.get_ylim()[0]), max(axis.get_xlim()[1], axis.get_ylim()[1])
        axis.plot([low, high], [low, high], color="0.6", linewidth=0.8, zorder=0)
        axis.set(title=suite, xlabel="return, trained", ylabel="return, frozen", xlim=(low, high), ylim=(low, high))
        axis.set_aspect("equal")
    if any(min(len(x), len(y)) < FEW_SEEDS for points in panels.values() for _, _, x, y in points):
        shown["a seed"] = A_SEED
    add_legend(figure, shown)
    return figure, numbers


def plot_frontier(args: Args, runs: list[Run]):
    """Final return, mean over tasks, against trained parameters, and against environment steps per second."""
    suites, style, numbers = read_suites(runs), styles(runs), {}
    figure, axes = make_figure(2 * len(suites), 2, 2.6)
    for left, right, suite in zip(axes[::2], axes[1::2], suites, strict=True):
        for label in suite.agents:
            scores, seeds, published = (
                suite.scores(label),
                suite.seed_means(label),
                suite.published(label, args.statistic),
            )
            value, ends = estimate(args, scores)
            trainable = np.median([run.config["parameters"]["all"]["trainable"] for run in suite.runs(label)])
            sps = np.median([run.evaluation["SPS"] for run in suite.runs(label)])
            for axis, x in ((left, trainable), (right, sps)):
                draw_score(axis, x, seeds, value, ends, style[label], upright=True)
            if published is not None:
                mark = FRN_MARK | {"color": style[label]["color"]}
                left.plot([trainable / 1.12, trainable * 1.12], [published] * 2, **mark)
            numbers[f"{suite.name} {label}"] = {"trainable": trainable, "SPS": sps, args.statistic: value}
            numbers[f"{suite.name} {label}"] |= {"interval": ends, "seeds": seeds, "published": published}
        for axis, name in ((left, "trained parameters"), (right, "environment steps per second")):
            axis.set(
                title=suite.name, xlabel=name, ylabel=f"return, {args.statistic}".replace("iqm", "IQM"), xscale="log"
            )
            axis.margins(x=0.15)
            axis.xaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 2, 3, 5), numticks=12))
            axis.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
            axis.minorticks_off()
    add_legend(figure, score_entries(args, style, suites))
    return figure, numbers


def evaluations(runs: list[Run]) -> dict:
    """Mean and sample standard deviation over seeds of each seed's mean return (as FRN, appendix D), and steps/s."""
    numbers = {}
    for task, agents in by_task(finished(runs)).items():
        for label, members in agents.items():
            seeds = [run.result for run in members]
            std, sps = (
                np.std(seeds, ddof=1) if len(seeds) > 1 else None,
                np.median([r.evaluation["SPS"] for r in members]),
            )
            numbers[f"{task} {label}"] = {"seeds": seeds, "mean": np.mean(seeds), "std": std, "SPS": sps}
    return numbers


def cell(x: dict | None, digits: int = 2) -> str:
    return "" if x is None else f"{x['mean']:.{digits}f}" + ("" if x["std"] is None else f" ± {x['std']:.{digits}f}")


def plot_heatmap(args: Args, runs: list[Run]):
    """Final returns of each agent on each task: mean and sample standard deviation over seeds."""
    numbers, suites = evaluations(runs), defaultdict(list)
    for run in finished(runs):
        suites[run.suite].append(run)
    heights = [len({run.task for run in members}) for members in suites.values()]
    agents = sorted({run.label: run.order for run in runs}.items(), key=lambda item: item[1])
    agents = [label for label, _ in agents]
    size = (1.9 + 0.95 * len(agents), 0.9 + 0.26 * sum(heights) + 0.9 * len(heights))
    figure, axes = plt.subplots(len(suites), 1, figsize=size, squeeze=False, height_ratios=heights)
    for axis, (suite, members) in zip(axes.flat, suites.items(), strict=True):
        tasks = list(dict.fromkeys(run.task for run in members))
        cells = [[numbers.get(f"{task} {label}") for label in agents] for task in tasks]
        means = np.array([[np.nan if x is None else x["mean"] for x in row] for row in cells])
        image = axis.imshow(means, cmap="cividis", aspect="auto")
        digits = 0 if np.nanmax(np.abs(means)) >= 100 else 2
        for (row, column), mean in np.ndenumerate(means):
            dark = np.dot(image.to_rgba(mean)[:3], (0.21, 0.72, 0.07)) < 0.5
            text = cell(cells[row][column], digits)
            axis.text(column, row, text, ha="center", va="center", fontsize=7, color="white" if dark else "black")
        axis.set_yticks(range(len(tasks)), tasks)
        axis.set_xticks(range(len(agents)), agents, rotation=25, ha="right", rotation_mode="anchor")
        axis.set_title(suite)
        axis.grid(False)
        figure.colorbar(image, ax=axis, label="return", fraction=0.05, aspect=max(8, 3 * len(tasks)))
    return figure, numbers


def plot_recall(args: Args, runs: list[Run]):
    """Success rate of the final evaluations against MemoryChain's delay."""
    numbers, style = {}, styles(runs)
    members = [run for run in finished(runs) if "success_rate" in run.evaluation and "delay" in run.args]
    for run in sorted(members, key=lambda run: (run.order, run.args["delay"], run.seed)):
        row = numbers.setdefault(run.label, {"delays": [], "seeds": [], "steps": [], "success_rate_128": []})
        if run.args["delay"] not in row["delays"]:
            row["delays"].append(run.args["delay"])
            for name in ("seeds", "steps", "success_rate_128"):
                row[name].append([])
        row["seeds"][-1].append(run.evaluation["success_rate"])
        row["steps"][-1].append(run.evaluation["environment_steps"])
        row["success_rate_128"][-1].append(run.evaluation.get("success_rate_128"))
    if not numbers:
        raise Nothing("no finished run of ppo_memorychain.py")
    figure, (axis,) = make_figure(1, 1, 3.0)
    everywhere = sorted(set().union(*(row["delays"] for row in numbers.values())))
    for i, (label, row) in enumerate(numbers.items()):
        x = np.array(row["delays"]) * 1.04 ** (i - len(numbers) / 2)  # side by side, where all succeed
        seeds = [[np.array(delay)] for delay in row["seeds"]]
        row[args.statistic], row["intervals"] = zip(*(estimate(args, delay) for delay in seeds), strict=True)
        axis.plot(x, row[args.statistic], **style[label])
        for at, delay, ends in zip(x, row["seeds"], row["intervals"], strict=True):
            if ends is not None:
                axis.plot([at, at], ends, color=style[label]["color"], linewidth=3, alpha=0.3)
            elif len(delay) > 1:
                axis.plot([at] * len(delay), delay, **DOTS, color=style[label]["color"])
    guessing = {"color": "0.5", "linestyle": ":", "linewidth": 1}
    axis.axhline(0.5, **guessing)
    axis.set_xscale("log", base=2)
    axis.set_xticks(everywhere, everywhere)
    axis.minorticks_off()
    axis.set(xlabel="delay", ylabel="success rate", ylim=(-0.04, 1.04))
    entries = {label: style[label] for label in numbers} | {"guessing": guessing}
    if any(1 < len(delay) < FEW_SEEDS for row in numbers.values() for delay in row["seeds"]):
        entries["a seed"] = A_SEED
    add_legend(figure, entries)
    return figure, numbers


# FFM's quantities: of what, their parameter and the flag that takes it away, and quantity times abs(parameter).
QUANTITIES = {
    "trace_durability": ("trace", "alpha", "decay", "trace_size", -math.log(0.01)),
    "contextual_period": ("context", "omega", "oscillation", "context_size", 2 * math.pi),
}
START = {"color": "0.25", "linewidth": 0.9}  # how the start is drawn


Memory = dict[
    tuple[str, str], tuple[np.ndarray, np.ndarray]
]  # (unit, quantity) -> steps at the start and after training


def read_spread(run: Run) -> Memory:
    """The logged [smallest, median, largest] steps of each FFM unit's traces and contexts."""
    scalars, steps = read_scalars(run), {}
    for tag in scalars:
        if named := re.fullmatch(rf"(memory\w*)/({'|'.join(QUANTITIES)})_median", tag):
            points = [scalars[tag.removesuffix("median") + end][:, 1] for end in ("min", "median", "max")]
            steps[named[1], named[2]] = tuple(np.array([values[i] for values in points]) for i in (0, -1))
    return steps


def read_checkpoint(run: Run) -> Memory:
    """The steps of every trace [m] and context [c]: -log(0.01) / |alpha| and 2 pi / |omega| (FFM's t_alpha, t_omega).

    At the start, both are spread evenly in their logarithm from 1 to 1024 steps (memory.py). What is not trained is not
    in the checkpoint, and stays so; what an ablation takes away is left out.
    """
    from flax.serialization import msgpack_restore  # here, as it loads JAX

    names = run.config.get("runs") or [run.folder.name]
    seeds = [name.split("__")[-2] if name.count("__") >= 2 else None for name in names]
    index = seeds.index(str(run.seed)) if str(run.seed) in seeds else 0
    file = run.folder / "checkpoint.msgpack"
    file = file if file.exists() else run.folder.parent / names[0] / file.name  # the seeds of a program may share one
    try:
        units, steps = {}, {}
        for path, values in msgpack_restore(file.read_bytes())[
            "state"
        ].items():  # ".params['memory_0']['alpha']": [S, m]
            if found := re.fullmatch(r"\.(?:params|frozen)\['(memory_\d+)'\]\['(\w+)'\]", path):
                units.setdefault(found[1], {})[found[2]] = values
        for (unit, weights), quantity in itertools.product(units.items(), QUANTITIES):
            _, name, flag, size, scale = QUANTITIES[quantity]
            if run.args.get(flag, True):
                start = after = np.geomspace(1, 1024, run.args[size])
                if name in weights:
                    after = scale / np.abs(np.asarray(weights[name])[index])
                steps[unit, quantity] = (start, after)
    except OSError:
        raise Damaged("no checkpoint can be read") from None
    except Exception as error:  # whatever msgpack and flax make of a file that is not whole
        raise Damaged(f"{file.name} is damaged ({type(error).__name__})") from None
    return steps


def plot_interpretation(args: Args, runs: list[Run]):
    """How long each of FFM's traces lasts, and after how long each context repeats: at the start and after training."""
    style, rows, numbers, spread_only = styles(runs), defaultdict(dict), {}, defaultdict(list)
    for run in (run for run in runs if run.memory == "ffm"):
        try:
            memory = read_checkpoint(run)
        except Damaged as reason:
            spread_only[f"{run.task} {run.label}", str(reason)].append(run.seed)
            try:
                memory = read_spread(run)
            except Damaged as error:
                warn(f"left out: {run.folder}: {error}")
                continue
        for (unit, quantity), steps in memory.items():
            rows[run.task, run.label].setdefault((quantity, unit), {})[run.seed] = steps
    if not rows:
        raise Nothing("no run with an FFM whose traces fade or turn")
    for (name, reason), seeds in spread_only.items():
        warn(f"{name}, seed {', '.join(map(str, seeds))}: {reason}; drawn: the logged smallest, median and largest")
    columns = sorted(set().union(*rows.values()), key=lambda panel: (list(QUANTITIES).index(panel[0]), panel[1]))
    size = (7.2, 0.9 + 1.6 * len(rows))
    figure, axes = plt.subplots(len(rows), len(columns), figsize=size, squeeze=False, sharex="col", sharey=True)
    for (row, (task, label)), (column, (quantity, unit)) in itertools.product(enumerate(rows), enumerate(columns)):
        axis, look = axes[row, column], style[label] | {"linestyle": "none", "markersize": 3, "alpha": 0.7}
        for seed, (start, after) in rows[task, label].get((quantity, unit), {}).items():
            x = np.arange(1, len(start) + 1)
            axis.plot(x, start, **START)
            axis.plot(x, after, **look)
            numbers.setdefault(f"{task} {label} {unit} {quantity}", {"start": start})[f"seed {seed}"] = after
        axis.set_yscale("log", base=2)
        axis.yaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(4, integer=True))
        if row == 0:
            axis.set_title(f"{quantity.replace('_', ' ')}\n{unit.replace('_', ' ')}")
        if row == len(rows) - 1:
            axis.set_xlabel(QUANTITIES[quantity][0])
        if column == 0:
            axis.set_ylabel(f"{task}\n{label}\nsteps")
    entries = {"at the start": START}
    for label in dict.fromkeys(label for _, label in rows):
        entries[f"{label}, after training (each seed)"] = style[label] | {"linestyle": "none"}
    add_legend(figure, entries, columns=3)
    return figure, numbers


# ------------------------------------------------------------------------------------------------------------- pages
def markdown(rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in [rows[0], ["---"] * len(rows[0]), *rows[1:]]]
    return "\n".join(lines) + "\n"


def write_table(args: Args, runs: list[Run]):
    """Final returns, mean and sample standard deviation over seeds; SPS is the median over tasks and seeds."""
    tasks = list(dict.fromkeys(run.task for run in finished(runs)))
    numbers, rows = evaluations(runs), [["", *tasks, "SPS"]]
    for label in styles(runs):
        cells = [numbers.get(f"{task} {label}") for task in tasks]
        speeds = [x["SPS"] for x in cells if x is not None]
        digits = [0 if x is not None and abs(x["mean"]) >= 100 else 2 for x in cells]
        rows.append([label, *map(cell, cells, digits), f"{np.median(speeds):,.0f}" if speeds else ""])
    return markdown(rows), numbers


def write_parameters(args: Args, runs: list[Run]):
    """All parameters of each agent, those that are trained, those that are not, and their share (FRN, Table 1)."""
    rows, numbers = [["", "total", "trainable", "frozen", "reduction"]], {}
    for task, agents in by_task(runs).items():
        for label, (run, *_) in agents.items():
            n = numbers[f"{run.script} {task} {label}"] = run.config["parameters"]["all"]
            counts = [f"{n[kind]:,}" for kind in ("total", "trainable", "frozen")]
            rows.append([f"{run.script} {task} {label}", *counts, f"{n['frozen'] / n['total']:.2%}"])
    return markdown(rows), numbers


def command(args: Args, kind: str, out: Path) -> str:
    """The command line that draws a kind as the report does."""
    words = ["python", "plot_results.py"]
    for flag in dataclasses.fields(Args):
        value = {"kind": kind, "out": str(out)}.get(flag.name, getattr(args, flag.name))
        if value != flag.default:
            words += ["--" + flag.name.replace("_", "-"), *(value if isinstance(value, tuple) else [str(value)])]
    return shlex.join(words)


def write_report(args: Args, runs: list[Run], left_out: list[str]):
    """One page with every figure and table that the runs have; its pictures stand beside it."""
    out = Path(args.out)
    seeds = defaultdict(set)
    for run in runs:
        seeds[run.label].add(run.seed)
    lines = [
        f"# Runs of {args.run_dir}\n",
        f"{len(runs)} runs. Intervals: {args.confidence:.0%}, stratified bootstrap.\n",
    ]
    lines += [f"- {label}: seeds {', '.join(map(str, sorted(s, key=str)))}" for label, s in sorted(seeds.items())]
    numbers = {}
    for kind, (draw, endings) in KINDS.items():
        lines.append(f"\n## {kind.capitalize()}\n")
        try:
            drawn, numbers[kind] = draw(args, runs)
        except Nothing as nothing:
            lines.append(f"Nothing to show: {nothing}.")
            continue
        file = out.with_name(f"{out.stem}_{kind}{endings[0]}")
        lines += [draw.__doc__.split("\n")[0], "", f"    {command(args, kind, file)}", ""]
        if endings == PAGES:
            lines.append(drawn.rstrip("\n"))
        else:
            save(drawn, file)
            lines.append(f"![{kind}]({file.name})")
    if left_out:
        lines += ["\n## Left out\n", *(f"- {line}" for line in left_out)]
    return "\n".join(lines) + "\n", numbers


PICTURES, PAGES = (".png", ".pdf", ".svg"), (".md",)
KINDS = {
    "curves": (plot_curves, PICTURES),
    "aggregate": (plot_aggregate, PICTURES),
    "scatter": (plot_scatter, PICTURES),
    "frontier": (plot_frontier, PICTURES),
    "heatmap": (plot_heatmap, PICTURES),
    "recall": (plot_recall, PICTURES),
    "interpretation": (plot_interpretation, PICTURES),
    "table": (write_table, PAGES),
    "parameters": (write_parameters, PAGES),
}


# ------------------------------------------------------------------------------------------------------------- output
def save(drawn, file: Path):
    """Writes a figure or a page beside `file` and renames it: what was there stays until the new one is whole."""
    content = io.BytesIO()
    if isinstance(drawn, str):
        content.write(drawn.encode())
    else:
        drawn.savefig(content, format=file.suffix[1:])
        plt.close(drawn)
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        beside.write_bytes(content.getvalue())
        beside.replace(file)
    except OSError as error:
        beside.unlink(missing_ok=True)
        fail(f"--out {file}: cannot be written: {error.strerror}")


def plain(value):
    """Numbers for json, with six digits; what is not finite is null."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, dict):
        return {str(name): plain(of) for name, of in value.items()}
    if isinstance(value, list | tuple):
        return [plain(of) for of in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def warn(message: str):
    print(f"plot_results.py: {message}", file=sys.stderr)


def fail(message: str):
    warn(f"error: {message}")
    sys.exit(2)


def main(argv: list[str] | None = None):
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without ± shows ?
    if shutil.get_terminal_size().columns < 60:
        os.environ["COLUMNS"] = "60"  # --help does not end where there is no width
    args = tyro.cli(Args, prog="plot_results.py", args=argv)
    for name, right, holds in (
        ("confidence", "must be between 0 and 1", 0 < args.confidence < 1),
        ("points", "must be from 1 to 10000", 1 <= args.points <= 10_000),
        ("smooth", "must be from 0 to 10000", 0 <= args.smooth <= 10_000),
    ):
        if not holds:
            fail(f"--{name} {getattr(args, name)}: {right}")
    draw, endings = KINDS.get(args.kind, (None, PAGES))
    args.out = args.out or args.kind + endings[0]
    out = Path(args.out)
    if out.suffix not in endings:
        fail(f"--out {args.out}: must end in {' or '.join(endings)} for --kind {args.kind}")
    if not out.absolute().parent.is_dir():
        fail(f"--out {args.out}: its folder does not exist")
    if out.is_dir() or not os.access(out.absolute().parent, os.W_OK):
        fail(f"--out {args.out}: cannot be written there")
    runs, left_out = find_runs(Path(args.run_dir).expanduser(), args.only, args.exclude)
    try:
        drawn, numbers = draw(args, runs) if draw else write_report(args, runs, left_out)
    except Nothing as nothing:
        fail(f"--run-dir {args.run_dir}: {nothing}")
    save(drawn, out)
    save(json.dumps(plain(numbers), indent=1, allow_nan=False) + "\n", out.with_suffix(".json"))
    try:
        if args.kind in ("table", "parameters"):
            print(drawn, end="")
        print(f"{out} and {out.with_suffix('.json')}: {len(runs)} run{'s' * (len(runs) > 1)}", flush=True)
    except OSError:  # who reads the output has gone; the files are written
        sys.stdout = open(os.devnull, "w")


if __name__ == "__main__":
    main()
