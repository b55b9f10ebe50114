"""Learning, on real budgets: minutes each, run by `pytest -m slow`."""

import json
import re

import numpy as np
import pytest
from conftest import ROOT

# Minutes of training are worth the seconds that XLA needs to optimise it.
OPTIMISED = {"JAX_DISABLE_MOST_OPTIMIZATIONS": None}
QUICK_START = re.search(r"pqn_ffm\.py (--env.*)", (ROOT / "README.md").read_text())[1]


def final_returns(script, tmp_path, flags):
    done = script(f"pqn_ffm.py {flags} --num-seeds 3", env=OPTIMISED)
    assert done.returncode == 0, done.stderr
    return [json.loads(file.read_text())["mean_return"] for file in (tmp_path / "runs").glob("*/eval.json")]


@pytest.mark.slow
def test_the_quick_start_of_the_readme_learns_with_every_seed(script, tmp_path):
    """Measured: 0.82 to 0.88. A player who guesses gets -0.5."""
    assert "--frozen" in QUICK_START
    returns = final_returns(script, tmp_path, QUICK_START)
    assert len(returns) == 3 and min(returns) > 0.5, returns


@pytest.mark.slow
def test_without_memory_the_same_budget_teaches_nothing(script, tmp_path):
    """The card to name was seen three steps ago: without memory, the best is the previous action's hint, a guess."""
    flags = QUICK_START.replace("--frozen", "--memory mlp").replace("--trace-size 16 --context-size 8", "")
    returns = final_returns(script, tmp_path, flags)
    assert len(returns) == 3 and np.mean(returns) < -0.3, returns


@pytest.mark.slow
def test_a_frozen_lru_recalls_what_an_mlp_cannot(script, tmp_path):
    """RepeatFirstEasy: name the suit of the first card at each of 52 steps. A player who guesses gets -0.5."""
    budget = "--env RepeatFirst --learning-rate 1e-3 --total-timesteps 200000 --num-seeds 3"
    returns = {}
    for agent in ("lru --frozen", "mlp"):
        done = script(f"pqn_frozen_rnn.py {budget} --memory {agent} --run-dir {agent[:3]}", env=OPTIMISED)
        assert done.returncode == 0, done.stderr
        files = (tmp_path / agent[:3]).glob("*/eval.json")
        returns[agent[:3]] = [json.loads(file.read_text())["mean_return"] for file in files]
        assert len(returns[agent[:3]]) == 3
    assert min(returns["lru"]) > max(returns["mlp"]) and np.mean(returns["lru"]) > np.mean(returns["mlp"]) + 0.5, (
        returns
    )
