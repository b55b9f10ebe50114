"""The contract of memory.py, for every unit: one function for acting and training, resets, freezing, gradients."""

import itertools
import os
import subprocess
import sys
from functools import cache, partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference

import memory
from memory import (
    FFM,
    GRU,
    LRU,
    SRC,
    DeepESN,
    Memoryless,
    ParalESN,
    count_parameters,
    merge,
    parameter_table,
    partition,
)

jax.config.update("jax_default_matmul_precision", "highest")

T, F = 7, 4
RESETS = np.array(list(itertools.product([False, True], repeat=T))).T  # [T, B]: a batch of all ways to reset
B = RESETS.shape[1]
UNITS = {
    "memoryless": Memoryless(),
    "gru": GRU(F, update_bias=-1.0),
    "ffm": FFM(F, trace_size=3, context_size=2, form="sequential"),
    "lru": LRU(F, form="sequential"),
    "deepesn": DeepESN(F, leak=0.6),
    "src": SRC(F),
    "paralesn": ParalESN(F, leak=0.8, form="sequential"),
    "ffm-associative": FFM(F, trace_size=3, context_size=2, form="associative"),
    "lru-associative": LRU(F, form="associative"),
    "paralesn-associative": ParalESN(F, leak=0.8, form="associative"),
}
STATES = [unit for unit in UNITS if unit != "memoryless"]
slow_twin = pytest.param("paralesn-associative", marks=pytest.mark.slow)  # nothing that the two before it have not
every_state = pytest.mark.parametrize("unit", [slow_twin if unit == slow_twin.values[0] else unit for unit in STATES])
every_class = pytest.mark.parametrize("unit", [unit for unit in STATES if "-" not in unit])
# Optimising takes half of the time and changes no fact here; tests/test_memory_width.py compares what comes out of it.
compiled = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def busy_carry(unit, seed=7):
    """A state in the middle of an episode: nothing is zero."""
    return jax.tree.map(lambda leaf: 0.3 * normal(seed, *leaf.shape), UNITS[unit].initialize_carry(B))


@cache
def initial_parameters(unit):
    """Those of the unit, and those of the unit with freeze=True."""
    cell = UNITS[unit]
    arguments = cell.initialize_carry(B), normal(0, 1, B, F), RESETS[:1]
    return compiled(lambda key: [c.init(key, *arguments) for c in (cell, cell.clone(freeze=True))])(jax.random.key(1))


@cache
def variables(unit):
    """Initial parameters and some noise, as all biases are 0 at the start."""
    return jax.tree.map(lambda leaf: leaf + 0.1 * normal(2, *leaf.shape), initial_parameters(unit)[0])


@cache
def apply(unit):
    return compiled(UNITS[unit].apply)


def in_chunks(unit, carry, x, reset, size):
    """What consecutive calls give on chunks of `size` steps (and a shorter last one)."""
    outputs = []
    for start in range(0, T, size):
        now = slice(start, start + size)
        carry, y = apply(unit)(variables(unit), carry, x[now], reset[now])
        outputs.append(y)
    return carry, np.concatenate(outputs)


def loss(cell, params, carry, x, reset, weights):
    """Σ weights ⊙ y, where they are not 0, and something of the last state; and what the unit returned."""
    carry, y = cell.apply(params, carry, x, reset)
    counted = jnp.where(weights != 0, y, 0.0) * weights
    return counted.sum() + sum(jnp.sin(leaf).sum() for leaf in jax.tree.leaves(carry)), (carry, y)


@cache
def gradient(unit, freeze=False):
    """The compiled gradient of `loss` for (params, carry, x), on a CPU in pieces of 3, 3 and 1 steps."""
    program = compiled(jax.grad(partial(loss, UNITS[unit].clone(freeze=freeze)), argnums=(0, 1, 2), has_aux=True))
    with mock.patch.object(memory, "PIECE", 3 * B):
        return program.lower(variables(unit), busy_carry(unit), normal(0, T, B, F), RESETS, weights_of(unit)).compile()


def weights_of(unit):
    y = jax.eval_shape(UNITS[unit].apply, variables(unit), busy_carry(unit), normal(0, T, B, F), RESETS)[1]
    return normal(3, *y.shape)


def assert_close(a, b, tolerance):
    jax.tree.map(lambda p, q: np.testing.assert_allclose(p, q, rtol=tolerance, atol=tolerance), a, b)


@pytest.mark.parametrize("unit", ["memoryless", *every_state.args[1]])
def test_steps_chunks_and_the_whole_sequence_equal_the_reference_whatever_the_resets(unit):
    x, carry = normal(0, T, B, F), busy_carry(unit)
    right = reference.run(UNITS[unit], variables(unit).get("params", {}), carry, x, RESETS)
    whole = in_chunks(unit, carry, x, RESETS, T)
    for size in (T, 3, 1):
        found = in_chunks(unit, carry, x, RESETS, size)
        assert_close(found, right, 2e-5)
        assert_close(found, whole, 3e-6)
        kinds = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(found[0])]
        assert kinds == [(leaf.shape, jnp.float32) for leaf in jax.tree.leaves(UNITS[unit].initialize_carry(B))]


@every_state
def test_gradients_are_the_numerical_ones_of_the_reference_whatever_the_resets(unit):
    weights, cell = weights_of(unit), UNITS[unit]
    point = [variables(unit), busy_carry(unit), normal(0, T, B, F)]

    def exact(point):
        params, carry, x = point
        carry, y = reference.run(cell, params["params"], carry, x, RESETS)
        return (y * weights).sum() + sum(np.sin(leaf).sum() for leaf in jax.tree.leaves(carry))

    gradients, outputs = gradient(unit)(*point, RESETS, weights)
    reference.check_gradient(exact, point, gradients)
    params, carry, x = point
    assert_close(outputs, reference.run(cell, params["params"], carry, x, RESETS), 2e-5)


@every_state
@pytest.mark.parametrize("counted", ["after", "before"])
def test_nan_and_inf_do_not_cross_a_reset_in_values_or_gradients(unit, counted):
    """Only what comes after the only reset counts for the loss, or only what comes before it; the rest is poisoned."""
    x, carry = normal(0, T, B, F), busy_carry(unit)
    start, t = np.arange(B) % T, np.arange(T)[:, None]
    counts = t >= start if counted == "after" else t < start  # [T, B]
    weights = np.where(counts[..., None], weights_of(unit), 0)

    def run(bad):
        """What the good part must be, and the gradient of the rest."""
        poisoned = x if bad is None else np.where(counts[..., None], x, np.float32(bad))
        stored = carry
        if bad is not None and counted == "after":
            stored = jax.tree.map(lambda leaf: np.full_like(leaf, bad), carry)
        (_, d_carry, dx), (last, y) = gradient(unit)(variables(unit), stored, poisoned, t == start, weights)
        good, rest = [np.asarray(dx)[counts], np.asarray(y)[counts]], [np.asarray(dx)[~counts]]
        (good if counted == "before" else rest).append(d_carry)
        if counted == "after":
            good.append(last)
        return good, rest

    clean, rest = run(None)
    if counted == "after":  # nothing flows back across the start of an episode
        assert all(np.all(leaf == 0) for leaf in jax.tree.leaves(rest))
    for bad in [np.nan, np.inf, -np.inf]:
        assert_close(run(bad)[0], clean, 3e-6)


@every_state
def test_a_nan_in_the_stored_state_does_not_reach_the_parameters_if_all_episodes_start_anew(unit):
    x, carry, reset = normal(0, T, B, F), busy_carry(unit), RESETS.copy()
    reset[0] = True

    def of_parameters(carry):
        return gradient(unit)(variables(unit), carry, x, reset, weights_of(unit))[0][0]

    poisoned = jax.tree.map(lambda leaf: np.full_like(leaf, np.nan), carry)
    jax.tree.map(np.testing.assert_array_equal, of_parameters(poisoned), of_parameters(carry))


@every_class
def test_seeds_can_be_vmapped(unit):
    x, carry, weights = normal(0, 3, T, B, F), busy_carry(unit), weights_of(unit)
    params = jax.tree.map(
        lambda leaf: leaf * np.array([0.9, 1.0, 1.1], np.float32).reshape(3, *[1] * leaf.ndim), variables(unit)
    )
    function = jax.grad(partial(loss, UNITS[unit]), argnums=(0, 2), has_aux=True)
    together = compiled(jax.vmap(lambda params, x: function(params, carry, x, RESETS, weights)))(params, x)
    for i in range(3):
        alone = jax.tree.map(lambda leaf, i=i: leaf[i], params)
        (d_params, _, dx), outputs = gradient(unit)(alone, carry, x[i], RESETS, weights)
        assert_close(jax.tree.map(lambda leaf, i=i: leaf[i], together), ((d_params, dx), outputs), 2e-4)


@every_class
def test_freezing_stops_the_gradient_of_the_parameters_only_and_drops_its_work(unit):
    trained, frozen = initial_parameters(unit)
    jax.tree.map(np.testing.assert_array_equal, trained, frozen)
    arguments = variables(unit), busy_carry(unit), normal(0, T, B, F), RESETS, weights_of(unit)
    (of_params, *of_rest), outputs = gradient(unit)(*arguments)
    (of_frozen_params, *of_frozen_rest), frozen_outputs = gradient(unit, freeze=True)(*arguments)
    assert all(np.any(leaf != 0) for leaf in jax.tree.leaves(of_params))
    assert all(np.all(leaf == 0) for leaf in jax.tree.leaves(of_frozen_params))
    assert_close([of_frozen_rest, frozen_outputs], [of_rest, outputs], 3e-6)
    assert gradient(unit, freeze=True).cost_analysis()["flops"] < gradient(unit).cost_analysis()["flops"]


def test_frozen_parameters_are_bit_identical_after_training_and_what_is_upstream_is_not():
    cell, target = UNITS["gru"].clone(freeze=True), normal(5, T, B, 1)
    params = {"encoder": {"W": normal(1, F, F)}, "memory": variables("gru")["params"]}
    trainable, frozen = partition(params, lambda path: path[0] == "memory")
    optimiser = optax.adam(1e-2)
    state = optimiser.init(trainable)
    assert len(jax.tree.leaves(state)) == 1 + 2 * 1  # Adam's count, and two moments of the one trainable leaf

    @compiled
    def update(trainable, state):
        def loss(trainable):
            params = merge(trainable, frozen)
            x, carry = normal(0, T, B, F) @ params["encoder"]["W"], cell.initialize_carry(B)
            return jnp.square(cell.apply({"params": params["memory"]}, carry, x, RESETS)[1] - target).mean()

        changes, state_ = optimiser.update(jax.grad(loss)(trainable), state)
        return optax.apply_updates(trainable, changes), state_

    learned = trainable
    for _ in range(3):
        learned, state = update(learned, state)
    after = merge(learned, frozen)
    jax.tree.map(np.testing.assert_array_equal, after["memory"], variables("gru")["params"])
    assert np.all(after["encoder"]["W"] != params["encoder"]["W"])


def test_wrong_arguments_are_named():
    cell, x, reset, carry = UNITS["gru"], normal(0, T, B, F), RESETS, np.zeros((B, F), np.float32)
    for arguments, message in [
        ((carry, x[0], reset), "GRU: x must be"),
        ((carry, x[:0], reset[:0]), "at least one step"),
        ((carry, x, reset[:-1]), "GRU: reset must be"),
        ((carry, x, reset.T), "GRU: reset must be"),
        ((carry, x, reset.astype(float)), "GRU: reset must be bool"),
        ((carry[:-1], x, reset), "GRU: the carry"),
        (((carry, carry), x, reset), "GRU: the carry"),
    ]:
        with pytest.raises(ValueError, match=message):
            cell.apply(variables("gru"), *arguments)


@pytest.mark.parametrize(
    ("cell", "fields", "message"),
    [
        (GRU, {"features": 0}, "GRU: features must be a positive integer below 2^31, not 0"),
        (GRU, {"features": 4.0}, "GRU: features must be a positive integer below 2^31, not 4.0"),
        (GRU, {"features": "4"}, "GRU: features must be a positive integer below 2^31, not '4'"),
        (GRU, {"freeze": 1}, "GRU: freeze must be True or False, not 1"),
        (GRU, {"update_bias": np.nan}, "GRU: update_bias must be a finite number, not nan"),
        (GRU, {"update_bias": "-2"}, "GRU: update_bias must be a finite number, not '-2'"),
        (FFM, {"trace_size": 0}, "FFM: trace_size must be a positive integer below 2^31, not 0"),
        (FFM, {"context_size": -1}, "FFM: context_size must be a positive integer below 2^31, not -1"),
        (FFM, {"context_size": 2**31}, "FFM: context_size must be a positive integer below 2^31, not 2147483648"),
        (FFM, {"input_gate": None}, "FFM: input_gate must be True or False, not None"),
        (FFM, {"form": "fast"}, "FFM: form must be one of auto, sequential, associative, not 'fast'"),
        (LRU, {"r_min": 1.0, "r_max": 0.9}, "LRU: r_min must be at least 0 and below r_max, 0.9, not 1.0"),
        (LRU, {"r_min": -0.1}, "LRU: r_min must be at least 0 and below r_max, 0.999, not -0.1"),
        (LRU, {"r_max": 1.1}, "LRU: r_max must be at most 1, not 1.1"),
        (LRU, {"r_max": np.nan}, "LRU: r_max must be a finite number, not nan"),
        (LRU, {"max_phase": 0.0}, "LRU: max_phase must be above 0 and at most 2π, not 0.0"),
        (LRU, {"max_phase": 6.3}, "LRU: max_phase must be above 0 and at most 2π, not 6.3"),
        (LRU, {"form": ""}, "LRU: form must be one of auto, sequential, associative, not ''"),
        (DeepESN, {"num_layers": 0}, "DeepESN: num_layers must be a positive integer below 2^31, not 0"),
        (DeepESN, {"leak": 0.0}, "DeepESN: leak must be above 0 and at most 1, not 0.0"),
        (DeepESN, {"spectral_radius": 0.0}, "DeepESN: spectral_radius must be above 0, not 0.0"),
        (DeepESN, {"spectral_radius": np.inf}, "DeepESN: spectral_radius must be a finite number, not inf"),
        (DeepESN, {"input_scaling": -0.1}, "DeepESN: input_scaling must not be negative, not -0.1"),
        (DeepESN, {"bias_scaling": -1}, "DeepESN: bias_scaling must not be negative, not -1"),
        (SRC, {"recurrent_scaling": -1.0}, "SRC: recurrent_scaling must not be negative, not -1.0"),
        (SRC, {"projection_scaling": np.nan}, "SRC: projection_scaling must be a finite number, not nan"),
        (ParalESN, {"leak": 1.5}, "ParalESN: leak must be above 0 and at most 1, not 1.5"),
        (ParalESN, {"kernel_size": 0}, "ParalESN: kernel_size must be a positive integer below 2^31, not 0"),
        (ParalESN, {"kernel_size": F + 1}, "ParalESN: kernel_size must be at most features, 4, not 5"),
        (ParalESN, {"r_max": 2.0}, "ParalESN: r_max must be at most 1, not 2.0"),
        (ParalESN, {"form": None}, "ParalESN: form must be one of auto, sequential, associative, not None"),
    ],
)
def test_wrong_settings_are_named(cell, fields, message):
    with pytest.raises(ValueError) as error:
        cell(**({"features": F} | fields))
    assert str(error.value) == message


def test_settings_at_the_edge_of_what_is_right_are_taken():
    LRU(1, r_min=0, r_max=1, max_phase=2 * np.pi)
    LRU(np.int64(4), r_min=np.float32(0.5))
    DeepESN(4, leak=1, input_scaling=0, bias_scaling=0.0)
    ParalESN(3, kernel_size=3)


def test_the_lru_needs_an_input_as_wide_as_its_output():
    cell = LRU(F + 1)
    with pytest.raises(ValueError, match="LRU: .* features = 5, x has 4"):
        cell.init(jax.random.key(0), cell.initialize_carry(B), normal(0, T, B, F), RESETS)


X64 = """
import jax
import jax.numpy as jnp
import numpy as np

import memory

memory.PIECE = 4  # so that two sequences of six steps are handled in pieces of two
T, B, F = 6, 2, 8
x = np.random.default_rng(0).normal(size=(T, B, F)).astype(np.float32)
reset = np.arange(T)[:, None].repeat(B, 1) == 3
cells = [unit(F, **({"num_layers": 1} if name in memory.RESERVOIRS else {})) for name, unit in memory.UNITS.items()]
cells.append(memory.LRU(F, form="associative"))


def everything(x):
    results = []
    for cell in cells:
        carry = cell.initialize_carry(B)
        variables = cell.init(jax.random.key(0), carry, x, reset)

        def loss(variables, x):
            carry_after, y = cell.apply(variables, carry, x, reset)
            return jnp.square(y).sum(), (carry_after, y)

        gradient, (carry_after, y) = jax.grad(loss, argnums=(0, 1), has_aux=True)(variables, x)
        told = cell.describe(variables.get("params", {}))
        results.append([variables, carry, carry_after, y, gradient, told])
    return results


wide = jax.jit(everything)(x)
with jax.enable_x64(False):
    narrow = jax.jit(everything)(x)
assert jnp.zeros(()).dtype == jnp.float64  # or this process shows nothing
compared = 0
for cell, a, b in zip(cells, wide, narrow, strict=True):
    for (path, p), q in zip(jax.tree.leaves_with_path(a), jax.tree.leaves(b), strict=True):
        assert p.dtype == q.dtype == jnp.float32 and np.array_equal(p, q), (cell, jax.tree_util.keystr(path))
        compared += 1
print(compared)
"""


@pytest.mark.slow
def test_with_64_bits_switched_on_every_unit_gives_the_same_bits():
    environment = os.environ | {"JAX_ENABLE_X64": "1", "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    command = [sys.executable, "-c", X64]
    process = subprocess.run(
        command, env=environment, capture_output=True, text=True, cwd=os.path.dirname(memory.__file__)
    )
    assert process.returncode == 0, process.stderr[-2000:]
    assert int(process.stdout) > 80  # arrays compared


def test_units_are_described_by_the_modules_that_hold_them():
    assert set(memory.UNITS) == {"ffm", "gru", "lru", "deepesn", "src", "paralesn", "mlp"}
    for name, unit in memory.UNITS.items():
        assert (name in memory.RESERVOIRS) == issubclass(unit, memory.Reservoir)
    parameters = variables("lru")["params"]
    network = {
        "input": {"W": jnp.ones(3)},
        "memory_0": parameters,
        "memory_1": parameters,
        "output": {"nu": jnp.ones(3)},
    }
    described = memory.describe_units(lambda: UNITS["lru"], network)
    expected = UNITS["lru"].describe(parameters)
    assert described == {f"memory_{i}/{key}": value for i in range(2) for key, value in expected.items()} != {}
    for unit in ("gru", "deepesn", "src"):
        assert memory.describe_units(lambda unit=unit: UNITS[unit], {"memory_0": variables(unit)["params"]}) == {}


def test_partition_and_merge_are_inverse_and_count():
    params = {"a": {"W": jnp.ones((2, 3)), "inner": {"b": jnp.ones(4)}}, "b": {"W": jnp.ones(5)}, "c": jnp.ones(())}
    trainable, frozen = partition(params, lambda path: path[0] == "a" and path[-1] == "b" or path[0] == "b")
    assert trainable == {"a": {"W": params["a"]["W"]}, "c": params["c"]}
    assert frozen == {"a": {"inner": {"b": params["a"]["inner"]["b"]}}, "b": params["b"]}
    assert jax.tree.structure(merge(trainable, frozen)) == jax.tree.structure(params)
    assert count_parameters(trainable, frozen) == {
        "a": {"total": 10, "trainable": 6, "frozen": 4},
        "b": {"total": 5, "trainable": 0, "frozen": 5},
        "c": {"total": 1, "trainable": 1, "frozen": 0},
        "all": {"total": 16, "trainable": 7, "frozen": 9},
    }
    assert parameter_table(count_parameters(trainable, frozen)).splitlines()[2:] == [
        "  b                       5          0          5",
        "  c                       1          1          0",
        "  all                    16          7          9",
    ]
    for nothing in [lambda path: False, lambda path: True]:
        parts = partition(params, nothing)
        assert {} in parts and jax.tree.structure(merge(*parts)) == jax.tree.structure(params)
