"""Observation and action spaces with gymnax's attributes; importing gymnax for two small classes takes a second."""

import jax
import jax.numpy as jnp
import numpy as np


class Discrete:
    """The integers 0 ... n-1."""

    def __init__(self, n):
        self.n = n
        self.shape = ()
        self.dtype = jnp.int32

    def sample(self, key):
        return jax.random.randint(key, self.shape, 0, self.n, self.dtype)

    def contains(self, x):
        x = jnp.asarray(x)
        is_integer = x.shape == self.shape and jnp.issubdtype(x.dtype, jnp.integer)
        return (x >= 0) & (x < self.n) if is_integer else jnp.bool_(False)

    def __repr__(self):
        return f"Discrete({self.n})"


class Box:
    """Arrays of one shape with low <= x <= high in every entry; low and high broadcast to the shape."""

    def __init__(self, low, high, shape, dtype=jnp.float32):
        self.low = np.broadcast_to(np.asarray(low, dtype), shape)
        self.high = np.broadcast_to(np.asarray(high, dtype), shape)
        self.shape = tuple(shape)
        self.dtype = dtype

    def sample(self, key):
        """Uniform between the bounds; standard normal in entries that are unbounded on both sides, like gymnasium."""
        bounded = np.isfinite(self.low) & np.isfinite(self.high)
        low, high = np.where(bounded, self.low, 0), np.where(bounded, self.high, 1)
        key_uniform, key_normal = jax.random.split(key)
        inside = jax.random.uniform(key_uniform, self.shape, self.dtype, low, high)
        return jnp.where(bounded, inside, jax.random.normal(key_normal, self.shape, self.dtype))

    def contains(self, x):
        x = jnp.asarray(x)
        return jnp.all((x >= self.low) & (x <= self.high)) if x.shape == self.shape else jnp.bool_(False)

    def __repr__(self):
        return f"Box({self.low.min()}, {self.high.max()}, {self.shape}, {np.dtype(self.dtype).name})"
