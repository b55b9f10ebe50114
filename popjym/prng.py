"""Random words for small programs: `jax.random`'s numbers without its loops.

On a CPU, `jax.random` compiles every call to a loop of its own, which costs more than a whole step of these games.
The same Threefry-2x32 hash (Salmon et al. 2011), written out as plain arithmetic, is fused by XLA into the rest of the
step. `split` and `bits` return exactly what `jax.random.split` and `jax.random.bits` return.
"""

import jax
import jax.numpy as jnp

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def threefry(key_words, counts):
    """One Threefry-2x32 block per count: uint32 [2] and uint32 [n] -> two uint32 [n]."""
    schedule = (key_words[0], key_words[1], key_words[0] ^ key_words[1] ^ jnp.uint32(0x1BD11BDA))
    left, right = jnp.zeros_like(counts) + schedule[0], counts + schedule[1]
    for group in range(5):
        for rotation in ROTATIONS[group % 2]:
            left = left + right
            right = (right << rotation) | (right >> (32 - rotation))
            right = right ^ left
        left = left + schedule[(group + 1) % 3]
        right = right + schedule[(group + 2) % 3] + jnp.uint32(group + 1)
    return left, right


def _words(key):
    """The two words of a threefry key, new style or old; None for any other kind of key."""
    words = jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key
    return words if words.shape == (2,) else None


def split(key):
    """Two fresh keys of the caller's kind."""
    words = _words(key)
    if words is None:
        return tuple(jax.random.split(key))
    children = jnp.stack(threefry(words, jnp.arange(2, dtype=jnp.uint32)), axis=1)  # [2 keys, 2 words]
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        children = jax.random.wrap_key_data(children, impl=jax.random.key_impl(key))
    return children[0], children[1]


def bits(key, n):
    """n random words, uint32 [n]. Like any use of a key, this uses it up."""
    words = _words(key)
    if words is None:
        return jax.random.bits(key, (n,))
    left, right = threefry(words, jnp.arange(n, dtype=jnp.uint32))
    return left ^ right


def below(word, n):
    """A uniform integer in 0 ... n-1 from one random word, int32. n is at most 2^16, so the bias is under 2^-16.

    This is floor(word * n / 2^32) in 32-bit arithmetic; a remainder would cost a division, which does not vectorise.
    """
    n = jnp.uint32(n)
    high, low = word >> 16, word & 0xFFFF
    return ((high * n + ((low * n) >> 16)) >> 16).astype(jnp.int32)


def uniform(word):
    """A uniform float32 in [0, 1), a multiple of 2^-24."""
    return (word >> 8).astype(jnp.float32) * jnp.float32(2**-24)


def normal(word):
    """A standard normal float32, by inversion."""
    centred = (uniform(word) + jnp.float32(2**-25)) * 2 - 1  # in (-1, 1), both ends excluded
    return jnp.float32(2**0.5) * jax.lax.erf_inv(centred)
