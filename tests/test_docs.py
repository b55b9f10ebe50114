"""The pages are true where a machine can tell: links lead somewhere, commands parse, docs/fork.md can be followed."""

import argparse
import importlib
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tyro
from conftest import ROOT

PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "popjym" / "README.md"])
SCRIPTS = ("pqn_ffm", "pqn_frozen_rnn", "ppo_memorychain", "ppo_playground", "pqn_arcade_cnn")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, *languages: str) -> list[str]:
    """The fenced blocks of a page in these languages."""
    return [block for language, block in FENCE.findall(page.read_text()) if language in languages]


# -------------------------------------------------------------------------------------------------------------- links
def anchors(page: Path) -> set[str]:
    """The names by which GitHub links to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_relative_link_and_picture_of_a_page_exists(page):
    text = FENCE.sub("", page.read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?://", target):
            continue
        file, _, anchor = target.partition("#")
        linked = (page.parent / file).resolve() if file else page
        assert linked.exists(), f"{target}: no such file"
        assert not anchor or anchor in anchors(linked), f"{target}: no such heading"


def test_every_page_that_a_program_names_exists_and_every_page_is_in_the_index():
    for file in [*ROOT.glob("*.py"), *ROOT.glob("*.sh"), *(ROOT / "tests").glob("*.py")]:
        for page in re.findall(r"\bdocs/[\w/]+\.md", file.read_text()):
            assert (ROOT / page).exists(), f"{file.name} names {page}"
    index = (ROOT / "docs" / "README.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "README.md" or f"]({page.name})" in index, f"{page.name} is not in docs/README.md"


# ----------------------------------------------------------------------------------------------------------- commands
STUB = """\
#!{sh}
command=$(printf '%s\\037' "${{0##*/}}" "$@")
printf '%s\\n' "$command" >> {log}
"""
TOOLS = ("sh", "xargs", "cat", "env")  # what a block may run for real; of everything else, nothing is executed


def commands_of(page: Path, folder: Path) -> list[list[str]]:
    """All that the shell blocks of a page, and its inline `python …` and `./benchmark.sh …`, would run.

    bash reads them, so that loops, variables and pipes mean what they mean to a reader. But `python` and ./benchmark.sh
    are programs that write down their arguments, and PATH has nothing but these and TOOLS: what else a block asks for
    is "command not found".
    """
    log, bin_folder = folder / "log", folder / "bin"
    log.touch()
    for stub in ("bin/python", "bin/python3.11", "bin/taskset", "benchmark.sh", ".venv/bin/pip", ".venv/bin/python"):
        (folder / stub).parent.mkdir(parents=True, exist_ok=True)
        (folder / stub).write_text(STUB.format(sh=shutil.which("sh"), log=log))
        (folder / stub).chmod(0o755)
    for tool in TOOLS:
        (bin_folder / tool).symlink_to(shutil.which(tool))
    inline = re.findall(r"`((?:[A-Z]+=\S+ )*(?:python|\./benchmark\.sh) [^`]+)`", FENCE.sub("", page.read_text()))
    for block in [*blocks(page, "", "bash", "sh"), *inline]:
        bash = [shutil.which("bash"), "--norc", "-c", block]
        subprocess.run(bash, cwd=folder, env={"PATH": str(bin_folder)}, capture_output=True, timeout=60)
    commands = [line.split("\037")[:-1] for line in dict.fromkeys(log.read_text().split("\n")[:-1])]
    # taskset -c CORE python …: what it would run counts.
    return [command[3:] if command[0] == "taskset" else command for command in commands]


class Parsed(Exception):
    """A program got as far as to have its flags."""


def parse(program: str, arguments: list[str], monkeypatch):
    """Lets the program that a command calls parse its flags: SystemExit where it refuses them.

    The rule: a command calls a program of this repository. Left out are pip, `python -m`, `python -c`, --help, and the
    fork of docs/fork.md, which is run below. Benchmarks that take words and no flags have to know these words.
    """
    if program == "benchmark.sh":
        if "--once" in arguments:  # how a line of its own list begins
            return
        dry_run = [ROOT / program, *([] if "--help" in arguments else ["--dry-run"]), *arguments]
        sys.exit(subprocess.run(dry_run, capture_output=True).returncode)
    file, *flags = arguments
    if program == "pip" or file in ("-m", "-c", "my_agent.py") or "--help" in flags:
        return
    name, text = Path(file).stem, (ROOT / file).read_text()
    if name in SCRIPTS:
        module = importlib.import_module(name)
        args = tyro.cli(module.Args, args=flags)
        if hasattr(args, "capture_video"):
            args.capture_video = False  # a film needs an OpenGL, which this machine may lack
        if args.resume is None and args.evaluate is None:  # these have their other flags from a run that is not here
            module.check_args(args)
    elif name == "plot_results":
        tyro.cli(importlib.import_module(name).Args, args=flags)
    elif "argparse" in text:
        parse_args = argparse.ArgumentParser.parse_args

        def stop_after_parsing(*args, **kwargs):
            raise Parsed(parse_args(*args, **kwargs))

        monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop_after_parsing)
        monkeypatch.setattr(sys, "argv", [str(ROOT / file), *flags])
        with pytest.raises(Parsed):
            runpy.run_path(str(ROOT / file), run_name="__main__")
        monkeypatch.undo()
    else:
        words = [word.removesuffix("-frozen") for word in flags if word.islower()]  # not tasks, and not numbers
        assert all(word in text for word in words), f"{file} does not know {flags}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_of_a_page_is_parsed_by_the_program_that_it_calls(page, tmp_path, monkeypatch, capfd):
    commands = commands_of(page, tmp_path)
    shells = "".join(blocks(page, "", "bash", "sh"))
    assert commands or not re.search(r"python|benchmark\.sh", shells), "the page's commands were found"
    refused = []
    for program, *arguments in commands:
        try:
            parse(program, arguments, monkeypatch)
        except (SystemExit, OSError) as error:
            code = error.code if isinstance(error, SystemExit) else error
            if code not in (None, 0):
                refused.append(f"{code}: {program} {' '.join(arguments)}\n{capfd.readouterr().err}")
    assert not refused, "\n".join(refused)


# --------------------------------------------------------------------------------------------------------------- fork
EDIT = re.compile(
    r"Put\sthis\s(before\sthe\sline|in\splace\sof\sthe\sline\sthat\sbegins\swith|in\splace\sof\sboth\slines\sthat\sbegin"
    r"\swith)\s`([^`]+)`[^`]*?:\n\n```python\n(.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


def follow(page: str, script: str) -> str:
    """The script after every edit that the page asks for, as a reader would make it."""
    for where, start, block in EDIT.findall(page):
        lines = script.split("\n")
        places = [i for i, line in enumerate(lines) if line.strip().startswith(start)]
        assert len(places) == (2 if "both" in where else 1), f"{len(places)} lines begin with {start!r}"
        for i in reversed(places):
            indent = lines[i][: len(lines[i]) - len(lines[i].lstrip())]
            new = textwrap.indent(block, indent).rstrip("\n").split("\n")
            empty = ["", ""] if block.count("\n") > 2 else []
            lines[i : i + 1] = [*new, *empty, lines[i]] if "before" in where else new
        script = "\n".join(lines)
    return script


@pytest.fixture(scope="module")
def fork(tmp_path_factory):
    """A folder with what docs/fork.md makes, and the modules that a fork needs."""
    folder = tmp_path_factory.mktemp("fork")
    page = (ROOT / "docs" / "fork.md").read_text()
    edits = EDIT.findall(page)
    assert len(edits) == page.count("```python\n"), "each block of the page is an edit that this test understands"
    copy = re.search(r"^cp (\w+\.py) (my_agent\.py)$", page, re.MULTILINE)
    for file in (copy[1], "memory.py"):
        shutil.copy(ROOT / file, folder)
    shutil.copytree(ROOT / "popjym", folder / "popjym")
    (folder / copy[2]).write_text(follow(page, (folder / copy[1]).read_text()))
    sys.path.insert(0, str(folder))
    yield SimpleNamespace(folder=folder, file=folder / copy[2], module=importlib.import_module("my_agent"))
    sys.path.remove(str(folder))
    del sys.modules["my_agent"]
    del sys.modules["memory"].UNITS["lstm"]  # of all that this process tests after it


def test_the_fork_has_the_style_of_the_scripts(fork):
    for check in (["check"], ["format", "--check"]):
        command = [sys.executable, "-m", "ruff", *check, "--config", str(ROOT / "pyproject.toml"), str(fork.file)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_forks_lstm_is_its_equations_and_keeps_the_contract(fork):
    """Against a loop in numpy with resets; NaN before a reset; steps, halves and the whole; a frozen one's gradient."""
    T, B, N = 7, 3, 4
    x = np.random.default_rng(0).standard_normal((T, B, N)).astype(np.float32)
    reset = np.zeros((T, B), bool)
    reset[0, 0] = reset[3, 1] = reset[4, 1] = reset[6, 2] = True
    cell = fork.module.LSTM(features=N, forget_bias=0.5)
    carry = cell.initialize_carry(B)
    start = jax.tree.map(lambda leaf: leaf + 0.3, carry)  # a state that a reset at 0 must hide
    params = cell.init(jax.random.key(1), carry, x, reset)["params"]
    apply = jax.jit(lambda params, carry, x, reset: cell.apply({"params": params}, carry, x, reset))
    (c, h), y = apply(params, start, x, reset)

    def sigmoid(z):
        return 1 / (1 + np.exp(-z))

    W, U, b = (np.asarray(params[name], np.float64) for name in "WUb")
    state = [np.full((B, N), 0.3), np.full((B, N), 0.3)]
    for t in range(T):
        for leaf in state:
            leaf[reset[t]] = 0
        i, f, o, g = np.split(x[t] @ W + state[1] @ U + b, 4, axis=-1)
        state[0] = sigmoid(f + 0.5) * state[0] + sigmoid(i) * np.tanh(g)
        state[1] = sigmoid(o) * np.tanh(state[0])
        np.testing.assert_allclose(y[t], state[1], atol=1e-6)
    np.testing.assert_allclose(c, state[0], atol=1e-6)
    np.testing.assert_allclose(h, state[1], atol=1e-6)

    for cuts in ([3], range(1, T)):
        carry, parts = start, []
        for part, marks in zip(np.split(x, cuts), np.split(reset, cuts), strict=True):
            carry, out = apply(params, carry, part, marks)
            parts.append(out)
        np.testing.assert_allclose(np.concatenate(parts), y, atol=1e-6)

    poisoned = jax.tree.map(lambda leaf: leaf.at[0].set(jnp.nan), start)
    np.testing.assert_array_equal(apply(params, poisoned, x, reset)[1], y)

    def loss(params, x, freeze):
        unit = fork.module.LSTM(features=N, freeze=freeze)
        return jnp.square(unit.apply({"params": params}, start, x, reset)[1]).mean()

    (trained, through), (frozen, through_frozen) = (
        jax.grad(loss, argnums=(0, 1))(params, x, freeze) for freeze in (False, True)
    )
    assert all(np.abs(leaf).max() > 0 for leaf in trained.values())
    assert all(np.abs(leaf).max() == 0 for leaf in frozen.values())
    np.testing.assert_allclose(through, through_frozen, atol=1e-7)


def test_the_forks_maze_pays_the_turn_and_the_way(fork):
    env, params = fork.module.make("TMaze")
    keys = jax.random.split(jax.random.key(0), 64)
    obs, state = jax.vmap(lambda key: env.reset(key, params))(keys)
    side = np.asarray(obs[:, :2]).argmax(-1)
    assert set(side) == {0, 1} and np.asarray(obs)[:, 2].max() == 0
    step = jax.jit(jax.vmap(lambda key, state, action: env.step(key, state, action, params)))
    wrong = np.arange(64) % 2 == 1  # these take the other turn, and one step on the way that does not go on
    returns = np.zeros(64)
    for t in range(params.length):
        action = np.where(wrong & (t == 2), 0, 2) if t < params.length - 1 else np.where(wrong, 1 - side, side)
        assert (np.asarray(obs[:, 2]) == (t == params.length - 1)).all()
        assert t == 0 or np.asarray(obs[:, :2]).max() == 0, "the sign is seen once"
        obs, state, reward, done, info = step(keys, state, action)
        returns += np.asarray(reward)
        assert (np.asarray(done) == (t == params.length - 1)).all()
    assert np.asarray(info["terminated"]).all() and not np.asarray(info["truncated"]).any()
    np.testing.assert_array_equal(returns, np.where(wrong, -2, 1))
    assert np.asarray(obs[:, :2]).max(-1).min() == 1, "the next episode begins with a sign"


SMALL = "--hidden-size 8 --num-envs 4 --num-steps 16 --num-minibatches 2 --update-epochs 1"


def run_fork(fork, flags: str) -> Path:
    """Runs the fork's CLI with small sizes, and returns its run folder."""
    command = [sys.executable, str(fork.file), *flags.split(), *SMALL.split(), "--run-dir", str(fork.folder / "runs")]
    environment = {"XLA_FLAGS": "--xla_backend_optimization_level=0"} | os.environ
    done = subprocess.run(command, cwd=fork.folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return Path(re.search(r"run folder\s+(\S+)", done.stdout)[1])


@pytest.fixture(scope="module")
def forked_run(fork):
    return run_fork(fork, "--env TMaze --memory lstm --frozen --forget-bias 2 --total-timesteps 640")


def test_the_fork_trains_from_its_command_line(forked_run):
    assert re.fullmatch(r"TMaze__my_agent__lstm-frozen__1__\d+\.\d+", forked_run.name)
    config, result = (json.loads((forked_run / f"{name}.json").read_text()) for name in ("config", "eval"))
    assert config["args"]["forget_bias"] == 2 and result["environment_steps"] == 640
    assert config["parameters"]["memory_0"] == {"total": 544, "trainable": 0, "frozen": 544}  # 2 · 8 · 32 + 32
    assert result["lengths"] == [8] * 10 and set(result["returns"]) <= {1.0 - n for n in range(9)} | {-8.0}


def test_a_trained_agent_is_loaded_and_played_as_the_page_says(fork, forked_run, monkeypatch, capsys):
    """The notebook of docs/pqn_ffm.md, with another run and its script: it plays what the run's evaluation says."""
    (cell,) = blocks(ROOT / "docs" / "pqn_ffm.md", "python")
    cell, n = re.subn(r'Path\("runs/[^"]+"\)', f"Path({str(forked_run)!r})", cell)
    cell, m = re.subn(r"import pqn_ffm as script.*", "import my_agent as script", cell)
    assert (n, m) == (1, 1)
    names = {}
    exec(compile(cell, "docs/pqn_ffm.md", "exec"), names)
    printed = float(capsys.readouterr().out)
    assert printed == pytest.approx(float(names["returns"].mean()))
    state, script = names["state"], fork.module
    saved = script.serialization.msgpack_restore((forked_run / "checkpoint.msgpack").read_bytes())["state"]
    np.testing.assert_array_equal(state.params["q_values"]["kernel"], saved[".params['q_values']['kernel']"][0])
    # 51 steps are six whole episodes, each like one of the evaluation, and three steps of at most 1 lost.
    episodes = json.loads((forked_run / "eval.json").read_text())["returns"]
    assert 6 * min(episodes) - 3 <= names["returns"].min() and names["returns"].max() <= 6 * max(episodes)
    assert len(names["returns"]) == 4
