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

    Complex numbers are pairs (real, imaginary): decay λ [...], inputs u [T, B, ...] (which may broadcast against the
    state in the trailing axes; None as imaginary part of real inputs), initial h [B, ...]. Returns h as a pair
    [T, B, ...].

    There are two forms with the same numbers to rounding. "sequential" steps through time: the least arithmetic and
    memory traffic, right for a CPU. "associative" computes all steps in O(log T) parallel rounds, right for an
    accelerator. "auto" chooses by JAX's default backend when the program is traced.
    """
    require(
        form in ("auto", "sequential", "associative"), f"form must be auto, sequential or associative, not {form!r}"
    )
    if form == "auto":
        form = "sequential" if jax.default_backend() == "cpu" else "associative"
    return (sequential_recurrence if form == "sequential" else associative_recurrence)(decay, inputs, reset, initial)


def sequential_recurrence(decay, inputs, reset, initial):
    def step(h, now):
        u, reset = now
        h = add(where_reset(reset, (0.0, 0.0), multiply(decay, h)), u)
        return h, h

    return jax.lax.scan(step, initial, (inputs, reset))[1]


def associative_recurrence(decay, inputs, reset, initial):
    """Spans of time are joined pairwise: (steps, did it reset, state at its end if the state before it is zero)."""
    u_re, u_im = inputs
    full = (len(reset), *initial[0].shape)
    inputs = jnp.broadcast_to(u_re, full), jnp.broadcast_to(jnp.zeros_like(u_re) if u_im is None else u_im, full)
    entry = add(where_reset(reset[0], (0.0, 0.0), multiply(decay, initial)), jax.tree.map(lambda u: u[0], inputs))
    inputs = jax.tree.map(lambda u, first: u.at[0].set(first), inputs, entry)
    # λ^steps is the same for the whole batch: [T, 1, ...]. Its modulus is at most 1: nothing can overflow, at any T.
    power = jax.tree.map(lambda part: jnp.broadcast_to(part, (len(reset), 1, *part.shape)), decay)

    def join(left, right):
        (left_power, left_reset, left_state), (right_power, right_reset, right_state) = left, right
        # The reset belongs to the operator: a reset in the right span hides the left one, and the span remembers
        # a reset in either half.
        flag = right_reset.reshape(right_reset.shape + (1,) * (left_state[0].ndim - 2))
        hidden = jax.tree.map(lambda part: jnp.where(flag, 0.0, part), multiply(right_power, left_state))
        return multiply(left_power, right_power), left_reset | right_reset, add(hidden, right_state)

    return jax.lax.associative_scan(join, (power, reset, inputs))[2]


def multiply(p, q):
    """The product of complex numbers as pairs."""
    return p[0] * q[0] - p[1] * q[1], p[0] * q[1] + p[1] * q[0]


def add(p, q):
    """The sum of complex numbers as pairs; None is an imaginary part of zero."""
    return p[0] + q[0], p[1] if q[1] is None else p[1] + q[1]


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
        states = linear_recurrence(gamma, (trace[..., None], None), reset, carry, self.form)  # [T, B, m, c] each
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


class LRU(Memory):
    """Linear recurrent unit (FRN, Eq. 5 and 11; Orvieto et al., 2023).

        λ = exp(-exp(ν) + i exp(θ))               N complex modes, |λ| < 1 whatever ν is
        h_t = λ ⊙ h_{t-1} + exp(γ) ⊙ B x_t        exp(γ) = sqrt(1 - |λ|²) at the start: noise keeps its variance
        y_t = Re(C h_t) + D ⊙ x_t

    ν, θ and γ are logarithms, so that every real value is valid. At the start, the modes are uniform in the ring
    r_min <= |λ| <= r_max of the complex plane, with phases up to max_phase. B holds its real and imaginary parts side
    by side, C holds Re C above -Im C: each is applied in one real product.
    """

    r_min: float = 0.9
    r_max: float = 0.999
    max_phase: float = 2 * math.pi
    form: str = "auto"
    """How the recurrence is computed: see `linear_recurrence`."""

    def initialize_carry(self, batch_size: int):
        h = jnp.zeros((batch_size, self.features))
        return h, h

    @nn.compact
    def __call__(self, carry, x: jax.Array, reset: jax.Array):
        self.check(carry, x, reset)
        N, F = self.features, x.shape[-1]
        require(F == N, f"LRU: y = Re(C h) + D ⊙ x needs an input as wide as the output: features = {N}, x has {F}")
        decay, nu = modes(self, N)
        gamma = self.weight("gamma", lambda key, shape: 0.5 * jnp.log1p(-jnp.exp(-2 * jnp.exp(nu))), N)
        B = self.weight("B", nn.initializers.normal((2 * F) ** -0.5), F, 2 * N)
        C = self.weight("C", nn.initializers.normal(N**-0.5), 2 * N, N)
        D = self.weight("D", nn.initializers.normal(1.0), N)
        u = jnp.split(x @ (B * jnp.exp(jnp.tile(gamma, 2))), 2, axis=-1)  # [T, B, N] each
        states = linear_recurrence(decay, tuple(u), reset, carry, self.form)  # [T, B, N] each
        y = jnp.concatenate(states, axis=-1) @ C + D * x
        return jax.tree.map(lambda part: part[-1], states), y


def modes(cell: Memory, N: int, suffix: str = ""):
    """N random modes as parameters of a cell with r_min, r_max, max_phase: λ as a pair [N], and ν."""
    require(
        0 <= cell.r_min < cell.r_max <= 1 and 0 < cell.max_phase <= 2 * math.pi,
        f"{type(cell).__name__}: needs 0 <= r_min < r_max <= 1 and 0 < max_phase <= 2π, "
        f"not r_min = {cell.r_min}, r_max = {cell.r_max}, max_phase = {cell.max_phase}",
    )
    nu = cell.weight(
        f"nu{suffix}", lambda key, shape: draw_nu(jax.random.uniform(key, shape), cell.r_min, cell.r_max), N
    )
    theta = cell.weight(
        f"theta{suffix}", lambda key, shape: draw_theta(jax.random.uniform(key, shape), cell.max_phase), N
    )
    radius, phase = jnp.exp(-jnp.exp(nu)), jnp.exp(theta)
    return (radius * jnp.cos(phase), radius * jnp.sin(phase)), nu


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

    y [T, B, num_layers · features]. Reservoirs need no layers between or before them: they stack on the input.
    """

    num_layers: int = 2

    def initialize_carry(self, batch_size: int):
        return tuple(self.initialize_layer(batch_size) for _ in range(self.num_layers))

    def initialize_layer(self, batch_size: int):
        return jnp.zeros((batch_size, self.features))

    @nn.compact
    def __call__(self, carry, x: jax.Array, reset: jax.Array):
        self.check(carry, x, reset)
        states, outputs = [], []
        for i, state in enumerate(carry):
            state, x = self.layer(i, state, x, reset)
            states.append(state)
            outputs.append(x)
        return tuple(states), jnp.concatenate(outputs, axis=-1)


class DeepESN(Reservoir):
    """Deep echo state network (FRN, Eq. A1 and A2; Gallicchio et al., 2017). A layer, driven by u_t = x_t or h_t below:

        c_t = tanh(W_in u_t + W_rec h_{t-1} + b)
        h_t = (1 - α) h_{t-1} + α c_t                y_t = all layers' h_t

    W_rec is a Gaussian matrix, scaled to its spectral radius exactly.
    """

    spectral_radius: float = 0.99
    leak: float = 1.0
    """α: 1 replaces the state at every step, a smaller one averages over about 1/α steps."""
    input_scaling: float = 1.0
    """Standard deviation of W_in u for inputs u of unit variance."""
    bias_scaling: float = 0.1
    """Standard deviation of b."""

    def layer(self, i: int, h: jax.Array, u: jax.Array, reset: jax.Array):
        require(0 < self.leak <= 1, f"DeepESN: leak must be in (0, 1], not {self.leak}")
        require(self.spectral_radius > 0, f"DeepESN: spectral_radius must be positive, not {self.spectral_radius}")
        N, F = self.features, u.shape[-1]
        W_in = self.weight(f"W_in_{i}", nn.initializers.normal(self.input_scaling * F**-0.5), F, N)
        W_rec = self.weight(f"W_rec_{i}", scaled_to_spectral_radius(self.spectral_radius), N, N)
        b = self.weight(f"b_{i}", nn.initializers.normal(self.bias_scaling), N)

        def step(h, now):
            driven, reset = now
            h = where_reset(reset, 0.0, h)
            h = (1 - self.leak) * h + self.leak * jnp.tanh(driven + h @ W_rec)
            return h, h

        return jax.lax.scan(step, h, (u @ W_in + b, reset))


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
        signs = self.weight(f"signs_{i}", lambda key, shape: jax.random.rademacher(key, shape, jnp.float32), 3, m)
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

    r_min: float = 0.9
    r_max: float = 0.999
    max_phase: float = 2 * math.pi
    leak: float = 1.0
    """α: a smaller one moves every mode towards 1, which remembers longer and turns more slowly."""
    input_scaling: float = 1.0
    bias_scaling: float = 0.1
    kernel_size: int = 3
    """Width of C: how many neighbouring coordinates are mixed."""
    form: str = "auto"
    """How the recurrence is computed: see `linear_recurrence`."""

    def initialize_layer(self, batch_size: int):
        h = jnp.zeros((batch_size, self.features))
        return h, h

    def layer(self, i: int, h, u: jax.Array, reset: jax.Array):
        N, F, k, a = self.features, u.shape[-1], self.kernel_size, self.leak
        require(0 < a <= 1, f"ParalESN: leak must be in (0, 1], not {a}")
        require(0 < k <= N, f"ParalESN: kernel_size must be in [1, features], not {k}")
        (re, im), _ = modes(self, N, f"_{i}")
        W_in = self.weight(f"W_in_{i}", nn.initializers.normal(self.input_scaling * (2 * F) ** -0.5), F, 2 * N)
        b = self.weight(f"b_{i}", nn.initializers.normal(self.bias_scaling), 2 * N)
        C = self.weight(f"C_{i}", nn.initializers.normal(k**-0.5), 2, k)
        c = self.weight(f"c_{i}", nn.initializers.normal(self.bias_scaling), N)
        inputs = jnp.split(a * (u @ W_in + b), 2, axis=-1)
        states = linear_recurrence(((1 - a) + a * re, a * im), tuple(inputs), reset, h, self.form)  # [T, B, N] each
        q = jnp.tanh(convolve(states[0], C[0]) - convolve(states[1], C[1]) + c)
        return jax.tree.map(lambda part: part[-1], states), q


def convolve(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """y_n = sum over j of kernel_j x_{n + k // 2 - j} along the last axis, with zeros beyond its ends."""
    k, N = len(kernel), x.shape[-1]
    padded = jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((k - 1 - k // 2, k // 2),))
    return sum(kernel[j] * padded[..., k - 1 - j : k - 1 - j + N] for j in range(k))
