"""Facts that hold for every script, each tested for all of them. A script joins by its rows in the tables."""

import functools
import importlib
import json
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import KEEP_CHECKPOINTS, ROOT
from flax import serialization

from memory import count_parameters, merge

# Flags that make a script small: two minibatches of an update, and two updates of a run. The first update ends before
# any episode does, the second one after some have.
SMALL = {
    "pqn_ffm": dict(
        env="RepeatPreviousEasy", hidden_size=16, trace_size=4, context_size=2, num_blocks=1, num_readout_blocks=1,
        num_envs=4, num_steps=30, num_minibatches=2, update_epochs=1, total_timesteps=240, learning_rate=1e-3,
        eval_episodes=2,
    ),
    "pqn_frozen_rnn": dict(
        env="RepeatPreviousEasy", memory="lru", hidden_size=16, num_blocks=1, num_readout_blocks=1, num_envs=4,
        num_steps=30, num_minibatches=2, update_epochs=1, total_timesteps=240, learning_rate=1e-3, eval_episodes=2,
    ),
    "ppo_memorychain": dict(
        delay=50, memory="gru", hidden_size=16, num_blocks=1, num_readout_blocks=1, num_envs=4, num_steps=30,
        num_minibatches=2, update_epochs=1, total_timesteps=240, learning_rate=1e-3, eval_episodes=2,
    ),
}  # fmt: skip
# Their episodes are longer than a test's rollouts: tests of their own have what is said here of episodes.
LONG = {
    "pqn_arcade_cnn": dict(
        env="CountRecallEasy", memory="lru", hidden_size=16, num_blocks=1, num_readout_blocks=1, num_envs=2,
        num_steps=4, num_minibatches=2, update_epochs=1, total_timesteps=16, learning_rate=1e-3, eval_episodes=1,
    ),
    "ppo_playground": dict(
        env="PendulumSwingup", impl="jax", memory="lru", hidden_size=16, num_blocks=1, num_readout_blocks=1, num_envs=2,
        num_steps=4, num_minibatches=2, update_epochs=1, total_timesteps=16, learning_rate=1e-3, eval_episodes=1,
    ),
}  # fmt: skip
ALL = SMALL | LONG
WITH_LONG_ONES_SLOW = [*SMALL, *(pytest.param(name, marks=pytest.mark.slow) for name in LONG)]
FIRST, *OTHERS = ALL
WITH_OTHERS_SLOW = [FIRST, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]

ALL_FROZEN = dict(frozen=True, frozen_mixers=True)
GRU = dict(memory="gru", trace_size=32, context_size=4)  # whose settings are not those of an FFM
# What is changed, and the beginnings of the names of the modules that are then frozen.
FROZEN = [
    ("pqn_ffm", dict(frozen=True), ["memory"]),
    pytest.param("pqn_ffm", dict(frozen_mixers=True) | GRU, ["mixer"], marks=pytest.mark.slow),
    ("pqn_ffm", ALL_FROZEN | GRU, ["memory", "mixer"]),
    pytest.param("pqn_frozen_rnn", dict(frozen=True), ["memory"], marks=pytest.mark.slow),
    ("pqn_frozen_rnn", ALL_FROZEN | dict(frozen_input=True, memory="gru"), ["memory", "mixer", "input"]),
    pytest.param("pqn_frozen_rnn", dict(frozen=True, memory="deepesn"), ["memory"], marks=pytest.mark.slow),
    ("ppo_memorychain", dict(frozen=True), ["memory"]),
    pytest.param("pqn_arcade_cnn", dict(frozen=True), ["memory"], marks=pytest.mark.slow),
    pytest.param("ppo_playground", dict(frozen=True), ["memory"], marks=pytest.mark.slow),
]
MEMORIES = [
    ("pqn_ffm", {}),
    ("pqn_ffm", GRU),
    ("pqn_frozen_rnn", {}),
    ("pqn_frozen_rnn", ALL_FROZEN | dict(memory="gru")),
    ("pqn_frozen_rnn", dict(frozen=True, memory="deepesn")),
    ("ppo_memorychain", {}),
    pytest.param("ppo_memorychain", dict(memory="lru"), marks=pytest.mark.slow),
    pytest.param("pqn_ffm", GRU | dict(memory="mlp"), marks=pytest.mark.slow),
    pytest.param("pqn_ffm", dict(env="NoisyStatelessCartPoleEasy"), marks=pytest.mark.slow),
]


def make_train(name: str, **changes) -> SimpleNamespace:
    module = importlib.import_module(name)
    args = module.Args(**ALL[name] | changes)
    module.check_args(args)
    return module.make_train(args)


@functools.cache
def made(name: str, changes: tuple = ()) -> SimpleNamespace:
    """The functions of a small run, each compiled once, and its start; `changes` are pairs of a flag and its value."""
    train = make_train(name, **dict(changes))
    functions = {name: jax.jit(function) for name, function in vars(train).items() if callable(function)}
    return SimpleNamespace(start=functions["init"](jnp.int32(3)), **functions)


# --------------------------------------------------------------------------------------------------------------- sizes
HUGE = [
    *((name, "--hidden-size 2147483647") for name in ALL),
    ("pqn_ffm", "--trace-size 2147483647 --context-size 4"),
    ("pqn_ffm", "--num-envs 2000000000 --num-steps 1 --num-minibatches 1 --total-timesteps 2e9"),
]


@pytest.mark.parametrize("name, flags", HUGE)
def test_a_run_that_no_memory_holds_is_one_line_before_anything_is_compiled(name, flags, monkeypatch, tmp_path, capfd):
    module, small = importlib.import_module(name), []
    for flag, value in ALL[name].items():
        small += [f"--{flag.replace('_', '-')}", str(value)]
    monkeypatch.setattr(jax.stages.Traced, "lower", None)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *small, *flags.split()])
    with pytest.raises(SystemExit) as ended:
        module.main()
    printed = capfd.readouterr()
    (line,) = printed.err.splitlines()
    assert ended.value.code == 2 and printed.out == "" and not any(tmp_path.iterdir())
    assert line.startswith(f"{name}.py: error: --hidden-size, --num-envs or the memory is too large: ")


# -------------------------------------------------------------------------------------------------------------- frozen
@pytest.mark.parametrize("name, changes, frozen", FROZEN)
def test_frozen_leaves_stay_bit_for_bit_have_no_optimiser_state_and_everything_else_moves(name, changes, frozen):
    run = made(name, tuple(changes.items()))
    state, _ = run.train_iteration(run.start)
    before, after = (jax.device_get(merge(s.params, s.frozen)) for s in (run.start, state))
    for module in before:
        same = jax.tree.leaves(jax.tree.map(np.array_equal, before[module], after[module]))
        still = module.startswith(tuple(frozen))
        # Of a trained module every leaf moves, also those before a frozen one: gradients pass through it.
        assert all(same) if still else not any(same), module
    # Adam keeps two moments of each trainable parameter, and nothing of a frozen one.
    trainable = sum(x.size for x in jax.tree.leaves(state.params))
    assert sum(x.size for x in jax.tree.leaves(state.opt_state) if x.ndim) == 2 * trainable
    counts = count_parameters(state.params, state.frozen)
    assert counts["all"]["trainable"] == trainable
    for module in before:
        assert (counts[module]["trainable"] == 0) == module.startswith(tuple(frozen)), module


@pytest.mark.parametrize("name", SMALL)
def test_an_update_in_which_no_episode_ends_has_no_nan(name):
    run = made(name, (("frozen", True),))
    state, metrics = run.train_iteration(run.start)
    assert metrics["charts/episodes"] == 0 and all(np.isfinite(value) for value in metrics.values())
    _, metrics = run.train_iteration(state)
    assert metrics["charts/episodes"] > 0


# -------------------------------------------------------------------------------------------- acting equals training
def disagreement_of_pqn(run, state, transitions):
    """Half of the mean squared difference of Q values, by the loss; and the mean Q value less that of the rollout."""
    taken = np.take_along_axis(np.asarray(transitions["q_values"]), np.asarray(transitions["action"])[..., None], -1)
    loss, mean = run.loss(state.params, state.frozen, state.runner.carry, transitions, taken[..., 0])
    return {"loss": loss, "mean": mean - taken.mean()}


def disagreement_of_ppo(run, state, transitions):
    """Half of the mean squared difference of values; the mean of ratio - 1 - log(ratio), which is 0 only at 1."""
    targets = transitions["reward"], transitions["value"]
    _, losses = run.loss(state.params, state.frozen, state.runner.carry, transitions, *targets)
    return {name: losses[name] for name in ("value_loss", "approx_kl", "clipfrac")}


DISAGREEMENT = {
    "pqn_ffm": disagreement_of_pqn,
    "pqn_frozen_rnn": disagreement_of_pqn,
    "ppo_memorychain": disagreement_of_ppo,
}


@pytest.mark.parametrize("name, changes", MEMORIES)
def test_the_first_minibatch_after_a_rollout_reproduces_it(name, changes):
    """This finds most faults of resets, carries and previous actions. The rollout begins in the middle of episodes."""
    run = made(name, tuple(changes.items()))
    runner, _ = run.rollout(run.start, jax.random.key(0))
    state = run.start.replace(runner=runner)
    _, transitions = run.rollout(state, jax.random.key(1))
    assert transitions["reset"][1:].any() and not transitions["reset"].all()
    found = DISAGREEMENT[name](run, state, transitions)
    assert all(abs(value) < 1e-6 for value in found.values()), found


# --------------------------------------------------------------------------------------------------------- time limits
TARGETS = {
    "pqn_ffm": "compute_targets",
    "pqn_frozen_rnn": "compute_targets",
    "ppo_memorychain": "compute_advantages",
}


@pytest.mark.parametrize("name", SMALL)
def test_a_time_limit_is_valued_by_what_was_seen_last_and_another_end_is_not(name):
    run, end = made(name, (("frozen", True),)), 10
    runner, transitions = run.rollout(run.start, jax.random.key(0))
    ends = {flag: np.zeros((30, 4), bool) for flag in ("done", "terminated", "truncated")}
    ends["done"][end, :3] = True
    ends["truncated"][end, :2] = True  # of the first two,
    ends["terminated"][end, 1:3] = True  # the second is over, too: there, and in the third, nothing follows

    def changed(**changes):
        """Where the targets change with a part of the transitions."""
        targets = getattr(run, TARGETS[name])
        state = run.start.params, run.start.frozen, runner
        return np.asarray(targets(*state, transitions | ends) != targets(*state, transitions | ends | changes))

    expected = np.zeros((30, 4), bool)
    expected[: end + 1, 0] = True
    seen = transitions["final_obs"].at[end].add(1)
    np.testing.assert_array_equal(changed(final_obs=seen), expected)
    memory = jax.tree.map(lambda leaf: leaf.at[end].add(1), transitions["carry"])
    np.testing.assert_array_equal(changed(carry=memory), expected)


# ---------------------------------------------------------------------------------------------- what users set for JAX
CHECKERS = {"JAX_DEBUG_KEY_REUSE": "1", "JAX_ENABLE_CUSTOM_PRNG": "1", "JAX_DEBUG_NANS": "1"}


@pytest.fixture(scope="module")
def checked_runs(tmp_path_factory):
    """checked_runs(name): a run under all of JAX's checkers, its process and its folder. Each is made once."""
    folder = tmp_path_factory.mktemp("checked")
    return functools.cache(lambda name: start(folder / name, name, CHECKERS))


def start(folder, name, env, flags=None):
    """A run of the script in a process of its own, which tells of files left open; its folder, and all checkpoints."""
    (folder / "kept").mkdir(parents=True)
    (folder / "sitecustomize.py").write_text(KEEP_CHECKPOINTS)
    if flags is None:
        flags = ["--checkpoint-every", "0"]
        for flag, value in ALL[name].items():
            flags += [f"--{flag.replace('_', '-')}", str(value)]
    command = [sys.executable, "-W", "error::ResourceWarning", str(ROOT / f"{name}.py"), *flags]
    env = os.environ | {"PYTHONPATH": str(folder), "KEPT": str(folder / "kept")} | env
    process = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    return SimpleNamespace(process=process, run=next(folder.glob("runs/*"), None), kept=folder / "kept")


def state_of(run, file="checkpoint.msgpack") -> dict[str, np.ndarray]:
    return serialization.msgpack_restore((run / file).read_bytes())["state"]


def returns_of(run) -> list[float]:
    return json.loads((run / "eval.json").read_text())["returns"]


@pytest.mark.parametrize("name", WITH_OTHERS_SLOW)
def test_no_random_number_is_used_twice_nothing_is_nan_and_nothing_warns(name, checked_runs):
    """Training and evaluation under the checker of keys, that of NaNs, and that of files left open."""
    process = checked_runs(name).process
    assert process.returncode == 0 and process.stderr == "", process.stderr[-3000:]


@pytest.mark.parametrize("name", WITH_LONG_ONES_SLOW)
def test_with_64_bits_by_default_every_type_is_the_same(name):
    """JAX_ENABLE_X64 changes the type of every array whose type is not named. No loop's carry may change it."""

    def types():
        train = make_train(name)
        state = jax.eval_shape(train.init, jnp.int32(3))
        results = state, jax.eval_shape(train.train_iteration, state), jax.eval_shape(train.evaluate, state)
        return {jax.tree_util.keystr(path): str(x.dtype) for path, x in jax.tree.leaves_with_path(results)}

    expected = types()
    with jax.enable_x64(True):
        assert types() == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_with_64_bits_by_default_a_run_is_the_same(name, checked_runs, tmp_path):
    wide = start(tmp_path / "wide", name, {"JAX_ENABLE_X64": "1"})
    assert wide.process.returncode == 0, wide.process.stderr[-3000:]
    expected, found = state_of(checked_runs(name).run), state_of(wide.run)
    for path, x in expected.items():
        assert found[path].dtype == x.dtype, path
        np.testing.assert_allclose(found[path], x, rtol=1e-4, atol=1e-5, err_msg=path)
    np.testing.assert_allclose(returns_of(wide.run), returns_of(checked_runs(name).run), rtol=1e-4)


@pytest.mark.parametrize("name", WITH_OTHERS_SLOW)
def test_a_run_resumed_after_its_first_update_ends_the_same_bit_for_bit(name, checked_runs, tmp_path):
    shutil.copytree(checked_runs(name).run, tmp_path / "runs" / "run")
    run = tmp_path / "runs" / "run"
    shutil.copy(checked_runs(name).kept / "1", run / "checkpoint.msgpack")
    (run / "eval.json").unlink()
    resumed = start(tmp_path / "resumed", name, CHECKERS, ["--resume", str(run)])
    assert resumed.process.returncode == 0 and resumed.process.stderr == "", resumed.process.stderr[-3000:]
    expected, found = state_of(checked_runs(name).run), state_of(run)
    assert expected.keys() == found.keys() and len(expected) > 20
    for path, x in expected.items():
        np.testing.assert_array_equal(found[path], x, err_msg=path)
    assert returns_of(run) == returns_of(checked_runs(name).run)
