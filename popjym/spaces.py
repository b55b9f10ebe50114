"""Observation and action spaces that pass for gymnax's."""

import sys

import jax
import jax.numpy as jnp
import numpy as np


class Space:
    """What gymnax's wrappers take for gymnax's own space of the same name.

    They ask `isinstance`, which also looks at an object's `__class__`. A subclass would do, too, but then every program
    that plays one of these games would import gymnax, which takes longer than JAX and popjym together. Whoever asks for
    gymnax's classes has imported it already.
    """

    @property
    def __class__(self):
        gymnax_spaces = sys.modules.get("gymnax.environments.spaces")
        return getattr(gymnax_spaces, type(self).__name__, type(self))

    def __reduce__(self):  # pickle's own way insists on `__class__` being the type
        return object.__new__, (type(self),), vars(self)


class Discrete(Space):
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


class Box(Space):
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
