"""Every unit of memory.py against its equations, written down once more as plain numpy loops in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memory import FFM, GRU

jax.config.update("jax_default_matmul_precision", "highest")

T, B, F, N = 20, 3, 6, 8


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def scenario(cell, features=F, steps=T):
    """Random parameters (biases too), a state in the middle of an episode, inputs, resets."""
    x = jax.random.normal(jax.random.key(0), (steps, B, features))
    reset = jax.random.bernoulli(jax.random.key(1), 0.1, (steps, B))
    variables = cell.init(jax.random.key(2), cell.initialize_carry(B), x, reset)
    leaves, tree = jax.tree.flatten(variables["params"])
    keys = jax.random.split(jax.random.key(3), len(leaves))
    noise = [0.1 * jax.random.normal(key, leaf.shape) for key, leaf in zip(keys, leaves, strict=True)]
    params = tree.unflatten([leaf + change for leaf, change in zip(leaves, noise, strict=True)])
    carry = jax.tree.map(lambda leaf: jax.random.uniform(jax.random.key(4), leaf.shape, minval=-0.5), carry_of(cell))
    return params, carry, x, reset


def carry_of(cell):
    return cell.initialize_carry(B)


def as_float64(tree):
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)


def as_complex(packed):
    real, imaginary = np.split(np.asarray(packed, np.float64), 2, axis=-1)
    return real + 1j * imaginary


def test_gru():
    cell = GRU(N)
    params, carry, x, reset = scenario(cell)
    (W_z, W_r, W_c), (U_z, U_r, U_c), (b_z, b_r, b_c) = (
        [as_float64(params[f"{name}_{gate}"]) for gate in "zrc"] for name in "WUb"
    )
    final, y = cell.apply({"params": params}, carry, x, reset)
    for b in range(B):
        h = as_float64(carry)[b]
        for t in range(T):
            o = as_float64(x)[t, b]
            if reset[t, b]:
                h = np.zeros(N)
            z = sigmoid(o @ W_z + h @ U_z + b_z)
            r = sigmoid(o @ W_r + h @ U_r + b_r)
            candidate = np.tanh(o @ W_c + (r * h) @ U_c + b_c)
            h = (1 - z) * h + z * candidate
            np.testing.assert_allclose(y[t, b], h, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(final[b], h, rtol=1e-5, atol=1e-6)


FLAGS = ["decay", "oscillation", "learn_decay", "learn_oscillation", "input_gate", "output_gate"]


@pytest.mark.parametrize("ablated", [None, *FLAGS])
def test_ffm_and_its_ablations(ablated):
    m, c = 5, 3
    cell = FFM(N, trace_size=m, context_size=c, **({ablated: False} if ablated else {}))
    params, carry, x, reset = scenario(cell)
    final, y = cell.apply({"params": params}, carry, x, reset)
    p = as_float64(params)

    # The parameters that a flag switches off do not exist; a decay that is not learned keeps its initial value.
    gone = {"decay": "alpha", "learn_decay": "alpha", "oscillation": "omega", "learn_oscillation": "omega"}
    gone |= {"input_gate": "l2", "output_gate": "l4"}
    assert {name.split("_")[0] for name in p} == {"alpha", "omega", "l1", "l2", "l3", "l4", "l5"} - {gone.get(ablated)}
    # as float32, like the constants of the unit: an error of 1e-7 in a period is visible after a few of them
    alpha = p.get("alpha", (-np.log(0.01) / np.geomspace(1, 1024, m)).astype(np.float32).astype(np.float64))
    omega = p.get("omega", (2 * np.pi / np.geomspace(1, 1024, c)).astype(np.float32).astype(np.float64))
    alpha, omega = (0 * alpha if ablated == "decay" else alpha), (0 * omega if ablated == "oscillation" else omega)
    gamma = np.exp(-np.abs(alpha))[:, None] * np.exp(-1j * omega)[None, :]  # Eq. 11 at t = 1

    def linear(name, v):
        return v @ p[f"{name}_kernel"] + p[f"{name}_bias"]

    for b in range(B):
        S = as_complex(carry[b]).reshape(c, m).T
        for t in range(T):
            o = as_float64(x)[t, b]
            if reset[t, b]:
                S = np.zeros((m, c))
            trace = linear("l1", o) * (1 if ablated == "input_gate" else sigmoid(linear("l2", o)))  # Eq. 14
            S = gamma * S + trace[:, None]  # Eq. 12, 15
            z = linear("l3", np.concatenate([S.real.T.ravel(), S.imag.T.ravel()]))  # Eq. 16
            normed = (z - z.mean()) / np.sqrt(z.var() + 1e-6)
            if ablated == "output_gate":
                expected = normed + linear("l5", o)
            else:
                gate = sigmoid(linear("l4", o))
                expected = normed * gate + linear("l5", o) * (1 - gate)  # Eq. 17
            np.testing.assert_allclose(y[t, b], expected, rtol=2e-5, atol=5e-6)
        np.testing.assert_allclose(as_complex(final[b]).reshape(c, m).T, S, rtol=1e-5, atol=1e-6)


def test_ffm_interpretation():
    cell = FFM(N)
    params = cell.init(jax.random.key(0), carry_of(cell), jnp.ones((1, B, F)), jnp.zeros((1, B), bool))["params"]
    told = cell.interpretation(params)
    durability, period = told["trace_durability"], told["contextual_period"]
    np.testing.assert_allclose(np.exp(-np.abs(params["alpha"]) * durability), 0.01, rtol=1e-5)  # β of it is left
    np.testing.assert_allclose(np.cos(params["omega"] * period), 1, rtol=1e-5)  # back where it started
    np.testing.assert_allclose([durability.min(), durability.max()], [1, 1024], rtol=1e-5)
    np.testing.assert_allclose([period.min(), period.max()], [1, 1024], rtol=1e-5)
    assert np.all(np.isinf(FFM(N, decay=False).interpretation({})["trace_durability"]))
    assert np.all(np.isinf(FFM(N, oscillation=False).interpretation({})["contextual_period"]))


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        (GRU(256), 393_984),
        (FFM(256), 2 * (256 * 32 + 32) + 3 * (256 * 256 + 256) + 32 + 4),
    ],
    ids=lambda value: type(value).__name__,
)
def test_parameters_at_width_256(cell, expected):
    x, reset = jnp.ones((1, 1, 256)), jnp.zeros((1, 1), bool)
    variables = cell.init(jax.random.key(0), cell.initialize_carry(1), x, reset)
    assert sum(leaf.size for leaf in jax.tree.leaves(variables)) == expected
