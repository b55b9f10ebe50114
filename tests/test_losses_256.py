"""Every script's loss and its gradient at the published width, against numpy in float64: as compiled for a real run."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import reference_agents

from memory import merge

T, B = 8, 2
PQN = dict(num_envs=B, num_steps=T, num_minibatches=1, env="StatelessCartPoleEasy", total_timesteps=T * B)
PPO = dict(num_envs=B, num_steps=T, num_minibatches=1, delay=8, total_timesteps=T * B, ent_coef=0.1)
# A script, its flags beside the published ones, and its loss.
LOSSES = [
    ("pqn_ffm", PQN, reference_agents.pqn_loss),
    ("pqn_ffm", PQN | dict(memory="gru", frozen=True), reference_agents.pqn_loss),
    ("pqn_frozen_rnn", PQN | dict(memory="lru"), reference_agents.pqn_loss),
    ("pqn_frozen_rnn", PQN | dict(memory="deepesn", frozen=True), reference_agents.pqn_loss),
    ("ppo_memorychain", PPO | dict(memory="gru"), reference_agents.ppo_loss),
    ("ppo_memorychain", PPO | dict(memory="lru", frozen=True), reference_agents.ppo_loss),
]


def random_transitions(rng, num_observations: int, num_actions: int) -> dict[str, np.ndarray]:
    """What a minibatch may hold, for all scripts: a cut within an episode, and old values that are not the new ones."""
    reset = np.zeros((T, B), bool)
    reset[T // 2, 0] = True
    return {
        "obs": rng.normal(size=(T, B, num_observations)).astype(np.float32),
        "previous_action": np.where(reset, -1, rng.integers(num_actions, size=(T, B))).astype(np.int32),
        "reset": reset,
        "action": rng.integers(num_actions, size=(T, B)).astype(np.int32),
        "log_prob": (-np.log(num_actions) + rng.normal(size=(T, B), scale=0.2)).astype(np.float32),
        "value": rng.normal(size=(T, B), scale=0.3).astype(np.float32),
    }


@pytest.mark.parametrize("script, flags, exact", LOSSES)
def test_a_loss_and_its_gradient_equal_the_reference(script, flags, exact):
    module = importlib.import_module(script)
    args = module.Args(**flags)
    module.check_args(args)
    train, rng = module.make_train(args), np.random.default_rng(0)
    not_optimised = {"xla_backend_optimization_level": 0}  # to save time
    state = jax.jit(train.init, compiler_options=not_optimised)(jnp.int32(0))

    def noisy(tree, scale):  # as biases and the memory are 0 at the start
        return jax.tree.map(lambda x: x + rng.normal(size=x.shape, scale=scale).astype(np.float32), tree)

    params, frozen, carry = noisy(state.params, 0.01), noisy(state.frozen, 0.01), noisy(state.runner.carry, 0.3)
    num_actions = merge(params, frozen)["q_values" if "pqn" in script else "logits"]["kernel"].shape[1]
    transitions = random_transitions(rng, state.runner.obs.shape[-1], num_actions)
    learned_from = [rng.normal(size=(T, B)).astype(np.float32) for _ in range(1 if "pqn" in script else 2)]
    given = transitions
    if script == "pqn_frozen_rnn":  # what the rollout keeps of the modules below the first trained one
        inputs = [transitions[name] for name in ("obs", "previous_action", "reset")]
        given = transitions | {"features": train.q_network(params, frozen, carry, *inputs)[2]}

    value_and_grad = jax.jit(jax.value_and_grad(train.loss, has_aux=True))
    (loss, _), gradient = value_and_grad(params, frozen, carry, given, *learned_from)

    unit, states = module.make_unit(args), list(carry.values()) if isinstance(carry, dict) else list(carry)
    frozen = reference.as_float64(frozen)

    def expected(params):
        return exact(args, unit, merge(params, frozen), states, transitions, *learned_from)

    np.testing.assert_allclose(loss, expected(reference.as_float64(params)), rtol=1e-5)
    # A small step, as LeakyReLU has a kink: of ten thousand activations, some are near it.
    reference.check_gradient(expected, params, gradient, step=1e-8)
