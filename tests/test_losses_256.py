"""Every script's loss and its gradient at the published width, against numpy in float64: as compiled for a real run."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import reference_agents

from memory import merge

# With this one, float32 decides as float64 does. In the CNN, nothing is nearer to a kink of LeakyReLU than 1e-6 of its
# layer's deviation, and so are no two numbers of different patches between which max-pooling chooses. And each of PPO's
# losses clips some ratios on either side.
SEED = 11
B = 2
SMALL = dict(num_envs=B, num_minibatches=1)
PQN = SMALL | dict(num_steps=8, total_timesteps=8 * B, env="StatelessCartPoleEasy")
PPO = SMALL | dict(num_steps=8, total_timesteps=8 * B, delay=8, ent_coef=0.1)
# Tasks whose resets compile quickly; pictures have their real size, and an action has two entries.
ARCADE = SMALL | dict(num_steps=3, total_timesteps=3 * B, env="BreakoutEasy")
PLAYGROUND = SMALL | dict(num_steps=8, total_timesteps=8 * B, env="PointMass")
OPPOSITE = dict(normalize_observations=False, norm_adv=False, clip_vloss=True)  # of what is published
# A script, its flags beside the published ones, and its loss.
LOSSES = [
    ("pqn_ffm", PQN, reference_agents.pqn_loss),
    ("pqn_ffm", PQN | dict(memory="gru", frozen=True), reference_agents.pqn_loss),
    ("pqn_frozen_rnn", PQN | dict(memory="lru"), reference_agents.pqn_loss),
    ("pqn_frozen_rnn", PQN | dict(memory="deepesn", frozen=True), reference_agents.pqn_loss),
    ("ppo_memorychain", PPO | dict(memory="gru"), reference_agents.ppo_loss),
    ("ppo_memorychain", PPO | dict(memory="lru", frozen=True), reference_agents.ppo_loss),
    pytest.param("pqn_arcade_cnn", ARCADE | dict(memory="lru"), reference_agents.pqn_loss, marks=pytest.mark.slow),
    ("pqn_arcade_cnn", ARCADE | dict(memory="gru", frozen=True), reference_agents.pqn_loss),
    pytest.param(
        "ppo_playground", PLAYGROUND | dict(memory="gru"), reference_agents.gaussian_ppo_loss, marks=pytest.mark.slow
    ),
    ("ppo_playground", PLAYGROUND | OPPOSITE | dict(memory="lru", frozen=True), reference_agents.gaussian_ppo_loss),
]


def random_pictures(rng, shape) -> np.ndarray:
    """Pictures [T, B, S, S, 3] of four rectangles each; where they meet is another point in each.

    Not of noise: LeakyReLU and max-pooling would decide on a million different numbers, and the nearest decisions would
    be within float32's rounding. These pictures have some thousand.
    """
    pictures = np.zeros(shape, np.uint8)
    for t, b in np.ndindex(shape[:2]):
        bottom, right = np.arange(shape[2]) >= rng.integers(1, shape[2], size=(2, 1))
        colors = rng.integers(256, size=(2, 2, 3))
        pictures[t, b] = colors[bottom.astype(int)[:, None], right.astype(int)]
    return pictures


def random_transitions(rng, T: int, observed, num_actions: int) -> dict[str, np.ndarray]:
    """What a minibatch may hold, for all scripts: a cut within an episode, and old values that are not the new ones.

    Observations are like those that were `observed` [B, ...].
    """
    reset = np.zeros((T, B), bool)
    reset[T // 2, 0] = True
    shape = T, *observed.shape
    is_picture = observed.dtype == np.uint8
    return {
        "obs": random_pictures(rng, shape) if is_picture else rng.normal(size=shape).astype(np.float32),
        "previous_action": np.where(reset, -1, rng.integers(num_actions, size=(T, B))).astype(np.int32),
        "reset": reset,
        "action": rng.integers(num_actions, size=(T, B)).astype(np.int32),
        "log_prob": (-np.log(num_actions) + rng.normal(size=(T, B), scale=0.2)).astype(np.float32),
        "value": rng.normal(size=(T, B), scale=0.3).astype(np.float32),
    }


def continuous(rng, transitions, action_size: int) -> dict[str, np.ndarray]:
    """The same with actions [T, B, A] of a Gaussian policy, and with an observation that is far from all others."""
    obs = transitions["obs"].copy()
    obs[0, 0, 0], obs[1, 1, 1] = 50, -50
    action = rng.normal(size=(*obs.shape[:2], action_size)).astype(np.float32)
    standard_normal = -0.5 * (action**2 + np.log(2 * np.pi)).sum(-1)
    log_prob = (standard_normal + rng.normal(size=obs.shape[:2], scale=0.4)).astype(np.float32)
    return transitions | {"obs": obs, "action": action, "log_prob": log_prob}


@pytest.mark.parametrize("script, flags, exact", LOSSES)
def test_a_loss_and_its_gradient_equal_the_reference(script, flags, exact):
    module = importlib.import_module(script)
    args = module.Args(**flags)
    module.check_args(args)
    train, rng, T = module.make_train(args), np.random.default_rng(SEED), args.num_steps
    not_optimised = {"xla_backend_optimization_level": 0}  # to save time
    state = jax.jit(train.init, compiler_options=not_optimised)(jnp.int32(0))

    def noisy(tree, scale):  # as biases and the memory are 0 at the start
        return jax.tree.map(lambda x: x + rng.normal(size=x.shape, scale=scale).astype(np.float32), tree)

    params, frozen, carry = noisy(state.params, 0.01), noisy(state.frozen, 0.01), noisy(state.runner.carry, 0.3)
    (head,) = params.keys() & {"q_values", "logits", "mean"}
    num_actions = params[head]["kernel"].shape[1]
    transitions = random_transitions(rng, T, state.runner.obs, num_actions)
    learned_from = [rng.normal(size=(T, B)).astype(np.float32) for _ in range(1 if "pqn" in script else 2)]
    given, constant, known = transitions, [frozen], {}
    if script == "pqn_frozen_rnn":  # what the rollout keeps of the modules below the first trained one
        inputs = [transitions[name] for name in ("obs", "previous_action", "reset")]
        given = transitions | {"features": train.q_network(params, frozen, carry, *inputs)[2]}
    if script == "ppo_playground":
        given = transitions = continuous(rng, transitions, num_actions)
        params["log_std"] = noisy(params["log_std"], 0.3)
        statistics = jax.tree.map(jnp.abs, noisy(state.statistics, 0.5))  # as a variance is positive
        constant, known = [frozen, statistics], {"statistics": reference.as_float64(statistics)}

    value_and_grad = jax.jit(jax.value_and_grad(train.loss, has_aux=True))
    (loss, _), gradient = value_and_grad(params, *constant, carry, given, *learned_from)

    unit, states = module.make_unit(args), list(carry.values()) if isinstance(carry, dict) else list(carry)
    frozen, targets = reference.as_float64((frozen, learned_from))

    def expected(params):
        return exact(args, unit, merge(params, frozen), states, transitions, *targets, **known)

    np.testing.assert_allclose(loss, expected(reference.as_float64(params)), rtol=1e-5)
    # A small step, as LeakyReLU has a kink: of ten thousand activations, some are near it.
    reference.check_gradient(expected, params, gradient, step=1e-8)
