"""pqn_frozen_rnn.py from the inside: Table 1, what is frozen, and kept features against those made again."""

import inspect
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_pqn_ffm import Scripted, lambda_returns_loop

import popjym
import pqn_ffm
import pqn_frozen_rnn
from memory import count_parameters, merge

TINY = dict(hidden_size=16, num_envs=4, num_steps=60, num_minibatches=2, update_epochs=2, learning_rate=1e-3)
RESERVOIRS = ["deepesn", "src", "paralesn"]
AGENTS = [("mlp", False)] + [(memory, frozen) for memory in ("gru", "lru", *RESERVOIRS) for frozen in (False, True)]
# (memory, flags): agents whose memory gives the same features in every epoch, and how many stages are kept.
FIXED = [(memory, {}, 1) for memory in RESERVOIRS]
FIXED += [(memory, dict(frozen_input=True, frozen_mixers=True), 5) for memory in ("gru", "lru")]
FIXED += [("lru", dict(frozen_input=True), 2), ("gru", dict(frozen_input=True, num_blocks=1), 2)]


def make_args(**changes) -> SimpleNamespace:
    flags = {name: value for group in vars(pqn_frozen_rnn.Args()).values() for name, value in vars(group).items()}
    args = SimpleNamespace(**flags | changes)
    pqn_frozen_rnn.check_args(args)
    return args


def tiny(recompute=False, **changes) -> SimpleNamespace:
    return pqn_frozen_rnn.make_train(make_args(**TINY | dict(total_timesteps=240 * 8) | changes), recompute)


# --------------------------------------------------------------------------------------------------------- parameters
def parameters(**changes) -> dict:
    train = pqn_frozen_rnn.make_train(make_args(**changes))
    state = jax.eval_shape(train.init, jax.random.PRNGKey(0))
    return count_parameters(state.params, state.frozen)


@pytest.mark.parametrize(
    "memory, total, frozen, ppo_total",
    [("gru", 1_119_746, 787_968, 1_385_221), ("lru", 858_114, 526_336, 1_123_589)],
)
def test_table_1_of_frn(memory, total, frozen, ppo_total):
    """PQN on StatelessCartPole; PPO on BallInCup (positions): 4 observations, 2 actions, three readout blocks."""
    numbers = parameters(env="StatelessCartPole", memory=memory)["all"]
    assert numbers == {"total": total, "trainable": total, "frozen": 0}
    numbers = parameters(env="StatelessCartPole", memory=memory, frozen=True)["all"]
    assert numbers == {"total": total, "trainable": 331_778, "frozen": frozen}

    # PPO's agent in parts: the trunk once, the readout twice, with two outputs (actor) and with one (critic).
    counts = parameters(env="StatelessCartPole", memory=memory, num_readout_blocks=3, frozen=True)  # 2 + 2 inputs
    readout = sum(n["total"] for name, n in counts.items() if name.startswith("readout"))
    actor, critic, log_std = readout + counts["q_values"]["total"], readout + 257, 2
    trunk = {name: n for name, n in counts.items() if not name.startswith(("readout", "q_values", "all"))}
    assert actor + critic + log_std + sum(n["total"] for n in trunk.values()) == ppo_total
    assert actor + critic + log_std + sum(n["trainable"] for n in trunk.values()) == 597_253
    assert sum(n["frozen"] for n in trunk.values()) == frozen


def test_a_reservoir_stacks_on_the_input_and_all_its_layers_reach_the_readout():
    """2 observations, 2 actions, 3 layers with W_in, W_rec, b each (Eq. A1), and an output projection of 768 inputs."""
    counts = parameters(env="StatelessCartPole", memory="deepesn", num_blocks=3, frozen=True)
    modules = {"memory_0", "output", "readout_0", "readout_norm_0", "readout_1", "readout_norm_1", "q_values", "all"}
    assert counts.keys() == modules
    assert counts["memory_0"]["frozen"] == (4 + 256 + 256) * 256 + 3 * (256 * 256 + 256)
    assert counts["output"]["trainable"] == (3 * 256 + 1) * 256


@pytest.mark.parametrize(
    "flags, rate, radii",
    [
        (dict(memory="gru"), 1e-5, (None, None)),
        (dict(memory="gru", frozen=True), 5e-5, (None, None)),
        (dict(memory="lru"), 1e-5, (0.9, 0.999)),
        (dict(memory="lru", frozen=True), 5e-5, (0.99, 0.9999)),
        (dict(memory="lru", frozen=True, r_min=0.5), 5e-5, (0.5, 0.9999)),
        (dict(memory="paralesn"), 1e-5, (0.99, 0.9999)),
        (dict(memory="deepesn", frozen=True), 5e-5, (None, None)),
        (dict(memory="mlp"), 5e-7, (None, None)),
    ],
)
def test_defaults_follow_memory_and_frozen(flags, rate, radii):
    args = make_args(**flags)
    assert args.learning_rate == rate and (args.r_min, args.r_max) == radii


def test_the_settings_of_a_unit_reach_it():
    def leaves(**changes):
        state = tiny(**changes).init(jax.random.PRNGKey(0))
        return merge(state.params, state.frozen)["memory_0"]

    radius = jnp.exp(-jnp.exp(leaves(memory="lru", r_min=0.3, r_max=0.4)["nu"]))
    assert 0.3 <= radius.min() and radius.max() <= 0.4
    assert jnp.exp(leaves(memory="lru", max_phase=0.1)["theta"]).max() <= 0.1
    W = leaves(memory="deepesn", spectral_radius=0.5)["W_rec_1"]
    np.testing.assert_allclose(abs(np.linalg.eigvals(W)).max(), 0.5, rtol=1e-4)
    assert leaves(memory="paralesn", kernel_size=5)["C_0"].shape == (2, 5)
    assert float(jnp.std(leaves(memory="deepesn", bias_scaling=3.0)["b_0"])) > 1
    base, doubled = (leaves(memory="deepesn", input_scaling=s)["W_in_0"] for s in (0.1, 0.2))
    np.testing.assert_allclose(2 * base, doubled, rtol=1e-5)
    for name in ("recurrent_scaling", "projection_scaling", "input_scaling", "leak"):
        changes = dict(memory="deepesn" if name == "leak" else "src", frozen=True)
        _, t = jax.jit((train := tiny(**changes)).rollout)(train.init(jax.random.PRNGKey(0)), jax.random.PRNGKey(1))
        _, u = jax.jit(tiny(**changes, **{name: 0.5}).rollout)(train.init(jax.random.PRNGKey(0)), jax.random.PRNGKey(1))
        assert abs(t["features"] - u["features"]).max() > 1e-3, name


# ------------------------------------------------------------------------------------------- features that are kept
@pytest.mark.parametrize("memory, flags, num_fixed", FIXED)
def test_gradients_from_kept_features_equal_those_of_running_the_memory_again(memory, flags, num_fixed):
    kept, again = (tiny(recompute, memory=memory, frozen=True, **flags) for recompute in (False, True))
    state = jax.jit(kept.init)(jax.random.PRNGKey(0))
    for _ in range(2):  # the memory at the rollout's start is not the initial one
        state, _ = jax.jit(kept.train_iteration)(state)
    (_, t), (_, u) = (jax.jit(train.rollout)(state, jax.random.PRNGKey(1)) for train in (kept, again))
    assert t["reset"][1:].any() and not t["reset"].all()
    assert t["features"].shape != u["features"].shape and (t["action"] == u["action"]).all()
    t["target"] = u["target"] = jnp.sin(jnp.arange(240.0)).reshape(60, 4)
    envs = jnp.array([2, 0])
    carry = jax.tree.map(lambda x: x[envs], state.actor.carry)
    results = []
    for train, transitions in ((kept, t), (again, u)):
        minibatch = {name: transitions[name][:, envs] for name in ("features", "reset", "action", "target")}
        value_and_grad = jax.jit(jax.value_and_grad(train.loss, has_aux=True))
        results.append(value_and_grad(state.params, state.frozen, carry, minibatch))
    for a, b in zip(jax.tree.leaves(results[0]), jax.tree.leaves(results[1]), strict=True):
        assert abs(a).max() > 0
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5 * abs(b).max())


@pytest.mark.parametrize("memory, flags, num_fixed", [FIXED[0], FIXED[4]])
def test_an_iteration_with_kept_features_is_the_one_that_runs_the_memory_again(memory, flags, num_fixed):
    states = []
    for recompute in (False, True):
        train = tiny(recompute, memory=memory, frozen=True, **flags)
        state = jax.jit(train.init)(jax.random.PRNGKey(0))
        states.append(jax.device_get(jax.jit(train.train_iteration)(state)[0]))
    np.testing.assert_array_equal(states[0].actor.obs, states[1].actor.obs)
    for a, b in zip(jax.tree.leaves(states[0].params), jax.tree.leaves(states[1].params), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-4)  # Adam's step is 1e-3, whatever the gradient's size


def loops_and_flops(train, state) -> tuple[int, float]:
    """Of the compiled gradient of one minibatch."""
    _, t = jax.eval_shape(train.rollout, state, jax.random.PRNGKey(0))
    t = {name: jnp.zeros(t[name].shape, t[name].dtype) for name in ("features", "reset", "action")}
    t["target"] = jnp.zeros(t["action"].shape)
    grad = jax.jit(jax.grad(train.loss, has_aux=True))
    program = grad.lower(state.params, state.frozen, state.actor.carry, t).compile()
    return program.as_text().count(" while("), program.cost_analysis()["flops"]


def test_with_kept_features_no_step_is_taken_through_time():
    for memory, flags, num_fixed in FIXED:
        train = tiny(memory=memory, frozen=True, **flags)
        state = train.init(jax.random.PRNGKey(0))
        loops, _ = loops_and_flops(train, state)
        everything = num_fixed == 1 or num_fixed == 5 or flags.get("num_blocks") == 1
        assert (loops == 0) == everything, (memory, flags, loops)


@pytest.mark.parametrize("memory", ["gru", "lru"])
def test_a_frozen_unit_costs_no_gradient(memory):
    flops = {}
    for flags in ({}, {"frozen": True}, {"frozen": True, "frozen_input": True, "frozen_mixers": True}):
        train = tiny(memory=memory, hidden_size=64, **flags)
        flops[len(flags)] = loops_and_flops(train, train.init(jax.random.PRNGKey(0)))[1]
    assert flops[1] < 0.9 * flops[0] and flops[3] < 0.5 * flops[1]


# ------------------------------------------------------------------------------------------------ acting and training
@pytest.mark.parametrize("memory, frozen", AGENTS)
def test_q_values_of_the_first_minibatch_are_those_of_the_rollout(memory, frozen):
    train = tiny(memory=memory, frozen=frozen, env="NoisyStatelessCartPole")
    state = jax.jit(train.init)(jax.random.PRNGKey(0))
    for _ in range(2):
        state, _ = jax.jit(train.train_iteration)(state)
    _, t = jax.jit(train.rollout)(state, jax.random.PRNGKey(1))
    assert t["reset"][1:].any() and not t["reset"].all()
    chosen = np.take_along_axis(np.asarray(t["q_values"]), np.asarray(t["action"])[..., None], -1)[..., 0]
    t["target"] = jnp.asarray(chosen + 1)  # so the loss is ½ where acting and training agree
    td_loss, mean_q = jax.jit(train.loss)(state.params, state.frozen, state.actor.carry, t)
    np.testing.assert_allclose([td_loss, mean_q], [0.5, chosen.mean()], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("memory, frozen", [("deepesn", True), ("lru", False)])
def test_targets_bootstrap_a_time_limit_from_the_last_observation_and_the_memory_before_its_reset(
    memory, frozen, monkeypatch
):
    monkeypatch.setattr(popjym, "make", lambda name: (Scripted(), None))
    args = make_args(**TINY | dict(num_steps=16, memory=memory, frozen=frozen))
    train = pqn_frozen_rnn.make_train(args)
    state = jax.jit(train.init)(jax.random.PRNGKey(0))
    for i in range(2):  # the second rollout begins in the middle of episodes
        before, (actor, t) = state, jax.jit(train.rollout)(state, jax.random.PRNGKey(i))
        state = state.replace(actor=actor)
    targets = jax.jit(train.compute_targets)(state.params, state.frozen, actor, t)
    assert bool((t["truncated"] & ~t["terminated"]).any() & (t["truncated"] & t["terminated"]).any())

    # The same again one environment and one step at a time, with memory and inputs carried by hand.
    q_network, t = jax.jit(train.q_network), jax.device_get(t)
    for b in range(args.num_envs):
        now = jax.tree.map(lambda x, b=b: x[b : b + 1], before.actor)
        carry, obs, previous_action, reset = now.carry, now.obs, now.previous_action, now.reset
        next_value = np.zeros(args.num_steps)
        for i in range(args.num_steps):
            carry, q, _ = q_network(state.params, state.frozen, carry, reset[None], obs[None], previous_action[None])
            np.testing.assert_allclose(q[0, 0], t["q_values"][i, b], atol=1e-5)
            led_to, action = jnp.asarray(t["final_obs"][i, b])[None], jnp.asarray(t["action"][i, b])[None]
            inputs = (jnp.zeros((1, 1), bool), led_to[None], action[None])
            next_value[i] = q_network(state.params, state.frozen, carry, *inputs)[1].max()
            done = t["done"][i, b]
            # The first observation of an episode of Scripted is that of its kind at t = 0.
            kind = jnp.roll(led_to[0, :3], 1)
            first = jnp.concatenate([kind, jnp.sin(jnp.arange(3.0))])[None]
            obs, previous_action = (first, jnp.full(1, -1)) if done else (led_to, action)
            reset = jnp.full(1, done)
        flags = (t["terminated"][:, b], t["done"][:, b])
        expected = lambda_returns_loop(t["reward"][:, b], *flags, next_value, args.gamma, args.td_lambda)
        np.testing.assert_allclose(targets[:, b], expected, rtol=1e-5, atol=1e-5)


def test_the_returns_are_those_that_are_tested_for_pqn_ffm():
    assert inspect.getsource(pqn_frozen_rnn.lambda_returns) == inspect.getsource(pqn_ffm.lambda_returns)


# ------------------------------------------------------------------------------------------------------------- frozen
@pytest.mark.parametrize(
    "memory, frozen",
    [
        *[(m, f) for m in ("gru", "lru") for f in ((), ("memory",), ("mixer",), ("memory", "mixer"))],
        ("lru", ("input", "memory", "mixer")),
        ("mlp", ("mixer", "input")),
        ("deepesn", ()),
        *[(m, ("memory",)) for m in RESERVOIRS],
    ],
)
def test_exactly_the_frozen_leaves_stay_bit_for_bit(memory, frozen):
    flags = dict(frozen="memory" in frozen, frozen_mixers="mixer" in frozen, frozen_input="input" in frozen)
    train = tiny(memory=memory, **flags)
    start = state = jax.jit(train.init)(jax.random.PRNGKey(0))
    for _ in range(2):
        state, _ = jax.jit(train.train_iteration)(state)
    before, after = (jax.device_get(merge(s.params, s.frozen)) for s in (start, state))
    still = {module for module in before if module.split("_")[0] in frozen}
    # Adam: two moments of every trained parameter, and the counts of its steps and of the schedule's.
    trainable = sum(x.size for m in before if m not in still for x in jax.tree.leaves(before[m]))
    assert sum(x.size for x in jax.tree.leaves(state.opt_state)) == 2 * trainable + 2
    for module in before:
        same = jax.tree.leaves(jax.tree.map(np.array_equal, before[module], after[module]))
        assert all(same) if module in still else not all(same), module


# ------------------------------------------------------------------------------------------------------ environments
@pytest.mark.parametrize("env", popjym.registered_envs)
def test_every_task_with_discrete_actions_trains_and_the_others_are_refused(env, capfd):
    """An iteration ends in a state of the shapes and types it began with, so that the next one can follow."""
    if "Pendulum" in env:
        with pytest.raises(SystemExit) as ended:
            make_args(env=env)
        assert ended.value.code == 2 and "continuous" in capfd.readouterr().err
        return
    train = tiny(env=env, memory="deepesn", frozen=True)
    before = jax.eval_shape(train.init, jax.random.PRNGKey(0))
    after, metrics = jax.eval_shape(train.train_iteration, before)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), before)
    assert metrics["charts/episodic_return"].shape == ()


# -------------------------------------------------------------------------------------------------- the command line
@pytest.mark.parametrize(
    "memory, frozen",
    [
        pytest.param(*agent, marks=pytest.mark.slow if agent[0] in RESERVOIRS and not agent[1] else ())
        for agent in AGENTS
    ],
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
    assert f"optimizer      {2 * counts['trainable'] + 2:,} numbers" in done.stdout
    assert config["args"]["memory"] == memory and config["args"]["learning_rate"] in (1e-5, 5e-5, 5e-7)
    assert len(result["returns"]) == 3 and result["environment_steps"] == 640
    # Minesweeper Easy: a 4 × 4 grid, where an episode ends with a mine, or when all is clear.
    assert all(-1 <= r <= 1 for r in result["returns"]) and all(1 <= n <= 32 for n in result["lengths"])


@pytest.mark.parametrize(
    "flags, words",
    [
        (dict(env="StatelessPendulumHard"), ["--env StatelessPendulumHard", "continuous"]),
        (dict(memory="mlp", frozen=True), ["--frozen", "mlp"]),
        (dict(max_grad_norm=0.0), ["--max-grad-norm 0.0", "above 0"]),
        (dict(memory="deepesn", frozen_mixers=True), ["--frozen-mixers", "deepesn"]),
        (dict(memory="src", frozen_input=True), ["--frozen-input", "src"]),
        (dict(memory="gru", r_min=0.5), ["--r-min 0.5", "gru"]),
        (dict(memory="lru", leak=0.5), ["--leak 0.5", "lru"]),
        (dict(memory="deepesn", recurrent_scaling=1.0), ["--recurrent-scaling 1", "deepesn"]),
        (dict(memory="lru", r_min=0.99, r_max=0.9), ["--r-min 0.99", "0.9"]),
        (dict(memory="lru", r_max=1.5), ["--r-max 1.5", "at most 1"]),
        (dict(memory="lru", r_min=float("nan")), ["--r-min nan"]),
        (dict(memory="lru", max_phase=7.0), ["--max-phase 7", "6.28"]),
        (dict(memory="deepesn", leak=0.0), ["--leak 0", "above 0"]),
        (dict(memory="paralesn", leak=1.5), ["--leak 1.5", "at most 1"]),
        (dict(memory="deepesn", spectral_radius=0.0), ["--spectral-radius 0"]),
        (dict(memory="src", input_scaling=-1.0), ["--input-scaling -1", "negative"]),
        (dict(memory="paralesn", kernel_size=0), ["--kernel-size 0", "positive"]),
        (dict(memory="paralesn", kernel_size=2**31), ["--kernel-size 2147483648", "below 2^31"]),
        (dict(memory="paralesn", kernel_size=257), ["--kernel-size 257", "hidden_size, 256"]),
    ],
)
def test_a_setting_that_makes_no_sense_is_one_line(flags, words, capfd):
    with pytest.raises(SystemExit) as ended:
        make_args(**flags)
    assert ended.value.code == 2
    printed = capfd.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and "error: " in printed.err
    assert all(word in printed.err for word in words), printed.err
