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

How to read the code. A unit multiplies its inputs with matrices, follows a recurrence, and multiplies the states with
matrices. Only the recurrence has to go step by step; the products of all steps are done at once. A unit writes this as
a function `sequence(state, x, reset) -> (last state, y)`. Three devices make it fast, and change no number:

    through_time  calls `sequence`. On a CPU it does so for one piece of time after the other, so short that what is
                  computed in between fits the processor's cache. A GPU wants all the work at once, and gets it.
    keep          To get gradients, intermediate results are needed a second time. Storing all of them takes longer
                  than computing most of them again (gradient checkpointing), so only those inside `keep` are stored:
                  the results of matrix products and recurrences.
    pairs         A vector of K complex numbers is stored as 2 K real ones: (real parts ‖ imaginary parts). A product
                  with a complex matrix is then a single real one, and no optimiser or checkpoint meets a complex
                  number. `pair` takes such a vector apart, `packed` puts it together.

The recurrences have gradients written by hand. Automatic differentiation would add to the gradient of a matrix at every
step; written by hand, this is one product over all steps, after the scan back in time.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from numbers import Integral, Real

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.ad_checkpoint import checkpoint_name

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


def parameter_table(counts: dict[str, dict[str, int]]) -> str:
    """What `count_parameters` returns, as lines of text: a module a line."""
    lines = [f"{'parameters':<16}{'total':>11}{'trainable':>11}{'frozen':>11}"]
    for name, n in counts.items():
        lines.append(f"  {name:<14}{n['total']:>11,}{n['trainable']:>11,}{n['frozen']:>11,}")
    return "\n".join(lines)


# ----------------------------------------------------------------------------------------------------------------------
# What all units share
# ----------------------------------------------------------------------------------------------------------------------


FORMS = ("auto", "sequential", "associative")
"""How a linear recurrence is computed: see `linear_recurrence`."""


class Memory(nn.Module):
    """The contract of the module docstring: checks it, and hands frozen parameters out without a gradient."""

    features: int
    """Width of the output y (of each layer, for units that have layers)."""
    freeze: bool = False
    """Keep the initial parameters: stop their gradients, and only theirs (FRN, Algorithm 1)."""

    def __post_init__(self):
        """Raises a ValueError that names the first wrong setting, its value, and what would be right."""
        super().__post_init__()
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is bool:
                self.require(isinstance(value, bool), field.name, "must be True or False")
            if field.type is int:
                whole = isinstance(value, Integral) and 0 < value < 2**31
                self.require(whole, field.name, "must be a positive integer below 2^31")
            if field.type is float:
                self.require(isinstance(value, Real) and math.isfinite(value), field.name, "must be a finite number")
            if field.name.endswith("_scaling"):
                self.require(value >= 0, field.name, "must not be negative")
        self.check_settings()

    def check_settings(self) -> None:
        """What a unit's settings must be beyond their types."""

    def require(self, holds: bool, setting: str, right: str) -> None:
        if not holds:
            raise ValueError(f"{type(self).__name__}: {setting} {right}, not {getattr(self, setting)!r}")

    def initialize_carry(self, batch_size: int):
        """The empty memory of a batch: the state before the first input of an episode."""
        raise TypeError(f"{type(self).__name__} does not define a state")

    def interpretation(self, params: dict) -> dict[str, jax.Array]:
        """What the parameters say about memory, in steps, for every dimension; empty for units that cannot tell."""
        return {}

    def describe(self, params: dict) -> dict[str, jax.Array]:
        """Scalars for a log: minimum, median and maximum of all that `interpretation` tells."""
        scalars = {}
        for name, steps in self.interpretation(params).items():
            scalars |= {f"{name}_min": steps.min(), f"{name}_median": jnp.median(steps), f"{name}_max": steps.max()}
        return scalars

    def weight(self, name: str, init: Callable, *shape: int) -> jax.Array:
        """A parameter of the unit, from init(key, shape, dtype); a constant to the gradient if the unit is frozen."""
        value = self.param(name, init, shape, jnp.float32)
        return jax.lax.stop_gradient(value) if self.freeze else value

    def check(self, carry, x: jax.Array, reset: jax.Array) -> None:
        """Raises a ValueError that names what breaks the contract."""
        name, sizes = type(self).__name__, x.shape[:2]
        if x.ndim != 3 or 0 in x.shape:
            raise ValueError(
                f"{name}: x must be [time, batch, features] with at least one step, but its shape is {x.shape}"
            )
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


def check_form(cell: Memory) -> None:
    cell.require(cell.form in FORMS, "form", f"must be one of {', '.join(FORMS)}")


def where_reset(reset: jax.Array, fresh, state):
    """`fresh` where an episode starts, else `state`. Selected, not multiplied: 0 · NaN is NaN, and would leak."""

    def select(new, old):
        return jnp.where(reset.reshape(reset.shape + (1,) * (old.ndim - reset.ndim)), new, old)

    return jax.tree.map(select, fresh, state)  # reset [B], leaves [B, ...]


PIECE = 1024
"""Rows (steps x batch) that `through_time` handles at once on a CPU: their intermediate results fit its cache."""


def through_time(function: Callable, carry, x: jax.Array, reset: jax.Array):
    """function(carry, x, reset) -> (carry, y) over all steps, on a CPU in pieces: see "How to read the code"."""
    T, B = reset.shape
    kept = jax.checkpoint_policies.save_only_these_names("kept")
    function = jax.checkpoint(function, policy=kept, prevent_cse=False)
    steps = max(1, PIECE // B)
    if jax.default_backend() != "cpu" or T < 2 * steps:
        return function(carry, x, reset)
    whole = T // steps * steps
    pieces = [part[:whole].reshape(-1, steps, *part.shape[1:]) for part in (x, reset)]
    carry, y = jax.lax.scan(lambda carry, piece: function(carry, *piece), carry, pieces)
    y = y.reshape(whole, *y.shape[2:])
    if whole < T:
        carry, rest = function(carry, x[whole:], reset[whole:])
        y = jnp.concatenate([y, rest])
    return carry, y


def keep(values):
    """Marks what the gradient keeps from the forward pass: see "How to read the code"."""
    return jax.tree.map(lambda value: checkpoint_name(value, "kept"), values)


def product(x: jax.Array, W: jax.Array) -> jax.Array:
    """x W for x [T, B, F], as one matrix product of T · B rows: its gradient for W is then a plain product too."""
    return keep((x.reshape(-1, x.shape[-1]) @ W).reshape(*x.shape[:-1], -1))


def rows(x: jax.Array) -> jax.Array:
    """[T, B, F] -> [T · B, F]: on a CPU, the gradients of dense layers and of LayerNorm are faster there."""
    return x.reshape(-1, x.shape[-1])


def outer_product(x: jax.Array, y: jax.Array) -> jax.Array:
    """Σ x_tb y_tbᵀ over time and batch: the gradient of a matrix, from its input x and its output's gradient y."""
    return x.reshape(-1, x.shape[-1]).T @ y.reshape(-1, y.shape[-1])


class Memoryless(Memory):
    """No memory: y_t = x_t. The baseline that everything below must beat; it has no state and no parameters."""

    features: int = 1
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

    The reset gate acts on the state before U_c, as in Eq. 4 (cuDNN and flax apply it after). At the start, the W keep
    the variance of their inputs (LeCun), the U are orthogonal: they neither shrink nor stretch a state.
    """

    update_bias: float = 0.0
    """The initial value of b_z; those of b_r and b_c are 0. At 0, as published, z is near 0.5: the state is halved at
    every step. A negative one makes it last about 1 / σ(update_bias) steps: 8 at -2, 56 at -4 (chrono initialisation,
    Tallec and Ollivier, 2018)."""

    def initialize_carry(self, batch_size: int):
        return jnp.zeros((batch_size, self.features), jnp.float32)

    @nn.compact
    def __call__(self, carry, x: jax.Array, reset: jax.Array):
        self.check(carry, x, reset)
        F, N = x.shape[-1], self.features
        W = [self.weight(f"W_{gate}", nn.initializers.lecun_normal(), F, N) for gate in "zrc"]
        U = [self.weight(f"U_{gate}", random_orthogonal, N, N) for gate in "zrc"]
        biases = {"z": self.update_bias, "r": 0.0, "c": 0.0}
        b = [self.weight(f"b_{gate}", nn.initializers.constant(bias), N) for gate, bias in biases.items()]

        def sequence(h, x, reset):
            inputs = [product(x, W[gate]) + b[gate] for gate in range(3)]  # [T, B, N] each
            h = gru_recurrence(U, inputs, reset, h)  # [T, B, N]
            return h[-1], h

        return through_time(sequence, carry, x, reset)


@jax.custom_vjp
def gru_recurrence(weights, inputs, reset: jax.Array, initial: jax.Array) -> jax.Array:
    """The part of a GRU that is sequential: all h [T, B, N], from the W x + b of all steps."""
    return gru_forward(weights, inputs, reset, initial)[0]


def gru_forward(weights, inputs, reset, initial):
    U_z, U_r, U_c = weights

    def step(h, now):
        x_z, x_r, x_c, reset = now
        h = where_reset(reset, 0.0, h)
        z, r = nn.sigmoid(x_z + h @ U_z), nn.sigmoid(x_r + h @ U_r)
        c = jnp.tanh(x_c + (r * h) @ U_c)
        h = (1 - z) * h + z * c
        return h, (h, z, r, c)

    h, *gates = keep(jax.lax.scan(step, initial, (*inputs, reset))[1])
    return h, (weights, reset, initial, h, gates)


def gru_backward(saved, dh):
    weights, reset, initial, h, (z, r, c) = saved
    U_z, U_r, U_c = (U.T for U in weights)  # transposed once, not at every step
    before = where_reset(reset, 0.0, shift(initial, h))  # h_{t-1} as step t saw it

    def step(dh_after, now):
        dh, h, z, r, c, reset = now
        dh = dh + dh_after
        d_c = dh * z * (1 - c * c)  # with respect to the sums inside tanh and σ
        d_rh = d_c @ U_c
        d_z = dh * (c - h) * z * (1 - z)
        d_r = d_rh * h * r * (1 - r)
        dh = dh * (1 - z) + d_rh * r + d_z @ U_z + d_r @ U_r
        return where_reset(reset, 0.0, dh), (d_z, d_r, d_c)

    sequence = dh, before, z, r, c, reset
    d_initial, d_inputs = jax.lax.scan(step, jnp.zeros_like(initial), sequence, reverse=True)
    seen = before, before, r * before  # what each U was multiplied with
    d_weights = [outer_product(left, right) for left, right in zip(seen, d_inputs, strict=True)]
    return d_weights, list(d_inputs), None, d_initial


gru_recurrence.defvjp(gru_forward, gru_backward)


def random_orthogonal(key, shape: tuple[int, int], dtype=jnp.float32) -> jax.Array:
    """A matrix drawn uniformly from all orthogonal ones: random reflections in ever fewer dimensions (Stewart, 1980).

    Not by LAPACK's QR, as flax does: on a CPU it shares XLA's threads, and several of them at once, as in a program of
    several seeds, can wait for each other forever.
    """
    N, _ = shape
    v = jnp.triu(jax.random.normal(key, shape, dtype))  # row i: a random direction of the last N - i coordinates
    sign = jnp.where(v.diagonal() < 0, -1.0, 1.0).astype(dtype)
    v = v + jnp.diag(sign * jnp.linalg.norm(v, axis=1))  # the mirror that takes it to ∓ the first of them
    v = v / jnp.linalg.norm(v, axis=1, keepdims=True)
    matrix, _ = jax.lax.scan(lambda Q, v: (Q - 2 * jnp.outer(v, v @ Q), None), jnp.diag(-sign), v, reverse=True)
    return matrix


def shift(initial: jax.Array, h: jax.Array) -> jax.Array:
    """The states before every step: initial [B, ...], then h [T, B, ...] without its last."""
    return jnp.concatenate([initial[None], h[:-1]])


# ----------------------------------------------------------------------------------------------------------------------
# Linear memory
# ----------------------------------------------------------------------------------------------------------------------


def linear_recurrence(decay, u, reset: jax.Array, initial: jax.Array, form: str = "auto") -> jax.Array:
    """All states of h_t = λ ⊙ h_{t-1} + u_t, for complex λ with |λ| <= 1, where h_{t-1} counts as 0 if reset[t].

        decay λ [2 K],   u [T, B, 2 K],   reset [T, B],   initial [B, 2 K]   ->   h [T, B, 2 K]     all as pairs

    A real input can drive several states: u [T, B, m] with K = c · m stands for c copies of itself, side by side.

    There are two forms, which agree to rounding. "sequential" steps through time: the least arithmetic and the least
    memory traffic, right for a CPU. "associative" takes all steps in O(log T) parallel rounds, right for an
    accelerator. "auto" decides by JAX's default backend when the program is traced.

    The gradient g_t = dh_t + conj(λ) ⊙ g_{t+1} is the same recurrence back in time, and needs no copy of what the
    forward scan did but h.
    """
    if form == "auto":
        form = "sequential" if jax.default_backend() == "cpu" else "associative"
    return _linear_recurrence((form, u.shape[-1]), decay, u, reset, initial)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear_recurrence(static, decay, u, reset, initial):  # static: form and width of u, which are no arrays
    return linear_forward(static, decay, u, reset, initial)[0]


def linear_forward(static, decay, u, reset, initial):
    form, _ = static
    width = initial.shape[-1]

    def step(h, now):
        u, reset = now
        h = add(where_reset(reset, (0.0, 0.0), multiply(pair(decay), h)), pair(copies(u, width)))
        return h, packed(h)

    if form == "sequential":
        h = jax.lax.scan(step, pair(initial), (u, reset))[1]
    else:
        h = associative_recurrence(decay, copies(u, width), reset, initial)
    h = keep(h)
    return h, (decay, reset, initial, h)


def linear_backward(static, saved, dh):
    form, width = static
    decay, reset, initial, h = saved
    back = conjugate(pair(decay))

    def step(after, now):
        g, d_decay = after  # g of step t + 1, or 0 if an episode started there: nothing flows back across its start
        dh, h, reset = now
        d_decay = add(d_decay, multiply(conjugate(pair(h)), g))
        g = add(pair(dh), multiply(back, g))
        return (where_reset(reset, (0.0, 0.0), g), d_decay), sum_of_copies(packed(g), width)

    if form == "sequential":
        zero = pair(jnp.zeros_like(initial))
        (g, d_decay), du = jax.lax.scan(step, (zero, zero), (dh, h, reset), reverse=True)
        seen = where_reset(reset[0], 0.0, initial)  # a NaN in it must not reach the gradient of λ as NaN · 0
        d_decay = packed(add(d_decay, multiply(conjugate(pair(seen)), g)))
        return d_decay.sum(0), du, None, packed(multiply(back, g))

    cut = jnp.concatenate([reset[1:], jnp.zeros_like(reset[:1])])  # is the state of this step the last of an episode?
    g = associative_recurrence(packed(back), dh[::-1], cut[::-1], jnp.zeros_like(initial))[::-1]
    seen = where_reset(reset, 0.0, shift(initial, h))
    d_decay = packed(multiply(conjugate(pair(seen)), pair(g)))
    d_initial = where_reset(reset[0], 0.0, packed(multiply(back, pair(g[0]))))
    return d_decay.sum((0, 1)), sum_of_copies(g, width), None, d_initial


_linear_recurrence.defvjp(linear_forward, linear_backward)


def associative_recurrence(decay, u, reset, initial):
    """Spans of time are joined pairwise; a span is (λ^steps, was there a reset, its last state if it began at 0)."""

    def times(p, q):
        return packed(multiply(pair(p), pair(q)))

    u = u.at[0].add(where_reset(reset[0], 0.0, times(decay, initial)))
    # λ^steps is the same for the whole batch: [T, 1, 2 K]. |λ^steps| <= 1, so that nothing overflows, at any T.
    power = jnp.broadcast_to(decay, (len(reset), 1, len(decay)))

    def join(left, right):
        (left_power, left_reset, left_state), (right_power, right_reset, right_state) = left, right
        # The reset belongs to the operator: one in the right span hides the left span, and the joined span
        # remembers a reset in either of them.
        state = jnp.where(right_reset[..., None], 0.0, times(right_power, left_state)) + right_state
        return times(left_power, right_power), left_reset | right_reset, state

    return jax.lax.associative_scan(join, (power, reset, u))[2]


def pair(vector: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(real, imaginary) of a complex vector that is stored as (real ‖ imaginary)."""
    half = vector.shape[-1] // 2
    return vector[..., :half], vector[..., half:]


def packed(p) -> jax.Array:
    """The inverse of `pair`."""
    return jnp.concatenate(p, axis=-1)


def multiply(p, q):
    return p[0] * q[0] - p[1] * q[1], p[0] * q[1] + p[1] * q[0]


def add(p, q):
    return p[0] + q[0], p[1] + q[1]


def conjugate(p):
    return p[0], -p[1]


def polar(radius: jax.Array, angle: jax.Array) -> jax.Array:
    """radius · exp(i angle) as (real ‖ imaginary)."""
    return jnp.concatenate([radius * jnp.cos(angle), radius * jnp.sin(angle)], axis=-1)


def copies(u: jax.Array, width: int) -> jax.Array:
    """What u adds to the state: u itself if complex; if real, copies of it as real part, and an imaginary part of 0."""
    if u.shape[-1] == width:
        return u
    real = jnp.tile(u, width // 2 // u.shape[-1])
    return jnp.concatenate([real, jnp.zeros_like(real)], axis=-1)


def sum_of_copies(g: jax.Array, width: int) -> jax.Array:
    """The transpose of `copies`, for the gradient."""
    if width == g.shape[-1]:
        return g
    real, _ = pair(g)
    return real.reshape(*real.shape[:-1], -1, width).sum(-2)


R_MIN, R_MAX = 0.9, 0.999
"""The default ring of an LRU's and a ParalESN's modes: half-lives from 7 to 700 steps. For slow modes, give the trained
and the frozen agent 0.99 and 0.9999 (69 to 7,000 steps); `recall_curves.py` shows what a frozen unit gains by them."""


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
    form: str = "auto"
    """How the recurrence is computed: see `linear_recurrence`."""

    def check_settings(self):
        check_form(self)

    def initialize_carry(self, batch_size: int):
        size = 2 * self.context_size * self.trace_size  # (Re S ‖ Im S), context by context
        return jnp.zeros((batch_size, size), jnp.float32)

    @nn.compact
    def __call__(self, carry, x: jax.Array, reset: jax.Array):
        self.check(carry, x, reset)
        m, c, N, F = self.trace_size, self.context_size, self.features, x.shape[-1]

        alpha, omega = initial_alpha(m), initial_omega(c)
        if self.decay and self.learn_decay:
            alpha = self.weight("alpha", lambda *_: initial_alpha(m), m)
        if self.oscillation and self.learn_oscillation:
            omega = self.weight("omega", lambda *_: initial_omega(c), c)
        radius = jnp.exp(-jnp.abs(alpha)) if self.decay else jnp.ones_like(alpha)
        angle = -omega if self.oscillation else jnp.zeros_like(omega)
        gamma = polar(jnp.tile(radius, c), jnp.repeat(angle, m))  # [2 c m]

        l1 = self.linear("l1", F, m)
        l3 = self.linear("l3", 2 * c * m, N)
        l5 = self.linear("l5", F, N)
        l2 = self.linear("l2", F, m) if self.input_gate else None
        l4 = self.linear("l4", F, N) if self.output_gate else None

        def sequence(S, x, reset):
            trace = l1(x)  # [T, B, m]
            if self.input_gate:
                trace = trace * nn.sigmoid(l2(x))
            S = linear_recurrence(gamma, trace, reset, S, self.form)  # [T, B, 2 c m]
            z = normalize(l3(S))  # [T, B, N]
            if not self.output_gate:
                return S[-1], z + l5(x)
            gate = nn.sigmoid(l4(x))
            return S[-1], z * gate + l5(x) * (1 - gate)

        return through_time(sequence, carry, x, reset)

    def linear(self, name: str, inputs: int, outputs: int) -> Callable:
        kernel = self.weight(f"{name}_kernel", nn.initializers.lecun_normal(), inputs, outputs)
        bias = self.weight(f"{name}_bias", nn.initializers.zeros, outputs)
        return lambda x: product(x, kernel) + bias

    def interpretation(self, params: dict) -> dict[str, jax.Array]:
        """How long each trace lasts and after how long each context repeats, in steps (∞: never)."""
        alpha = params.get("alpha", initial_alpha(self.trace_size))
        omega = params.get("omega", initial_omega(self.context_size))
        if not self.decay:
            alpha = jnp.zeros_like(alpha)
        if not self.oscillation:
            omega = jnp.zeros_like(omega)
        return {"trace_durability": trace_durability(alpha), "contextual_period": contextual_period(omega)}


def initial_alpha(trace_size: int, longest: float = 1024.0):
    return -math.log(0.01) / jnp.geomspace(1.0, longest, trace_size, dtype=jnp.float32)


def initial_omega(context_size: int, longest: float = 1024.0):
    return 2 * math.pi / jnp.geomspace(1.0, longest, context_size, dtype=jnp.float32)


def normalize(z: jax.Array, epsilon: float = 1e-6) -> jax.Array:
    """Layer normalisation without parameters (LN in FFM, Eq. 17)."""
    z = z - z.mean(-1, keepdims=True)
    return z * jax.lax.rsqrt(jnp.square(z).mean(-1, keepdims=True) + epsilon)


class LRU(Memory):
    """Linear recurrent unit (FRN, Eq. 5 and 11; Orvieto et al., 2023).

        λ = exp(-exp(ν) + i exp(θ))               N complex modes, |λ| < 1 whatever ν is
        h_t = λ ⊙ h_{t-1} + exp(γ) ⊙ B x_t        exp(γ) = sqrt(1 - |λ|²) at the start: noise keeps its variance
        y_t = Re(C h_t) + D ⊙ x_t

    ν, θ and γ are logarithms, so that every real value is valid. At the start, the modes are uniform in the ring
    r_min <= |λ| <= r_max of the complex plane, with phases up to max_phase. B holds its real and imaginary parts side
    by side, C holds Re C above -Im C: each is applied in one real product.
    """

    r_min: float = R_MIN
    r_max: float = R_MAX
    max_phase: float = 2 * math.pi
    form: str = "auto"
    """How the recurrence is computed: see `linear_recurrence`."""

    def check_settings(self):
        check_form(self)
        check_ring(self)

    def initialize_carry(self, batch_size: int):
        return jnp.zeros((batch_size, 2 * self.features), jnp.float32)  # (Re h ‖ Im h)

    @nn.compact
    def __call__(self, carry, x: jax.Array, reset: jax.Array):
        self.check(carry, x, reset)
        N, F = self.features, x.shape[-1]
        if F != N:
            raise ValueError(
                f"LRU: y = Re(C h) + D ⊙ x needs an input as wide as the output: features = {N}, x has {F}"
            )
        decay, nu = modes(self, N)
        gamma = self.weight("gamma", lambda *_: 0.5 * jnp.log1p(-jnp.exp(-2 * jnp.exp(nu))), N)
        B = self.weight("B", nn.initializers.normal((2 * F) ** -0.5), F, 2 * N)
        C = self.weight("C", nn.initializers.normal(N**-0.5), 2 * N, N)
        D = self.weight("D", nn.initializers.normal(1.0), N)
        B = B * jnp.exp(jnp.tile(gamma, 2))

        def sequence(h, x, reset):
            h = linear_recurrence(decay, product(x, B), reset, h, self.form)  # [T, B, 2N]
            return h[-1], product(h, C) + D * x

        return through_time(sequence, carry, x, reset)

    def interpretation(self, params: dict) -> dict[str, jax.Array]:
        """The steps after which a hundredth of each mode is left: |λ|^t = exp(-exp(ν) t)."""
        return {"trace_durability": trace_durability(jnp.exp(params["nu"]))}


def check_ring(cell: Memory) -> None:
    cell.require(0 <= cell.r_min < cell.r_max, "r_min", f"must be at least 0 and below r_max, {cell.r_max}")
    cell.require(cell.r_max <= 1, "r_max", "must be at most 1")
    cell.require(0 < cell.max_phase <= 2 * math.pi, "max_phase", "must be above 0 and at most 2π")


def modes(cell: Memory, N: int, suffix: str = ""):
    """N random modes as parameters of a cell with r_min, r_max, max_phase: λ [2 N], and ν [N]."""

    def init_nu(key, shape, dtype):
        return draw_nu(jax.random.uniform(key, shape, dtype), cell.r_min, cell.r_max)

    def init_theta(key, shape, dtype):
        return draw_theta(jax.random.uniform(key, shape, dtype), cell.max_phase)

    nu, theta = cell.weight(f"nu{suffix}", init_nu, N), cell.weight(f"theta{suffix}", init_theta, N)
    return polar(jnp.exp(-jnp.exp(nu)), jnp.exp(theta)), nu


def draw_nu(uniform: jax.Array, r_min: float, r_max: float) -> jax.Array:
    """ν of modes whose density is uniform over the area of a ring, from uniform numbers in [0, 1].

    A radius of exactly 0 or 1 would make ν, or the logarithm of the norm sqrt(1 - r²), infinite.
    """
    area = jnp.clip(r_min**2 + uniform * (r_max**2 - r_min**2), 1e-6, 1 - 1e-6)
    return jnp.log(-0.5 * jnp.log(area))


def draw_theta(uniform: jax.Array, max_phase: float) -> jax.Array:
    """θ of modes whose phase is uniform in (0, max_phase], from uniform numbers in [0, 1]; a phase of 0 has no log."""
    return jnp.log(max_phase * jnp.maximum(uniform, 1e-6))


# ----------------------------------------------------------------------------------------------------------------------
# Reservoirs: random from the start, and meant to stay so (FRN, appendix B)
# ----------------------------------------------------------------------------------------------------------------------


class Reservoir(Memory):
    """Layers of `features` units, each driven by the one below; the output is all of them side by side (FRN, Eq. A2).

    y [T, B, num_layers · features]. Reservoirs need no layers between or before them: they stack on the input. What a
    layer does is a reservoir's own: layer(i, state, u, reset) -> (last state, y), with u [T, B, F] from below.
    """

    num_layers: int = 2

    def initialize_carry(self, batch_size: int):
        return tuple(self.initialize_layer(batch_size) for _ in range(self.num_layers))

    def initialize_layer(self, batch_size: int):
        return jnp.zeros((batch_size, self.features), jnp.float32)

    @nn.compact
    def __call__(self, carry, x: jax.Array, reset: jax.Array):
        self.check(carry, x, reset)
        states, outputs = [], []
        for i, state in enumerate(carry):
            state, x = self.layer(i, state, x, reset)
            states.append(state)
            outputs.append(x)
        return tuple(states), jnp.concatenate(outputs, axis=-1)


def check_leak(cell: Reservoir) -> None:
    cell.require(0 < cell.leak <= 1, "leak", "must be above 0 and at most 1")


class DeepESN(Reservoir):
    """Deep echo state network (FRN, Eq. A1 and A2; Gallicchio et al., 2017). A layer, driven by u_t = x_t or h_t below:

        c_t = tanh(W_in u_t + W_rec h_{t-1} + b)
        h_t = (1 - α) h_{t-1} + α c_t                y_t = all layers' h_t

    W_rec is a Gaussian matrix, scaled to its spectral radius exactly.
    """

    spectral_radius: float = 0.99
    """Just inside the edge of stability: at 0.9, and with strong inputs, it remembers a third as long."""
    leak: float = 1.0
    """α: 1 replaces the state at every step, a smaller one averages over about 1/α steps."""
    input_scaling: float = 0.1
    """Standard deviation of W_in u for inputs u of unit variance. Small: a saturated tanh forgets."""
    bias_scaling: float = 0.01
    """Standard deviation of b."""

    def check_settings(self):
        check_leak(self)
        self.require(self.spectral_radius > 0, "spectral_radius", "must be above 0")

    def layer(self, i: int, h: jax.Array, u: jax.Array, reset: jax.Array):
        N, F = self.features, u.shape[-1]
        W_in = self.weight(f"W_in_{i}", nn.initializers.normal(self.input_scaling * F**-0.5), F, N)
        W_rec = self.weight(f"W_rec_{i}", scaled_to_spectral_radius(self.spectral_radius), N, N)
        b = self.weight(f"b_{i}", nn.initializers.normal(self.bias_scaling), N)

        def sequence(h, u, reset):
            h = leaky_recurrence(self.leak, W_rec, product(u, W_in) + b, reset, h)
            return h[-1], h

        return through_time(sequence, h, u, reset)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def leaky_recurrence(leak: float, W: jax.Array, inputs: jax.Array, reset: jax.Array, initial: jax.Array):
    """All h_t = (1 - α) h_{t-1} + α tanh(inputs_t + h_{t-1} W), [T, B, N]; its gradient as in `gru_recurrence`."""
    return leaky_forward(leak, W, inputs, reset, initial)[0]


def leaky_forward(leak, W, inputs, reset, initial):
    def step(h, now):
        inputs, reset = now
        h = where_reset(reset, 0.0, h)
        c = jnp.tanh(inputs + h @ W)
        h = (1 - leak) * h + leak * c
        return h, (h, c)

    h, c = keep(jax.lax.scan(step, initial, (inputs, reset))[1])
    return h, (W, reset, initial, h, c)


def leaky_backward(leak, saved, dh):
    W, reset, initial, h, c = saved
    W_transposed = W.T  # once, not at every step

    def step(dh_after, now):
        dh, c, reset = now
        dh = dh + dh_after
        d_inputs = leak * dh * (1 - c * c)
        dh = (1 - leak) * dh + d_inputs @ W_transposed
        return where_reset(reset, 0.0, dh), d_inputs

    d_initial, d_inputs = jax.lax.scan(step, jnp.zeros_like(initial), (dh, c, reset), reverse=True)
    before = where_reset(reset, 0.0, shift(initial, h))
    return outer_product(before, d_inputs), d_inputs, None, d_initial


leaky_recurrence.defvjp(leaky_forward, leaky_backward)


def scaled_to_spectral_radius(target: float) -> Callable:
    """An initialiser of square Gaussian matrices with the largest |eigenvalue| given."""

    def draw(key, shape, dtype=jnp.float32):
        matrix = jax.random.normal(key, shape, dtype)
        return matrix * (target / spectral_radius(matrix))

    return draw


def spectral_radius(matrix: jax.Array, squarings: int = 26) -> jax.Array:
    """The largest |eigenvalue| by Gelfand's formula, ‖M^k‖^(1/k) at k = 2^26: exact to rounding, on every backend."""
    log_radius = 0.0
    for i in range(squarings):
        norm = jnp.linalg.norm(matrix)
        matrix = jnp.matmul(matrix / norm, matrix / norm, precision=jax.lax.Precision.HIGHEST)
        log_radius += jnp.log(norm) / 2**i
    return jnp.exp(log_radius + jnp.log(jnp.linalg.norm(matrix)) / 2**squarings)


class SRC(Reservoir):
    """Structured reservoir computing (FRN, Eq. A3 and A4; Dong et al., 2020). A layer, driven by u_t:

        h_t = tanh(S [σ_r h_{t-1}; σ_in u_t]) / √N,    S = the top left N x (N + d) block of T
        T = g √m H D1 H D2 H D3                        H: orthonormal Hadamard matrix of size m = 2^k >= N + d

    The D are diagonals of random signs, so that T behaves like a Gaussian matrix of standard deviation g but has only
    3 m parameters, and the fast Walsh-Hadamard transform applies it in O(m log m): no matrix is ever formed.
    """

    recurrent_scaling: float = 1.0
    """σ_r."""
    input_scaling: float = 1.0
    """σ_in, divided by √d so that inputs of unit variance arrive with this standard deviation."""
    projection_scaling: float = 1.0
    """g (γ in Eq. A4)."""

    def layer(self, i: int, h: jax.Array, u: jax.Array, reset: jax.Array):
        N, d = self.features, u.shape[-1]
        m = 1 << (N + d - 1).bit_length()
        signs = self.weight(f"signs_{i}", random_signs, 3, m)
        gain = self.projection_scaling * m**0.5
        driven = jnp.pad(self.input_scaling * d**-0.5 * u, ((0, 0), (0, 0), (N, m - N - d)))  # [T, B, m]

        def step(h, now):
            driven, reset = now
            h = where_reset(reset, 0.0, h)
            v = driven + jnp.pad(self.recurrent_scaling * h, ((0, 0), (0, m - N)))  # [σ_r h; σ_in u; 0]
            for sign in signs[::-1]:
                v = hadamard_transform(sign * v)
            h = jnp.tanh(gain * v[..., :N]) / N**0.5
            return h, h

        return jax.lax.scan(step, h, (driven, reset))


def random_signs(key, shape, dtype) -> jax.Array:
    """1 or -1, with the same chance; jax.random.rademacher draws others where JAX_ENABLE_X64 is set."""
    return jnp.where(jax.random.bernoulli(key, dtype(0.5), shape), 1.0, -1.0).astype(dtype)


def hadamard_transform(x: jax.Array) -> jax.Array:
    """H x over the last axis, H the orthonormal Hadamard matrix (Sylvester's order), in O(m log m).

    One round replaces all pairs (p, q) by (p + q, p - q); taking neighbours apart and putting sums before differences
    makes every round the same, and after log2(m) rounds every element has met every other.
    """
    m = x.shape[-1]
    for _ in range(m.bit_length() - 1):
        even, odd = x[..., 0::2], x[..., 1::2]
        x = jnp.concatenate([even + odd, even - odd], axis=-1)
    return x * m**-0.5


class ParalESN(Reservoir):
    """Parallel echo state network (FRN, Eq. A5 and A6; Pinna et al., 2026). A layer, driven by u_t = x_t or q_t below:

        h_t = λ̄ ⊙ h_{t-1} + α (W_in u_t + b),   λ̄ = (1 - α) + α λ     complex and linear: parallel over time
        q_t = tanh(Re(C * h_t + c))                                    mixes each state with its neighbours

    λ is drawn from a ring like the LRU's, * is a convolution across the state's coordinates with zeros beyond the ends.
    Only the real part of c would be seen: c is real.
    """

    r_min: float = R_MIN
    r_max: float = R_MAX
    max_phase: float = 2 * math.pi
    leak: float = 1.0
    """α: a smaller one moves every mode towards 1, which remembers longer and turns more slowly."""
    input_scaling: float = 0.1
    """Standard deviation of W_in u for inputs u of unit variance; the slow modes add up many of them."""
    bias_scaling: float = 0.01
    """Standard deviation of b and c."""
    kernel_size: int = 3
    """Width of C: how many neighbouring coordinates are mixed."""
    form: str = "auto"
    """How the recurrence is computed: see `linear_recurrence`."""

    def check_settings(self):
        check_form(self)
        check_ring(self)
        check_leak(self)
        self.require(self.kernel_size <= self.features, "kernel_size", f"must be at most features, {self.features}")

    def initialize_layer(self, batch_size: int):
        return jnp.zeros((batch_size, 2 * self.features), jnp.float32)  # (Re h ‖ Im h)

    def layer(self, i: int, h, u: jax.Array, reset: jax.Array):
        N, F, k, a = self.features, u.shape[-1], self.kernel_size, self.leak
        decay = self.leaky(modes(self, N, f"_{i}")[0])
        W_in = self.weight(f"W_in_{i}", nn.initializers.normal(self.input_scaling * (2 * F) ** -0.5), F, 2 * N)
        b = self.weight(f"b_{i}", nn.initializers.normal(self.bias_scaling), 2 * N)
        C = self.weight(f"C_{i}", nn.initializers.normal(k**-0.5), 2, k)
        c = self.weight(f"c_{i}", nn.initializers.normal(self.bias_scaling), N)

        def sequence(h, u, reset):
            h = linear_recurrence(decay, a * (product(u, W_in) + b), reset, h, self.form)  # [T, B, 2N]
            real, imaginary = jnp.split(h, 2, axis=-1)
            return h[-1], jnp.tanh(convolve(real, C[0]) - convolve(imaginary, C[1]) + c)

        return through_time(sequence, h, u, reset)

    def leaky(self, decay: jax.Array) -> jax.Array:
        """λ̄ = (1 - α) + α λ."""
        real, imaginary = pair(self.leak * decay)
        return packed((1 - self.leak + real, imaginary))

    def interpretation(self, params: dict) -> dict[str, jax.Array]:
        """The steps after which a hundredth of each mode is left, of all layers' modes: |λ̄|^t."""
        radii = []
        for i in range(self.num_layers):
            decay = self.leaky(polar(jnp.exp(-jnp.exp(params[f"nu_{i}"])), jnp.exp(params[f"theta_{i}"])))
            radii.append(jnp.hypot(*pair(decay)))
        return {"trace_durability": trace_durability(jnp.log(jnp.concatenate(radii)))}


def convolve(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """y_n = sum over j of kernel_j x_{n + k // 2 - j} along the last axis, with zeros beyond its ends."""
    k, N = len(kernel), x.shape[-1]
    padded = jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((k - 1 - k // 2, k // 2),))
    return sum(kernel[j] * padded[..., k - 1 - j : k - 1 - j + N] for j in range(k))


# ----------------------------------------------------------------------------------------------------------------------
# Units by the names that the scripts' --memory has for them
# ----------------------------------------------------------------------------------------------------------------------

UNITS = {
    "ffm": FFM,
    "gru": GRU,
    "lru": LRU,
    "deepesn": DeepESN,
    "src": SRC,
    "paralesn": ParalESN,
    "mlp": Memoryless,
}
RESERVOIRS = ("deepesn", "src", "paralesn")
"""Those that are layers upon each other by themselves, with no trained layer between: see `Reservoir`."""


def describe_units(make_unit: Callable[[], Memory], params: dict) -> dict[str, jax.Array]:
    """{"memory_0/trace_durability_max": …, …}: what each module whose name starts with "memory" says of its memory.

    `make_unit()` is the unit that these modules are; `params` are those of the whole network.
    """
    scalars = {}
    for module in sorted(params):
        if module.startswith("memory"):
            told = make_unit().describe(params[module])
            scalars |= {f"{module}/{key}": value for key, value in told.items()}
    return scalars
