"""Log-probabilities of a teacher's likeliest tokens in a byte each: codes of equal steps below 0.

What that loses is bounded. A code is off by at most half a step, the mass of all others is sent as it is, and the
receiver divides by the sum. So for p rounded to p', with errors within a range of one step,

    KL(p || p') = log E[exp(error)] - E[error] <= CODE_STEP² / 8     (Hoeffding's lemma; E is over p)
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tllm.training.job.distillation_keys import CODE_STEP

LAST = 255
"""Of a probability of 6e-10: what is less likely is told as that."""


def codes_of(log_p: NDArray[Any]) -> NDArray[np.uint8]:
    """The nearest code of each."""
    return np.clip(np.rint(-log_p / CODE_STEP), 0, LAST).astype(np.uint8)


def log_probs_of(codes: NDArray[np.uint8]) -> NDArray[np.float32]:
    """What codes say; of a place and its rest together they do not add up to 1 exactly."""
    return (codes * -CODE_STEP).astype(np.float32)


def normalised(log_p_PB: NDArray[Any]) -> NDArray[Any]:
    """The same with probabilities of each place that add up to 1. Some may be -inf, but not all of a place."""
    largest_P1 = log_p_PB.max(-1, keepdims=True)
    total_P1 = np.exp(log_p_PB - largest_P1).sum(-1, keepdims=True)
    shifted_PB: NDArray[Any] = log_p_PB - (largest_P1 + np.log(total_P1))
    return shifted_PB
