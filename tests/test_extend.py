"""Runs that go on to more steps, or are evaluated elsewhere or while they train; what TensorBoard shows of flags.

As in test_runs.py, one script stands for all. The programs run in this process, from their command lines.
"""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tensorboard.backend.event_processing import event_accumulator
from tensorboard.plugins.hparams import metadata
from test_runs import FLAGS, STEPS, assert_one_line_error, checkpoint, contents, points

import popjym
import ppo_memorychain
import pqn_ffm

EVAL = "eval/episodic_return"
LEARNING_RATE = 3e-2  # so that six updates make a difference to the greedy episodes
SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """run("--resume …") is the finished program: its returncode, and what it printed."""
    printed = tmp_path_factory.mktemp("printed")

    def run(flags: str, script=pqn_ffm):
        handlers, columns = [signal.getsignal(number) for number in SIGNALS], os.environ.get("COLUMNS")
        generator, code = jax.config.jax_default_prng_impl, 0
        with contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", [f"{script.__name__}.py", *flags.split()])
            patch.setattr(fcntl, "flock", lambda *_: None)  # this process would hold it until it ends
            out, err = (stack.enter_context(open(printed / name, "w")) for name in ("out", "err"))
            stack.enter_context(contextlib.redirect_stdout(out))
            stack.enter_context(contextlib.redirect_stderr(err))
            try:
                script.main()
            except SystemExit as ended:
                code = ended.code
            finally:
                jax.config.update("jax_default_prng_impl", generator)
                os.environ.pop("COLUMNS") if columns is None else patch.setenv("COLUMNS", columns)
                for number, handler in zip(SIGNALS, handlers, strict=True):
                    signal.signal(number, handler)
        stdout, stderr = ((printed / name).read_text() for name in ("out", "err"))
        return SimpleNamespace(returncode=code, stdout=stdout, stderr=stderr)

    return run


def start(run, folder: Path, flags: str = "") -> list[Path]:
    """The folders of a run of two seeds and of six updates, from its start to its end."""
    changed = {"learning-rate": LEARNING_RATE, "total-timesteps": 384, "seed": 7, "num-seeds": 2, "run-dir": folder}
    small = " ".join(f"--{name} {value}" for name, value in (FLAGS | changed).items())
    process = run(f"{small} --frozen {flags}")
    assert process.returncode == 0 and process.stderr == "", process.stderr
    return sorted(folder.iterdir())


@pytest.fixture(scope="module")
def plain(run, tmp_path_factory):
    """The folders of a run that is only trained and evaluated. Tests that change something copy it."""
    return start(run, tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def watched(run, tmp_path_factory):
    """The same run with evaluations while it trains: its folders, and its checkpoints by their update."""
    kept, write = tmp_path_factory.mktemp("kept"), pqn_ffm.write

    def write_and_keep(file, data):
        write(file, data)
        if file.name == "checkpoint.msgpack":
            shutil.copy(file, kept / str(checkpoint(file.parent).update))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pqn_ffm, "write", write_and_keep)
        folder = tmp_path_factory.mktemp("watched")
        runs = start(run, folder, "--eval-every 96 --keep-best --checkpoint-every 0")
    return SimpleNamespace(runs=runs, kept=kept)


def copy(runs: list[Path], folder: Path) -> list[Path]:
    shutil.copytree(runs[0].parent, folder / "copy")
    return sorted((folder / "copy").iterdir())


@pytest.fixture(scope="module")
def extended(run, plain, tmp_path_factory):
    """The plain run extended from 6 updates to 12."""
    runs = copy(plain, tmp_path_factory.mktemp("extended"))
    process = run(f"--resume {runs[1]} --total-timesteps 7.68e2")
    assert process.returncode == 0 and process.stderr == "", process.stderr
    return SimpleNamespace(runs=runs, process=process)


def read(run: Path, name: str = "eval") -> dict:
    return json.loads((run / f"{name}.json").read_text())


def state_of(run: Path, name: str = "checkpoint.msgpack", **changed):
    """The arguments of a run, its functions, and the state [S, ...] that a checkpoint holds."""
    args = pqn_ffm.Args(**read(run, "config")["args"] | changed)
    train = pqn_ffm.make_train(args)
    shapes = jax.eval_shape(jax.vmap(train.init), jnp.arange(args.seed, args.seed + args.num_seeds))
    return args, train, pqn_ffm.load(run / name, shapes)[0]


# --------------------------------------------------------------------------------------------------------- extending
def test_an_extended_run_goes_on_from_its_state_with_the_schedules_of_the_new_total(plain, extended):
    assert checkpoint(plain[0]).update == 6 and checkpoint(extended.runs[0]).update == 12
    # The last checkpoint of the short run, trained on by six updates of a run of twelve.
    args, train, state = state_of(plain[0], total_timesteps=768)
    iterate = jax.jit(lambda state: jax.lax.map(train.train_iteration, state))
    losses = []
    for _ in range(6):
        state, metrics = iterate(state)
        losses.append(metrics["losses/td_loss"])
    saved = checkpoint(extended.runs[0]).state
    for path, leaf in jax.tree.leaves_with_path(state):
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(saved[name], leaf, rtol=1e-4, atol=1e-6, err_msg=name)
    steps = np.arange(1, 13) * STEPS
    for i, (old, new) in enumerate(zip(plain, extended.runs, strict=True)):
        old, new = points(old), points(new)
        for tag in (tag for tag in new if tag.startswith(("losses/", "memory_0/"))):
            assert [step for step, _ in new[tag]] == steps.tolist() and new[tag][:6] == old[tag], tag
        np.testing.assert_allclose([value for _, value in new["losses/td_loss"]][6:], [x[i] for x in losses], rtol=1e-4)
        # Update n (from 0) is made with what is left of the line at its first step: the old one, then the new one.
        for total, updates in ((384, range(6)), (768, range(6, 12))):
            for n in updates:
                learning_rate = LEARNING_RATE + (1e-10 - LEARNING_RATE) * n * STEPS / total
                epsilon = 1 + (0.05 - 1) * min(1, n * STEPS / (0.25 * total))
                assert new["charts/learning_rate"][n] == ((n + 1) * STEPS, pytest.approx(learning_rate, rel=1e-5))
                assert new["charts/epsilon"][n] == ((n + 1) * STEPS, pytest.approx(epsilon, rel=1e-5))
        assert [step for step, _ in new[EVAL]] == [384, 768], "of the old end, and of the new one"


def test_an_extended_run_says_so_in_its_files(plain, extended):
    for old, new in zip(plain, extended.runs, strict=True):
        before, config = read(old, "config"), read(new, "config")
        assert before["args"]["total_timesteps"] == 384 and config["args"]["total_timesteps"] == 768
        assert config | {"args": None} == before | {"args": None}
        assert config["args"] | {"total_timesteps": 384} == before["args"]
        assert read(old)["environment_steps"] == 384 and read(new)["environment_steps"] == 768
        assert points(new)[EVAL][-1] == (768, pytest.approx(read(new)["mean_return"]))
        assert f"{read(new)['mean_return']:.3f}" in extended.process.stdout


def test_a_total_that_was_reached_long_ago_is_finished_and_changes_nothing(run, extended):
    before = contents(extended.runs[0].parent)
    for total in (768, 384, 64):
        process = run(f"--resume {extended.runs[0]} --total-timesteps {total}")
        assert process.returncode == 0 and process.stderr == "" and "finished" in process.stdout
        assert "compile time" not in process.stdout
        assert contents(extended.runs[0].parent) == before


def test_an_extended_run_is_unfinished_until_it_is_evaluated_again(run, plain, extended, tmp_path, monkeypatch):
    """Killed at the worst moment: all updates are made, and the new evaluation is not written yet."""
    runs, write = copy(plain, tmp_path), pqn_ffm.write

    def killed(file, data):
        if file.name == "eval.json":
            raise KeyboardInterrupt
        write(file, data)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(pqn_ffm, "write", killed)
        run(f"--resume {runs[0]} --total-timesteps 768")
    assert checkpoint(runs[0]).update == 12 and not any((folder / "eval.json").exists() for folder in runs)
    assert run(f"--resume {runs[0]}").returncode == 0
    for folder, other in zip(runs, extended.runs, strict=True):
        assert read(folder)["returns"] == read(other)["returns"] and read(folder)["environment_steps"] == 768


def test_a_finished_run_plays_more_episodes_when_it_is_asked_to(run, plain, tmp_path):
    runs = copy(plain, tmp_path)
    process = run(f"--resume {runs[0]} --eval-episodes 5")
    assert process.returncode == 0 and process.stderr == ""
    a, b = checkpoint(plain[0]), checkpoint(runs[0])
    assert a.update == b.update == 6 and all((a.state[path] == b.state[path]).all() for path in a.state)
    evaluated = run(f"--evaluate {runs[0]}")
    assert evaluated.returncode == 0
    for folder in runs:
        assert len(read(folder)["returns"]) == 5 and read(folder, "config")["args"]["eval_episodes"] == 5
        assert read(folder, "evaluate")["returns"] == read(folder)["returns"]
        (folder / "evaluate.json").unlink()
    before = contents(runs[0].parent)
    assert "finished" in run(f"--resume {runs[0]}").stdout
    assert contents(runs[0].parent) == before


# -------------------------------------------------------------------------------------------------- evaluated elsewhere
def played(runs: list[Path], i: int, env: str, forget: bool) -> tuple[np.ndarray, np.ndarray]:
    """Returns and lengths of three greedy episodes of seed i, by a loop over steps and over episodes.

    To forget is to give the agent the memory of the start at every step.
    """
    args, _, state = state_of(runs[0])
    params = jax.tree.map(lambda leaf: leaf[i], pqn_ffm.merge(state.params, state.frozen))
    env, env_params = popjym.make(env)
    agent = pqn_ffm.Agent(args, env.action_space(env_params).n)
    act = jax.jit(lambda carry, *inputs: agent.apply({"params": params}, carry, *inputs))
    env_reset = jax.jit(lambda key: env.reset(key, env_params))
    env_step = jax.jit(lambda *now: env.step(*now, env_params))
    key, reset_key = jax.random.split(jax.random.split(jax.random.key(7 + i), 4)[3])
    reset_keys, step_keys = jax.random.split(reset_key, 3), []
    for _ in range(200):
        key, step_key = jax.random.split(key)
        step_keys.append(jax.random.split(jax.random.split(step_key, 3)[2], 3))
    returns, lengths = [], []
    for episode in range(3):
        obs, env_state = env_reset(reset_keys[episode])
        carry, action, rewards, done = agent.initialize_carry(1), -1, [], False
        while not done:
            if forget:
                carry = agent.initialize_carry(1)
            reset = jnp.zeros((1, 1), bool)  # the memory is already that of the start
            carry, q_values = act(carry, obs[None, None], jnp.full((1, 1), action), reset)
            action = int(np.asarray(q_values)[0, 0].argmax())
            obs, env_state, reward, done, _ = env_step(step_keys[len(rewards)][episode], env_state, action)
            rewards.append(float(reward))
        returns.append(sum(rewards))
        lengths.append(len(rewards))
    return np.array(returns), np.array(lengths)


@pytest.mark.parametrize("forget", [False, True])
@pytest.mark.parametrize("env", ["RepeatPreviousEasy", "RepeatPreviousMedium"])
def test_an_agent_plays_another_task_of_the_same_sizes_and_without_its_memory(run, extended, tmp_path, env, forget):
    runs = copy(extended.runs, tmp_path)
    before = contents(runs[0].parent)
    process = run(f"--evaluate {runs[1]} --env {env} {'--forget' * forget}")
    assert process.returncode == 0 and process.stderr == "", process.stderr
    for i, folder in enumerate(runs):
        result = read(folder, "evaluate")
        returns, lengths = played(runs, i, env, forget)
        np.testing.assert_allclose(result["returns"], returns, atol=1e-5)
        assert result["lengths"] == lengths.tolist() == [51 if env == "RepeatPreviousEasy" else 103] * 3
        assert result["env"] == env and result["forget"] == forget and result["environment_steps"] == 768
        if forget and env == "RepeatPreviousEasy":
            assert result["returns"] != read(folder)["returns"]
        (folder / "evaluate.json").unlink()
    assert contents(runs[0].parent) == before


@pytest.mark.slow
def test_a_memory_chain_of_another_delay_is_another_task_of_the_same_sizes(run, tmp_path):
    """Its name follows the delay."""
    small = "--hidden-size 8 --memory gru --num-envs 2 --num-steps 32 --num-minibatches 2 --update-epochs 1"
    command = f"--delay 20 {small} --num-readout-blocks 1 --total-timesteps 64 --eval-episodes 2 --run-dir {tmp_path}"
    assert run(command, ppo_memorychain).returncode == 0
    (folder,) = tmp_path.iterdir()
    evaluated = run(f"--evaluate {folder} --delay 9 --forget", ppo_memorychain)
    assert evaluated.returncode == 0, evaluated.stderr
    result = read(folder, "evaluate")
    assert result["env"] == "MemoryChain-9" and result["delay"] == 9 and result["forget"]
    assert result["lengths"] == [10, 10] and read(folder)["lengths"] == [21, 21]
    before = contents(folder)
    for flags in ("--env MemoryChain-9", "--env MemoryChain-9 --delay 9"):
        assert_one_line_error(run(f"--evaluate {folder} {flags}", ppo_memorychain), "--env MemoryChain-9", "keeps it")
    assert_one_line_error(run("--env MemoryChain-9 --delay 20", ppo_memorychain), "--env MemoryChain-9", "20")
    assert contents(folder) == before


@pytest.mark.parametrize("env", ["CountRecallEasy", "StatelessCartPoleEasy"])
def test_a_task_of_other_sizes_is_one_line_and_nothing_is_written(run, plain, env):
    """Of other actions, and of other observations."""
    before = contents(plain[0].parent)
    process = run(f"--evaluate {plain[0]} --env {env}")
    assert_one_line_error(process, "--env", "other sizes")
    assert process.stdout == "" and contents(plain[0].parent) == before


# ----------------------------------------------------------------------------------------- evaluated while it trains
def test_evaluation_while_training_changes_nothing_of_it(plain, watched):
    a, b = checkpoint(plain[0]), checkpoint(watched.runs[0])
    assert a.update == b.update and a.state.keys() == b.state.keys()
    for path in a.state:
        np.testing.assert_array_equal(a.state[path], b.state[path], err_msg=path)
    for folder, other in zip(plain, watched.runs, strict=True):
        a, b = points(folder), points(other)
        assert a.keys() == b.keys() and all(a[tag] == b[tag] for tag in a.keys() - {"charts/SPS", EVAL})
        assert read(folder)["returns"] == read(other)["returns"]


def test_evaluation_while_training_is_that_of_a_checkpoint_of_its_update(run, watched, tmp_path):
    """Updates end at steps 64, 128, …; each one that reaches or passes a multiple of 96 is evaluated, and no other."""
    curves = [points(folder)[EVAL] for folder in watched.runs]
    runs = copy(watched.runs, tmp_path)
    for n, update in enumerate((2, 3, 5, 6)):
        shutil.copy(watched.kept / str(update), runs[0] / "checkpoint.msgpack")
        assert run(f"--evaluate {runs[0]}").returncode == 0
        for curve, folder in zip(curves, runs, strict=True):
            result = read(folder, "evaluate")
            assert result["environment_steps"] == update * STEPS and not result["keep_best"]
            assert curve[n] == (update * STEPS, pytest.approx(result["mean_return"]))
    assert {len(curve) for curve in curves} == {4}


def best_of(runs: list[Path]) -> tuple[float, int]:
    """The best mean over the seeds of what was logged, and the first update that had it."""
    curves = np.array([points(folder)[EVAL] for folder in runs])  # [S, N, 2]
    means = curves[..., 1].mean(0)
    return means.max(), int(curves[0, means.argmax(), 0]) // STEPS


def test_the_best_agent_is_kept_and_plays_when_it_is_asked_for(run, watched, tmp_path):
    runs = copy(watched.runs, tmp_path)
    best, update = best_of(runs)
    kept = checkpoint(runs[0], "best.msgpack")
    assert kept.update == update and not (runs[1] / "best.msgpack").exists()
    state = checkpoint(watched.kept, str(update)).state
    assert all((kept.state[path] == state[path]).all() for path in state)
    assert run(f"--evaluate {runs[1]} --keep-best").returncode == 0
    results = [read(folder, "evaluate") for folder in runs]
    assert np.mean([result["mean_return"] for result in results]) == pytest.approx(best)
    assert all(result["environment_steps"] == update * STEPS and result["keep_best"] for result in results)


@pytest.mark.parametrize("after, better", [(2, 0), (5, 0), (2, 0.01)])
def test_the_best_agent_survives_a_resume(run, watched, tmp_path, after, better):
    """Resumed before the best update, after it, and with one before that was better than all that come."""
    runs = copy(watched.runs, tmp_path)
    notes = pqn_ffm.serialization.msgpack_restore((watched.kept / str(after)).read_bytes())
    best, update = best_of(watched.runs)
    assert 2 < update < 5
    if better:
        notes["best"], notes["best_update"] = best + better, 1
    (runs[0] / "checkpoint.msgpack").write_bytes(pqn_ffm.serialization.msgpack_serialize(notes))
    for file in [*runs[0].glob("best.*"), *(folder / "eval.json" for folder in runs)]:
        file.unlink()
    assert run(f"--resume {runs[0]}").returncode == 0
    last = pqn_ffm.serialization.msgpack_restore((runs[0] / "checkpoint.msgpack").read_bytes())
    assert last["best"] == pytest.approx(best + better)
    written = (runs[0] / "best.msgpack").exists()
    assert written == (not better and update > after)
    assert not written or checkpoint(runs[0], "best.msgpack").update == update
    assert all(points(folder)[EVAL] == points(other)[EVAL] for folder, other in zip(runs, watched.runs, strict=True))


@pytest.mark.parametrize("when", ["before best.msgpack is written", "after"])
def test_the_best_agent_is_of_the_run_that_goes_on_wherever_it_was_killed(run, watched, tmp_path, monkeypatch, when):
    """Killed at its first best agent, long before a checkpoint is due, and resumed with other flags."""
    write = pqn_ffm.write

    def killed(file, data):
        if file.name != "best.msgpack" or when == "after":
            write(file, data)
        if file.name == "best.msgpack":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(pqn_ffm, "write", killed)
        start(run, tmp_path, "--eval-every 96 --keep-best --checkpoint-every 1000")
    runs = sorted(tmp_path.iterdir())
    assert checkpoint(runs[0]).update == 2 and (runs[0] / "best.msgpack").exists() == (when == "after")
    # It is not evaluated again while it trains: what is the best then is what was the best before.
    assert run(f"--resume {runs[0]} --total-timesteps 768 --eval-every 1e6").returncode == 0
    kept, expected = checkpoint(runs[0], "best.msgpack"), checkpoint(watched.kept, "2").state
    assert kept.update == 2 and checkpoint(runs[0]).update == 12
    assert all((kept.state[path] == expected[path]).all() for path in expected)


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--forget", ["--forget True", "--evaluate"]),
        ("--keep-best", ["--keep-best True", "--eval-every"]),
        ("--eval-every 0", ["--eval-every 0", "positive"]),
        ("--eval-every -64", ["--eval-every -64", "positive"]),
        ("--eval-every nan", ["--eval-every nan"]),
    ],
)
def test_flags_that_make_no_sense_are_one_line(run, tmp_path, monkeypatch, flags, words):
    monkeypatch.chdir(tmp_path)
    assert_one_line_error(run(flags), *words)
    assert not any(tmp_path.iterdir())


def test_the_best_agent_of_a_run_that_kept_none_is_one_line(run, plain):
    before = contents(plain[0].parent)
    assert_one_line_error(run(f"--evaluate {plain[0]} --keep-best"), "--keep-best", "--eval-every")
    assert_one_line_error(run(f"--resume {plain[0]} --forget"), "--forget")
    assert contents(plain[0].parent) == before


# ------------------------------------------------------------------------------------------------ flags in TensorBoard
def test_tensorboard_has_the_flags_as_hyperparameters_and_as_a_table(extended):
    """The table is shown at the step of each start; of hyperparameters TensorBoard keeps those of the first one."""
    for folder in extended.runs:
        accumulator = event_accumulator.EventAccumulator(str(folder)).Reload()
        content = accumulator.PluginTagToContent("hparams")
        info = metadata.parse_session_start_info_plugin_data(content["_hparams_/session_start_info"])
        found = {name: getattr(value, value.WhichOneof("kind")) for name, value in info.hparams.items()}
        args = read(folder, "config")["args"]
        assert found == {k: v for k, v in args.items() if v is not None} | {"total_timesteps": 384}
        experiment = metadata.parse_experiment_plugin_data(content["_hparams_/experiment"])
        assert [metric.name.tag for metric in experiment.metric_infos] == [EVAL]
        assert {info.name for info in experiment.hparam_infos} == found.keys()

        tables = accumulator.Tensors("flags/text_summary")
        assert [table.step for table in tables] == [0, 384]
        for table, total in zip(tables, (384, 768), strict=True):
            head, line, *lines = table.tensor_proto.string_val[0].decode().splitlines()
            assert (head, line) == ("|flag|value|", "|-|-|")
            cells = dict(line.strip("|").split("|") for line in lines)
            assert cells.pop("resume") in ("None", str(extended.runs[1]))
            expected = {name: str(value) for name, value in (args | {"total_timesteps": total}).items()}
            assert cells == {name: value for name, value in expected.items() if name != "resume"}


def test_weights_and_biases_gets_the_film_of_each_seed(run, tmp_path, monkeypatch):
    """As nobody plays a film of a vector task, the script is given one; wandb is a stand-in that keeps what it gets."""
    logs, make_train = [], pqn_ffm.make_train

    def init(name, **_):
        return SimpleNamespace(log=lambda values, step: logs.append((name, step, values)))

    def with_film(args):
        train = make_train(args)
        train.after = lambda state, folder: (folder / "film.gif").write_text(str(state.seed))
        return train

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Video=lambda file: Path(file).read_text()))
    monkeypatch.setattr(pqn_ffm, "make_train", with_film)
    runs = start(run, tmp_path, "--track")
    films = [(name, step, values["eval/film"]) for name, step, values in logs if "eval/film" in values]
    assert films == [(runs[0].name, 384, "7"), (runs[1].name, 384, "8")]
