"""The agents and the losses of the scripts once more, in numpy and float64, on top of the units in reference.py.

Everything takes parameters by the names that the scripts give them: params["mixer_0"]["kernel"], … Nothing is taken
from the scripts themselves.
"""

import numpy as np
import reference


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
    """½ (Q(s, a) - G)², averaged over steps and environments. The agent reads its previous action too."""
    num_actions = params["q_values"]["kernel"].shape[1]
    x = np.concatenate([transitions["obs"], one_hot(transitions["previous_action"], num_actions)], axis=-1)
    q_values = readout(params, trunk(params, unit, carry, x, transitions["reset"]), "readout", "q_values")
    taken = (q_values * one_hot(transitions["action"], num_actions)).sum(-1)
    return 0.5 * np.mean((taken - targets) ** 2)


def log_softmax(logits):
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def ppo_loss(args, unit, params, carry, transitions, advantages, returns):
    """PPO's clipped objective and its clipped error of the values, of an agent with discrete actions."""
    x = trunk(params, unit, carry, transitions["obs"], transitions["reset"])
    log_p = log_softmax(readout(params, x, "actor", "logits"))
    value = readout(params, x, "critic", "value")[..., 0]
    ratio = np.exp((log_p * one_hot(transitions["action"], log_p.shape[-1])).sum(-1) - transitions["log_prob"])
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    clipped = np.clip(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
    policy_loss = -np.minimum(ratio * advantages, clipped * advantages).mean()
    near = transitions["value"] + np.clip(value - transitions["value"], -args.clip_coef, args.clip_coef)
    value_loss = 0.5 * np.maximum((value - returns) ** 2, (near - returns) ** 2).mean()
    entropy = -(np.exp(log_p) * log_p).sum(-1).mean()
    return policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy
