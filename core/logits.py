"""Log-probabilities from logits, NumPy arrays and torch tensors alike: it calls functions that the two libraries
share under the same names, and imports no torch.
"""

import sys
from typing import Any

import numpy as np

Array = Any  # a NumPy array or a torch tensor


def library(array: Array) -> Any:
    """The module whose array this is, numpy or torch."""
    return np if isinstance(array, np.ndarray) else sys.modules["torch"]


def on_host(array: Array) -> np.ndarray:
    """An array that was left on its device, here."""
    return array if isinstance(array, np.ndarray) else array.cpu().numpy()


def log_sum(logits: Array) -> Array:
    """The logarithm of the sum of exponentials over the last axis, which stays with length 1."""
    xp = library(logits)
    largest = xp.amax(logits, axis=-1, keepdims=True)
    return largest + xp.log(xp.exp(logits - largest).sum(-1)[..., None])


def log_softmax(logits: Array) -> Array:
    """Log-probabilities over the last axis."""
    return logits - log_sum(logits)


def divergence(ours: Array, theirs: Array) -> Array:
    """KL(ours || theirs) in nats of the distributions over the last axis, which goes."""
    with np.errstate(invalid="ignore"):  # of logits that are not finite, whoever judges them sees a NaN
        ours, theirs = log_softmax(ours), log_softmax(theirs)
        return (library(ours).exp(ours) * (ours - theirs)).sum(-1)
