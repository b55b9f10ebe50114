"""What several scripts need stands in each of them, identical to the letter, between two markers."""

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from conftest import ROOT

START = re.compile(r"\s*# --- shared block: (.+) ---")
END = re.compile(r"\s*# --- end shared block: (.+) ---")


def shared_blocks(text: str) -> dict[str, list[str]]:
    """The lines of each block, by its name. Raises ValueError where markers do not pair up."""
    blocks, name = {}, None
    for number, line in enumerate(text.splitlines(), 1):
        if start := START.fullmatch(line):
            if name is not None or start[1] in blocks:
                raise ValueError(f"line {number}: block {start[1]!r} starts inside another, or twice")
            name = start[1]
            blocks[name] = []
        elif end := END.fullmatch(line):
            if end[1] != name:
                raise ValueError(f"line {number}: block {end[1]!r} ends, but {name!r} is open")
            name = None
        elif "shared block" in line:
            raise ValueError(f"line {number}: not quite a marker: {line.strip()}")
        elif name is not None:
            blocks[name].append(line)
    if name is not None:
        raise ValueError(f"block {name!r} has no end")
    return blocks


def differences(scripts: dict[str, str]) -> list[str]:
    """What is wrong with the shared blocks of these scripts, name to text; empty when all copies agree."""
    problems, copies = [], defaultdict(dict)
    for script, text in scripts.items():
        try:
            for name, lines in shared_blocks(text).items():
                copies[name][script] = lines
        except ValueError as error:
            problems.append(f"{script}: {error}")
    for name, by_script in copies.items():
        if missing := scripts.keys() - by_script.keys():
            problems.append(f"block {name!r} is missing in {', '.join(sorted(missing))}")
        first, *others = by_script
        problems += [f"block {name!r} differs in {first} and {s}" for s in others if by_script[s] != by_script[first]]
    return problems


def scripts() -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(ROOT.glob("p[qp][no]_*.py"))}


def test_all_copies_are_identical():
    assert differences(scripts()) == []


def test_every_script_has_the_block():
    for name, text in scripts().items():
        assert shared_blocks(text).keys() == {"runs"}, name


# What a script may have, from its first line to its last: a new line is paid for with an old one.
LIMITS = {
    "pqn_ffm.py": 759,
    "pqn_frozen_rnn.py": 781,
    "ppo_memorychain.py": 786,
    "pqn_arcade_cnn.py": 899,
    "ppo_playground.py": 953,
}
SHARED = 325


def test_there_is_a_limit_for_every_script():
    assert scripts().keys() == LIMITS.keys()


@pytest.mark.parametrize("name", LIMITS)
def test_a_script_can_be_read_in_one_sitting(name):
    lines = scripts()[name].splitlines()
    assert len(lines) <= LIMITS[name]
    assert max(map(len, lines)) <= 120
    assert sum(map(len, shared_blocks(scripts()[name]).values())) <= SHARED


@pytest.mark.parametrize("name", LIMITS)
def test_the_order_of_a_script_is_the_same_in_all_and_the_agent_is_on_the_second_screen(name):
    text = scripts()[name]
    order = [
        "class Args",
        "def make_env(",
        "class Agent",
        "class TrainState",
        "def loss(",
        "def evaluate(",
        "def main(",
    ]
    places = [re.search(rf"^\s*{re.escape(part)}", text, re.M) for part in order]
    assert all(places), [part for part, place in zip(order, places, strict=True) if place is None]
    lines = [text.count("\n", 0, place.start()) + 1 for place in places]
    # Tasks from outside bring their masks and pictures with them, which stand before the agent.
    longer = {"pqn_arcade_cnn.py": 237, "ppo_playground.py": 220}
    assert lines == sorted(lines) and lines[2] < longer.get(name, 150)


TEXT = "a\n# --- shared block: x ---\nb\n    c\n# --- end shared block: x ---\nd\n"


@pytest.mark.parametrize(
    "other, problem",
    [
        (TEXT.replace("    c", "   c"), "differs"),
        (TEXT.replace("b\n", "b \n"), "differs"),
        (TEXT.replace("b\n", ""), "differs"),
        (TEXT.replace("b\n", "b\n\n"), "differs"),
        (TEXT.replace(": x ---", ": y ---"), "missing"),
        (TEXT.replace("# --- end shared block: x ---\n", ""), "no end"),
        (TEXT.replace("# --- end shared block: x", "# --- end shared block: y"), "is open"),
        (TEXT.replace("# --- shared block: x ---\n", ""), "is open"),
        (TEXT.replace("# --- shared block: x ---", "# -- shared block: x --"), "not quite a marker"),
        (TEXT + TEXT, "twice"),
        ("a\nd\n", "missing"),
    ],
)
def test_the_check_finds_planted_differences(other, problem):
    assert differences({"one.py": TEXT, "two.py": TEXT}) == []
    found = differences({"one.py": TEXT, "two.py": other})
    assert found and any(problem in line for line in found), found


def test_code_outside_the_blocks_may_differ_and_indentation_of_markers_too():
    indented = TEXT.replace("# ---", "    # ---").replace("a\n", "z\n").replace("d\n", "")
    assert differences({"one.py": TEXT, "two.py": indented}) == []


def test_a_script_imports_nothing_of_the_project_but_memory_and_popjym():
    modules = {path.stem for path in ROOT.glob("*.py")} | {path.parent.name for path in ROOT.glob("*/__init__.py")}
    for name, text in scripts().items():
        imported = set(re.findall(r"^\s*(?:from|import) (\w+)", text, re.M))
        assert imported & modules <= {"memory", "popjym"}, name


def test_importing_the_scripts_starts_nothing(tmp_path):
    names = ", ".join(Path(name).stem for name in scripts())
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import {names}"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "" and not list(tmp_path.iterdir()), done.stderr
