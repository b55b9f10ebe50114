"""The contract of memory.py, for every unit: one function for acting and training, resets, freezing, gradients."""

import os
import subprocess
import sys
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

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

T, B, F = 8, 2, 4
UNITS = {
    "memoryless": Memoryless(),
    "gru": GRU(F),
    "ffm": FFM(F, trace_size=3, context_size=2, form="sequential"),
    "ffm-associative": FFM(F, trace_size=3, context_size=2, form="associative"),
    "lru": LRU(F, form="sequential"),
    "lru-associative": LRU(F, form="associative"),
    "deepesn": DeepESN(F, leak=0.6),
    "src": SRC(F),
    "paralesn": ParalESN(F, leak=0.8, form="sequential"),
    "paralesn-associative": ParalESN(F, leak=0.8, form="associative"),
}
every_unit = pytest.mark.parametrize("unit", UNITS)
every_state = pytest.mark.parametrize("unit", [name for name in UNITS if name != "memoryless"])


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def resets(*indices, steps=T):
    reset = np.zeros((steps, B), bool)
    reset[list(indices)] = True
    return reset


def busy_carry(cell, seed=7):
    """A state in the middle of an episode: nothing is zero."""
    return jax.tree.map(lambda leaf: 0.3 * normal(seed, *leaf.shape), cell.initialize_carry(B))


@cache
def apply(unit):
    return jax.jit(UNITS[unit].apply)


@cache
def variables(unit):
    cell = UNITS[unit]
    return jax.jit(cell.init)(jax.random.key(1), cell.initialize_carry(B), normal(0, 1, B, F), resets(steps=1))


def in_chunks(function, params, carry, x, reset, size):
    """What consecutive calls give on chunks of `size` steps (and a shorter last one)."""
    outputs = []
    for start in range(0, len(x), size):
        carry, y = function(params, carry, x[start : start + size], reset[start : start + size])
        outputs.append(y)
    return carry, jnp.concatenate(outputs)


def assert_close(a, b, tolerance=3e-6):
    jax.tree.map(lambda p, q: np.testing.assert_allclose(p, q, rtol=tolerance, atol=tolerance), a, b)


@every_unit
def test_steps_chunks_of_every_size_and_the_whole_sequence_agree_with_a_reset_at_every_index(unit):
    x, carry = normal(0, T, B, F), busy_carry(UNITS[unit])
    for reset in [resets(), *(resets(t) for t in range(T)), resets(0, 1, 2), resets(2, 5), resets(*range(T))]:
        whole = apply(unit)(variables(unit), carry, x, reset)
        for size in [1, 3]:
            assert_close(in_chunks(apply(unit), variables(unit), carry, x, reset, size), whole)
    for size in range(2, T):
        reset = resets(3).copy()
        reset[5, 0] = True
        whole = apply(unit)(variables(unit), carry, x, reset)
        assert_close(in_chunks(apply(unit), variables(unit), carry, x, reset, size), whole)


@every_state
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_any_resets_agree(unit, data):
    x, carry = normal(data.draw(st.integers(0, 999)), T, B, F), busy_carry(UNITS[unit], data.draw(st.integers(0, 999)))
    reset = np.array(data.draw(st.lists(st.booleans(), min_size=T * B, max_size=T * B))).reshape(T, B)
    whole = apply(unit)(variables(unit), carry, x, reset)
    assert_close(in_chunks(apply(unit), variables(unit), carry, x, reset, data.draw(st.sampled_from([1, 3]))), whole)


@every_state
def test_after_a_reset_the_past_is_gone(unit):
    x, fresh = normal(0, T, B, F), UNITS[unit].initialize_carry(B)
    for t in range(T):
        # The same episode at another time: rolled to the front, in an empty memory.
        _, y = apply(unit)(variables(unit), busy_carry(UNITS[unit]), x, resets(t))
        _, alone = apply(unit)(variables(unit), fresh, np.roll(x, -t, 0), resets())
        assert_close(y[t:], alone[: T - t])


@every_state
def test_nan_and_inf_do_not_cross_a_reset_in_values_or_gradients(unit):
    t, x = 3, normal(0, T, B, F)
    cell, reset = UNITS[unit], resets(t)

    @jax.jit
    def run(x, carry):
        def loss(x, carry):
            carry, y = cell.apply(variables(unit), carry, x, reset)
            return jnp.square(y[t:]).sum() + sum(jnp.sin(leaf).sum() for leaf in jax.tree.leaves(carry)), (carry, y[t:])

        return jax.grad(loss, has_aux=True)(x, carry)

    clean_gradient, clean = run(x, busy_carry(cell))
    assert np.all(clean_gradient[:t] == 0)  # nothing flows back across the start of an episode
    for bad in [np.nan, np.inf, -np.inf]:
        poisoned = x.copy()
        poisoned[:t] = bad
        gradient, outputs = run(
            poisoned, jax.tree.map(lambda leaf, bad=bad: jnp.full_like(leaf, bad), busy_carry(cell))
        )
        assert_close(outputs, clean)
        assert_close(gradient[t:], clean_gradient[t:])


@every_state
def test_a_nan_in_the_stored_state_does_not_reach_the_parameters_if_all_episodes_start_anew(unit):
    cell, x = UNITS[unit], normal(0, T, B, F)

    @jax.jit
    def gradient(carry):
        loss = lambda params: jnp.square(cell.apply(params, carry, x, resets(0, 4))[1]).sum()  # noqa: E731
        return jax.grad(loss)(variables(unit))

    poisoned = jax.tree.map(lambda leaf: jnp.full_like(leaf, np.nan), busy_carry(cell))
    assert_close(gradient(poisoned), gradient(busy_carry(cell)))


@every_state
def test_gradients_of_the_whole_sequence_equal_those_of_steps_and_chunks(unit):
    x, carry, cell = normal(0, T, B, F), busy_carry(UNITS[unit]), UNITS[unit]
    reset = resets(0, 4, 5)
    reset[4, 1] = False
    weights = normal(3, *apply(unit)(variables(unit), carry, x, reset)[1].shape)

    def gradient(size):
        def loss(params, carry, x):
            def chunk(carry, now):
                return cell.apply(params, carry, *now)

            cut = [part.reshape(-1, size, *part.shape[1:]) for part in (x, jnp.asarray(reset))]
            carry, y = jax.lax.scan(chunk, carry, cut)
            y = y.reshape(weights.shape)
            return (y * weights).sum() + sum(jnp.sin(leaf).sum() for leaf in jax.tree.leaves(carry))

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(variables(unit), carry, x)

    assert_close(gradient(1), gradient(T), 2e-5)
    assert_close(gradient(4), gradient(T), 2e-5)


@every_state
def test_gradients_are_the_numerical_ones(unit):
    cell, reset = UNITS[unit], resets(0, 3)
    reset[3, 1] = False
    with jax.enable_x64(True):  # for the difference quotients; memory.py itself never asks for float64
        x = np.random.default_rng(0).normal(size=(T, B, F))
        carry = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), busy_carry(cell))
        params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), variables(unit))
        function = jax.jit(lambda params, carry, x: cell.apply(params, carry, x, reset))
        check_grads(function, (params, carry, x), order=1, modes=["rev"], atol=1e-6, rtol=1e-6, eps=1e-6)


@every_state
def test_pieces_for_the_cache_change_nothing(unit, monkeypatch):
    x, carry, cell = normal(0, T, B, F), busy_carry(UNITS[unit]), UNITS[unit]
    reset = resets(0, 4)
    reset[4, 1] = False

    def loss(params, carry, x):
        carry, y = cell.apply(params, carry, x, reset)
        return jnp.square(y).sum() + sum(jnp.sin(leaf).sum() for leaf in jax.tree.leaves(carry)), (carry, y)

    def run():
        return jax.jit(jax.grad(lambda *args: loss(*args), argnums=(0, 1, 2), has_aux=True))(variables(unit), carry, x)

    whole = run()
    monkeypatch.setattr(memory, "PIECE", 3 * B)  # pieces of 3, 3 and 2 steps
    assert_close(run(), whole, 1e-5)


@every_unit
def test_one_sequence_of_a_batch_does_not_see_the_others(unit):
    x, reset, carry = normal(0, T, B, F), resets(3), busy_carry(UNITS[unit])
    reset[3, 0] = False
    together = apply(unit)(variables(unit), carry, x, reset)[1]
    for b in range(B):
        alone = jax.tree.map(lambda leaf, b=b: leaf[b : b + 1], carry)
        y = apply(unit)(variables(unit), alone, x[:, b : b + 1], reset[:, b : b + 1])[1]
        assert_close(y, together[:, b : b + 1])


@every_unit
def test_carry_keeps_its_shapes_and_types_under_scan(unit):
    x, reset, carry, cell = normal(0, T, B, F), resets(3), busy_carry(UNITS[unit]), UNITS[unit]
    assert all(leaf.shape[0] == B and leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(cell.initialize_carry(B)))

    @jax.jit
    def rollout(carry):
        def act(carry, now):
            carry, y = cell.apply(variables(unit), carry, now[0][None], now[1][None])
            return carry, y[0]

        return jax.lax.scan(act, carry, (x, reset))  # fails if the carry changes its shape or type

    assert_close(rollout(carry), apply(unit)(variables(unit), carry, x, reset))
    shapes = jax.tree.map(jnp.shape, apply(unit)(variables(unit), carry, x, reset)[0])
    assert shapes == jax.tree.map(jnp.shape, cell.initialize_carry(B))


@every_unit
def test_seeds_can_be_vmapped(unit):
    reset, cell = resets(3), UNITS[unit]
    seeds, inputs = jax.random.split(jax.random.key(2), 3), normal(0, 3, T, B, F)

    def train(key, x):
        carry = cell.initialize_carry(B)
        loss = lambda params, x: jnp.square(cell.apply(params, carry, x, reset)[1]).sum()  # noqa: E731
        return jax.grad(loss, argnums=(0, 1))(cell.init(key, carry, x, reset), x)

    together, single = jax.jit(jax.vmap(train))(seeds, inputs), jax.jit(train)
    for i in range(3):
        assert_close(jax.tree.map(lambda leaf, i=i: leaf[i], together), single(seeds[i], inputs[i]), 2e-5)


@every_state
def test_freezing_stops_the_gradient_of_the_parameters_only_and_drops_its_work(unit):
    trained, x, reset, carry = UNITS[unit], normal(0, T, B, F), resets(4), busy_carry(UNITS[unit])
    frozen, params = trained.clone(freeze=True), variables(unit)
    init = jax.jit(frozen.init)(jax.random.key(1), frozen.initialize_carry(B), x[:1], reset[:1])
    assert jax.tree.all(jax.tree.map(jnp.array_equal, params, init))

    def gradient(cell):
        def loss(params, carry, x):
            carry, y = cell.apply(params, carry, x, reset)
            return jnp.square(y).sum() + sum(jnp.sin(leaf).sum() for leaf in jax.tree.leaves(carry))

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(params, carry, x).compile()

    of_trained, of_frozen = gradient(trained), gradient(frozen)
    (of_params, *of_rest), (of_frozen_params, *of_frozen_rest) = (f(params, carry, x) for f in (of_trained, of_frozen))
    assert all(jnp.any(leaf != 0) for leaf in jax.tree.leaves(of_params))
    assert all(jnp.all(leaf == 0) for leaf in jax.tree.leaves(of_frozen_params))
    assert_close(of_frozen_rest, of_rest)
    assert of_frozen.cost_analysis()["flops"] < of_trained.cost_analysis()["flops"]


@every_state
def test_frozen_parameters_are_bit_identical_after_training_and_what_is_upstream_is_not(unit):
    cell, reset, target = UNITS[unit].clone(freeze=True), resets(4), normal(5, T, B, 1)
    params = {"encoder": {"W": normal(1, F, F)}, "memory": variables(unit)["params"]}
    trainable, frozen = partition(params, lambda path: path[0] == "memory")
    optimiser = optax.adam(1e-2)
    state = optimiser.init(trainable)
    assert len(jax.tree.leaves(state)) == 1 + 2 * 1  # Adam's count, and two moments of the one trainable leaf

    @jax.jit
    def update(trainable, state):
        def loss(trainable):
            params = merge(trainable, frozen)
            carry = cell.initialize_carry(B)
            y = cell.apply({"params": params["memory"]}, carry, normal(0, T, B, F) @ params["encoder"]["W"], reset)[1]
            return jnp.square(y - target).mean()

        changes, state_ = optimiser.update(jax.grad(loss)(trainable), state)
        return optax.apply_updates(trainable, changes), state_

    learned = trainable
    for _ in range(3):
        learned, state = update(learned, state)
    after = merge(learned, frozen)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, after["memory"], variables(unit)["params"]))
    assert np.all(after["encoder"]["W"] != params["encoder"]["W"])


def test_wrong_arguments_are_named():
    cell, x, reset, carry = UNITS["gru"], normal(0, T, B, F), resets(), np.zeros((B, F), np.float32)
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
        (GRU, {"features": 0}, "GRU: features must be a positive integer, not 0"),
        (GRU, {"features": 4.0}, "GRU: features must be a positive integer, not 4.0"),
        (GRU, {"features": "4"}, "GRU: features must be a positive integer, not '4'"),
        (GRU, {"freeze": 1}, "GRU: freeze must be True or False, not 1"),
        (GRU, {"update_bias": np.nan}, "GRU: update_bias must be a finite number, not nan"),
        (GRU, {"update_bias": "-2"}, "GRU: update_bias must be a finite number, not '-2'"),
        (FFM, {"trace_size": 0}, "FFM: trace_size must be a positive integer, not 0"),
        (FFM, {"context_size": -1}, "FFM: context_size must be a positive integer, not -1"),
        (FFM, {"input_gate": None}, "FFM: input_gate must be True or False, not None"),
        (FFM, {"form": "fast"}, "FFM: form must be one of auto, sequential, associative, not 'fast'"),
        (LRU, {"r_min": 1.0, "r_max": 0.9}, "LRU: r_min must be at least 0 and below r_max, 0.9, not 1.0"),
        (LRU, {"r_min": -0.1}, "LRU: r_min must be at least 0 and below r_max, 0.999, not -0.1"),
        (LRU, {"r_max": 1.1}, "LRU: r_max must be at most 1, not 1.1"),
        (LRU, {"r_max": np.nan}, "LRU: r_max must be a finite number, not nan"),
        (LRU, {"max_phase": 0.0}, "LRU: max_phase must be above 0 and at most 2π, not 0.0"),
        (LRU, {"max_phase": 6.3}, "LRU: max_phase must be above 0 and at most 2π, not 6.3"),
        (LRU, {"form": ""}, "LRU: form must be one of auto, sequential, associative, not ''"),
        (DeepESN, {"num_layers": 0}, "DeepESN: num_layers must be a positive integer, not 0"),
        (DeepESN, {"leak": 0.0}, "DeepESN: leak must be above 0 and at most 1, not 0.0"),
        (DeepESN, {"spectral_radius": 0.0}, "DeepESN: spectral_radius must be above 0, not 0.0"),
        (DeepESN, {"spectral_radius": np.inf}, "DeepESN: spectral_radius must be a finite number, not inf"),
        (DeepESN, {"input_scaling": -0.1}, "DeepESN: input_scaling must not be negative, not -0.1"),
        (DeepESN, {"bias_scaling": -1}, "DeepESN: bias_scaling must not be negative, not -1"),
        (SRC, {"recurrent_scaling": -1.0}, "SRC: recurrent_scaling must not be negative, not -1.0"),
        (SRC, {"projection_scaling": np.nan}, "SRC: projection_scaling must be a finite number, not nan"),
        (ParalESN, {"leak": 1.5}, "ParalESN: leak must be above 0 and at most 1, not 1.5"),
        (ParalESN, {"kernel_size": 0}, "ParalESN: kernel_size must be a positive integer, not 0"),
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
        cell.init(jax.random.key(0), cell.initialize_carry(B), normal(0, T, B, F), resets())


X64 = """
import jax
import jax.numpy as jnp
import numpy as np

import memory

memory.PIECE = 4  # so that two sequences of six steps are handled in pieces of two
T, B, F = 6, 2, 8
x = np.random.default_rng(0).normal(size=(T, B, F)).astype(np.float32)
reset = np.arange(T)[:, None].repeat(B, 1) == 3
cells = [unit(F) for unit in memory.UNITS.values()]
cells += [unit(F, form="associative") for unit in (memory.FFM, memory.LRU)]


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


def test_with_64_bits_switched_on_every_unit_gives_the_same_bits():
    environment = os.environ | {"JAX_ENABLE_X64": "1", "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    command = [sys.executable, "-c", X64]
    process = subprocess.run(
        command, env=environment, capture_output=True, text=True, cwd=os.path.dirname(memory.__file__)
    )
    assert process.returncode == 0, process.stderr[-2000:]
    assert int(process.stdout) > 100


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
