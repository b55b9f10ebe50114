"""The agents and the losses of the scripts once more, in numpy and float64, on top of the units in reference.py.

Everything takes parameters by the names that the scripts give them: params["mixer_0"]["kernel"], … Nothing is taken
from the scripts themselves.
"""

import numpy as np
import reference
from numpy.lib.stride_tricks import sliding_window_view


def linear(p, x):
    return x @ p["kernel"] + p["bias"]


def layer_norm(x, p=None):
    """Over the features, with flax's ε, and with parameters where there are some."""
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
    return x if p is None else x * p["scale"] + p["bias"]


def leaky_relu(x):
    return np.where(x > 0, x, 0.01 * x)


def one_hot(index, size):
    """[...] -> [..., size]; an index of -1 has no bit set."""
    return (np.asarray(index)[..., None] == np.arange(size)).astype(np.float64)


# FRN Table A2, a line a layer: the kernel and its stride, the size of the max-pooling that follows and its stride.
TABLE_A2 = [
    ((5, 5, 3, 64), 2, 2, 2),
    ((3, 3, 64, 128), 2, 2, 2),
    ((3, 3, 128, 256), 2, 3, 1),
    ((1, 1, 256, 512), 1, 1, 1),  # nothing is pooled after it
]


def windows(x, size, stride):
    """[N, H, W, C] -> [N, H', W', C, size, size], without padding."""
    return sliding_window_view(x, (size, size), axis=(1, 2))[:, ::stride, ::stride]


def cnn(params, pictures):
    """Pictures [T, B, 128, 128, 3] of 0 … 255 -> features [T, B, 512]: 4 × [convolution, LeakyReLU, max-pooling]."""
    x = pictures.reshape(-1, *pictures.shape[2:]) / 255
    for i, (shape, stride, pooling, pooling_stride) in enumerate(TABLE_A2):
        kernel = params[f"kernel_{i}"]
        assert kernel.shape == shape
        x = np.tensordot(windows(x, shape[0], stride), kernel, axes=((4, 5, 3), (0, 1, 2))) + params[f"bias_{i}"]
        x = windows(leaky_relu(x), pooling, pooling_stride).max((4, 5))
    return x.reshape(*pictures.shape[:2], 512)


def trunk(params, unit, carry, x, reset):
    """Linear -> L × [unit -> mixer: Linear, LayerNorm, LeakyReLU] -> Linear (FRN Fig. 7): [T, B, F] -> [T, B, H].

    A reservoir reads x itself, and only the last Linear follows (FRN appendix B). `carry` has one state a unit.
    """
    if "input" in params:
        x = linear(params["input"], x)
    for i, state in enumerate(carry):
        _, x = reference.run(unit, params[f"memory_{i}"], state, x, reset)
        if f"mixer_{i}" in params:
            x = leaky_relu(layer_norm(linear(params[f"mixer_{i}"], x)))
    return linear(params["output"], x)


def readout(params, x, prefix, last):
    """K × [Linear, LayerNorm with parameters, LeakyReLU] -> Linear."""
    for i in range(sum(name.startswith(f"{prefix}_norm_") for name in params)):
        x = leaky_relu(layer_norm(linear(params[f"{prefix}_{i}"], x), params[f"{prefix}_norm_{i}"]))
    return linear(params[last], x)


def pqn_loss(args, unit, params, carry, transitions, targets):
    """½ (Q(s, a) - G)², averaged over steps and environments. The agent reads its previous action too.

    Where there is a CNN, it reads the features of a picture in place of the picture.
    """
    num_actions = params["q_values"]["kernel"].shape[1]
    obs = cnn(params["cnn"], transitions["obs"]) if "cnn" in params else transitions["obs"]
    x = np.concatenate([obs, one_hot(transitions["previous_action"], num_actions)], axis=-1)
    q_values = readout(params, trunk(params, unit, carry, x, transitions["reset"]), "readout", "q_values")
    taken = (q_values * one_hot(transitions["action"], num_actions)).sum(-1)
    return 0.5 * np.mean((taken - targets) ** 2)


def log_softmax(logits):
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def clipped_losses(args, log_prob, value, transitions, advantages, returns):
    """PPO's clipped objective, to be minimised, and its error of the values, clipped if that is asked for."""
    ratio = np.exp(log_prob - transitions["log_prob"])
    if args.norm_adv:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    clipped = np.clip(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
    policy_loss = -np.minimum(ratio * advantages, clipped * advantages).mean()
    error = (value - returns) ** 2
    if args.clip_vloss:
        near = transitions["value"] + np.clip(value - transitions["value"], -args.clip_coef, args.clip_coef)
        error = np.maximum(error, (near - returns) ** 2)
    return policy_loss, 0.5 * error.mean()


def ppo_loss(args, unit, params, carry, transitions, advantages, returns):
    """PPO's loss of an agent with discrete actions."""
    x = trunk(params, unit, carry, transitions["obs"], transitions["reset"])
    log_p = log_softmax(readout(params, x, "actor", "logits"))
    value = readout(params, x, "critic", "value")[..., 0]
    log_prob = (log_p * one_hot(transitions["action"], log_p.shape[-1])).sum(-1)
    policy_loss, value_loss = clipped_losses(args, log_prob, value, transitions, advantages, returns)
    entropy = -(np.exp(log_p) * log_p).sum(-1).mean()
    return policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy


def gaussian_ppo_loss(args, unit, params, carry, transitions, advantages, returns, statistics):
    """PPO's loss of an agent whose actions [T, B, A] are independent and Gaussian, with the same deviations always.

    It reads observations by the mean and variance [O] of `statistics`, cut off at ±10; None: as they are.
    """
    obs = transitions["obs"]
    if statistics is not None:
        obs = np.clip((obs - statistics.mean) / np.sqrt(statistics.var + 1e-8), -10, 10)
    x = trunk(params, unit, carry, obs, transitions["reset"])
    mean, variance = readout(params, x, "actor", "mean"), np.exp(2 * params["log_std"])
    value = readout(params, x, "critic", "value")[..., 0]
    density = np.exp(-((transitions["action"] - mean) ** 2) / (2 * variance)) / np.sqrt(2 * np.pi * variance)
    log_prob = np.log(density.prod(-1))
    policy_loss, value_loss = clipped_losses(args, log_prob, value, transitions, advantages, returns)
    entropy = 0.5 * np.log(2 * np.pi * np.e * variance).sum()
    return policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy
