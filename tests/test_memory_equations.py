"""Every unit of memory.py against its equations, written down once more as plain numpy loops in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

from memory import (
    FFM,
    GRU,
    LRU,
    SRC,
    DeepESN,
    ParalESN,
    draw_nu,
    draw_theta,
    hadamard_transform,
    linear_recurrence,
    random_orthogonal,
)

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


def test_the_update_bias_of_a_gru_is_where_its_update_gate_starts():
    x, reset = jnp.zeros((1, B, F)), jnp.ones((1, B), bool)
    for given, expected in [({}, 0.0), ({"update_bias": -4.0}, -4.0)]:
        cell = GRU(N, **given)
        params = cell.init(jax.random.key(0), carry_of(cell), x, reset)["params"]
        assert np.all(params["b_z"] == expected) and np.all(params["b_r"] == 0) and np.all(params["b_c"] == 0)


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
    described = cell.describe(params)
    assert set(described) == {f"{name}_{s}" for name in told for s in ("min", "median", "max")}
    np.testing.assert_allclose(described["trace_durability_median"], np.median(durability), rtol=1e-6)
    assert np.all(np.isinf(FFM(N, decay=False).interpretation({})["trace_durability"]))
    assert np.all(np.isinf(FFM(N, oscillation=False).interpretation({})["contextual_period"]))


@pytest.mark.parametrize("cell", [LRU(N), ParalESN(N), ParalESN(N, leak=0.5)], ids=["lru", "paralesn", "leaky"])
def test_the_durability_of_a_mode_is_the_time_until_a_hundredth_of_it_is_left(cell):
    """The unit itself says so: what is left of a state after t steps without an input, mode by mode."""
    steps = 10
    x, reset, carry = jnp.zeros((steps, B, N)), jnp.zeros((steps, B), bool), carry_of(cell)
    params = cell.init(jax.random.key(0), carry, x, reset)["params"]
    silent = {name: 0 * leaf if name.startswith("b_") else leaf for name, leaf in params.items()}
    start = jax.tree.map(jnp.ones_like, carry)
    silent |= {name: 0 * leaf for name, leaf in params.items() if name.startswith("W_in")}
    end, _ = cell.apply({"params": silent}, start, x, reset)
    left = [np.abs(as_complex(after)[0]) / np.sqrt(2) for after in jax.tree.leaves(end)]  # |1 + i| at the start
    expected = np.log(0.01) / np.log(np.concatenate(left)) * steps
    durability = cell.interpretation(params)["trace_durability"]
    np.testing.assert_allclose(durability, expected, rtol=5e-3)  # float32 near a radius of 0.9999
    described = cell.describe(params)
    assert set(described) == {"trace_durability_min", "trace_durability_median", "trace_durability_max"}
    spread = [expected.min(), np.median(expected), expected.max()]
    np.testing.assert_allclose(
        [described[f"trace_durability_{s}"] for s in ("min", "median", "max")], spread, rtol=5e-3
    )


def test_lru():
    cell = LRU(N)
    params, carry, x, reset = scenario(cell, features=N)
    p = as_float64(params)
    eigenvalues = np.exp(-np.exp(p["nu"]) + 1j * np.exp(p["theta"]))  # Eq. 11
    B_matrix = as_complex(p["B"]) * np.exp(p["gamma"])
    C_matrix = p["C"][:N] - 1j * p["C"][N:]
    final, y = cell.apply({"params": params}, carry, x, reset)
    for b in range(B):
        h = as_complex(carry[b])
        for t in range(T):
            o = as_float64(x)[t, b]
            h = eigenvalues * (0 if reset[t, b] else h) + o @ B_matrix  # Eq. 5
            np.testing.assert_allclose(y[t, b], (h @ C_matrix).real + p["D"] * o, rtol=1e-5, atol=5e-6)
        np.testing.assert_allclose(as_complex(final[b]), h, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("leak", [1.0, 0.3])
def test_deepesn(leak):
    cell = DeepESN(N, num_layers=3, leak=leak)
    params, carry, x, reset = scenario(cell)
    p = as_float64(params)
    final, y = cell.apply({"params": params}, carry, x, reset)
    for b in range(B):
        h = [as_float64(layer)[b] for layer in carry]
        for t in range(T):
            u = as_float64(x)[t, b]
            for i in range(3):
                before = np.zeros(N) if reset[t, b] else h[i]
                candidate = np.tanh(u @ p[f"W_in_{i}"] + before @ p[f"W_rec_{i}"] + p[f"b_{i}"])  # Eq. A1
                u = h[i] = (1 - leak) * before + leak * candidate
            np.testing.assert_allclose(y[t, b], np.concatenate(h), rtol=1e-5, atol=2e-6)  # Eq. A2
        for i in range(3):
            np.testing.assert_allclose(final[i][b], h[i], rtol=1e-5, atol=2e-6)


def test_src():
    cell = SRC(N, recurrent_scaling=1.1, input_scaling=0.7, projection_scaling=0.9)
    params, carry, x, reset = scenario(cell)
    final, y = cell.apply({"params": params}, carry, x, reset)
    for b in range(B):
        h = [as_float64(layer)[b] for layer in carry]
        for t in range(T):
            u = as_float64(x)[t, b]
            for i in range(2):
                m = 16  # the next power of two of N + d = 8 + 6, and of 8 + 8
                H = scipy.linalg.hadamard(m) / np.sqrt(m)
                D1, D2, D3 = (np.diag(row) for row in as_float64(params[f"signs_{i}"]))
                S = (0.9 * np.sqrt(m) * H @ D1 @ H @ D2 @ H @ D3)[:N, : N + len(u)]  # Eq. A4
                before = np.zeros(N) if reset[t, b] else h[i]
                u = h[i] = np.tanh(S @ np.concatenate([1.1 * before, 0.7 / np.sqrt(len(u)) * u])) / np.sqrt(N)  # Eq. A3
            np.testing.assert_allclose(y[t, b], np.concatenate(h), rtol=1e-5, atol=2e-6)
        for i in range(2):
            np.testing.assert_allclose(final[i][b], h[i], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("m", [1, 2, 4, 64, 512])
def test_hadamard_transform_equals_the_matrix_product_and_is_its_own_inverse(m):
    x = jax.random.normal(jax.random.key(0), (3, m))
    np.testing.assert_allclose(hadamard_transform(x), x @ (scipy.linalg.hadamard(m) / np.sqrt(m)), rtol=1e-4, atol=3e-6)
    np.testing.assert_allclose(hadamard_transform(hadamard_transform(x)), x, rtol=1e-4, atol=3e-6)


def test_src_is_frozen_signs_and_holds_no_matrix():
    cell = SRC(256)
    x, reset = jnp.ones((1, 1, 256)), jnp.zeros((1, 1), bool)
    params = cell.init(jax.random.key(0), cell.initialize_carry(1), x, reset)["params"]
    assert all(leaf.shape == (3, 512) and set(np.unique(leaf)) == {-1, 1} for leaf in params.values())
    # no intermediate result is larger than a few vectors
    jaxpr = jax.make_jaxpr(cell.apply)({"params": params}, cell.initialize_carry(1), x, reset)
    assert "512,512" not in str(jaxpr) and "256,256" not in str(jaxpr) and "dot_general" not in str(jaxpr)


@pytest.mark.parametrize("kernel_size", [1, 2, 3, 4, 8])
def test_paralesn(kernel_size):
    leak = 0.7
    cell = ParalESN(N, leak=leak, kernel_size=kernel_size)
    params, carry, x, reset = scenario(cell)
    p = as_float64(params)
    final, y = cell.apply({"params": params}, carry, x, reset)
    for b in range(B):
        h = [as_complex(layer[b]) for layer in carry]
        for t in range(T):
            u, features = as_float64(x)[t, b], []
            for i in range(2):
                eigenvalues = np.exp(-np.exp(p[f"nu_{i}"]) + 1j * np.exp(p[f"theta_{i}"]))
                transition = (1 - leak) + leak * eigenvalues
                driven = leak * (u @ as_complex(p[f"W_in_{i}"]) + as_complex(p[f"b_{i}"]))
                h[i] = transition * (0 if reset[t, b] else h[i]) + driven  # Eq. A5
                kernel = p[f"C_{i}"][0] + 1j * p[f"C_{i}"][1]
                mixed = np.convolve(h[i], kernel)[kernel_size // 2 :][:N]  # the middle of the full convolution
                u = np.tanh((mixed + p[f"c_{i}"]).real)  # Eq. A6
                features.append(u)
            np.testing.assert_allclose(y[t, b], np.concatenate(features), rtol=1e-5, atol=5e-6)
        for i in range(2):
            np.testing.assert_allclose(as_complex(final[i][b]), h[i], rtol=1e-5, atol=5e-6)


# ----------------------------------------------------------------------------------------------------------------------
# Initialisation
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ring", [(0.0, 1.0), (0.9, 0.999), (0.99, 0.9999), (0.0, 0.5), (0.999999, 1.0)])
@pytest.mark.parametrize("max_phase", [2 * np.pi, np.pi / 10, 1e-3])
def test_no_draw_of_the_modes_is_infinite_or_without_gradient(ring, max_phase):
    extremes = jnp.array([0.0, 1e-38, 1e-7, 1 - 2**-24, 1.0])
    uniform = jnp.concatenate([jax.random.uniform(jax.random.key(0), (10_000,)), extremes])
    nu, theta = draw_nu(uniform, *ring), draw_theta(uniform, max_phase)
    gamma = 0.5 * jnp.log1p(-jnp.exp(-2 * jnp.exp(nu)))
    radius, phase = jnp.exp(-jnp.exp(nu)), jnp.exp(theta)
    slopes = [jax.vmap(jax.grad(f))(v) for f, v in [(lambda v: jnp.exp(-jnp.exp(v)), nu), (jnp.exp, theta)]]
    for values in (nu, theta, gamma, *slopes):
        assert np.all(np.isfinite(values))
    assert np.all(radius > 0) and np.all(radius < 1) and all(np.all(slope != 0) for slope in slopes)
    np.testing.assert_allclose(np.exp(2 * gamma) + radius**2, 1, rtol=1e-6)
    assert np.all(radius >= ring[0] - 1e-6) and np.all(radius <= ring[1] + 1e-6)
    assert np.all(phase > 0) and np.all(phase <= max_phase * (1 + 1e-6))


@pytest.mark.parametrize("unit", [LRU, ParalESN])
@pytest.mark.parametrize("freeze", [False, True])
def test_the_modes_start_in_the_same_ring_whatever_the_unit_and_whether_frozen(unit, freeze):
    cell = unit(128, freeze=freeze)
    x, reset, carry = jnp.zeros((1, B, 128)), jnp.zeros((1, B), bool), carry_of(cell)
    params = jax.jit(cell.init)(jax.random.key(0), carry, x, reset)["params"]
    radius = np.concatenate([np.exp(-np.exp(nu)) for name, nu in params.items() if name.startswith("nu")])
    assert 0.9 <= radius.min() < 0.905 and 0.998 < radius.max() <= 0.999


def test_random_orthogonal_matrices_are_uniform_over_the_orthogonal_group():
    """Moments of Haar's measure in three dimensions: E tr² = 1, E tr⁴ = 3, E q² = 1/3, E q⁴ = 1/5, E det = 0."""
    Q = jax.vmap(lambda key: random_orthogonal(key, (3, 3)))(jax.random.split(jax.random.key(0), 100_000))
    trace = jnp.trace(Q, axis1=1, axis2=2)
    np.testing.assert_allclose([(trace**2).mean(), (trace**4).mean()], [1, 3], rtol=0.03)
    np.testing.assert_allclose((Q**2).mean(0), 1 / 3, rtol=0.02)
    np.testing.assert_allclose((Q**4).mean(0), 1 / 5, rtol=0.03)
    np.testing.assert_allclose([jnp.linalg.det(Q).mean(), *Q.mean(0).ravel()], 0, atol=0.02)
    np.testing.assert_allclose((Q[:, 0, 0] ** 2 * Q[:, 1, 1] ** 2).mean(), 2 / 15, rtol=0.03)


def test_a_gru_starts_orthogonal_without_lapack():
    """LAPACK's kernels, called for several seeds at once, can wait for each other forever."""
    cell = GRU(features=32)
    x, reset, carry = jnp.ones((1, 1, 32)), jnp.ones((1, 1), bool), cell.initialize_carry(1)
    init = jax.jit(jax.vmap(lambda key: cell.init(key, carry, x, reset)))
    keys = jax.random.split(jax.random.key(0), 3)
    for U in (U for name, U in init(keys)["params"].items() if name.startswith("U")):
        np.testing.assert_allclose(U @ U.mT, np.broadcast_to(np.eye(32), (3, 32, 32)), atol=1e-5)
    assert '"lapack' not in init.lower(keys).compile().as_text()
    assert '"lapack' in jax.jit(jnp.linalg.qr).lower(jnp.eye(3)).compile().as_text(), "else the line above is blind"


@pytest.mark.parametrize("target", [0.5, 0.99, 1.3])
def test_deepesn_has_the_spectral_radius_asked_for(target):
    cell = DeepESN(256, num_layers=2, spectral_radius=target)
    x, reset = jnp.ones((1, 1, 16)), jnp.zeros((1, 1), bool)
    for seed in range(3):
        params = jax.jit(cell.init)(jax.random.key(seed), cell.initialize_carry(1), x, reset)["params"]
        for i in range(2):
            eigenvalues = np.linalg.eigvals(np.asarray(params[f"W_rec_{i}"], np.float64))
            assert abs(np.abs(eigenvalues).max() - target) < 1e-5 * target


# ----------------------------------------------------------------------------------------------------------------------
# What the papers say about the dynamics
# ----------------------------------------------------------------------------------------------------------------------


def two_trajectories(cell, params, steps, features, starts=(4, 5)):
    x = jax.random.normal(jax.random.key(0), (steps, B, features))
    reset = jnp.zeros((steps, B), bool)

    def states(seed):
        carry = jax.tree.map(lambda leaf: jax.random.normal(jax.random.key(seed), leaf.shape), carry_of(cell))
        _, all_states = jax.lax.scan(
            lambda carry, now: 2 * (cell.apply({"params": params}, carry, now[None], reset[:1])[0],), carry, x
        )
        return jax.tree.map(lambda first, rest: jnp.concatenate([first[None], rest]), carry, all_states)

    return states(starts[0]), states(starts[1])


def test_lru_forgets_its_initial_state_at_the_rate_of_its_largest_eigenvalue():
    cell = LRU(N, r_min=0.5, r_max=0.95)
    params, *_ = scenario(cell, features=N)
    radius = np.exp(-np.exp(as_float64(params["nu"])))
    one, other = two_trajectories(cell, params, 60, N)
    difference = np.abs(as_complex(one) - as_complex(other))  # [T + 1, B, N]
    t = np.arange(61)[:, None, None]
    np.testing.assert_allclose(difference, radius**t * difference[0], rtol=1e-3, atol=2e-6)  # Eq. 12, mode by mode
    norm = np.linalg.norm(difference, axis=-1)
    assert np.all(norm <= radius.max() ** t[..., 0] * norm[0] * (1 + 1e-5) + 1e-5)  # Eq. 12


@pytest.mark.parametrize("leak", [1.0, 0.4])
def test_a_leaky_esn_contracts_by_kappa(leak):
    cell = DeepESN(N, num_layers=1, leak=leak, spectral_radius=0.5)
    params, *_ = scenario(cell)
    kappa = (1 - leak) + leak * np.linalg.norm(as_float64(params["W_rec_0"]), 2)  # Eq. 8
    params["W_rec_0"] *= 0.9 / max(kappa, 0.9)
    kappa = (1 - leak) + leak * np.linalg.norm(as_float64(params["W_rec_0"]), 2)
    assert kappa < 1
    (one,), (other,) = two_trajectories(cell, params, 100, F)
    distance = np.linalg.norm(as_float64(one) - as_float64(other), axis=-1)
    assert np.all(distance[1:] <= kappa * distance[:-1] + 1e-6) and np.all(distance[-1] < 1e-2 * distance[0])


def test_the_frozen_gru_of_two_dimensions_forgets_in_one_and_never_in_the_other():
    cell = GRU(2, freeze=True)
    zero = {f"{name}_{gate}": jnp.zeros(shape) for gate in "zrc" for name, shape in [("U", (2, 2)), ("b", 2)]}
    params = zero | {"W_z": jnp.zeros((1, 2)), "W_r": jnp.zeros((1, 2)), "W_c": jnp.array([[1.0, 0.0]])}
    params["U_c"] = jnp.diag(jnp.array([0.0, 4.0]))  # the construction above Eq. 14
    w_star = 0.5
    for _ in range(200):
        w_star = np.tanh(2 * w_star)
    steps = 60
    o = np.random.default_rng(0).uniform(-1, 1, (steps, 2, 1)).astype(np.float32)
    o[:, 1] = o[:, 0]  # the same input
    start = jnp.array([[0.9, 0.0], [-0.7, w_star]])  # for two initial states
    _, h = cell.apply({"params": params}, start, jnp.asarray(o), jnp.zeros((steps, 2), bool))
    v, w = np.moveaxis(np.asarray(h), -1, 0)
    np.testing.assert_allclose(w[:, 1] - w[:, 0], w_star, rtol=1e-5)  # no echo state property
    v_star, reference = np.array([0.9, -0.7]), []
    for t in range(steps):
        v_star = 0.5 * v_star + 0.5 * np.tanh(o[t, 0, 0])  # Eq. 14
        reference.append(v_star)
    np.testing.assert_allclose(v, reference, rtol=1e-4, atol=1e-6)
    history = [sum(2.0 ** -(k + 1) * np.tanh(o[t - k, 0, 0]) for k in range(t + 1)) for t in range(steps)]
    bound = 2.0 ** (1 - np.arange(1, steps + 1))
    assert np.all(np.abs(v - np.array(history)[:, None]) <= bound[:, None] + 1e-6)  # Eq. 15


# ----------------------------------------------------------------------------------------------------------------------
# float32 over 100,000 steps
# ----------------------------------------------------------------------------------------------------------------------

LONG = 100_000


@pytest.mark.parametrize("form", ["sequential", "associative"])
@pytest.mark.parametrize("durability", ["initial", 20_000])
def test_a_linear_recurrence_is_correct_in_float32_at_every_one_of_100_000_steps(form, durability):
    m, c = 4, 3
    alpha = -np.log(0.01) / (np.geomspace(1, 1024, m) if durability == "initial" else np.full(m, durability))
    omega = 2 * np.pi / np.geomspace(1, 1024, c)
    alpha, omega = np.tile(alpha, c).astype(np.float32), np.repeat(omega, m).astype(np.float32)
    rng = np.random.default_rng(0)
    u, reset = rng.normal(size=(LONG, 1, m)).astype(np.float32), rng.random((LONG, 1)) < 1 / 50_000
    gamma = jnp.exp(-alpha) * jnp.stack([jnp.cos(omega), -jnp.sin(omega)])
    start = rng.normal(size=(1, 2 * c * m)).astype(np.float32)
    h = jax.jit(lambda u: linear_recurrence(gamma.reshape(-1), u, reset, start, form))(u)
    exact_gamma = np.exp(-alpha.astype(np.float64) - 1j * omega.astype(np.float64))
    S, exact = as_complex(start[0]), np.empty((LONG, c * m), complex)
    for t in range(LONG):
        S = (0 if reset[t, 0] else exact_gamma * S) + np.tile(u[t, 0].astype(np.float64), c)
        exact[t] = S
    error = np.linalg.norm(as_complex(h[:, 0]) - exact, axis=-1) / np.linalg.norm(exact, axis=-1)
    assert error.max() < 1e-3


@pytest.mark.parametrize("unit", [FFM, LRU, GRU, DeepESN, SRC, ParalESN])
def test_every_unit_stays_correct_in_float32_over_100_000_steps(unit):
    """float32 against the same unit in float64, started from the same state: rounding does not build up."""
    cell = unit(4)
    x = np.random.default_rng(0).normal(size=(LONG, 1, 4))
    reset = np.zeros((LONG, 1), bool)
    init = cell.init(jax.random.key(0), cell.initialize_carry(1), x[:1].astype(np.float32), reset[:1])
    _, y = jax.jit(cell.apply)(init, cell.initialize_carry(1), x.astype(np.float32), reset)
    assert y.dtype == jnp.float32
    with jax.enable_x64(True):
        exact_init = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), init)
        x = x.astype(np.float32).astype(np.float64)
        carry = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), cell.initialize_carry(1))
        _, exact = jax.jit(cell.apply)(exact_init, carry, x, reset)
        assert exact.dtype == jnp.float64
    error = np.linalg.norm(np.asarray(y) - np.asarray(exact), axis=-1) / np.linalg.norm(np.asarray(exact), axis=-1)
    assert np.quantile(error, 0.999) < 1e-3 and error.max() < 1e-1


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        (GRU(256), 393_984),
        (LRU(256), 263_168),
        (FFM(256), 2 * (256 * 32 + 32) + 3 * (256 * 256 + 256) + 32 + 4),
    ],
    ids=lambda value: type(value).__name__,
)
def test_parameters_at_width_256(cell, expected):
    x, reset = jnp.ones((1, 1, 256)), jnp.zeros((1, 1), bool)
    variables = cell.init(jax.random.key(0), cell.initialize_carry(1), x, reset)
    assert sum(leaf.size for leaf in jax.tree.leaves(variables)) == expected
