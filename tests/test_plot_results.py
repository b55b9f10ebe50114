"""plot_results.py on run folders whose numbers are known: what it groups, leaves out, computes and draws."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import matplotlib.colors
import matplotlib.pyplot as plt
import numpy as np
import pytest
import scipy.stats
from conftest import ROOT
from matplotlib.collections import PolyCollection
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary

import plot_results
from plot_results import Args, find_runs

REPEAT = "RepeatFirstEasy"
PICTURES = [kind for kind, (_, endings) in plot_results.KINDS.items() if ".png" in endings]


def write_events(run, points, name="events"):
    """Points (step, {tag: value}) in an event file; None for the values writes TensorBoard's restart mark."""
    writer = EventsWriter(str(run / name))
    for step, scalars in points:
        if scalars is None:
            writer.write_event(Event(step=step, session_log=SessionLog(status=SessionLog.START)))
            continue
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        writer.write_event(Event(step=step, summary=Summary(value=values)))
    writer.close()


def make_run(runs, task=REPEAT, memory="gru", seed=1, result=0.5, values=(0.0,) * 10, **options):
    """A run with a point of its return every 100 steps. `result` None leaves it unfinished.

    Options: script, exp_name, time, trainable, SPS, tag, scores (more of eval.json), and flags.
    """
    script = options.pop("script", "pqn_frozen_rnn")
    exp_name, time = options.pop("exp_name", script), options.pop("time", 1_700_000_000)
    trainable, sps, scores = options.pop("trainable", 100), options.pop("SPS", 1000), options.pop("scores", {})
    tag = options.pop("tag", "charts/episodic_return")
    run = runs / f"{task}__{exp_name}__{memory}__{seed}__{time}"
    run.mkdir(parents=True)
    frozen, memory = memory.endswith("-frozen"), memory.removesuffix("-frozen")
    args = {"env": task, "exp_name": exp_name, "memory": memory, "frozen": frozen, "total_timesteps": 1000}
    counts = {"total": 100, "trainable": trainable, "frozen": 100 - trainable}
    config = {"script": script, "args": args | {"seed": seed} | options, "seed": seed, "runs": [run.name]}
    (run / "config.json").write_text(json.dumps(config | {"parameters": {"all": counts}}))
    if values is not None:
        write_events(run, [(100 * (i + 1), {tag: value}) for i, value in enumerate(values)])
    if result is not None:
        evaluation = {"mean_return": result, "SPS": sps, "environment_steps": 1000} | scores
        (run / "eval.json").write_text(json.dumps(evaluation))
    return run


def draw(runs, kind, **flags):
    """The figure of a kind, laid out as it is saved, and its numbers."""
    args = Args(run_dir=str(runs), kind=kind, **flags)
    found, _ = find_runs(runs, args.only, args.exclude)
    figure, numbers = plot_results.KINDS[kind][0](args, found)
    figure.canvas.draw()
    plt.close(figure)
    return figure, numbers


def plot(tmp_path, *flags, env=(), **options):
    """The program as its user starts it, in tmp_path."""
    command = [sys.executable, str(ROOT / "plot_results.py"), *flags]
    options = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 60} | options
    return subprocess.run(command, env=os.environ | dict(env), **options)


def refused(capsys, *flags):
    """The one line with which main ends."""
    with pytest.raises(SystemExit) as ended:
        plot_results.main(list(flags))
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if "left out" not in line]
    assert ended.value.code == 2 and len(lines) == 1 and "error: --" in lines[0], captured.err
    return lines[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Something for every kind: FFM, frozen and trained GRU and LRU on two POPGym tasks, MemoryChain; 3 and 6 seeds."""
    runs, rng = tmp_path_factory.mktemp("all") / "runs", np.random.default_rng(0)
    for task, memory, seed in [
        (task, memory, seed)
        for task in (REPEAT, "RepeatPreviousHard")
        for memory in ("mlp", "gru", "gru-frozen", "lru", "lru-frozen")
        for seed in range(1, 7)
    ]:
        trainable = 30 if memory.endswith("frozen") else 100
        make_run(runs, task, memory, seed, rng.normal(), rng.normal(size=10), trainable=trainable)
    for delay, memory, seed in [(d, m, s) for d in (4, 128) for m in ("lru", "lru-frozen", "mlp") for s in range(3)]:
        scores = {"success_rate": [1.0, 0.8, 0.5][seed]}
        task, flags = f"MemoryChain-{delay}", {"script": "ppo_memorychain", "delay": delay}
        make_run(runs, task, memory, seed, rng.normal(), rng.normal(size=10), scores=scores, **flags)
    for seed in (1, 2):
        flags = {"script": "pqn_ffm", "trace_size": 3, "context_size": 2, "values": None}
        run = make_run(runs, REPEAT, "ffm", seed, 0.9, **flags)
        tags = [f"memory_0/{q}_{e}" for q in plot_results.QUANTITIES for e in ("min", "median", "max")]
        points = [(step, dict.fromkeys(tags, 1.0 + step)) for step in (0, 1000)]
        write_events(run, [*points, (1000, {"charts/episodic_return": 0.3})])
    return runs


# ------------------------------------------------------------------------------------------- which runs are one agent
def test_what_differs_among_an_agents_runs_is_in_its_label(tmp_path):
    for rate in (1e-3, 3e-4, 1e-5):
        for norm in (True, False):
            make_run(
                tmp_path,
                seed=1,
                learning_rate=rate,
                norm_adv=norm,
                run_dir=f"r{rate}",
                time=int(1e9 + rate * 1e6 + norm),
            )
    make_run(tmp_path, memory="gru-frozen", learning_rate=5e-5, norm_adv=True)
    runs, left_out = find_runs(tmp_path)
    labels = [run.label for run in runs]
    assert labels[0] == "GRU lr 1e-5, no norm_adv" and "GRU lr 3e-4, norm_adv" in labels and not left_out
    assert labels[-1] == "Frozen GRU" and len(set(labels)) == 7
    rates = [re.search("lr (.*?),", label)[1] for label in labels[:6:2]]
    assert rates == ["1e-5", "3e-4", "1e-3"]


def test_runs_of_both_groups_and_ablations_are_told_apart(tmp_path):
    for script, memory in (("pqn_ffm", "gru"), ("pqn_ffm", "ffm"), ("pqn_frozen_rnn", "gru"), ("my_lstm", "lstm")):
        make_run(tmp_path / "group" / script, memory=memory, script=script)  # as benchmark.sh: a folder for each group
    make_run(tmp_path / "group" / "pqn_ffm", memory="ffm", script="pqn_ffm", exp_name="pqn_ffm-no-decay", decay=False)
    labels = [run.label for run in find_runs(tmp_path / "group")[0]]
    assert labels == ["GRU pqn_ffm", "GRU pqn_frozen_rnn", "FFM", "FFM no-decay", "lstm"]


def test_tasks_of_one_name_in_two_suites_are_two_tasks(tmp_path):
    make_run(tmp_path, "CountRecallEasy")
    make_run(tmp_path, "CountRecallEasy", script="pqn_arcade_cnn", obs_size=128)
    assert [run.task for run in find_runs(tmp_path)[0]] == [
        "CountRecallEasy (POPGym)",
        "CountRecallEasy (POPGym Arcade)",
    ]


def test_only_and_exclude_choose_by_name_and_by_flag(tmp_path):
    for memory in ("gru", "gru-frozen", "lru"):
        for rate in (1e-3, 1e-4):
            make_run(tmp_path, memory=memory, learning_rate=rate, time=int(1e9 + 1e6 * rate))
    runs, _ = find_runs(tmp_path, only=("learning_rate=0.001",), exclude=("frozen=True", "__lru"))
    chosen = [run.folder.name for run in runs]
    assert chosen == [f"{REPEAT}__pqn_frozen_rnn__gru__1__1000001000"]
    assert len(find_runs(tmp_path, only=("frozen=True", "R*First*lru"))[0]) == 4


def test_tasks_and_delays_stand_in_their_order(tmp_path):
    for task in ("RepeatFirstHard", "RepeatFirstMedium", REPEAT):
        make_run(tmp_path, task)
    for delay in (128, 16, 4):
        make_run(tmp_path, f"MemoryChain-{delay}", delay=delay)
    assert [run.task for run in find_runs(tmp_path)[0]] == [
        *("MemoryChain-4", "MemoryChain-16", "MemoryChain-128"),
        *(REPEAT, "RepeatFirstMedium", "RepeatFirstHard"),
    ]


# ------------------------------------------------------------------------------------------------- what is left out
def test_an_aborted_start_hides_no_finished_run_and_is_named(tmp_path, capsys):
    finished = make_run(tmp_path, seed=1, time=1_700_000_000)
    aborted = make_run(tmp_path, seed=1, time=1_800_000_000, result=None)
    other_size = make_run(tmp_path, seed=2, result=None, total_timesteps=5)
    (run,), left_out = find_runs(tmp_path)
    assert run.folder == finished and run.label == "GRU"
    error = capsys.readouterr().err
    assert len(left_out) == 2 and f"{aborted}: unfinished" in error and f"{other_size}: unfinished" in error


def test_the_time_in_the_folders_name_counts_not_that_of_its_files(tmp_path, capsys):
    newer = make_run(tmp_path, time=1_800_000_000)
    older = make_run(tmp_path, time=1_700_000_000)
    os.utime(newer / "config.json", (1, 1))
    assert [run.folder for run in find_runs(tmp_path)[0]] == [newer]
    assert f"left out: {older}: {newer.name} is a newer run" in capsys.readouterr().err


@pytest.mark.parametrize(
    "older, newer",
    [
        (1_700_000_000, "1796106330.523175"),  # runs were once named by whole seconds
        ("1796106330.523175", 1_800_000_000),
        ("1796106330.099999", "1796106330.523175"),
        ("999999999.523175", "1796106330.099999"),
    ],
)
def test_times_in_names_of_folders_are_compared_by_their_values(tmp_path, older, newer):
    newer, _ = make_run(tmp_path, time=newer), make_run(tmp_path, time=older)
    assert [run.folder for run in find_runs(tmp_path)[0]] == [newer]


@pytest.mark.parametrize(
    "name, content",
    [
        ("eval.json", '{"mean_return": 0.5, "SP'),
        ("eval.json", '{"mean_return": NaN, "SPS": 1, "environment_steps": 1}'),
        ("eval.json", "[]"),
        ("config.json", '{"name": "a foreign program"}'),
        ("config.json", '{"args": []}'),
        ("config.json", b"\xff\xfe"),
    ],
)
def test_a_damaged_or_foreign_folder_is_named_and_hurts_no_other(tmp_path, capsys, name, content):
    good = make_run(tmp_path, seed=1)
    bad = make_run(tmp_path, seed=2)
    (bad / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    runs, (line,) = find_runs(tmp_path)
    assert [run.folder for run in runs] == [good] and str(bad) in line and name in line
    assert capsys.readouterr().err.count("\n") == 1


def test_a_damaged_event_file_hurts_its_seed_only(tmp_path, capsys):
    for seed in range(4):
        run = make_run(tmp_path, seed=seed, values=np.full(10, float(seed)))
        (file,) = run.glob("events.*")
        data = file.read_bytes()
        if seed == 1:
            file.write_bytes(data[:200] + bytes(28) + data[228:])
        if seed == 2:
            file.write_bytes(data[:-5])
        if seed == 3:
            file.unlink()
    figure, numbers = draw(tmp_path, "curves")
    assert numbers[f"{REPEAT} GRU"]["seeds"] == [0] and numbers[f"{REPEAT} GRU"]["mean"].tolist() == [0] * 10
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["GRU (1 seed)"]
    error = capsys.readouterr().err
    assert error.count("is damaged") == 2 and error.count("no event file") == 1 and error.count("\n") == 3


def test_what_a_resumed_run_logged_twice_counts_once(tmp_path):
    run, tag = make_run(tmp_path, values=None), "charts/episodic_return"
    write_events(run, [(100, {tag: 1.0}), (200, {tag: 2.0}), (300, {tag: 9.0})], name="a")
    # Records of the second file come after those of the first.
    shutil.move(next(run.glob("a.*")), run / "events.out.tfevents.1")
    write_events(run, [(300, None), (300, {tag: 3.0}), (400, {tag: 4.0})], name="b")
    shutil.move(next(run.glob("b.*")), run / "events.out.tfevents.2")
    numbers = draw(tmp_path, "curves")[1][f"{REPEAT} GRU"]
    assert numbers["steps"].tolist() == [100, 200, 300, 400] and numbers["mean"].tolist() == [1, 2, 3, 4]


def test_a_run_folder_itself_is_drawn_finished_or_not(tmp_path):
    run = make_run(tmp_path, result=None, values=[1.0, 2.0])
    make_run(tmp_path, seed=2)
    numbers = draw(run, "curves")[1]
    assert numbers[f"{REPEAT} GRU"]["mean"].tolist() == [1, 2]
    (file,) = run.glob("events.*")
    file.write_bytes(file.read_bytes()[:-5])  # the record that is being written just now
    assert draw(run, "curves")[1][f"{REPEAT} GRU"]["mean"].tolist() == [1]


# ---------------------------------------------------------------------------------------------------------- statistics
def test_the_interval_is_the_percentile_bootstrap_of_scipy():
    scores = np.random.default_rng(0).normal(size=8)
    low, high = plot_results.estimate(Args(), [scores])[1]
    method = {"n_resamples": 100_000, "method": "percentile", "rng": 1}
    right = scipy.stats.bootstrap((scores,), np.mean, **method).confidence_interval
    np.testing.assert_allclose([low, high], right, atol=0.05 * scores.std())
    low, high = plot_results.estimate(Args(statistic="iqm"), [scores])[1]
    right = scipy.stats.bootstrap((scores,), lambda x, axis: scipy.stats.trim_mean(x, 0.25, axis), **method)
    np.testing.assert_allclose([low, high], right.confidence_interval, atol=0.05 * scores.std())


def test_the_bootstrap_is_stratified():
    """Tasks of different levels: seeds are never drawn from another task, so that levels do not widen the interval."""
    rng = np.random.default_rng(0)
    tasks = [rng.normal(level, 1, size=10) for level in (0, 100, 1000)]
    value, (low, high) = plot_results.estimate(Args(), tasks)
    assert value == pytest.approx(np.mean(tasks))
    error = np.sqrt(sum(np.var(task) / 10 for task in tasks)) / 3  # of the mean of three means
    assert high - low == pytest.approx(2 * 1.96 * error, rel=0.1)


def test_iqm_is_the_mean_of_the_middle_half():
    scores = [np.array([0.0, 1.0, 2.0, 100.0]), np.array([3.0, 4.0, 5.0, -100.0])]
    assert plot_results.combine(scores, "iqm") == np.mean([1, 2, 3, 4])
    assert plot_results.combine(scores, "mean") == pytest.approx(np.mean([25.75, -22]))


def test_the_probability_of_improvement_counts_pairs_of_seeds(tmp_path):
    ours, theirs = [np.array([1.0, 2.0, 3.0]), np.array([5.0])], [np.array([2.0, 0.0]), np.array([1.0, 9.0])]
    assert plot_results.improvement(ours, theirs) == pytest.approx(((1 + 1.5 + 2) / 6 + 1 / 2) / 2)
    u = scipy.stats.mannwhitneyu(ours[0], theirs[0]).statistic
    assert plot_results.improvement(ours[:1], theirs[:1]) == pytest.approx(u / 6)


# ------------------------------------------------------------------------------------------------------------- curves
def test_curves_of_few_seeds_are_the_seeds_and_no_band(tmp_path):
    values = np.random.default_rng(0).normal(size=(3, 10)).astype(np.float32)
    for seed in range(3):
        make_run(tmp_path, seed=seed, values=values[seed])
    figure, numbers = draw(tmp_path, "curves", points=5)
    points = values.reshape(3, 5, 2).mean(-1)
    row, (axis,) = numbers[f"{REPEAT} GRU"], figure.axes
    np.testing.assert_allclose(row["mean"], points.mean(0), atol=1e-6)
    np.testing.assert_allclose(row["curves"], points, atol=1e-6)
    assert row["steps"].tolist() == [150, 350, 550, 750, 950] and row["seeds"] == [0, 1, 2] and "low" not in row
    assert not axis.collections and len(axis.lines) == 4
    np.testing.assert_allclose(axis.lines[-1].get_ydata(), points.mean(0), atol=1e-6)
    np.testing.assert_allclose([line.get_ydata() for line in axis.lines[:3]], points, atol=1e-6)
    low, high = axis.get_ylim()
    assert low < points.min() and high > points.max() and axis.get_title() == REPEAT


def test_curves_of_five_seeds_have_their_interval_as_a_band(tmp_path):
    values = np.random.default_rng(0).normal(size=(5, 10)).astype(np.float32)
    for seed in range(5):
        make_run(tmp_path, memory="lru-frozen", seed=seed, values=values[seed])
    figure, numbers = draw(tmp_path, "curves")
    row, (axis,) = numbers[f"{REPEAT} Frozen LRU"], figure.axes
    (band,), (line,) = axis.collections, axis.lines
    assert isinstance(band, PolyCollection) and line.get_linestyle() == "--"
    corners = band.get_paths()[0].vertices
    assert corners[:, 1].min() == pytest.approx(row["low"].min()) and corners[:, 1].max() == pytest.approx(
        row["high"].max()
    )
    assert (
        (row["low"] >= values.min(0)).all() and (row["low"] < row["mean"]).all() and (row["mean"] < row["high"]).all()
    )


def test_smooth_is_a_running_mean_of_each_seed(tmp_path):
    make_run(tmp_path, values=[0, 3, 6, 0, 0, 0, 0, 0, 0, 9])
    assert draw(tmp_path, "curves", smooth=1)[1][f"{REPEAT} GRU"]["mean"].tolist() == [1.5, 3, 3, 2, 0, 0, 0, 0, 3, 4.5]


def test_panels_are_those_that_have_the_metric(tmp_path, capsys):
    make_run(tmp_path, REPEAT, seed=1, values=[1.0], tag="eval/episodic_return")
    make_run(tmp_path, "RepeatFirstHard", seed=1)
    figure, _ = draw(tmp_path, "curves", metric="eval/episodic_return")
    (axis,) = figure.axes
    (line,) = axis.lines
    assert axis.get_title() == REPEAT and line.get_xydata().tolist() == [[100, 1]]
    assert line.get_marker() == "o" and line.get_markevery() is None  # one point is seen
    assert "RepeatFirstHard GRU, seed 1: no eval/episodic_return" in capsys.readouterr().err
    assert "charts/episodic_return" in refused(capsys, "--run-dir", str(tmp_path), "--metric", "no/such")


def test_seeds_that_ended_early_are_drawn_to_their_end(tmp_path):
    make_run(tmp_path, seed=1, values=np.ones(10))
    make_run(tmp_path, seed=2, values=np.zeros(4))
    figure, numbers = draw(tmp_path, "curves")
    assert numbers[f"{REPEAT} GRU"]["steps"].tolist() == [100, 200, 300, 400]  # where both have a value
    assert [len(line.get_xdata()) for line in figure.axes[0].lines] == [10, 4, 4]


# --------------------------------------------------------------------------------------------------------- all figures
@pytest.mark.parametrize("kind", PICTURES)
def test_legends_are_beside_or_below_the_panels(folder, kind):
    figure, _ = draw(folder, kind)
    if kind != "heatmap":  # its axes name all there is
        assert len(figure.legends) == 1
    for axis in figure.axes:
        assert axis.get_legend() is None
        data = axis.get_tightbbox()
        for legend in figure.legends:
            assert not legend.get_window_extent().overlaps(data)
    page = figure.bbox
    for artist in [*figure.axes, *figure.legends]:
        box = artist.get_tightbbox()
        assert box.x0 >= -1 and box.y0 >= -1 and box.x1 <= page.x1 + 1 and box.y1 <= page.y1 + 1  # nothing is cut off


def test_a_memory_has_one_colour_in_every_figure_and_is_dashed_where_frozen(folder):
    for kind in set(PICTURES) - {"heatmap"}:
        figure, _ = draw(folder, kind)
        (legend,) = figure.legends
        for handle, text in zip(legend.legend_handles, legend.get_texts(), strict=True):
            for name, color, marker in plot_results.MEMORIES.values():
                if re.match(rf"(Frozen )?{name}\b", text.get_text()):
                    assert matplotlib.colors.same_color(handle.get_color(), color) and handle.get_marker() == marker
                    frozen = "rozen" in text.get_text()
                    assert (handle.get_markerfacecolor() == "white") == frozen
                    if handle.get_linestyle() != "None":
                        assert handle.get_linestyle() == ("--" if frozen else "-")


def cielab(linear):
    """CIELAB coordinates of a colour in linear RGB."""
    x = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ linear
    f = np.cbrt(x / np.array([0.9505, 1, 1.089]))
    f = np.where(f > 6 / 29, f, x / np.array([0.9505, 1, 1.089]) * (29 / 6) ** 2 / 3 + 4 / 29)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def test_colours_stay_apart_in_grey_print_and_for_colour_blind_readers():
    """Machado et al. (2009): full protanopia, deuteranopia and tritanopia, applied in linear RGB."""
    sight = {
        "all": np.eye(3),
        "prot": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
        "deut": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
        "trit": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
    }
    for (_, one, a), (_, two, b) in combinations(plot_results.MEMORIES.values(), 2):
        assert a != b
        linear = []
        for color in (one, two):
            rgb = np.array(matplotlib.colors.to_rgb(color))
            linear.append(np.where(rgb > 0.04045, ((rgb + 0.055) / 1.055) ** 2.4, rgb / 12.92))
        assert abs(cielab(linear[0])[0] - cielab(linear[1])[0]) > 7, (one, two)
        for matrix in sight.values():
            seen = [cielab(np.clip(np.array(matrix) @ color, 0, 1)) for color in linear]
            assert np.linalg.norm(seen[0] - seen[1]) > 20, (one, two)


def test_variants_of_a_memory_have_markers_and_shades_of_their_own(tmp_path):
    for rate in (1e-3, 1e-4, 1e-5):
        for memory in ("lru", "lru-frozen"):
            make_run(tmp_path, memory=memory, learning_rate=rate, time=int(1e9 + 1e6 * rate))
    style = plot_results.styles(find_runs(tmp_path)[0])
    assert len({look["marker"] for look in style.values()}) == len({look["color"] for look in style.values()}) == 3
    assert style["LRU lr 1e-4"]["color"] == style["Frozen LRU lr 1e-4"]["color"]


# ---------------------------------------------------------------------------------------------- means over the tasks
FAMILIES = [
    "Minesweeper",
    "NoisyStatelessCartPole",
    "RepeatFirst",
    "RepeatPrevious",
    "StatelessCartPole",
    "HigherLower",
]
TASKS = [family + level for family in FAMILIES for level in ("Easy", "Medium", "Hard")]


def x_of_dashed(axis):
    return sorted(
        line.get_xdata()[0] for line in axis.lines if line.get_linestyle() == "--" and len(line.get_xdata()) == 2
    )


def test_aggregate_is_the_mean_over_tasks_beside_the_published_one(tmp_path):
    results = np.random.default_rng(0).normal(size=(4, 18, 3))
    agents = ("gru", "gru-frozen", "lru", "lru-frozen")
    for (a, t, s), result in np.ndenumerate(results):
        make_run(tmp_path, TASKS[t], agents[a], s, result, values=None)
    figure, numbers = draw(tmp_path, "aggregate")
    left, right = figure.axes
    row = numbers["POPGym"]
    names = ["GRU", "Frozen GRU", "LRU", "Frozen LRU"]
    assert [label.get_text() for label in left.get_yticklabels()] == list(row["agents"]) == names
    for a, name in enumerate(names):
        assert row["agents"][name]["mean"] == pytest.approx(results[a].mean())
        assert row["agents"][name]["seeds"] == pytest.approx(results[a].mean(0))
        assert row["agents"][name]["interval"] is None
        marks = [line for line in left.lines if line.get_ydata()[0] == a]
        assert marks[0].get_xdata() == [pytest.approx(results[a].mean())]
        assert list(marks[1].get_xdata()) == pytest.approx(results[a].mean(0))  # few seeds: each of them
    assert x_of_dashed(left) == pytest.approx([0.386, 0.386 / 0.887, 0.458, 0.464])
    u = [scipy.stats.mannwhitneyu(results[1, t], results[0, t]).statistic / 9 for t in range(18)]
    assert row["improvement"]["Frozen GRU"]["probability"] == pytest.approx(np.mean(u))
    assert [line.get_xdata()[0] for line in right.lines if line.get_marker() == "o"][0] == pytest.approx(np.mean(u))
    # Another statistic, or the mean over other tasks, is another quantity.
    assert x_of_dashed(draw(tmp_path, "aggregate", statistic="iqm")[0].axes[0]) == []
    figure, _ = draw(tmp_path, "aggregate", exclude=("HigherLowerHard",))
    assert x_of_dashed(figure.axes[0]) == []


def test_frozen_mixers_have_published_values_of_their_own(tmp_path):
    for task in TASKS:
        for memory in ("gru-frozen", "lru-frozen"):
            flags = {"exp_name": "pqn_frozen_rnn-frozen-mixers", "frozen_mixers": True}
            make_run(tmp_path, task, memory, 1, 0.3, values=None, **flags)
    assert x_of_dashed(draw(tmp_path, "aggregate")[0].axes[0]) == [0.341, 0.392]


@pytest.mark.parametrize(
    "suite, published",
    [("MuJoCo Playground", [772.9, 791.8, 831.9, 842.8]), ("POPGym Arcade", [0.624, 0.643, 0.676, 0.694])],
)
def test_the_other_suites_have_theirs(tmp_path, suite, published):
    flags = {"observe": "positions"} if suite == "MuJoCo Playground" else {"obs_size": 128}
    for task in plot_results.FRN_TASKS[suite]:
        for memory in ("gru", "gru-frozen", "lru", "lru-frozen"):
            make_run(tmp_path, task + "Easy" * (suite == "POPGym Arcade"), memory, 1, 0.3, values=None, **flags)
    assert x_of_dashed(draw(tmp_path, "aggregate")[0].axes[0]) == published
    frontier = draw(tmp_path, "frontier")[0].axes[0]
    dashed = [line.get_ydata()[0] for line in frontier.lines if line.get_linestyle() == "--"]
    assert sorted(dashed) == published


def test_agents_are_compared_on_the_tasks_that_all_have(tmp_path, capsys):
    make_run(tmp_path, REPEAT, "gru", result=1.0)
    make_run(tmp_path, REPEAT, "lru", result=0.5)
    make_run(tmp_path, "RepeatFirstHard", "gru", result=-5.0)
    row = draw(tmp_path, "aggregate")[1]["POPGym"]
    assert row["tasks"] == [REPEAT] and row["agents"]["GRU"]["mean"] == 1
    assert "no mean over RepeatFirstHard" in capsys.readouterr().err


def test_scatter_has_a_point_for_each_task(folder):
    figure, numbers = draw(folder, "scatter", only=("pqn_frozen_rnn",))
    (axis,) = figure.axes
    points = [line.get_xydata() for line in axis.lines if line.get_markersize() == 6]
    assert len(points) == 4 == len(numbers)
    for (point,), row in zip(points, numbers.values(), strict=True):
        np.testing.assert_allclose(point, [np.mean(row["trained"]), np.mean(row["frozen"])])
        assert row["intervals"][0] is not None  # six seeds
    assert axis.get_xlim() == axis.get_ylim() and axis.get_aspect() == 1


def test_frontier_has_returns_against_trained_parameters_and_speed(tmp_path):
    for memory, trainable, sps in (("lru", 80, 500), ("lru-frozen", 20, 2000)):
        for seed in (1, 2):
            make_run(tmp_path, memory=memory, seed=seed, result=0.1 * seed, trainable=trainable, SPS=sps + seed)
    figure, numbers = draw(tmp_path, "frontier")
    assert numbers["POPGym Frozen LRU"]["trainable"] == 20 and numbers["POPGym Frozen LRU"]["SPS"] == 2001.5
    for axis, xs in zip(figure.axes, ([80, 20], [501.5, 2001.5]), strict=True):
        points = [line.get_xydata().tolist() for line in axis.lines if line.get_markersize() == 5]
        assert points == [[[x, pytest.approx(0.15)]] for x in xs] and axis.get_xscale() == "log"


# ------------------------------------------------------------------------------------------------------- interpretation
def ffm_run(runs, seed, names=None):
    run = make_run(runs, memory="ffm", seed=seed, script="pqn_ffm", trace_size=3, context_size=2)
    if names:
        config = json.loads((run / "config.json").read_text()) | {"runs": names}
        (run / "config.json").write_text(json.dumps(config))
    return run


def write_checkpoint(run: Path, **units: dict[str, np.ndarray]):
    """As the scripts do it: every array by its path in the state, with the seeds [S] first."""
    from flax.serialization import msgpack_serialize

    state = {}
    for unit, weights in units.items():
        state |= {f".params['{unit}']['{name}']": values for name, values in weights.items()}
    data = {"state": state | {".update": np.array([7])}, "update": 7, "seconds": 1.0}
    (run / "checkpoint.msgpack").write_bytes(msgpack_serialize(data))


def test_interpretation_shows_every_trace_of_a_checkpoint(tmp_path):
    import memory

    alpha, omega = np.array([-4.0, 0.1, 0.01], np.float32), np.array([3.0, -0.01], np.float32)
    run = ffm_run(tmp_path, 1)
    untrained = {"l1_kernel": np.ones((1, 2, 3))}
    write_checkpoint(run, memory_0={"alpha": alpha[None], "omega": omega[None]}, memory_1=untrained, output=untrained)
    figure, numbers = draw(tmp_path, "interpretation")
    for quantity, of, value, start in (
        ("trace_durability", memory.trace_durability, alpha, memory.initial_alpha(3)),
        ("contextual_period", memory.contextual_period, omega, memory.initial_omega(2)),
    ):
        row = numbers[f"{REPEAT} FFM memory_0 {quantity}"]
        np.testing.assert_allclose(row["seed 1"], of(value), rtol=1e-5)
        np.testing.assert_allclose(row["start"], of(start), rtol=1e-5)
        still = numbers[f"{REPEAT} FFM memory_1 {quantity}"]  # not trained, so not in the checkpoint
        assert (still["seed 1"] == still["start"]).all()
    assert len(figure.axes) == 4
    start, after = figure.axes[0].lines
    np.testing.assert_allclose(after.get_ydata(), memory.trace_durability(alpha), rtol=1e-5)
    assert start.get_ydata().tolist() == pytest.approx([1, 32, 1024])


def test_interpretation_takes_each_seed_from_the_checkpoint_of_its_program(tmp_path):
    names = [f"{REPEAT}__pqn_ffm__ffm__{seed}__1700000000" for seed in (4, 5)]
    runs = [ffm_run(tmp_path, seed, names) for seed in (4, 5)]
    leaves = {"alpha": np.array([[1.0, 1, 1], [2.0, 2, 2]]), "omega": np.ones((2, 2))}
    write_checkpoint(runs[0], memory_0=leaves)
    row = draw(tmp_path, "interpretation")[1][f"{REPEAT} FFM memory_0 trace_durability"]
    assert row["seed 4"] == pytest.approx(-np.log(0.01)) and row["seed 5"] == pytest.approx(-np.log(0.01) / 2)


def test_interpretation_without_a_good_checkpoint_is_what_was_logged(tmp_path, capsys):
    run = ffm_run(tmp_path, 1)
    (run / "checkpoint.msgpack").write_bytes(b"\x93\x01")
    (events,) = run.glob("events.*")
    events.unlink()
    spread = [f"memory_0/trace_durability_{end}" for end in ("min", "median", "max")]
    points = [
        (0, dict(zip(spread, (1.0, 32.0, 1024.0), strict=True))),
        (9, dict(zip(spread, (2.0, 3.0, 4.0), strict=True))),
    ]
    write_events(run, points)
    row = draw(tmp_path, "interpretation")[1][f"{REPEAT} FFM memory_0 trace_durability"]
    assert row["start"].tolist() == [1, 32, 1024] and row["seed 1"].tolist() == [2, 3, 4]
    assert "checkpoint.msgpack is damaged" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------- recall and tables
def test_recall_is_the_success_rate_of_each_agent_against_the_delay(tmp_path):
    rates = {(8, "lru"): [1.0, 0.8], (128, "lru"): [0.5], (16, "lru"): [1.0, 1.0], (8, "lru-frozen"): [0.9]}
    for (delay, agent), seeds in rates.items():
        for seed, rate in enumerate(seeds):
            scores = {"success_rate": rate, "success_rate_128": rate - 0.1, "environment_steps": 1000 + seed}
            make_run(tmp_path, f"MemoryChain-{delay}", agent, seed, 0.0, delay=delay, scores=scores)
    make_run(tmp_path, "MemoryChain-64", "lru", result=None, delay=64)
    figure, numbers = draw(tmp_path, "recall")
    row = numbers["LRU"]
    assert row["delays"] == [8, 16, 128] and row["seeds"] == [[1.0, 0.8], [1.0, 1.0], [0.5]]
    assert row["mean"] == pytest.approx((0.9, 1.0, 0.5)) and row["steps"] == [[1000, 1001], [1000, 1001], [1000]]
    assert numbers["Frozen LRU"]["delays"] == [8] and len(numbers) == 2
    (axis,) = figure.axes
    assert [text.get_text() for text in axis.get_xticklabels()] == ["8", "16", "128"]
    assert axis.lines[0].get_ydata() == pytest.approx((0.9, 1.0, 0.5))


def test_heatmap_and_table_have_mean_and_sample_deviation(tmp_path, capsys):
    runs = tmp_path / "runs"
    for seed, result in enumerate((0.1, 0.4, None)):
        make_run(runs, seed=seed, result=result, SPS=1000 + seed)
    make_run(runs, "RepeatFirstHard", "lru-frozen", result=-0.3)
    figure, numbers = draw(runs, "heatmap")
    assert numbers[f"{REPEAT} GRU"] == {
        "seeds": [0.1, 0.4],
        "mean": pytest.approx(0.25),
        "std": pytest.approx(np.std([0.1, 0.4], ddof=1)),
        "SPS": 1000.5,
    }
    shown = [text.get_text() for text in figure.axes[0].texts]
    assert shown == ["0.25 ± 0.21", "", "", "-0.30"]
    capsys.readouterr()
    plot_results.main(["--run-dir", str(runs), "--kind", "table", "--out", str(tmp_path / "table.md")])
    table = [f"|  | {REPEAT} | RepeatFirstHard | SPS |", "| --- | --- | --- | --- |"]
    table += ["| GRU | 0.25 ± 0.21 |  | 1,000 |", "| Frozen LRU |  | -0.30 | 1,000 |"]
    assert (tmp_path / "table.md").read_text().splitlines() == capsys.readouterr().out.splitlines()[:-1] == table


def test_parameters_are_those_of_each_agent(tmp_path):
    for memory, frozen in (("gru", 0), ("gru-frozen", 787_968)):
        run = make_run(tmp_path / "runs", "StatelessCartPoleEasy", memory)
        config = json.loads((run / "config.json").read_text())
        config["parameters"] = {"all": {"total": 1_119_746, "trainable": 1_119_746 - frozen, "frozen": frozen}}
        (run / "config.json").write_text(json.dumps(config))
    plot_results.main(["--run-dir", str(tmp_path / "runs"), "--kind", "parameters", "--out", str(tmp_path / "p.md")])
    assert (tmp_path / "p.md").read_text().splitlines()[2:] == [
        "| pqn_frozen_rnn StatelessCartPoleEasy GRU | 1,119,746 | 1,119,746 | 0 | 0.00% |",
        "| pqn_frozen_rnn StatelessCartPoleEasy Frozen GRU | 1,119,746 | 331,778 | 787,968 | 70.37% |",
    ]


def test_the_report_has_every_kind_and_the_commands_that_draw_them(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs", seed=9, result=None)
    shutil.copytree(folder, tmp_path / "runs", dirs_exist_ok=True)
    plot_results.main(["--kind", "report", "--smooth", "1", "--exclude", "Hard"])
    page = (tmp_path / "report.md").read_text()
    assert re.findall("^## (.*)", page, re.M) == [*(kind.capitalize() for kind in plot_results.KINDS), "Left out"]
    for kind in PICTURES:
        assert f"![{kind}](report_{kind}.png)" in page and (tmp_path / f"report_{kind}.png").stat().st_size > 5000
    assert "unfinished" in page and "| Frozen GRU |" in page
    numbers = json.loads((tmp_path / "report.json").read_text())
    assert set(numbers) == set(plot_results.KINDS)
    (command,) = (line for line in page.splitlines() if "--kind scatter" in line)
    before = (tmp_path / "report_scatter.png").read_bytes()
    (tmp_path / "report_scatter.png").unlink()
    plot_results.main(shlex.split(command)[2:])
    assert (tmp_path / "report_scatter.png").read_bytes() == before
    assert "--smooth 1" in command and "--exclude Hard" in command


# ---------------------------------------------------------------------------------------------------- the command line
@pytest.mark.parametrize("ending, start", [("png", b"\x89PNG"), ("pdf", b"%PDF"), ("svg", b"<?xml")])
def test_a_picture_has_its_numbers_beside_it(tmp_path, ending, start, capsys):
    run = make_run(tmp_path / "runs")
    make_run(tmp_path / "runs", "RepeatFirstHard", seed=2, values=[float("nan")])
    out = tmp_path / f"x.{ending}"
    plot_results.main(["--run-dir", str(run.parent), "--out", str(out)])
    assert out.read_bytes().startswith(start)

    def no_constant(name):
        raise AssertionError(f"{name} is not JSON")

    numbers = json.loads(out.with_suffix(".json").read_text(), parse_constant=no_constant)
    assert numbers[f"{REPEAT} GRU"]["mean"] == [0.0] * 10
    assert sorted(file.name for file in tmp_path.iterdir()) == ["runs", "x.json", f"x.{ending}"]


def test_bad_flags_and_folders_are_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "no such folder" in refused(capsys)
    (tmp_path / "runs").mkdir()
    assert "no run folder" in refused(capsys)
    make_run(tmp_path / "runs", result=None)
    assert "no finished run" in refused(capsys)
    make_run(tmp_path / "runs", seed=2)
    (tmp_path / "folder.png").mkdir()
    for flags, word in (
        (("--only", "nothing*like"), "--only"),
        (("--confidence", "1.5"), "1.5"),
        (("--points", "0"), "--points 0"),
        (("--smooth", "-1"), "--smooth -1"),
        (("--kind", "table", "--out", "x.png"), "x.png"),
        (("--out", "x.txt"), "x.txt"),
        (("--out", "no/folder/x.png"), "its folder does not exist"),
        (("--out", "folder.png"), "folder.png"),
        (("--kind", "recall"), "ppo_memorychain.py"),
        (("--kind", "scatter"), "frozen"),
        (("--kind", "interpretation"), "FFM"),
    ):
        assert word in refused(capsys, *flags)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["folder.png", "runs"]


def test_what_cannot_be_written_leaves_what_was_there(tmp_path, capsys, monkeypatch):
    make_run(tmp_path / "runs")
    (tmp_path / "x.png").write_text("before")

    def full(self, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(plot_results.Path, "write_bytes", full)
    line = refused(capsys, "--run-dir", str(tmp_path / "runs"), "--out", str(tmp_path / "x.png"))
    assert "x.png" in line and "No space left" in line and (tmp_path / "x.png").read_text() == "before"


def test_an_ascii_terminal_without_width_sees_tables_and_help(tmp_path):
    for seed, result in ((1, 0.1), (2, 0.4)):
        make_run(tmp_path / "runs", seed=seed, result=result)
    ascii_only = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = plot(tmp_path, "--kind", "table", env=ascii_only)
    assert done.returncode == 0 and "0.25 ? 0.21" in done.stdout, done.stderr
    assert "0.25 ± 0.21" in (tmp_path / "table.md").read_text(encoding="utf-8")
    done = plot(tmp_path, "--help", env=ascii_only | {"COLUMNS": "1"})
    assert done.returncode == 0 and "--run-dir" in done.stdout and not done.stderr


def test_a_reader_that_goes_away_does_no_harm(tmp_path):
    for seed in range(2):
        make_run(tmp_path / "runs", seed=seed)
    read, write = os.pipe()
    os.close(read)
    done = plot(tmp_path, "--kind", "table", capture_output=False, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert done.returncode == 0 and not done.stderr and (tmp_path / "table.json").exists()
