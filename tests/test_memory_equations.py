"""The settings of every unit of memory.py, its initialisation, and what the papers say about its dynamics."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import scipy.linalg
from reference import as_complex, as_float64

from memory import (
    FFM,
    GRU,
    LRU,
    SRC,
    DeepESN,
    ParalESN,
    convolve,
    draw_nu,
    draw_theta,
    hadamard_transform,
    linear_recurrence,
    random_orthogonal,
)

jax.config.update("jax_default_matmul_precision", "highest")

T, B, F, N = 20, 3, 6, 8
compiled = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # half of the time, the same facts


def initial(cell, features=F, seed=0):
    """The initial parameters. A test that uses a few of them compiles only what draws these."""
    x, reset = jnp.zeros((1, B, features)), jnp.zeros((1, B), bool)
    return cell.init(jax.random.key(seed), carry_of(cell), x, reset)["params"]


def scenario(cell, features=F, steps=T):
    """Random parameters (biases too), a state in the middle of an episode, inputs, resets."""
    rng = np.random.default_rng(0)

    def normal(shape, scale):
        return rng.normal(size=shape, scale=scale).astype(np.float32)

    x, reset = normal((steps, B, features), 1), rng.random((steps, B)) < 0.1
    params = compiled(lambda: initial(cell, features))()
    params = jax.tree.map(lambda leaf: leaf + normal(leaf.shape, 0.1), params)
    carry = jax.tree.map(lambda leaf: normal(leaf.shape, 0.3), carry_of(cell))
    return params, carry, x, reset


def carry_of(cell):
    return cell.initialize_carry(B)


FLAGS = ["decay", "oscillation", "learn_decay", "learn_oscillation", "input_gate", "output_gate"]
# Every unit with its default settings is in tests/test_memory.py.
SETTINGS = [
    *(FFM(N, trace_size=5, context_size=3, **{flag: False}) for flag in FLAGS),
    LRU(F, r_min=0.2, r_max=0.7, max_phase=0.5),
    DeepESN(N, num_layers=3, leak=0.3, spectral_radius=1.2),
    SRC(N, num_layers=1, recurrent_scaling=1.1, input_scaling=0.7, projection_scaling=0.9),
    ParalESN(N, num_layers=1, leak=0.7, kernel_size=4),
]


def name_of(cell):
    settings = [f for f in dataclasses.fields(cell) if f.name not in ("features", "parent", "name")]
    return "-".join([type(cell).__name__, *(f.name for f in settings if getattr(cell, f.name) != f.default)])


@pytest.mark.parametrize("cell", SETTINGS, ids=name_of)
def test_settings_do_what_the_equations_say(cell):
    params, carry, x, reset = scenario(cell)
    found = compiled(cell.apply)({"params": params}, carry, x, reset)
    expected = reference.run(cell, params, carry, x, reset)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=5e-6), found, expected)


@pytest.mark.parametrize("ablated", [None, *FLAGS])
def test_what_a_flag_of_ffm_switches_off_has_no_parameters(ablated):
    cell = FFM(N, **({ablated: False} if ablated else {}))
    gone = {"decay": "alpha", "learn_decay": "alpha", "oscillation": "omega", "learn_oscillation": "omega"}
    gone |= {"input_gate": "l2", "output_gate": "l4"}
    names = {name.split("_")[0] for name in jax.eval_shape(lambda: initial(cell))}
    assert names == {"alpha", "omega", "l1", "l2", "l3", "l4", "l5"} - {gone.get(ablated)}


def test_the_update_bias_of_a_gru_is_where_its_update_gate_starts():
    for given, expected in [({}, 0.0), ({"update_bias": -4.0}, -4.0)]:
        biases = compiled(lambda given=given: [initial(GRU(N, **given))[f"b_{gate}"] for gate in "zrc"])()
        assert np.all(biases[0] == expected) and np.all(biases[1] == 0) and np.all(biases[2] == 0)


def test_ffm_interpretation():
    cell = FFM(N)
    params = compiled(lambda: {name: initial(cell)[name] for name in ("alpha", "omega")})()
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


@pytest.mark.parametrize("cell", [LRU(N), ParalESN(N, leak=0.5)], ids=["lru", "paralesn"])
def test_the_durability_of_a_mode_is_the_time_until_a_hundredth_of_it_is_left(cell):
    """The unit itself says so: what is left of a state after t steps without an input, mode by mode."""
    steps = 10
    x, reset, carry = np.zeros((steps, B, N), np.float32), np.zeros((steps, B), bool), carry_of(cell)
    params = compiled(lambda: initial(cell, N))()
    silent = {name: 0 * leaf if name.startswith(("b_", "W_in")) else leaf for name, leaf in params.items()}
    end, _ = compiled(cell.apply)({"params": silent}, jax.tree.map(np.ones_like, carry), x, reset)
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


@pytest.mark.parametrize("m", [1, 2, 4, 64, 512])
def test_hadamard_transform_equals_the_matrix_product_and_is_its_own_inverse(m):
    x = jax.random.normal(jax.random.key(0), (3, m))
    np.testing.assert_allclose(hadamard_transform(x), x @ (scipy.linalg.hadamard(m) / np.sqrt(m)), rtol=1e-4, atol=3e-6)
    np.testing.assert_allclose(hadamard_transform(hadamard_transform(x)), x, rtol=1e-4, atol=3e-6)


def test_src_is_frozen_signs_and_holds_no_matrix():
    cell = SRC(256)
    x, reset = jnp.ones((1, 1, 256)), jnp.zeros((1, 1), bool)
    params = compiled(lambda: initial(cell, 256))()
    assert all(leaf.shape == (3, 512) and set(np.unique(leaf)) == {-1, 1} for leaf in params.values())
    # no intermediate result is larger than a few vectors
    jaxpr = jax.make_jaxpr(cell.apply)({"params": params}, cell.initialize_carry(1), x, reset)
    assert "512,512" not in str(jaxpr) and "256,256" not in str(jaxpr) and "dot_general" not in str(jaxpr)


@pytest.mark.parametrize("kernel_size", [1, 2, 3, 4, 8])
def test_the_convolution_is_the_middle_of_the_full_one(kernel_size):
    x, kernel = np.random.default_rng(0).normal(size=(2, N)), np.random.default_rng(1).normal(size=kernel_size)
    full = np.stack([np.convolve(row, kernel) for row in x])
    found = convolve(jnp.asarray(x, jnp.float32), jnp.asarray(kernel, jnp.float32))
    np.testing.assert_allclose(found, full[:, kernel_size // 2 :][:, :N], rtol=1e-5, atol=1e-6)


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

    @compiled
    def all_nu():
        params = initial(unit(128, freeze=freeze), 128)
        return [nu for name, nu in params.items() if name.startswith("nu")]

    radius = np.exp(-np.exp(np.concatenate(all_nu())))
    assert 0.9 <= radius.min() < 0.905 and 0.998 < radius.max() <= 0.999


def test_random_orthogonal_matrices_are_uniform_over_the_orthogonal_group():
    """Moments of Haar's measure in three dimensions: E tr² = 1, E tr⁴ = 3, E q² = 1/3, E q⁴ = 1/5, E det = 0."""
    draw = compiled(jax.vmap(lambda key: random_orthogonal(key, (3, 3))))
    Q = np.asarray(draw(jax.random.split(jax.random.key(0), 100_000)))
    trace = np.trace(Q, axis1=1, axis2=2)
    np.testing.assert_allclose([(trace**2).mean(), (trace**4).mean()], [1, 3], rtol=0.03)
    np.testing.assert_allclose((Q**2).mean(0), 1 / 3, rtol=0.02)
    np.testing.assert_allclose((Q**4).mean(0), 1 / 5, rtol=0.03)
    np.testing.assert_allclose([np.linalg.det(Q).mean(), *Q.mean(0).ravel()], 0, atol=0.02)
    np.testing.assert_allclose((Q[:, 0, 0] ** 2 * Q[:, 1, 1] ** 2).mean(), 2 / 15, rtol=0.03)


def test_a_gru_starts_orthogonal_without_lapack():
    """LAPACK's kernels, called for several seeds at once, can wait for each other forever."""
    seeds = jnp.arange(3)
    init = compiled(jax.vmap(lambda seed: initial(GRU(32), 32, seed))).lower(seeds).compile()
    for name, U in init(seeds).items():
        if name.startswith("U"):
            np.testing.assert_allclose(U @ U.mT, np.broadcast_to(np.eye(32), (3, 32, 32)), atol=1e-5)
    assert '"lapack' not in init.as_text()
    assert '"lapack' in compiled(jnp.linalg.qr).lower(jnp.eye(3)).compile().as_text(), "else the line above is blind"


def test_deepesn_has_the_spectral_radius_asked_for():
    for target in (0.99, 1.3):
        cell = DeepESN(256, num_layers=1, spectral_radius=target)
        W = np.asarray(compiled(lambda cell=cell: initial(cell)["W_rec_0"])(), np.float64)
        assert abs(np.abs(np.linalg.eigvals(W)).max() - target) < 1e-5 * target


# ----------------------------------------------------------------------------------------------------------------------
# What the papers say about the dynamics
# ----------------------------------------------------------------------------------------------------------------------


def two_trajectories(cell, params, steps, features):
    """All states of a unit, from two initial ones and with the same inputs."""
    x, reset = np.random.default_rng(0).normal(size=(steps, B, features)), np.zeros((1, B), bool)

    def step(carry, x):
        carry, _ = cell.apply({"params": params}, carry, x[None], reset)
        return carry, carry

    @compiled
    def states(carry):
        after = jax.lax.scan(step, carry, jnp.asarray(x, jnp.float32))[1]
        return jax.tree.map(lambda first, rest: jnp.concatenate([first[None], rest]), carry, after)

    shapes, rng = carry_of(cell), np.random.default_rng(1)
    starts = [jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), shapes) for _ in range(2)]
    return [states(start) for start in starts]


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
    start = np.array([[0.9, 0.0], [-0.7, w_star]], np.float32)  # for two initial states
    _, h = compiled(cell.apply)({"params": params}, start, o, np.zeros((steps, 2), bool))
    v, w = np.moveaxis(np.asarray(h), -1, 0)
    np.testing.assert_allclose(w[:, 1] - w[:, 0], w_star, rtol=1e-5)  # no echo state property
    v_star, expected = np.array([0.9, -0.7]), []
    for t in range(steps):
        v_star = 0.5 * v_star + 0.5 * np.tanh(o[t, 0, 0])  # Eq. 14
        expected.append(v_star)
    np.testing.assert_allclose(v, expected, rtol=1e-4, atol=1e-6)
    history = [sum(2.0 ** -(k + 1) * np.tanh(o[t - k, 0, 0]) for k in range(t + 1)) for t in range(steps)]
    bound = 2.0 ** (1 - np.arange(1, steps + 1))
    assert np.all(np.abs(v - np.array(history)[:, None]) <= bound[:, None] + 1e-6)  # Eq. 15


# ----------------------------------------------------------------------------------------------------------------------
# float32 over 100,000 steps
# ----------------------------------------------------------------------------------------------------------------------

LONG = 100_000


@pytest.mark.parametrize("form", ["sequential", pytest.param("associative", marks=pytest.mark.slow)])
def test_a_linear_recurrence_is_correct_in_float32_at_every_one_of_100_000_steps(form):
    m, c, rng = 4, 3, np.random.default_rng(0)
    durability = np.concatenate([np.geomspace(1, 1024, m), np.full(m, 20_000)])  # as at the start, and long ones
    alpha = np.tile(-np.log(0.01) / durability, c).astype(np.float32)
    omega = np.repeat(2 * np.pi / np.geomspace(1, 1024, c), 2 * m).astype(np.float32)
    u, reset = rng.normal(size=(LONG, 1, 2 * m)).astype(np.float32), rng.random((LONG, 1)) < 1 / 50_000
    gamma = jnp.exp(-alpha) * jnp.stack([jnp.cos(omega), -jnp.sin(omega)])
    start = rng.normal(size=(1, 4 * c * m)).astype(np.float32)
    h = jax.jit(lambda u: linear_recurrence(gamma.reshape(-1), u, reset, start, form))(u)
    exact_gamma = np.exp(-alpha.astype(np.float64) - 1j * omega.astype(np.float64))
    driven, S, exact = np.tile(u[:, 0].astype(np.float64), c), as_complex(start[0]), []
    for t in range(LONG):
        S = driven[t] + (0 if reset[t, 0] else exact_gamma * S)
        exact.append(S)

    def norm(S):
        return np.linalg.norm(S.reshape(LONG, c, 2, m), axis=(1, 3))  # [T, 2]: of short ones and of long ones

    exact = np.stack(exact)
    assert (norm(as_complex(h[:, 0]) - exact) / norm(exact)).max() < 1e-3


@pytest.mark.slow
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
    assert sum(leaf.size for leaf in jax.eval_shape(lambda: initial(cell, 256)).values()) == expected
