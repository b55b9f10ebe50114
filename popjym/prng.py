"""Random words for small programs.

On a CPU, `jax.random` costs more than a whole step of these games: every call compiles to a loop of many small kernels,
and to split a key is one more such call. So one step makes one call, for all the random words it needs, and the hash is
written out as plain arithmetic. The generator is the one behind jax's default keys, Threefry-2x32 (Salmon et al. 2011):
block i is the hash of the counter i.
"""

import jax
import jax.numpy as jnp

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def stored(x):
    """x, written to memory once.

    XLA fuses arithmetic into whatever uses its result, and would hash again in every expression that uses a word, in
    loops that do not vectorise. It does not do that with a sum, even with one like this.
    """
    twice = jnp.where(jnp.arange(2, dtype=jnp.int32) == 0, x[..., None], jnp.zeros_like(x)[..., None])
    return jnp.any(twice, axis=-1) if x.dtype == bool else jnp.sum(twice, axis=-1, dtype=x.dtype)


def threefry(key, count):
    """The Threefry-2x32 hash of the counter (0, count): two words from a key of two words, all uint32."""
    schedule = (key[0], key[1], key[0] ^ key[1] ^ jnp.uint32(0x1BD11BDA))
    left, right = jnp.full_like(count, key[0]), count + key[1]
    for group in range(5):
        for rotation in ROTATIONS[group % 2]:
            left = left + right
            right = (right << rotation) | (right >> (32 - rotation))
            right = right ^ left
        left = left + schedule[(group + 1) % 3]
        right = right + schedule[(group + 2) % 3] + jnp.uint32(group + 1)
    return stored(left), stored(right)


def words(key, n):
    """n random words from a jax key, new style or old: a list of uint32 scalars. The key is used up, as always.

    The first words of a key are the same for every n.
    """
    if n == 0:
        return []
    is_typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if is_typed and jax.config.jax_debug_key_reuse:
        jax.random.bits(key)  # tells the checker that the key is used up: it does not know this hash as a use
    key_words = jax.random.key_data(key) if is_typed else key
    if key_words.shape != (2,):  # not a threefry key
        return list(jax.random.bits(key, (n,), jnp.uint32))
    key_words = (stored(key_words[0]), stored(key_words[1]))
    blocks = [threefry(key_words, jnp.uint32(i)) for i in range((n + 1) // 2)]
    return [word for block in blocks for word in block][:n]


def below(word, n):
    """A uniform integer in 0 ... n-1 from one random word, int32, for n up to 2^16.

    This is floor(word * n / 2^32) in 32-bit arithmetic. Its bias is below n / 2^32, and it costs no division.
    """
    n = jnp.uint32(n)
    high, low = word >> 16, word & 0xFFFF
    return ((high * n + ((low * n) >> 16)) >> 16).astype(jnp.int32)


def uniform(word):
    """A uniform float32 in [0, 1), a multiple of 2^-24."""
    return (word >> 8).astype(jnp.float32) * jnp.float32(2**-24)


def normal(word):
    """A standard normal float32, by inversion of a uniform one from the open interval (-1, 1)."""
    centred = (word >> 9).astype(jnp.float32) * jnp.float32(2**-22) + jnp.float32(2**-23 - 1)
    return jnp.float32(2**0.5) * jax.lax.erf_inv(centred)
