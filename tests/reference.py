"""The units of memory.py once more, in numpy and float64: a plain loop over time, from the papers' equations.

    carry, y = reference.run(cell, params, carry, x, reset)

takes and returns what `cell.apply({"params": params}, carry, x, reset)` does, as numpy arrays. Nothing here is fast. It
shares nothing with memory.py but the names and the layout of the parameters.
"""

import jax
import numpy as np
import scipy.linalg

from memory import FFM, GRU, LRU, SRC, DeepESN, Memoryless, ParalESN


def as_float64(tree):
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)


def as_complex(packed):
    """(real ‖ imaginary) -> complex."""
    real, imaginary = np.split(np.asarray(packed, np.float64), 2, axis=-1)
    return real + 1j * imaginary


def as_pair(z):
    """The inverse of `as_complex`."""
    return np.concatenate([z.real, z.imag], axis=-1)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def fresh(state, reset):
    """The state [B, ...] before a step: zeros where an episode starts."""
    return np.where(reset[:, None], 0, state)


def run(cell, params, carry, x, reset):
    params, carry, x, reset = as_float64(params), as_float64(carry), as_float64(x), np.asarray(reset)
    return RECURRENCES[type(cell)](cell, params, carry, x, reset)


def memoryless(cell, p, carry, x, reset):
    return carry, x


def gru(cell, p, h, x, reset):
    outputs = []
    for o, start in zip(x, reset, strict=True):
        h = fresh(h, start)
        z = sigmoid(o @ p["W_z"] + h @ p["U_z"] + p["b_z"])
        r = sigmoid(o @ p["W_r"] + h @ p["U_r"] + p["b_r"])
        candidate = np.tanh(o @ p["W_c"] + (r * h) @ p["U_c"] + p["b_c"])
        h = (1 - z) * h + z * candidate  # FRN, Eq. 4
        outputs.append(h)
    return h, np.stack(outputs)


def ffm(cell, p, carry, x, reset):
    m, c, batch = cell.trace_size, cell.context_size, x.shape[1]
    # Where they are no parameters, float32 like the constants of the unit: an error of 1e-7 in a period is visible
    # after a few of them.
    alpha = p.get("alpha", (-np.log(0.01) / np.geomspace(1, 1024, m)).astype(np.float32).astype(np.float64))
    omega = p.get("omega", (2 * np.pi / np.geomspace(1, 1024, c)).astype(np.float32).astype(np.float64))
    radius = np.exp(-np.abs(alpha)) if cell.decay else np.ones(m)
    angle = -omega if cell.oscillation else np.zeros(c)
    gamma = radius[:, None] * np.exp(1j * angle)[None, :]  # FFM, Eq. 11 at t = 1: [m, c]

    def linear(name, v):
        return v @ p[f"{name}_kernel"] + p[f"{name}_bias"]

    S = as_complex(carry).reshape(batch, c, m).swapaxes(1, 2)  # [B, m, c]; stored context by context
    outputs = []
    for o, start in zip(x, reset, strict=True):
        trace = linear("l1", o) * (sigmoid(linear("l2", o)) if cell.input_gate else 1)  # Eq. 14
        S = gamma * np.where(start[:, None, None], 0, S) + trace[:, :, None]  # Eq. 12, 15
        z = linear("l3", as_pair(S.swapaxes(1, 2).reshape(batch, c * m)))  # Eq. 16
        normed = (z - z.mean(-1, keepdims=True)) / np.sqrt(z.var(-1, keepdims=True) + 1e-6)
        if cell.output_gate:
            gate = sigmoid(linear("l4", o))
            outputs.append(normed * gate + linear("l5", o) * (1 - gate))  # Eq. 17
        else:
            outputs.append(normed + linear("l5", o))
    return as_pair(S.swapaxes(1, 2).reshape(batch, c * m)), np.stack(outputs)


def lru(cell, p, carry, x, reset):
    N = cell.features
    eigenvalues = np.exp(-np.exp(p["nu"]) + 1j * np.exp(p["theta"]))  # FRN, Eq. 11
    B, C = as_complex(p["B"]) * np.exp(p["gamma"]), p["C"][:N] - 1j * p["C"][N:]
    h, outputs = as_complex(carry), []
    for o, start in zip(x, reset, strict=True):
        h = eigenvalues * fresh(h, start) + o @ B  # Eq. 5
        outputs.append((h @ C).real + p["D"] * o)
    return as_pair(h), np.stack(outputs)


def deepesn(cell, p, carry, x, reset):
    h, outputs = list(carry), []
    for u, start in zip(x, reset, strict=True):
        for i, state in enumerate(h):
            before = fresh(state, start)
            candidate = np.tanh(u @ p[f"W_in_{i}"] + before @ p[f"W_rec_{i}"] + p[f"b_{i}"])  # FRN, Eq. A1
            u = h[i] = (1 - cell.leak) * before + cell.leak * candidate
        outputs.append(np.concatenate(h, axis=-1))  # Eq. A2
    return tuple(h), np.stack(outputs)


def src(cell, p, carry, x, reset):
    N, h, outputs = cell.features, list(carry), []
    blocks, widths = [], [x.shape[-1], *[N] * (cell.num_layers - 1)]
    for i, d in enumerate(widths):
        m = 2 ** int(np.ceil(np.log2(N + d)))
        H = scipy.linalg.hadamard(m) / np.sqrt(m)
        D1, D2, D3 = p[f"signs_{i}"]  # diagonals: H D is H with its columns scaled
        top = (((H * D1)[:N] @ (H * D2)) @ (H * D3))[:, : N + d]
        blocks.append(cell.projection_scaling * np.sqrt(m) * top)  # S in FRN, Eq. A4
    for u, start in zip(x, reset, strict=True):
        for i, (S, d) in enumerate(zip(blocks, widths, strict=True)):
            driven = np.concatenate([cell.recurrent_scaling * fresh(h[i], start), cell.input_scaling / d**0.5 * u], -1)
            u = h[i] = np.tanh(driven @ S.T) / np.sqrt(N)  # Eq. A3
        outputs.append(np.concatenate(h, axis=-1))
    return tuple(h), np.stack(outputs)


def paralesn(cell, p, carry, x, reset):
    N, leak, middle = cell.features, cell.leak, cell.kernel_size // 2
    h, outputs, layers = [as_complex(layer) for layer in carry], [], []
    for i in range(cell.num_layers):
        eigenvalues = np.exp(-np.exp(p[f"nu_{i}"]) + 1j * np.exp(p[f"theta_{i}"]))
        kernel = p[f"C_{i}"][0] + 1j * p[f"C_{i}"][1]
        transition = (1 - leak) + leak * eigenvalues
        layers.append((transition, as_complex(p[f"W_in_{i}"]), as_complex(p[f"b_{i}"]), kernel, p[f"c_{i}"]))
    for u, start in zip(x, reset, strict=True):
        features = []
        for i, (transition, W_in, b, kernel, c) in enumerate(layers):
            h[i] = transition * fresh(h[i], start) + leak * (u @ W_in + b)  # FRN, Eq. A5
            mixed = np.stack([np.convolve(row, kernel)[middle:][:N] for row in h[i]])  # the full one's middle
            u = np.tanh((mixed + c).real)  # Eq. A6
            features.append(u)
        outputs.append(np.concatenate(features, axis=-1))
    return tuple(as_pair(layer) for layer in h), np.stack(outputs)


RECURRENCES = {
    FFM: ffm,
    GRU: gru,
    LRU: lru,
    DeepESN: deepesn,
    SRC: src,
    ParalESN: paralesn,
    Memoryless: memoryless,
}


def check_gradient(function, point, gradient, seed=0, tolerance=2e-5, step=1e-6):
    """Compares the gradient of a scalar function with central differences of it, along a random direction in each leaf.

    `function` takes a tree of float64 arrays like `point`, and must be computed in float64. The tolerance is relative
    to the norm of the leaf's gradient, which is how large a derivative along a random direction is.
    """
    rng = np.random.default_rng(seed)
    paths, tree = jax.tree.flatten_with_path(as_float64(point))
    leaves = [leaf for _, leaf in paths]
    gradients = jax.tree.leaves(as_float64(gradient))
    assert len(leaves) == len(gradients) > 0
    for i, (path, leaf) in enumerate(paths):
        direction = rng.normal(size=leaf.shape)
        values = []
        for sign in (1, -1):
            moved = [*leaves[:i], leaf + sign * step * direction, *leaves[i + 1 :]]
            values.append(function(tree.unflatten(moved)))
        expected, found = (values[0] - values[1]) / (2 * step), (gradients[i] * direction).sum()
        allowed = tolerance * max(np.linalg.norm(gradients[i]), 1e-3)
        assert abs(found - expected) <= allowed, f"{jax.tree_util.keystr(path)}: {found}, but numerically {expected}"
