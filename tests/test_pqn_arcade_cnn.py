"""pqn_arcade_cnn.py: the CNN, the tasks' pictures and ends, targets, what is frozen, whole runs and their films."""

import functools
import json
import re
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import popgym_arcade
import pytest
from flax import serialization
from PIL import Image
from popgym_arcade.registration import REGISTERED_ENVIRONMENTS
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_pqn_ffm import lambda_returns_loop

import pqn_arcade_cnn
from memory import UNITS, count_parameters, merge

FAMILIES = dict.fromkeys(name.removesuffix("Easy") for name in REGISTERED_ENVIRONMENTS if name.endswith("Easy"))


def make_args(**changes) -> pqn_arcade_cnn.Args:
    args = pqn_arcade_cnn.Args(**changes)
    pqn_arcade_cnn.check_args(args)
    return args


@functools.cache
def tiny(**changes) -> SimpleNamespace:
    """The functions of a small run."""
    small = dict(env="CountRecallEasy", hidden_size=16, num_envs=3, num_steps=5, num_minibatches=1, update_epochs=1)
    args = make_args(**small | dict(eval_episodes=3, capture_video=True) | changes)
    train = pqn_arcade_cnn.make_train(args)
    compiled = {name: jax.jit(getattr(train, name)) for name in ("init", "rollout", "compute_targets", "q_network")}
    value_and_grad = jax.jit(jax.value_and_grad(train.loss, has_aux=True))
    return SimpleNamespace(args=args, train=train, value_and_grad=value_and_grad, **compiled)


# ---------------------------------------------------------------------------------------------------------------- CNN
LAYERS = {  # kernel, stride, channels of a convolution and side of its output; size, stride of a pooling and side
    128: [(5, 2, 64, 62), (2, 2, 31), (3, 2, 128, 15), (2, 2, 7), (3, 2, 256, 3), (3, 1, 1), (1, 1, 512, 1)],
    256: [(7, 2, 64, 125), (2, 2, 62), (3, 2, 128, 30), (2, 2, 15), (3, 2, 256, 7), (2, 2, 3), (3, 2, 512, 1)],
}


def table_a2(params, frames, obs_size):
    """Layer by layer as the table has it, with XLA's convolution and pooling, every layer's shape asserted."""
    x, i = frames.astype(jnp.float32) / 255, 0
    for size, stride, *channels, side in LAYERS[obs_size]:
        if channels:
            numbers = ("NHWC", "HWIO", "NHWC")
            kernel, bias = params[f"kernel_{i}"], params[f"bias_{i}"]
            assert kernel.shape[:2] == (size, size)
            x = jax.lax.conv_general_dilated(x, kernel, (stride, stride), "VALID", dimension_numbers=numbers) + bias
            x, i = jnp.where(x > 0, x, 0.01 * x), i + 1
        else:
            x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, size, size, 1), (1, stride, stride, 1), "VALID")
        assert x.shape == (len(frames), side, side, *(channels or [x.shape[-1]]))
    return x.reshape(len(frames), -1)


@pytest.mark.parametrize(
    "obs_size, number, backend",
    [
        (128, 505_472, "cpu"),
        pytest.param(128, 505_472, "gpu", marks=pytest.mark.slow),
        pytest.param(256, 1_558_656, "cpu", marks=pytest.mark.slow),
    ],
)
def test_the_cnn_is_table_a2_to_the_layer(obs_size, number, backend, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)  # products here, XLA's convolutions on an accelerator
    cnn = pqn_arcade_cnn.CNN(obs_size)
    frames = jax.random.randint(jax.random.key(0), (3, obs_size, obs_size, 3), 0, 256).astype(jnp.uint8)
    params = jax.jit(cnn.init)(jax.random.key(1), frames)["params"]
    assert sum(x.size for x in jax.tree.leaves(params)) == number
    weights = jax.random.normal(jax.random.key(2), (3, 512))

    def value_and_grad(network):
        return jax.jit(jax.value_and_grad(lambda params: (network(params) * weights).sum()))(params)

    value, grad = value_and_grad(lambda params: cnn.apply({"params": params}, frames))
    expected, expected_grad = value_and_grad(lambda params: table_a2(params, frames, obs_size))
    np.testing.assert_allclose(value, expected, rtol=1e-4)
    for name in params:
        scale = float(jnp.abs(expected_grad[name]).max())
        np.testing.assert_allclose(grad[name], expected_grad[name], atol=1e-4 * scale, err_msg=name)


# ------------------------------------------------------------------------------------------------------- environment
@pytest.mark.slow
@pytest.mark.parametrize("env", FAMILIES)
def test_a_step_is_the_environments_own(env):
    """Pictures, states, rewards and ends of two environments, over several episodes of random actions.

    Bit for bit, but for real numbers of a state: XLA may join a product and a sum in one of two programs. The noise of
    an episode's first picture has a key of its own.
    """
    args = make_args(env=env)
    own, params = popgym_arcade.make(args.env, partial_obs=True)
    num_actions, reset, step, _ = pqn_arcade_cnn.make_env(args)
    assert num_actions == own.action_space(params).n
    own_step, step = jax.jit(jax.vmap(own.step, in_axes=(0, 0, 0, None))), jax.jit(step)
    keys = jax.random.split(jax.random.key(0), 2)
    obs, state = jax.jit(reset)(keys)
    own_keys = jax.vmap(jax.random.split)(keys)[:, 0]
    own_obs, own_state = jax.jit(jax.vmap(own.reset, in_axes=(0, None)))(own_keys, params)
    ends, first = 0, np.ones(2, bool)
    for t in range(400 if env in ("AutoEncode", "Tetris") else 140):
        comparable = ~first if env == "NoisyCartPole" else np.ones(2, bool)
        for x, y in zip(jax.tree.leaves((obs, state)), jax.tree.leaves((own_obs, own_state)), strict=True):
            if jnp.issubdtype(x.dtype, jnp.floating):
                np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7)
            else:
                np.testing.assert_array_equal(x[comparable], y[comparable])
        own_state = state
        keys = jax.random.split(jax.random.fold_in(jax.random.key(1), t), 2)
        action = jax.random.randint(keys[0], (2,), 0, num_actions)
        obs, state, reward, terminated, truncated, _ = step(keys, state, action)
        own_obs, own_state, own_reward, done, _ = own_step(keys, own_state, action, params)
        np.testing.assert_array_equal(reward, own_reward)
        np.testing.assert_array_equal(terminated | truncated, done)
        assert not (terminated & truncated).any()
        ends, first = ends + int(done.sum()), np.asarray(done)
    assert ends > 0


def last_step(env: str, action: int, **changes):
    """(terminated, truncated) of the step that ends the episode after `changes` of its first state."""
    _, reset, step, _ = pqn_arcade_cnn.make_env(make_args(env=env))
    keys = jax.random.split(jax.random.key(0), 1)
    _, state = reset(keys)
    state = state.replace(**{name: jnp.full_like(getattr(state, name), x) for name, x in changes.items()})
    step = jax.jit(step)
    for _ in range(5):
        _, state, _, terminated, truncated, _ = step(keys, state, jnp.array([action]))
        if terminated[0] | truncated[0]:
            return bool(terminated[0]), bool(truncated[0])


@pytest.mark.parametrize(
    "env, action, changes, terminal",
    [
        ("BattleShip", 0, {"timestep": 126}, False),
        ("CartPole", 0, {"time": 198}, False),  # counts the limit as terminal itself
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("CountRecall", 2, {"alreadyMove": 124}, False),
                ("CountRecall", 4, {"timestep": 25}, True),
                ("Navigator", 4, {"board": 2}, True),
                ("MineSweeper", 4, {"mine_grid": 1}, True),
                ("CartPole", 0, {"x": 3.0, "time": 198}, True),
                ("Breakout", 0, {"time": 1998}, False),
                ("Tetris", 0, {"time": 2998}, False),
                ("Skittles", 0, {"time": 98}, False),
                ("AutoEncode", 0, {"timestep": 259}, False),
            )
        ),
    ],
)
def test_time_limits_are_not_terminal(env, action, changes, terminal, monkeypatch):
    task = type(popgym_arcade.make(f"{env}Easy")[0])  # here it draws nothing: only its rules matter
    monkeypatch.setattr(task, "get_obs", lambda self, state, *_, **__: jnp.zeros((1, 1, 3), jnp.uint8))
    assert last_step(env, action, **changes) == (terminal, not terminal)


@pytest.mark.slow
def test_the_twins_are_the_same_task_and_one_of_them_shows_what_the_other_hides():
    keys = jax.random.split(jax.random.key(0), 2)
    seen = {}
    for full in (False, True):
        _, reset, step, _ = pqn_arcade_cnn.make_env(make_args(env="CountRecall", fully_observable=full))
        first, state = jax.jit(reset)(keys)
        obs, state, *_ = jax.jit(step)(keys, state, jnp.array([4, 2]))  # confirm; do nothing
        seen[full] = jax.device_get((first, obs, state))
        own = popgym_arcade.make("CountRecallEasy", partial_obs=not full)[0]
        for b in range(2):
            np.testing.assert_array_equal(obs[b], own.render(jax.tree.map(lambda x, b=b: x[b], state)))
    jax.tree.map(np.testing.assert_array_equal, seen[False][2], seen[True][2])
    assert (seen[False][0] == seen[True][0]).all(), "nothing to hide yet"
    differs = (seen[False][1] != seen[True][1]).any((1, 2, 3))
    assert differs.tolist() == [True, False], "the history of cards"


# ------------------------------------------------------------------------------------------ rollout, targets, training
@pytest.fixture(scope="module")
def rolled():
    """A rollout of three environments in the middle of episodes: two of them reach their time limit, one its end."""
    run = tiny()
    state = run.init(jnp.int32(0))
    moves = state.runner.env_state.replace(alreadyMove=jnp.array([123, 125, 0]), timestep=jnp.array([0, 3, 25]))
    carry = jax.tree.map(lambda x: jax.random.normal(jax.random.key(1), x.shape), state.runner.carry)
    no_reset, previous_action = jnp.zeros(3, bool), jnp.arange(3, dtype=jnp.int32)
    runner = state.runner.replace(env_state=moves, carry=carry, reset=no_reset, previous_action=previous_action)
    # Greedy, and always with the action that confirms: one environment plays its last card.
    params = state.params | {"q_values": state.params["q_values"] | {"bias": jnp.array([0.0, 0, 0, 0, 9])}}
    state = state.replace(params=params, runner=runner, update=jnp.int32(run.args.total_timesteps // 15))
    runner, transitions = run.rollout(state, jax.random.key(2))
    t = jax.device_get(transitions)
    return SimpleNamespace(state=state, runner=runner, t=t, transitions=transitions, **vars(run))


def test_targets_bootstrap_time_limits_from_the_last_picture_and_the_memory_before_its_reset(rolled):
    state, t = rolled.state, rolled.t
    assert t["truncated"][:, :2].any(0).all() and t["terminated"][:, 2].any()
    targets = rolled.compute_targets(state.params, state.frozen, rolled.runner, rolled.transitions)
    own = popgym_arcade.make("CountRecallEasy", partial_obs=True)[0]
    carry, next_value = state.runner.carry, np.zeros((5, 3))
    for i in range(5):
        now = [jnp.asarray(t[name][i][None]) for name in ("obs", "previous_action", "reset")]
        carry, q_values = rolled.q_network(state.params, state.frozen, carry, *now)
        np.testing.assert_allclose(q_values[0], t["q_values"][i], rtol=1e-4, atol=1e-5)
        led_to = [jax.tree.map(lambda x, b=b, i=i: x[i, b], t["final_state"]) for b in range(3)]
        pictures = jnp.stack([own.render(x) for x in led_to])[None]
        action = jnp.asarray(t["action"][i][None])
        _, next_q = rolled.q_network(state.params, state.frozen, carry, pictures, action, now[2] & False)
        next_value[i] = next_q[0].max(-1)
    for b in range(3):
        x = (t["reward"][:, b], t["terminated"][:, b], t["done"][:, b], next_value[:, b])
        expected = lambda_returns_loop(*x, rolled.args.gamma, rolled.args.td_lambda)
        np.testing.assert_allclose(targets[:, b], expected, rtol=1e-4, atol=1e-5)


def test_q_values_of_the_first_minibatch_are_those_of_the_rollout(rolled):
    state = rolled.state
    chosen = np.take_along_axis(rolled.t["q_values"], rolled.t["action"][..., None], -1)[..., 0]
    targets = jnp.asarray(chosen + 1)  # so the loss is ½ where acting and training agree
    losses, _ = rolled.value_and_grad(state.params, state.frozen, state.runner.carry, rolled.transitions, targets)
    np.testing.assert_allclose(losses, [0.5, chosen.mean()], rtol=1e-4)
    assert rolled.t["reset"][1:].any() and (rolled.t["previous_action"][rolled.t["reset"]] == -1).all()


def test_pictures_are_uint8_all_the_way_and_kept_once(rolled):
    pixels = 128 * 128 * 3
    kept = [x for x in jax.tree.leaves(rolled.t) if x.size >= pixels]
    assert [(x.shape, x.dtype) for x in kept] == [((5, 3, 128, 128, 3), np.uint8)]
    kept = [x for x in jax.tree.leaves((rolled.state.runner, rolled.runner)) if x.size >= pixels]
    assert [(x.shape, x.dtype) for x in kept] == [((3, 128, 128, 3), np.uint8)] * 2
    assert len(np.unique(rolled.t["obs"])) > 5


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["lru", "gru", "ffm"])
def test_the_cnn_learns_through_a_frozen_unit_as_through_a_trained_one_with_its_weights(memory, rolled):
    one, other = (tiny(memory=memory, frozen=frozen) for frozen in (True, False))
    state = one.init(jnp.int32(3))
    batch = state.runner.carry, rolled.transitions, jnp.ones((5, 3), jnp.float32)
    _, grads = one.value_and_grad(state.params, state.frozen, *batch)
    everything = merge(state.params, state.frozen)
    _, full = other.value_and_grad(everything, {}, *batch)
    assert "memory_0" in full and "memory_0" not in grads and set(state.frozen) == {"memory_0", "memory_1"}
    for name, gradient in grads["cnn"].items():
        scale = float(jnp.abs(full["cnn"][name]).max())
        assert scale > 0
        np.testing.assert_allclose(gradient, full["cnn"][name], atol=1e-5 * scale, err_msg=name)


def test_the_output_projection_is_linear():
    """FRN Table A1: from the last mixer to the first readout block, W x + b and nothing else."""
    args = make_args(memory="mlp", hidden_size=8)
    agent, seen = pqn_arcade_cnn.Agent(args, 5), {}

    def record(call, inputs, options, context):
        result = call(*inputs, **options)
        if context.method_name == "__call__":
            seen[context.module.name] = inputs[0], result
        return result

    obs = jax.random.randint(jax.random.key(0), (2, 1, 128, 128, 3), 0, 256).astype(jnp.uint8)
    inputs = agent.initialize_carry(1), obs, jnp.zeros((2, 1), jnp.int32), jnp.ones((2, 1), bool)
    variables = jax.jit(agent.init)(jax.random.key(1), *inputs)
    with nn.intercept_methods(record):
        agent.apply(variables, *inputs)
    x, projected = seen["output"]
    weights = variables["params"]["output"]
    np.testing.assert_allclose(projected, x @ weights["kernel"] + weights["bias"], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(seen["readout_0"][0], projected)
    z = seen["mixer_1"][1]  # LeakyReLU of what its LayerNorm gives
    z = (z - z.mean(-1, keepdims=True)) / jnp.sqrt(z.var(-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(x, jnp.where(z > 0, z, 0.01 * z), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("env", ["CountRecallEasy", "CartPoleEasy", "TetrisEasy"])
def test_with_64_bits_by_default_all_types_are_the_same(env):
    """The tasks name no types. An update ends with the shapes and types that it began with, as the next one needs."""
    train = tiny(env=env).train
    types = []
    for wide in (False, True):
        with jax.enable_x64(wide):
            state = jax.eval_shape(train.init, jnp.int32(0))
            states = state, jax.eval_shape(train.train_iteration, state)[0]
            types.append(jax.tree.map(lambda x: (x.shape, x.dtype), (states, jax.eval_shape(train.evaluate, state))))
    assert types[0] == types[1] and types[0][0][0] == types[0][0][1]


# ------------------------------------------------------------------------------------------------ settings and counts
@pytest.mark.parametrize("flags, rate", [({}, 5e-5), ({"frozen": True}, 3e-4), ({"memory": "mlp"}, 5e-5)])
def test_the_defaults_are_table_a5(flags, rate):
    args = make_args(**flags)
    assert (args.learning_rate, args.final_learning_rate, args.gamma, args.td_lambda) == (rate, 5e-7, 0.99, 0.65)
    assert (args.max_grad_norm, args.start_e, args.end_e, args.num_envs, args.num_steps) == (10, 1, 0.05, 16, 128)
    assert (args.num_minibatches, args.update_epochs, args.total_timesteps) == (4, 4, 20_000_000)


@pytest.mark.parametrize("memory, vector_agent, unit", [("gru", 1_119_746, 393_984), ("lru", 858_114, 263_168)])
def test_the_agent_is_that_of_table_1_with_a_cnn_before_it(memory, vector_agent, unit):
    """The table's agent reads 2 + 2 numbers and has 2 actions; this one reads 512 + 5 and has 5."""
    total = vector_agent + (517 - 4) * 256 + 3 * (256 + 1) + 505_472
    train = pqn_arcade_cnn.make_train(make_args(memory=memory, frozen=True))
    state = jax.eval_shape(train.init, jnp.int32(0))
    numbers = count_parameters(state.params, state.frozen)
    assert numbers["all"] == {"total": total, "trainable": total - 2 * unit, "frozen": 2 * unit}
    assert numbers["cnn"] == {"total": 505_472, "trainable": 505_472, "frozen": 0}


@pytest.mark.parametrize(
    "flags, words",
    [
        ({"env": "Battlesheep"}, ["--env Battlesheep", "BattleShip, ", "Navigator", "Hard"]),
        ({"env": "NavigatorEasyEasy"}, ["--env NavigatorEasyEasy"]),
        ({"memory": "mlp", "frozen": True}, ["--frozen True", "mlp"]),
        ({"memory": "gru", "r_min": 0.5}, ["--r-min 0.5", "gru"]),
        ({"r_min": 0.9999, "r_max": 0.99}, ["--r-min must", "0.9999", "r-max"]),
        ({"max_phase": 0.0}, ["--max-phase must", "0.0", "above 0"]),
        ({"memory": "ffm", "trace_size": 0}, ["--trace-size must", "0", "positive"]),
        ({"num_envs": 6}, ["--num-envs 6", "4 minibatches"]),
        ({"max_grad_norm": 0.0}, ["--max-grad-norm 0.0", "positive"]),
    ],
)
def test_a_bad_flag_is_one_line(flags, words, capfd):
    with pytest.raises(SystemExit) as stopped:
        make_args(**flags)
    error = capfd.readouterr().err
    assert stopped.value.code == 2 and error.count("\n") == 1 and all(word in error for word in words), error


def test_every_task_has_a_name_with_and_without_its_difficulty():
    assert {make_args(env=name).env for name in REGISTERED_ENVIRONMENTS} == set(REGISTERED_ENVIRONMENTS)
    assert {make_args(env=family).env for family in FAMILIES} == {f"{family}Easy" for family in FAMILIES}
    assert len(FAMILIES) == 10
    for spelling in ("battleship_hard", "BATTLE-SHIP-HARD", "battleshipHard"):
        assert make_args(env=spelling).env == "BattleShipHard"
    assert make_args(env="count_recall").env == "CountRecallEasy"


@pytest.mark.parametrize("memory, given", [("lru", {"r_min": 0.5, "max_phase": 1.0}), ("ffm", {"trace_size": 8})])
def test_the_settings_of_a_unit_reach_it_and_their_defaults_are_its_own(memory, given):
    default = UNITS[memory](features=256)
    for frozen in (False, True):
        unit = pqn_arcade_cnn.make_unit(make_args(memory=memory, frozen=frozen, **given))
        for name in ("r_min", "r_max", "max_phase") if memory == "lru" else ("trace_size", "context_size"):
            assert getattr(unit, name) == given.get(name, getattr(default, name))


# ------------------------------------------------------------------------------------------------------------ the film
def durations(film) -> list[int]:
    """Milliseconds of each picture; equal pictures in a row are one with a longer duration."""
    found = []
    for i in range(film.n_frames):
        film.seek(i)
        found.append(film.info["duration"])
    return found


@pytest.mark.slow
def test_a_film_is_the_first_evaluated_episode_seen_by_the_agent_beside_everything(rolled, tmp_path):
    """With the fixture's weights the agent confirms every card: 26 steps, all of whose cards the twin shows."""
    pictures = rolled.train.film(rolled.state)
    assert pictures.shape == (27, 128, 256, 3) and pictures.dtype == np.uint8
    hidden = [int((x[:, :128] != x[:, 128:]).any(-1).sum()) for x in pictures]
    assert hidden[0] == 0 and (np.diff(hidden) > 0).all(), hidden
    _, reset, step, _ = pqn_arcade_cnn.make_env(rolled.args)
    evaluation_key = jax.random.split(jax.random.key(0), 4)[3]  # of seed 0; `evaluate` resets with its second half
    keys = jax.random.split(jax.random.split(evaluation_key)[1], rolled.args.eval_episodes)
    obs, env_state = jax.jit(reset)(keys)
    step = jax.jit(step)
    for picture in pictures[:-1]:
        np.testing.assert_array_equal(picture[:, :128], obs[0])
        obs, env_state = step(keys, env_state, jnp.full(len(keys), 4))[:2]

    rolled.train.after(rolled.state, tmp_path)
    with Image.open(tmp_path / "film.gif") as film:
        assert film.size == (256, 128) and sum(durations(film)) == 200 * 27
    log = EventAccumulator(str(tmp_path)).Reload()
    (shown,) = log.Images("eval/film")
    assert shown.step == int(rolled.state.update) * 15
    assert shown.encoded_image_string == (tmp_path / "film.gif").read_bytes()


# ---------------------------------------------------------------------------------------------------------- whole runs
RUN = (
    "pqn_arcade_cnn.py --env count_recall --memory lru --frozen --hidden-size 16 --num-envs 2 --num-steps 4 "
    "--num-minibatches 2 --update-epochs 1 --eval-episodes 2 --total-timesteps 24 --checkpoint-every 0 --capture-video"
)


@pytest.mark.slow
def test_a_run_is_filmed_and_resumes_bit_for_bit(script, tmp_path):
    done = script(RUN)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    assert run.name.startswith("CountRecallEasy__pqn_arcade_cnn__lru-frozen__1__")
    config, result = (json.loads((run / f"{name}.json").read_text()) for name in ("config", "eval"))
    assert config["parameters"]["cnn"]["total"] == 505_472 and config["parameters"]["memory_0"]["trainable"] == 0
    film = (run / "film.gif").read_bytes()
    with Image.open(run / "film.gif") as gif:
        first = np.asarray(gif.convert("RGB"))
        duration = sum(durations(gif))
    # A first picture has nothing to hide: both halves are it.
    np.testing.assert_array_equal(first[:, :128], first[:, 128:])
    number = int(re.search(r"^film +(\d+) pictures", done.stdout, re.M)[1])
    assert duration == 200 * number and number == result["lengths"][0] + 1
    assert EventAccumulator(str(run)).Reload().Images("eval/film")

    end = (run / "checkpoint.msgpack").read_bytes()
    (run / "checkpoint.previous").replace(run / "checkpoint.msgpack")  # the last but one
    for name in ("eval.json", "film.gif"):
        (run / name).unlink()
    resumed = script(f"pqn_arcade_cnn.py --resume {run}")
    assert resumed.returncode == 0 and resumed.stderr == "", resumed.stderr
    states = [serialization.msgpack_restore(data)["state"] for data in (end, (run / "checkpoint.msgpack").read_bytes())]
    for one, other in zip(*(jax.tree.leaves(state) for state in states), strict=True):
        np.testing.assert_array_equal(one, other)
    assert json.loads((run / "eval.json").read_text())["returns"] == result["returns"]
    assert (run / "film.gif").read_bytes() == film

    # An evaluation leaves all of this as it is, and its film beside it.
    before = {file: file.read_bytes() for file in run.iterdir()}
    evaluated = script(f"pqn_arcade_cnn.py --evaluate {run} --forget --eval-episodes 1")
    assert evaluated.returncode == 0 and evaluated.stderr == "", evaluated.stderr
    assert {file.name for file in run.iterdir()} == {file.name for file in before} | {"evaluate.json", "evaluate.gif"}
    assert all(file.read_bytes() == data for file, data in before.items())
    with Image.open(run / "evaluate.gif") as gif:
        assert sum(durations(gif)) == 200 * (json.loads((run / "evaluate.json").read_text())["lengths"][0] + 1)
