"""Memory for partially observable reinforcement learning: recurrent units with one interface.

An agent that cannot see the whole state must summarise what it has seen: it reads one input x_t at a time into a state
h_t and acts on an output y_t. The units in this file differ in how they do that; they share one contract, so that
swapping memories is a one-word change:

    cell  = GRU(features=256, freeze=True)
    carry = cell.initialize_carry(batch_size)          # the empty memory; a pytree whose leaves are [B, ...]
    variables = cell.init(key, carry, x, reset)
    carry, y = cell.apply(variables, carry, x, reset)  # x [T, B, F], reset [T, B] bool -> y [T, B, F']

Time comes first. `reset[t]` says that x[t] is the first input of a new episode: the state before it is the initial
state. T = 1 is acting, T > 1 is training: the same function and the same numbers.

With `freeze=True` the unit keeps its random initial parameters ("FRN", Algorithm 1): no gradient reaches them, while
gradients still flow through the unit to its input. The parameters stay in the "params" collection either way;
`partition` takes the frozen ones out of what is differentiated and optimised.

The two papers, called FFM and FRN below:
    FFM  Morad, Kortvelesy, Liwicki, Prorok (2023). Reinforcement Learning with Fast and Forgetful Memory.
    FRN  Wang, He, Jin (2026). Does Learning Recurrent Networks Matter in Partially Observable RL?
"""

import math
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

# ----------------------------------------------------------------------------------------------------------------------
# Parameters: which are trained, which are frozen, and how many of each
# ----------------------------------------------------------------------------------------------------------------------


def partition(params: dict, is_frozen: Callable[[tuple[str, ...]], bool]) -> tuple[dict, dict]:
    """Splits nested parameters into (trainable, frozen) by a predicate on the path, e.g. ("memory_0", "W").

    Differentiate and optimise `trainable` alone, and the frozen leaves have neither a gradient nor an optimiser state.
    """
    flat = flatten_dict(params)
    trainable = {path: leaf for path, leaf in flat.items() if not is_frozen(path)}
    frozen = {path: leaf for path, leaf in flat.items() if is_frozen(path)}
    return unflatten_dict(trainable), unflatten_dict(frozen)


def merge(trainable: dict, frozen: dict) -> dict:
    """The inverse of `partition`."""
    return unflatten_dict(flatten_dict(trainable) | flatten_dict(frozen))


def count_parameters(trainable: dict, frozen: dict | None = None) -> dict[str, dict[str, int]]:
    """Counts parameters by top-level module: {"memory_0": {"total": 3, "trainable": 1, "frozen": 2}, ..., "all": …}."""
    frozen = frozen or {}

    def count(tree) -> int:
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))

    def row(a, b) -> dict[str, int]:
        return {"total": count(a) + count(b), "trainable": count(a), "frozen": count(b)}

    modules = {name: row(trainable.get(name), frozen.get(name)) for name in sorted({*trainable, *frozen})}
    return modules | {"all": row(trainable, frozen)}


# ----------------------------------------------------------------------------------------------------------------------
# What all units share
# ----------------------------------------------------------------------------------------------------------------------


class Memory(nn.Module):
    """The contract of the module docstring: checks it, and hands frozen parameters out without a gradient."""

    features: int
    """Width of the output y (of each layer, for units that have layers)."""
    freeze: bool = False
    """Keep the initial parameters: stop their gradients, and only theirs (FRN, Algorithm 1)."""

    def initialize_carry(self, batch_size: int):
        """The empty memory of a batch: the state before the first input of an episode."""
        raise TypeError(f"{type(self).__name__} does not define a state")

    def weight(self, name: str, init: Callable, *shape: int) -> jax.Array:
        """A parameter of the unit; a constant to the gradient if the unit is frozen."""
        value = self.param(name, init, shape)
        return jax.lax.stop_gradient(value) if self.freeze else value

    def check(self, carry, x: jax.Array, reset: jax.Array) -> None:
        """Raises a ValueError that names what breaks the contract."""
        name, sizes = type(self).__name__, x.shape[:2]
        if x.ndim != 3:
            raise ValueError(f"{name}: x must be [time, batch, features], but its shape is {x.shape}")
        if reset.shape != sizes:
            raise ValueError(f"{name}: reset must be [time, batch] = {sizes} like x, but its shape is {reset.shape}")
        if reset.dtype != jnp.bool_:
            raise ValueError(f"{name}: reset must be bool, but its dtype is {reset.dtype}")
        expected = jax.eval_shape(lambda: self.initialize_carry(x.shape[1]))
        found = jax.tree.map(jnp.shape, carry)
        if found != jax.tree.map(jnp.shape, expected):
            raise ValueError(
                f"{name}: the carry of a batch of {x.shape[1]} must have the shapes "
                f"{jax.tree.map(jnp.shape, expected)}, but has {found}"
            )


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def where_reset(reset: jax.Array, fresh, state):
    """`fresh` where an episode starts, else `state`. Selected, not multiplied: 0 · NaN is NaN, and would leak."""

    def select(new, old):
        return jnp.where(reset.reshape(reset.shape + (1,) * (old.ndim - reset.ndim)), new, old)

    return jax.tree.map(select, fresh, state)  # reset [B], leaves [B, ...]


class Memoryless(Memory):
    """No memory: y_t = x_t. The baseline that everything below must beat; it has no state and no parameters."""

    features: int = 0
    """Unused: the output is as wide as the input."""

    def initialize_carry(self, batch_size: int):
        return ()

    @nn.compact
    def __call__(self, carry, x: jax.Array, reset: jax.Array):
        self.check(carry, x, reset)
        return carry, x


# ----------------------------------------------------------------------------------------------------------------------
# Gated memory
# ----------------------------------------------------------------------------------------------------------------------


class GRU(Memory):
    """Gated recurrent unit (FRN, Eq. 4; Cho et al., 2014).

        z_t = σ(W_z x_t + U_z h_{t-1} + b_z)                update gate: how much of the state is replaced
        r_t = σ(W_r x_t + U_r h_{t-1} + b_r)                reset gate: how much of the state the candidate sees
        c_t = tanh(W_c x_t + U_c (r_t ⊙ h_{t-1}) + b_c)     candidate
        h_t = (1 - z_t) ⊙ h_{t-1} + z_t ⊙ c_t               y_t = h_t

    The reset gate acts on the state before U_c, as in Eq. 4 (cuDNN and flax apply it after). The matrices of x stand
    side by side in W, those of h that can be multiplied at the same time in U_zr.
    """

    def initialize_carry(self, batch_size: int):
        return jnp.zeros((batch_size, self.features))

    @nn.compact
    def __call__(self, carry, x: jax.Array, reset: jax.Array):
        self.check(carry, x, reset)
        N = self.features
        W = self.weight("W", nn.initializers.lecun_normal(), x.shape[-1], 3 * N)
        U_zr = self.weight("U_zr", blocks(nn.initializers.orthogonal(), 2), N, 2 * N)
        U_c = self.weight("U_c", nn.initializers.orthogonal(), N, N)
        b = self.weight("b", nn.initializers.zeros, 3 * N)
        x_zrc = x @ W + b  # [T, B, 3N]: the inputs of all steps in one product

        def step(h, inputs):
            x_zrc, reset = inputs
            h = where_reset(reset, 0.0, h)
            x_z, x_r, x_c = jnp.split(x_zrc, 3, axis=-1)
            h_z, h_r = jnp.split(h @ U_zr, 2, axis=-1)
            z, r = nn.sigmoid(x_z + h_z), nn.sigmoid(x_r + h_r)
            candidate = jnp.tanh(x_c + (r * h) @ U_c)
            h = (1 - z) * h + z * candidate
            return h, h

        return jax.lax.scan(step, carry, (x_zrc, reset))


def blocks(init: Callable, count: int) -> Callable:
    """An initialiser of `count` matrices side by side, each drawn by `init`."""

    def draw(key, shape, dtype=jnp.float32):
        keys = jax.random.split(key, count)
        return jnp.concatenate([init(k, (shape[0], shape[1] // count), dtype) for k in keys], axis=1)

    return draw


# ----------------------------------------------------------------------------------------------------------------------
# Linear memory
# ----------------------------------------------------------------------------------------------------------------------


def linear_recurrence(decay, inputs, reset: jax.Array, initial, form: str = "auto"):
    """All states of h_t = λ ⊙ h_{t-1} + u_t, for complex λ of modulus at most 1, with h_{t-1} = 0 where reset[t].

    Complex numbers are pairs (real, imaginary): decay λ [...], inputs u [T, B, ...] (may broadcast against the state
    in the trailing axes; None as imaginary part of real inputs), initial h [B, ...]. Returns h as a pair [T, B, ...].
    """
    a, b = decay
    re, im = inputs

    def step(h, now):
        u_re, u_im, reset = now
        h_re, h_im = h
        h_re, h_im = where_reset(reset, (0.0, 0.0), (a * h_re - b * h_im, a * h_im + b * h_re))
        h = (h_re + u_re, h_im if u_im is None else h_im + u_im)
        return h, h

    return jax.lax.scan(step, initial, (re, im, reset))[1]


def trace_durability(alpha, beta: float = 0.01):
    """FFM's t_α = -log(β) / |α|: the steps after which the fraction β of a trace is left."""
    return -math.log(beta) / jnp.abs(alpha)


def contextual_period(omega):
    """FFM's t_ω = 2π / |ω|: the steps after which a context repeats."""
    return 2 * math.pi / jnp.abs(omega)


class FFM(Memory):
    """Fast and forgetful memory (FFM, Eq. 12 to 17).

        x̃_t = ℓ1(x_t) ⊙ σ(ℓ2(x_t))                              input gate: what is worth remembering      (14)
        S_t = γ ⊙ S_{t-1} + x̃_t 1ᵀ,   γ = exp(-|α|) exp(-iω)ᵀ    m traces in c contexts, all linear         (12, 15)
        z_t = ℓ3(Re S_t ‖ Im S_t)                                                                           (16)
        y_t = LN(z_t) ⊙ σ(ℓ4(x_t)) + ℓ5(x_t) ⊙ (1 - σ(ℓ4(x_t)))  output gate; LN without parameters         (17)

    Every trace decays at its own rate α [m], every context turns at its own frequency ω [c]. At the start, the traces
    last from 1 to 1024 steps (`trace_durability`) and the contexts repeat after 1 to 1024 steps (`contextual_period`),
    both spaced geometrically. A period of 1 is ω = 2π: a context that stands still at integer times.

    The paper's ablations are flags. What a flag switches off has no parameters.
    """

    trace_size: int = 32
    """m: the number of traces."""
    context_size: int = 4
    """c: the number of contexts in which each trace is kept."""
    decay: bool = True
    """False: traces never fade, |γ| = 1."""
    oscillation: bool = True
    """False: contexts do not turn, ω = 0."""
    learn_decay: bool = True
    """False: α keeps its initial value."""
    learn_oscillation: bool = True
    """False: ω keeps its initial value."""
    input_gate: bool = True
    """False: x̃ = ℓ1(x)."""
    output_gate: bool = True
    """False: y = LN(z) + ℓ5(x), a residual connection that mixes in equal parts."""

    def initialize_carry(self, batch_size: int):
        S = jnp.zeros((batch_size, self.trace_size, self.context_size))
        return S, S

    @nn.compact
    def __call__(self, carry, x: jax.Array, reset: jax.Array):
        self.check(carry, x, reset)
        m, c, N = self.trace_size, self.context_size, self.features

        def linear(name, inputs, width):
            kernel = self.weight(f"{name}_kernel", nn.initializers.lecun_normal(), inputs.shape[-1], width)
            return inputs @ kernel + self.weight(f"{name}_bias", nn.initializers.zeros, width)

        alpha, omega = initial_alpha(m), initial_omega(c)
        if self.decay and self.learn_decay:
            alpha = self.weight("alpha", lambda key, shape: initial_alpha(m), m)
        if self.oscillation and self.learn_oscillation:
            omega = self.weight("omega", lambda key, shape: initial_omega(c), c)
        radius = jnp.exp(-jnp.abs(alpha)) if self.decay else jnp.ones(m)
        angle = -omega if self.oscillation else jnp.zeros(c)
        gamma = jnp.outer(radius, jnp.cos(angle)), jnp.outer(radius, jnp.sin(angle))  # [m, c] each

        trace = linear("l1", x, m)  # [T, B, m]
        if self.input_gate:
            trace *= nn.sigmoid(linear("l2", x, m))
        states = linear_recurrence(gamma, (trace[..., None], None), reset, carry)  # [T, B, m, c] each
        flat = [part.reshape(*x.shape[:2], m * c) for part in states]
        z = linear("l3", jnp.concatenate(flat, axis=-1), N)  # [T, B, N]
        z, residual = normalize(z), linear("l5", x, N)
        if self.output_gate:
            gate = nn.sigmoid(linear("l4", x, N))
            y = z * gate + residual * (1 - gate)
        else:
            y = z + residual
        return jax.tree.map(lambda part: part[-1], states), y

    def interpretation(self, params: dict) -> dict[str, jax.Array]:
        """How long each trace lasts and after how long each context repeats, in steps (∞: never)."""
        alpha = params.get("alpha", initial_alpha(self.trace_size)) if self.decay else jnp.zeros(self.trace_size)
        omega = (
            params.get("omega", initial_omega(self.context_size)) if self.oscillation else jnp.zeros(self.context_size)
        )
        return {"trace_durability": trace_durability(alpha), "contextual_period": contextual_period(omega)}


def initial_alpha(trace_size: int, longest: float = 1024.0):
    return -math.log(0.01) / jnp.geomspace(1.0, longest, trace_size)


def initial_omega(context_size: int, longest: float = 1024.0):
    return 2 * math.pi / jnp.geomspace(1.0, longest, context_size)


def normalize(z: jax.Array, epsilon: float = 1e-6) -> jax.Array:
    """Layer normalisation without parameters (LN in FFM, Eq. 17)."""
    z = z - z.mean(-1, keepdims=True)
    return z * jax.lax.rsqrt(jnp.square(z).mean(-1, keepdims=True) + epsilon)
