"""Programs that a released compiler got wrong, against numpy, at the sizes where it did.

On CPUs, jaxlib 0.10.2 joins products and reductions in a way that returns wrong numbers, crashes or hangs; the pinned
version does not. Tests with small shapes cannot see it: whoever changes the pin looks here first. Public reports:
https://github.com/jax-ml/jax/issues/39103, 39257 and 40412. Each result stands alone in its program: two of them are
compiled in another way, which was right.
"""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

AFTER_THE_PRODUCT = {
    "sum": lambda z, numpy: z.sum(),
    "sum over rows": lambda z, numpy: z.sum(0),
    "sum over columns": lambda z, numpy: z.sum(1),
    "sum of tanh": lambda z, numpy: numpy.tanh(z).sum(),
}


@pytest.mark.parametrize("size", [64, 100, 128, 256])
def test_a_product_with_a_constant_and_a_reduction(size):
    y = np.random.default_rng(0).standard_normal((size, size)).astype(np.float32)
    exact = y.astype(np.float64) @ np.full((size, size), 1 / size)
    wrong = []
    for name, function in AFTER_THE_PRODUCT.items():

        @jax.jit
        def program(y, function=function):
            product = jnp.matmul(y, jnp.full((size, size), 1 / size, jnp.float32), precision=jax.lax.Precision.HIGHEST)
            return function(product, jnp)

        found, right = np.asarray(program(y)), function(exact, np)
        if not np.allclose(found, right, rtol=1e-4, atol=1e-3):
            wrong.append(f"{name}: off by {np.abs(found - right).max()}")
    assert not wrong


def test_a_matrix_times_each_of_many_vectors_and_a_reduction():
    """39103: the last row is wrong from 32,769 rows on."""
    rows = 32_769
    x = np.zeros((rows, 3), np.float32)
    x[:, 0] = np.arange(rows)
    matrix = jnp.eye(3, dtype=jnp.float32)
    found = jax.jit(jax.vmap(lambda row: jnp.square(matrix @ row).sum()))(x)
    np.testing.assert_allclose(found, np.arange(rows, dtype=np.float64) ** 2, rtol=1e-6)


# What crashes or hangs does so in a process of its own.
EIGHT_DIMENSIONS = """
import jax, jax.numpy as jnp, numpy as np

rng = np.random.default_rng(0)
x, W = rng.random((10, 4, 6), np.float32), rng.random((10, 4, 6, 9, 9, 9, 9, 9), np.float32)
program = jax.jit(lambda x, W: jnp.log((x.reshape(10, 4, 6, 1, 1, 1, 1, 1) * W).sum(2)))
expected = np.log(np.einsum("abc,abcdefgh->abdefgh", x, W))
np.testing.assert_allclose(program(x, W), expected, rtol=1e-4, atol=1e-5)
"""

A_DIMENSION_OF_ONE = """
import jax, numpy as np

x, y = np.random.default_rng(0).standard_normal((2, 3, 1, 2, 2, 8, 8, 8)).astype(np.float32)
program = jax.jit(lambda x, y: (x * y).sum(3))
np.testing.assert_allclose(program(x, y), (x * y).sum(3), rtol=1e-5, atol=1e-6)
"""


@pytest.mark.parametrize("program", [EIGHT_DIMENSIONS, A_DIMENSION_OF_ONE], ids=["39257", "40412"])
def test_reductions_of_many_dimensions_end_and_are_right(program):
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert process.returncode == 0, process.stderr[-2000:]
