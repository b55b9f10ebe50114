"""Every unit at the published width, forward and gradient, against numpy: as it is compiled for a real run."""

import jax
import numpy as np
import pytest
import reference

from memory import FFM, GRU, LRU, SRC, DeepESN, ParalESN

jax.config.update("jax_default_matmul_precision", "highest")

T, B, WIDTH = 16, 2, 256
CELLS = [
    pytest.param(FFM(WIDTH), id="ffm"),
    pytest.param(FFM(WIDTH, form="associative"), id="ffm-associative", marks=pytest.mark.slow),
    pytest.param(GRU(WIDTH, update_bias=-2.0), id="gru"),
    pytest.param(LRU(WIDTH), id="lru"),
    pytest.param(LRU(WIDTH, form="associative"), id="lru-associative", marks=pytest.mark.slow),
    pytest.param(DeepESN(WIDTH, leak=0.7), id="deepesn"),
    pytest.param(SRC(WIDTH), id="src"),
    pytest.param(ParalESN(WIDTH, leak=0.9), id="paralesn"),
]


@pytest.mark.parametrize("cell", CELLS)
def test_a_unit_of_the_published_width_and_its_gradient_equal_the_reference(cell):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(T, B, WIDTH)).astype(np.float32)
    reset = np.zeros((T, B), bool)
    reset[T // 2, 0] = True
    carry = jax.tree.map(
        lambda leaf: rng.normal(size=leaf.shape, scale=0.3).astype(np.float32), cell.initialize_carry(B)
    )
    init = jax.jit(cell.init, compiler_options={"xla_backend_optimization_level": 0})  # to save time
    params = init(jax.random.key(0), carry, x, reset)["params"]
    # Noise, as every bias is 0 at the start.
    params = jax.tree.map(lambda leaf: leaf + rng.normal(size=leaf.shape, scale=0.01).astype(np.float32), params)
    outputs = jax.eval_shape(cell.apply, {"params": params}, carry, x, reset)
    weights = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), outputs)

    @jax.jit
    @jax.value_and_grad
    def loss(point):
        outputs = cell.apply({"params": point["params"]}, point["carry"], point["x"], reset)
        return sum(jax.tree.leaves(jax.tree.map(lambda w, leaf: (w * leaf).sum(), weights, outputs)))

    def exact(point):
        outputs = reference.run(cell, point["params"], point["carry"], point["x"], reset)
        return sum(jax.tree.leaves(jax.tree.map(lambda w, leaf: (np.float64(w) * leaf).sum(), weights, outputs)))

    found, expected = (
        jax.jit(cell.apply)({"params": params}, carry, x, reset),
        reference.run(cell, params, carry, x, reset),
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, expected)
    point = {"params": params, "carry": carry, "x": x}
    value, gradient = loss(point)
    reference.check_gradient(exact, point, gradient)
