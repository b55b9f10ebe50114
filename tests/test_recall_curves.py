"""recall_curves.py: what a readout finds, and what bad input is told."""

import errno
import json
import os

import numpy as np
import pytest

import plot_results
import recall_curves


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """run("--units GRU …") in this process, files in tmp_path, delays up to 256: (exit code, stdout, stderr)."""
    monkeypatch.setattr(recall_curves, "DELAYS", 256)

    def run(flags):
        files = f"--json {tmp_path}/curves.json --png {tmp_path}/curves.png"
        monkeypatch.setattr("sys.argv", ["recall_curves.py", *files.split(), *flags.split()])
        code = 0
        try:
            recall_curves.main()
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return run


def test_curves_of_two_widths_stand_beside_each_other(run, tmp_path):
    """A run adds to the file what it was asked for, under a name that tells its width, and draws all of it."""
    code, stdout, _ = run("--units LRU:r_min=0.9,r_max=0.99 --features 8 --seeds 2")
    assert code == 0 and len(stdout.splitlines()) == 2
    assert run("--units LRU GRU:features=8 --features 4 --seeds 1 --tasks cue")[0] == 0
    results = json.loads((tmp_path / "curves.json").read_text())
    assert list(results["stream"]) == ["LRU:r_min=0.9,r_max=0.99,features=8"]
    assert list(results["cue"]) == ["LRU:r_min=0.9,r_max=0.99,features=8", "LRU:features=4", "GRU:features=8"]
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG") and len(os.listdir(tmp_path)) == 2

    runs = results["stream"]["LRU:r_min=0.9,r_max=0.99,features=8"]
    assert len(runs) == 2 and runs[0] != runs[1]
    for stream in runs:  # 8 complex modes: 16 numbers can hold 16 independent bits, and 256 were asked for
        assert 8 < stream["capacity"] < 16 and stream["accuracy"][0] > 0.9 and abs(stream["accuracy"][-1] - 0.5) < 0.05
    for cue in results["cue"]["LRU:r_min=0.9,r_max=0.99,features=8"]:
        assert cue["delays"] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
        assert cue["accuracy"][:4] == [1, 1, 1, 1] and abs(cue["accuracy"][-1] - 0.5) < 0.15


def test_the_units_of_the_figure_exist_and_name_their_radii():
    for description in recall_curves.UNITS:
        unit = recall_curves.make_unit(description)
        assert unit.freeze and unit.features == 256
        assert ("r_min" in description) == hasattr(unit, "r_min")


def test_settings_have_the_types_of_the_fields():
    unit = recall_curves.make_unit("DeepESN:leak=1,num_layers=3,features=16")
    assert (unit.leak, unit.num_layers, unit.features) == (1.0, 3, 16) and type(unit.leak) is float
    assert recall_curves.make_unit("FFM:input_gate=false,form=sequential").input_gate is False


def test_a_readout_finds_what_is_there_and_nothing_else():
    rng = np.random.default_rng(0)
    states, bits = rng.normal(size=(3000, 5)), rng.choice([-1.0, 1.0], size=(3000, 3))
    states[:, 0] = 7 + 2 * bits[:, 0]  # one bit as it is, one under noise as large as the bit, one not at all
    states[:, 1] = states[:, 1] + bits[:, 1]
    accuracy, r2 = recall_curves.decode(states, bits, train=2000)
    np.testing.assert_allclose(accuracy, [1, 0.841, 0.5], atol=0.05)  # 0.841: a normal variable above -1
    np.testing.assert_allclose(r2, [1, 0.5, 0], atol=0.05)  # 1 of bit, 1 of noise


@pytest.mark.parametrize(
    "flags, told",
    [
        ("--units RNN", "--units RNN: no unit is called 'RNN'; there are GRU, FFM, LRU, DeepESN, SRC, ParalESN"),
        ("--units Memoryless", "--units Memoryless: no unit is called 'Memoryless'"),
        ("--units GRU LRU:radius=1", "--units LRU:radius=1: LRU has no setting 'radius'; it has features, r_min"),
        ("--units LRU:r_min", "--units LRU:r_min: r_min must be of type float, not ''"),
        ("--units LRU:r_min=high", "--units LRU:r_min=high: r_min must be of type float, not 'high'"),
        ("--units FFM:input_gate=0", "--units FFM:input_gate=0: input_gate must be true or false, not '0'"),
        ("--units GRU:freeze=false", "--units GRU:freeze=false: GRU has no setting 'freeze'"),
        ("--units LRU:r_min=0.9,r_max=0.5", "--units LRU:r_min=0.9,r_max=0.5: LRU: "),
        ("--units GRU:features=0", "--units GRU:features=0: GRU: features must be"),
        ("--seeds 0", "--seeds 0: must be a positive integer"),
        ("--features -1", "--features -1: must be a positive integer"),
        ("--png curves.xyz", "--png curves.xyz: must end in .png"),
        ("--png nowhere/curves.png", "--png nowhere/curves.png: its folder is not there, or cannot be written to"),
        ("--json nowhere/curves.json", "--json nowhere/curves.json: its folder is not there, or cannot be written to"),
        ("--json /", "--json /: cannot read it: Is a directory"),
    ],
)
def test_bad_input_is_told_in_one_line(run, flags, told):
    code, stdout, stderr = run(flags)
    assert (code, stdout, stderr.count("\n")) == (2, "", 1)
    assert stderr.startswith("recall_curves.py: " + told)


@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"cue": {"GRU": [',
        "[]",
        '{"cue": 3}',
        '{"cue": {"GRU": [{"delays": [1]}]}}',
        '{"cue": {"GRU": [1]}}',
        "\xff",
    ],
)
def test_a_damaged_file_is_told_and_kept(run, tmp_path, text):
    path = tmp_path / "curves.json"
    path.write_bytes(text.encode("latin-1"))
    code, stdout, stderr = run("--units GRU")
    assert (code, stdout, stderr.count("\n")) == (2, "", 1)
    assert stderr.startswith(f"recall_curves.py: --json {path}: not a file of recall curves (")
    assert path.read_bytes() == text.encode("latin-1")


def test_a_failing_disk_is_told_and_loses_nothing(run, tmp_path, monkeypatch):
    path = tmp_path / "curves.json"
    path.write_text("{}")

    def replace(old, new):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), new)

    monkeypatch.setattr(os, "replace", replace)
    code, _, stderr = run("--units LRU --tasks cue --seeds 1 --features 4")
    assert code == 2 and stderr == f"recall_curves.py: cannot write {path}: Read-only file system\n"
    assert path.read_text() == "{}"


def test_help_on_a_terminal_that_knows_ascii_only(script):
    process = script("recall_curves.py --help", env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert process.returncode == 0 and "--features" in process.stdout, process.stderr


def test_a_unit_has_the_colour_of_all_figures_its_settings_a_line_and_the_legend_lies_below():
    run = {"delays": [1, 2, 4], "accuracy": [1.0, 0.9, 0.5]}
    names = ["LRU", "LRU:r_min=0.0", "GRU"]
    figure = recall_curves.plot({"cue": {name: [run] for name in names}, "stream": {name: [run] for name in names[:2]}})
    for axis, count in zip(figure.axes, (3, 2), strict=True):
        lines = {line.get_label(): line for line in axis.get_lines() if line.get_label() in names}
        assert len(lines) == count and axis.get_legend() is None
        assert lines["LRU"].get_color() == lines["LRU:r_min=0.0"].get_color() == plot_results.MEMORIES["lru"][1]
        assert lines["LRU"].get_linestyle() != lines["LRU:r_min=0.0"].get_linestyle()
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["GRU", "LRU", "LRU:r_min=0.0"]
    figure.canvas.draw()
    below = legend.get_window_extent().y1
    assert all(axis.get_tightbbox().y0 >= below for axis in figure.axes)
