"""The contract of memory.py, for every unit: one function for acting and training, resets, freezing, gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memory import FFM, GRU, LRU, SRC, DeepESN, Memoryless, ParalESN, count_parameters, merge, partition

jax.config.update("jax_default_matmul_precision", "highest")

T, B, F = 12, 3, 8
UNITS = {
    "memoryless": Memoryless(),
    "gru": GRU(F),
    "ffm": FFM(F, trace_size=5, context_size=3, form="sequential"),
    "ffm-associative": FFM(F, trace_size=5, context_size=3, form="associative"),
    "lru": LRU(F, form="sequential"),
    "lru-associative": LRU(F, form="associative"),
    "deepesn": DeepESN(F, leak=0.6),
    "src": SRC(F),
    "paralesn": ParalESN(F, leak=0.8, form="sequential"),
    "paralesn-associative": ParalESN(F, leak=0.8, form="associative"),
}
WITH_STATE = [name for name in UNITS if name != "memoryless"]


@pytest.fixture(params=UNITS)
def unit(request):
    return request.param


def batch(seed=0, steps=T, size=B, features=F):
    return jax.random.normal(jax.random.key(seed), (steps, size, features))


def no_reset(steps=T, size=B):
    return jnp.zeros((steps, size), bool)


def reset_at(*indices, steps=T, size=B):
    return no_reset(steps, size).at[jnp.array(indices)].set(True)


def busy_carry(cell, seed=7, size=B):
    """A state in the middle of an episode: nothing is zero."""
    leaves, tree = jax.tree.flatten(cell.initialize_carry(size))
    keys = jax.random.split(jax.random.key(seed), max(len(leaves), 1))
    return tree.unflatten(
        [jax.random.uniform(k, leaf.shape, leaf.dtype, -0.5, 0.5) for k, leaf in zip(keys, leaves, strict=False)]
    )


def variables(cell, features=F):
    return cell.init(jax.random.key(1), cell.initialize_carry(B), batch(features=features), no_reset())


def in_chunks(cell, params, carry, x, reset, cuts):
    """The outputs of consecutive calls that split the sequence before the steps in `cuts`."""
    apply = jax.jit(cell.apply)
    outputs, edges = [], [0, *cuts, len(x)]
    for start, end in zip(edges, edges[1:], strict=False):
        carry, y = apply(params, carry, x[start:end], reset[start:end])
        outputs.append(y)
    return carry, jnp.concatenate(outputs)


def assert_close(a, b, tolerance=2e-6):
    jax.tree.map(lambda p, q: np.testing.assert_allclose(p, q, rtol=tolerance, atol=tolerance), a, b)


def test_steps_chunks_and_the_whole_sequence_agree_with_a_reset_at_every_index(unit):
    cell, x = UNITS[unit], batch()
    params, carry = variables(cell), busy_carry(cell)
    for reset in [no_reset(), *(reset_at(t) for t in range(T)), reset_at(0, 1, 2), reset_at(4, 7), reset_at(*range(T))]:
        whole = jax.jit(cell.apply)(params, carry, x, reset)
        assert_close(in_chunks(cell, params, carry, x, reset, range(1, T)), whole)
        assert_close(in_chunks(cell, params, carry, x, reset, [5]), whole)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("unit", WITH_STATE)
def test_any_resets_and_any_cut_agree(unit, data):
    cell, x = UNITS[unit], batch(data.draw(st.integers(0, 99)))
    reset = jnp.array(data.draw(st.lists(st.lists(st.booleans(), min_size=B, max_size=B), min_size=T, max_size=T)))
    cut = data.draw(st.integers(1, T - 1))
    params, carry = variables(cell), busy_carry(cell)
    assert_close(in_chunks(cell, params, carry, x, reset, [cut]), jax.jit(cell.apply)(params, carry, x, reset))


@pytest.mark.parametrize("unit", WITH_STATE)
def test_after_a_reset_the_past_is_gone(unit):
    cell, x = UNITS[unit], batch()
    params = variables(cell)
    for t in range(T):
        _, y = cell.apply(params, busy_carry(cell), x, reset_at(t))
        _, alone = cell.apply(params, cell.initialize_carry(B), x[t:], no_reset(T - t))
        assert_close(y[t:], alone)


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
@pytest.mark.parametrize("unit", WITH_STATE)
def test_nan_and_inf_do_not_cross_a_reset_in_values_or_gradients(unit, bad):
    cell, x, t = UNITS[unit], batch(), 5
    params = variables(cell)
    carry = jax.tree.map(lambda leaf: jnp.full_like(leaf, bad), cell.initialize_carry(B))
    poisoned = x.at[:t].set(bad)

    def loss(x, carry, reset):
        carry, y = cell.apply(params, carry, x, reset)
        return jnp.square(y[-(T - t) :]).sum(), (carry, y[-(T - t) :])

    _, clean_outputs = loss(x[t:], cell.initialize_carry(B), no_reset(T - t))
    clean_gradient = jax.grad(loss, has_aux=True)(x[t:], cell.initialize_carry(B), no_reset(T - t))[0]
    gradient, outputs = jax.grad(loss, has_aux=True)(poisoned, carry, reset_at(t))
    assert_close(outputs, clean_outputs)
    assert_close(gradient[t:], clean_gradient, 1e-5)


@pytest.mark.parametrize("unit", WITH_STATE)
def test_gradients_of_the_whole_sequence_equal_those_of_single_steps(unit):
    cell, x, reset = UNITS[unit], batch(), reset_at(0, 4, 5, 9).at[4, 1].set(False)
    weights = batch(3, features=cell.apply(variables(cell), busy_carry(cell), x, reset)[1].shape[-1])

    def loss(params, carry, x, cuts):
        carry, y = in_chunks(cell, params, carry, x, reset, cuts)
        return (y * weights).sum() + sum(jnp.sin(leaf).sum() for leaf in jax.tree.leaves(carry))

    gradient = jax.grad(loss, argnums=(0, 1, 2))
    arguments = variables(cell), busy_carry(cell), x
    assert_close(gradient(*arguments, []), gradient(*arguments, range(1, T)), 2e-5)
    assert_close(gradient(*arguments, []), gradient(*arguments, [6]), 2e-5)


def test_one_sequence_of_a_batch_does_not_see_the_others(unit):
    cell, x, reset = UNITS[unit], batch(), reset_at(3).at[3, 0].set(False)
    params, carry = variables(cell), busy_carry(cell)
    together = cell.apply(params, carry, x, reset)[1]
    for b in range(B):
        alone = jax.tree.map(lambda leaf, b=b: leaf[b : b + 1], carry)
        y = cell.apply(params, alone, x[:, b : b + 1], reset[:, b : b + 1])[1]
        assert_close(y, together[:, b : b + 1])


def test_carry_keeps_its_shapes_and_types_under_scan(unit):
    cell, x, reset = UNITS[unit], batch(), reset_at(3)
    params, carry = variables(cell), cell.initialize_carry(B)
    assert all(leaf.shape[0] == B and leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(carry))

    def act(carry, now):
        carry, y = cell.apply(params, carry, now[0][None], now[1][None])
        return carry, y[0]

    scanned = jax.lax.scan(act, carry, (x, reset))  # fails if the carry changes its shape or type
    assert_close(scanned, cell.apply(params, carry, x, reset))


def test_seeds_can_be_vmapped(unit):
    cell, reset = UNITS[unit], reset_at(3)
    seeds = jax.random.split(jax.random.key(2), 3)
    inputs = jnp.stack([batch(seed) for seed in range(3)])

    def train(key, x):
        params = cell.init(key, cell.initialize_carry(B), x, reset)
        loss = lambda params, x: jnp.square(cell.apply(params, cell.initialize_carry(B), x, reset)[1]).sum()  # noqa: E731
        return jax.grad(loss, argnums=(0, 1), allow_int=True)(params, x)

    together = jax.vmap(train)(seeds, inputs)
    for i in range(3):
        assert_close(jax.tree.map(lambda leaf, i=i: leaf[i], together), train(seeds[i], inputs[i]), 1e-5)


@pytest.mark.parametrize("unit", WITH_STATE)
def test_freezing_stops_the_gradient_of_the_parameters_only(unit):
    trained, x, reset = UNITS[unit], batch(), reset_at(4)
    frozen = trained.clone(freeze=True)
    params, carry = variables(trained), busy_carry(trained)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, params, variables(frozen)))

    def loss(cell, params, carry, x):
        carry, y = cell.apply(params, carry, x, reset)
        return jnp.square(y).sum() + sum(jnp.sin(leaf).sum() for leaf in jax.tree.leaves(carry))

    of_params, *of_rest = jax.grad(loss, argnums=(1, 2, 3))(trained, params, carry, x)
    of_frozen_params, *of_frozen_rest = jax.grad(loss, argnums=(1, 2, 3))(frozen, params, carry, x)
    assert all(jnp.any(leaf != 0) for leaf in jax.tree.leaves(of_params))
    assert all(jnp.all(leaf == 0) for leaf in jax.tree.leaves(of_frozen_params))
    assert_close(of_frozen_rest, of_rest)


def test_wrong_arguments_are_named():
    cell, x, reset = UNITS["gru"], batch(), no_reset()
    params, carry = variables(cell), cell.initialize_carry(B)
    for arguments, message in [
        ((carry, x[0], reset), "x must be"),
        ((carry, x, reset[:-1]), "reset must be"),
        ((carry, x, reset.T), "reset must be"),
        ((carry, x, reset.astype(float)), "reset must be bool"),
        ((carry[:-1], x, reset), "carry"),
        (((carry, carry), x, reset), "carry"),
    ]:
        with pytest.raises(ValueError, match=message):
            cell.apply(params, *arguments)


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
