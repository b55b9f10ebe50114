"""pqn_frozen_rnn.py from the inside: Table 1, what is frozen, and kept features against those made again."""

import functools
import inspect
import json
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_pqn_ffm import Scripted, lambda_returns_loop

import popjym
import pqn_ffm
import pqn_frozen_rnn
from memory import UNITS, count_parameters, merge

RESERVOIRS = ["deepesn", "src", "paralesn"]
AGENTS = [("mlp", False)] + [(memory, frozen) for memory in ("gru", "lru", *RESERVOIRS) for frozen in (False, True)]
EVERYTHING = dict(frozen_input=True, frozen_mixers=True)
# (memory, flags): agents whose memory gives the same features in every epoch. In the first five, nothing below the
# output projection is trained; in the others, what follows the first unit is.
KEPT = [(memory, {}) for memory in RESERVOIRS] + [(memory, EVERYTHING) for memory in ("gru", "lru")]
KEPT += [("lru", dict(frozen_input=True)), ("gru", dict(frozen_input=True, num_blocks=1, frozen_mixers=True))]


def make_args(**changes) -> pqn_frozen_rnn.Args:
    args = pqn_frozen_rnn.Args(**changes)
    pqn_frozen_rnn.check_args(args)
    return args


@functools.cache
def tiny(**changes) -> SimpleNamespace:
    """The functions of a small run."""
    small = dict(hidden_size=16, num_envs=4, num_steps=60, num_minibatches=2, update_epochs=2, total_timesteps=240 * 8)
    args = make_args(**small | dict(learning_rate=1e-3) | changes)
    train = pqn_frozen_rnn.make_train(args)
    names = ("init", "rollout", "compute_targets", "loss", "train_iteration", "q_network")
    compiled = {name: jax.jit(getattr(train, name)) for name in names}
    value_and_grad = jax.jit(jax.value_and_grad(train.loss, has_aux=True))
    return SimpleNamespace(args=args, train=train, value_and_grad=value_and_grad, **compiled)


@functools.cache
def trained(**changes) -> SimpleNamespace:
    """A small run after two updates: the memory is not the initial one. With a rollout; its episodes have 51 steps."""
    run = tiny(**changes)
    start = state = run.init(jnp.int32(0))
    for _ in range(2):
        state, _ = run.train_iteration(state)
    runner, transitions = run.rollout(state, jax.random.key(1))
    reset = transitions["reset"]
    assert reset[1:].any() and not reset.all()
    return SimpleNamespace(start=start, state=state, runner=runner, transitions=transitions, **vars(run))


# --------------------------------------------------------------------------------------------------------- parameters
def parameters(**changes) -> dict:
    train = pqn_frozen_rnn.make_train(make_args(env="StatelessCartPoleEasy", **changes))
    state = jax.eval_shape(train.init, jnp.int32(0))
    return count_parameters(state.params, state.frozen)


@pytest.mark.parametrize(
    "memory, total, frozen, ppo_total",
    [("gru", 1_119_746, 787_968, 1_385_221), ("lru", 858_114, 526_336, 1_123_589)],
)
def test_table_1_of_frn(memory, total, frozen, ppo_total):
    """PQN on StatelessCartPole; PPO on BallInCup (positions): 4 observations, 2 actions, three readout blocks."""
    assert parameters(memory=memory)["all"] == {"total": total, "trainable": total, "frozen": 0}
    assert parameters(memory=memory, frozen=True)["all"] == {"total": total, "trainable": 331_778, "frozen": frozen}

    # PPO's agent in parts: the trunk once, the readout twice, with two outputs (actor) and with one (critic).
    counts = parameters(memory=memory, num_readout_blocks=3, frozen=True)  # 2 + 2 inputs
    readout = sum(n["total"] for name, n in counts.items() if name.startswith("readout"))
    actor, critic, log_std = readout + counts["q_values"]["total"], readout + 257, 2
    trunk = {name: n for name, n in counts.items() if not name.startswith(("readout", "q_values", "all"))}
    assert actor + critic + log_std + sum(n["total"] for n in trunk.values()) == ppo_total
    assert actor + critic + log_std + sum(n["trainable"] for n in trunk.values()) == 597_253
    assert sum(n["frozen"] for n in trunk.values()) == frozen


def test_a_reservoir_stacks_on_the_input_and_all_its_layers_reach_the_readout():
    """2 observations, 2 actions, 3 layers with W_in, W_rec, b each (Eq. A1), and an output projection of 768 inputs."""
    counts = parameters(memory="deepesn", num_blocks=3, frozen=True)
    modules = {"memory_0", "output", "readout_0", "readout_norm_0", "readout_1", "readout_norm_1", "q_values", "all"}
    assert counts.keys() == modules
    assert counts["memory_0"]["frozen"] == (4 + 256 + 256) * 256 + 3 * (256 * 256 + 256)
    assert counts["output"]["trainable"] == (3 * 256 + 1) * 256


@pytest.mark.parametrize("memory", ["mlp", "lru", "deepesn"])
def test_the_output_projection_is_linear(memory):
    """FRN Table A1: from the last mixer (or the reservoir) to the first readout block, W x + b and nothing else."""
    args = make_args(memory=memory, hidden_size=8)
    agent, seen = pqn_frozen_rnn.Agent(args, 3), {}

    def record(call, inputs, options, context):
        result = call(*inputs, **options)
        if context.method_name == "__call__":
            seen[context.module.name] = inputs[0], result
        return result

    obs, action, reset = jax.random.normal(jax.random.key(0), (2, 3, 4)), jnp.zeros((2, 3), int), jnp.ones((2, 3), bool)
    inputs = agent.initialize_carry(3), obs, action, reset
    variables = agent.init(jax.random.key(1), *inputs)
    with nn.intercept_methods(record):
        agent.apply(variables, *inputs)
    x, projected = seen["output"]
    weights = variables["params"]["output"]
    np.testing.assert_allclose(projected, x @ weights["kernel"] + weights["bias"], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(seen["readout_0"][0], projected)
    if memory == "deepesn":
        np.testing.assert_array_equal(x, seen["memory_0"][1][1].reshape(6, -1))
    else:  # what leaves a mixer: LeakyReLU of what its LayerNorm gives
        z = seen["mixer_1"][1]
        z = (z - z.mean(-1, keepdims=True)) / jnp.sqrt(z.var(-1, keepdims=True) + 1e-6)
        np.testing.assert_allclose(x, jnp.where(z > 0, z, 0.01 * z), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "flags, rate",
    [
        (dict(memory="gru"), 1e-5),
        (dict(memory="lru", frozen=True), 5e-5),
        (dict(memory="paralesn"), 1e-5),
        (dict(memory="deepesn", frozen=True), 5e-5),
        (dict(memory="mlp"), 5e-7),
    ],
)
def test_the_published_learning_rate_follows_memory_and_frozen(flags, rate):
    assert make_args(**flags).learning_rate == rate
    assert make_args(**flags, learning_rate=0.1).learning_rate == 0.1


@pytest.mark.parametrize("memory", ["gru", "lru", *RESERVOIRS])
def test_the_settings_of_a_unit_reach_it_and_their_defaults_are_its_own(memory):
    def settings(**changes):
        return vars(pqn_frozen_rnn.make_unit(make_args(memory=memory, **changes)))

    defaults = settings()
    default_unit = UNITS[memory](features=256)
    given = [name for name, flag in vars(pqn_frozen_rnn.Args).items() if flag is None and name in default_unit.__dict__]
    assert given, "every unit has settings"
    for name in given:
        assert defaults[name] == getattr(default_unit, name) == settings(frozen=True)[name]
        value = 7 if name == "kernel_size" else 0.25 if name == "r_min" else 0.95
        assert settings(**{name: value})[name] == value


def test_the_settings_of_a_unit_reach_its_parameters():
    params = tiny(memory="lru", r_min=0.3, r_max=0.4, max_phase=0.1).init(jnp.int32(0)).params
    for module in ("memory_0", "memory_1"):
        radius, phase = jnp.exp(-jnp.exp(params[module]["nu"])), jnp.exp(params[module]["theta"])
        assert 0.3 <= radius.min() and radius.max() <= 0.4 and phase.max() <= 0.1
    shapes = jax.eval_shape(tiny(memory="paralesn", kernel_size=5).train.init, jnp.int32(0)).params["memory_0"]
    assert shapes["C_0"].shape == shapes["C_1"].shape == (2, 5)


# ------------------------------------------------------------------------------------------- features that are kept
class RunAgain(pqn_frozen_rnn.Agent):
    """The agent that makes all features again, whatever was kept."""

    def __call__(self, carry, obs, previous_action, reset, features=None):
        return super().__call__(carry, obs, previous_action, reset)


def run_again(args) -> SimpleNamespace:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pqn_frozen_rnn, "Agent", RunAgain)
        return pqn_frozen_rnn.make_train(args)


def kept_id(setting) -> str:
    return "-".join([setting[0], *setting[1]])


KEPT_IN_BRIEF = [("lru", EVERYTHING)]


@pytest.mark.parametrize(
    "setting",
    [setting if setting in KEPT_IN_BRIEF else pytest.param(setting, marks=pytest.mark.slow) for setting in KEPT],
    ids=kept_id,
)
def test_gradients_from_kept_features_equal_those_of_running_the_memory_again(setting):
    memory, flags = setting
    run = trained(memory=memory, frozen=True, **flags)
    state, envs = run.state, jnp.array([2, 0])
    carry = jax.tree.map(lambda x: x[envs], state.runner.carry)
    minibatch = jax.tree.map(lambda x: x[:, envs], run.transitions)
    targets = jnp.sin(jnp.arange(120.0)).reshape(60, 2)
    again = jax.jit(jax.value_and_grad(run_again(run.args).loss, has_aux=True))
    results = [f(state.params, state.frozen, carry, minibatch, targets) for f in (run.value_and_grad, again)]
    for a, b in zip(jax.tree.leaves(results[0]), jax.tree.leaves(results[1]), strict=True):
        assert abs(a).max() > 0
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5 * abs(b).max())


@pytest.mark.parametrize("setting", [KEPT[0], pytest.param(KEPT[4], marks=pytest.mark.slow)], ids=kept_id)
def test_an_iteration_with_kept_features_is_the_one_that_runs_the_memory_again(setting):
    memory, flags = setting
    run = trained(memory=memory, frozen=True, **flags)
    one = run.train_iteration(run.start)[0]
    other = jax.jit(run_again(run.args).train_iteration)(run.start)[0]
    np.testing.assert_array_equal(one.runner.obs, other.runner.obs)
    for a, b in zip(jax.tree.leaves(one.params), jax.tree.leaves(other.params), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-4)  # Adam's step is 1e-3, whatever the gradient's size


def loops_and_flops(**changes) -> tuple[int, float]:
    """Of the compiled gradient of one rollout."""
    run = tiny(**changes)
    state = jax.eval_shape(run.train.init, jnp.int32(0))
    _, transitions = jax.eval_shape(run.train.rollout, state, jax.random.key(0))
    targets = jax.ShapeDtypeStruct(transitions["action"].shape, jnp.float32)
    grad = jax.jit(jax.grad(run.train.loss, has_aux=True))
    program = grad.lower(state.params, state.frozen, state.runner.carry, transitions, targets).compile()
    return program.as_text().count(" while("), program.cost_analysis()["flops"]


@pytest.mark.parametrize("setting", KEPT, ids=kept_id)
def test_where_all_features_are_kept_no_step_is_taken_through_time(setting):
    memory, flags = setting
    loops, _ = loops_and_flops(memory=memory, frozen=True, **flags)
    assert (loops == 0) == (flags != dict(frozen_input=True)), loops


@pytest.mark.parametrize("memory", ["gru", "lru"])
def test_a_frozen_unit_costs_no_gradient(memory):
    trainable, frozen, everything = (
        loops_and_flops(memory=memory, hidden_size=64, **flags)[1]
        for flags in ({}, {"frozen": True}, {"frozen": True, **EVERYTHING})
    )
    assert frozen < 0.9 * trainable and everything < 0.5 * frozen


# ------------------------------------------------------------------------------------------------ acting and training
@pytest.mark.parametrize(
    "memory, frozen",
    [
        pytest.param(*agent, marks=() if agent in [("gru", True), ("deepesn", True)] else pytest.mark.slow)
        for agent in AGENTS
    ],
)
def test_q_values_of_the_first_minibatch_are_those_of_the_rollout(memory, frozen):
    run = trained(memory=memory, frozen=frozen)
    q_values, action = (np.asarray(run.transitions[name]) for name in ("q_values", "action"))
    chosen = np.take_along_axis(q_values, action[..., None], -1)[..., 0]
    targets = jnp.asarray(chosen + 1)  # so the loss is ½ where acting and training agree
    td_loss, mean_q = run.loss(run.state.params, run.state.frozen, run.state.runner.carry, run.transitions, targets)
    np.testing.assert_allclose([td_loss, mean_q], [0.5, chosen.mean()], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("memory, frozen", [("deepesn", True), pytest.param("lru", False, marks=pytest.mark.slow)])
def test_targets_bootstrap_a_time_limit_from_the_last_observation_and_the_memory_before_its_reset(
    memory, frozen, monkeypatch
):
    monkeypatch.setattr(popjym, "make", lambda name: (Scripted(), None))
    run = tiny.__wrapped__(num_steps=16, memory=memory, frozen=frozen)
    state = run.init(jnp.int32(0))
    for i in range(2):  # the second rollout begins in the middle of episodes
        before, (runner, transitions) = state, run.rollout(state, jax.random.key(i))
        state = state.replace(runner=runner)
    targets = run.compute_targets(state.params, state.frozen, runner, transitions)
    t = jax.device_get(transitions)
    assert bool((t["truncated"] & ~t["terminated"]).any() & (t["truncated"] & t["terminated"]).any())

    # The same again one environment and one step at a time, with memory and inputs carried by hand.
    for b in range(run.args.num_envs):
        now = jax.tree.map(lambda x, b=b: x[b : b + 1], before.runner)
        carry, obs, previous_action, reset = now.carry, now.obs, now.previous_action, now.reset
        next_value = np.zeros(run.args.num_steps)
        for i in range(run.args.num_steps):
            inputs = obs[None], previous_action[None], reset[None]
            carry, q, _ = run.q_network(state.params, state.frozen, carry, *inputs)
            np.testing.assert_allclose(q[0, 0], t["q_values"][i, b], atol=1e-5)
            led_to, action = jnp.asarray(t["final_obs"][i, b])[None], jnp.asarray(t["action"][i, b])[None]
            inputs = led_to[None], action[None], jnp.zeros((1, 1), bool)
            next_value[i] = run.q_network(state.params, state.frozen, carry, *inputs)[1].max()
            done = t["done"][i, b]
            # The first observation of an episode of Scripted is that of its kind at t = 0.
            kind = jnp.roll(led_to[0, :3], 1)
            first = jnp.concatenate([kind, jnp.sin(jnp.arange(3.0))])[None]
            obs, previous_action = (first, jnp.full(1, -1)) if done else (led_to, action)
            reset = jnp.full(1, done)
        ends = (t["terminated"][:, b], t["done"][:, b])
        expected = lambda_returns_loop(t["reward"][:, b], *ends, next_value, run.args.gamma, run.args.td_lambda)
        np.testing.assert_allclose(targets[:, b], expected, rtol=1e-5, atol=1e-5)


def test_the_returns_are_those_that_are_tested_for_pqn_ffm():
    assert inspect.getsource(pqn_frozen_rnn.lambda_returns) == inspect.getsource(pqn_ffm.lambda_returns)


# ------------------------------------------------------------------------------------------------------------- frozen
@pytest.mark.parametrize(
    "memory, frozen",
    [
        ("gru", ()),
        ("gru", ("memory",)),
        ("lru", ("input", "memory", "mixer")),
        ("deepesn", ()),
        pytest.param("lru", ("memory",), marks=pytest.mark.slow),
        *[pytest.param(memory, ("memory",), marks=pytest.mark.slow) for memory in RESERVOIRS],
        pytest.param("gru", ("mixer",), marks=pytest.mark.slow),
        pytest.param("mlp", ("input", "mixer"), marks=pytest.mark.slow),
    ],
)
def test_exactly_the_frozen_leaves_stay_bit_for_bit(memory, frozen):
    flags = dict(frozen_mixers=True) if "mixer" in frozen else {}
    flags |= dict(frozen_input=True) if "input" in frozen else {}
    run = trained(memory=memory, frozen="memory" in frozen, **flags)
    before, after = (jax.device_get(merge(state.params, state.frozen)) for state in (run.start, run.state))
    still = {module for module in before if module.split("_")[0] in frozen}
    # Adam: two moments of every trained parameter, and the counts of its steps and of the schedule's.
    trainable = sum(x.size for m in before if m not in still for x in jax.tree.leaves(before[m]))
    assert sum(x.size for x in jax.tree.leaves(run.state.opt_state)) == 2 * trainable + 2
    for module in before:
        same = jax.tree.leaves(jax.tree.map(np.array_equal, before[module], after[module]))
        assert all(same) if module in still else not all(same), module


# ------------------------------------------------------------------------------------------------------ environments
@pytest.mark.parametrize(
    "env",
    [env if env.endswith("Easy") else pytest.param(env, marks=pytest.mark.slow) for env in popjym.registered_envs],
)
def test_every_task_with_discrete_actions_trains_and_the_others_are_refused(env, capfd):
    """An iteration ends in a state of the shapes and types it began with, so that the next one can follow."""
    if "Pendulum" in env:
        with pytest.raises(SystemExit) as ended:
            make_args(env=env)
        assert ended.value.code == 2 and "continuous" in capfd.readouterr().err
        return
    train = tiny(env=env, memory="deepesn", frozen=True).train
    before = jax.eval_shape(train.init, jnp.int32(0))
    after, metrics = jax.eval_shape(train.train_iteration, before)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), before)
    assert metrics["charts/episodic_return"].shape == ()


# -------------------------------------------------------------------------------------------------- the command line
@pytest.mark.parametrize(
    "memory, frozen",
    [pytest.param(*agent, marks=() if agent == ("paralesn", True) else pytest.mark.slow) for agent in AGENTS],
)
def test_a_run_of_each_memory(script, tmp_path, memory, frozen):
    small = (
        "--env MinesweeperEasy --num-envs 4 --num-steps 16 --num-minibatches 2 --total-timesteps 640 --hidden-size 16"
    )
    done = script(f"pqn_frozen_rnn.py {small} --memory {memory} {'--frozen' * frozen} --eval-episodes 3 --seed 4")
    assert done.returncode == 0 and done.stderr == "", done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    assert run.name.startswith(f"MinesweeperEasy__pqn_frozen_rnn__{memory}{'-frozen' * frozen}__4__")
    config, result = (json.loads((run / f"{name}.json").read_text()) for name in ("config", "eval"))
    counts = config["parameters"]["all"]
    assert (counts["frozen"] > 0) == frozen and counts["total"] == counts["trainable"] + counts["frozen"]
    assert config["args"]["memory"] == memory and config["args"]["learning_rate"] in (1e-5, 5e-5, 5e-7)
    assert len(result["returns"]) == 3 and result["environment_steps"] == 640
    # Minesweeper Easy: a 4 × 4 grid, where an episode ends with a mine, or when all is clear.
    assert all(-1 <= r <= 1 for r in result["returns"]) and all(1 <= n <= 32 for n in result["lengths"])


@pytest.mark.parametrize(
    "flags, words",
    [
        (dict(env="StatelessPendulumHard"), ["--env StatelessPendulumHard", "continuous"]),
        (dict(memory="mlp", frozen=True), ["--frozen", "mlp"]),
        (dict(max_grad_norm=0.0), ["--max-grad-norm 0.0", "positive"]),
        (dict(memory="deepesn", frozen_mixers=True), ["--frozen-mixers", "deepesn"]),
        (dict(memory="src", frozen_input=True), ["--frozen-input", "src"]),
        (dict(memory="gru", r_min=0.5), ["--r-min 0.5", "gru"]),
        (dict(memory="lru", leak=0.5), ["--leak 0.5", "lru"]),
        (dict(memory="lru", update_bias=-2.0), ["--update-bias -2", "lru"]),
        (dict(memory="deepesn", recurrent_scaling=1.0), ["--recurrent-scaling 1", "deepesn"]),
        (dict(memory="lru", r_min=0.99, r_max=0.9), ["--r-min must", "0.99", "0.9"]),
        (dict(memory="lru", r_max=1.5), ["--r-max must", "1.5", "at most 1"]),
        (dict(memory="lru", r_min=float("nan")), ["--r-min must", "nan"]),
        (dict(memory="lru", max_phase=7.0), ["--max-phase must", "7", "2π"]),
        (dict(memory="deepesn", leak=0.0), ["--leak must", "0", "above 0"]),
        (dict(memory="paralesn", leak=1.5), ["--leak must", "1.5", "at most 1"]),
        (dict(memory="deepesn", spectral_radius=0.0), ["--spectral-radius must", "0"]),
        (dict(memory="src", input_scaling=-1.0), ["--input-scaling must", "-1", "negative"]),
        (dict(memory="paralesn", kernel_size=0), ["--kernel-size must", "0", "positive"]),
        (dict(memory="paralesn", kernel_size=257), ["--kernel-size must", "257", "hidden-size, 256"]),
    ],
)
def test_a_setting_that_makes_no_sense_is_one_line(flags, words, capfd):
    with pytest.raises(SystemExit) as ended:
        make_args(**flags)
    assert ended.value.code == 2
    printed = capfd.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and "error: " in printed.err
    assert all(word in printed.err for word in words), printed.err
