"""Random words for small programs.

On a CPU, `jax.random` costs more than a whole step of these games: every call compiles to a loop with many small
kernels, and splitting a key is another such call. So one step makes one call, for all the random words it needs. The
generator is the one behind jax's default keys, Threefry-2x32 (Salmon et al. 2011): block i is the hash of counter i.
"""

import jax
import jax.numpy as jnp

ROTATIONS_EVEN, ROTATIONS_ODD = (13, 15, 26, 6), (17, 29, 16, 24)


def _mix(left, right, rotations):
    """Four rounds of Threefry-2x32."""
    for rotation in rotations:
        left = left + right
        right = (right << rotation) | (right >> (32 - rotation))
        right = right ^ left
    return left, right


def threefry(key, counts):
    """The Threefry-2x32 hash of the counters (0, counts), all uint32: a key of two words -> two words per count."""
    k0, k1 = key
    k2 = k0 ^ k1 ^ jnp.uint32(0x1BD11BDA)
    left, right = _mix(jnp.full_like(counts, k0), counts + k1, ROTATIONS_EVEN)
    left, right = left + k1, right + k2 + jnp.uint32(1)

    # The other sixteen rounds as a loop of two, for the sake of the loop: its result is stored. Straight-line code
    # would be fused into every expression that uses a word, and hashed again for each of them.
    def eight_rounds(i, words):
        left, right = _mix(*words, ROTATIONS_ODD)
        left, right = left + jnp.where(i == 0, k2, k1), right + jnp.where(i == 0, k0, k2) + jnp.uint32(2 * i + 2)
        left, right = _mix(left, right, ROTATIONS_EVEN)
        return left + jnp.where(i == 0, k0, k2), right + jnp.where(i == 0, k1, k0) + jnp.uint32(2 * i + 3)

    return jax.lax.fori_loop(0, 2, eight_rounds, (left, right))


def words(key, n):
    """n random words from a jax key, new style or old: a list of uint32 scalars. The key is used up, as always.

    The first words of a key are the same for every n.
    """
    if n == 0:
        return []
    key_words = jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key
    if key_words.shape != (2,):  # not a threefry key
        return list(jax.random.bits(key, (n,)))
    left, right = threefry((key_words[0], key_words[1]), jnp.arange((n + 1) // 2, dtype=jnp.uint32))
    return [(left, right)[i % 2][i // 2] for i in range(n)]


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
