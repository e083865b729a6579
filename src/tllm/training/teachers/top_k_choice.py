"""How many of its most likely tokens a teacher sends at each position, so that little of its distribution is lost.

Of a distribution p over V tokens the teacher sends its k likeliest tokens and the mass R of all others. The student
takes the others for equally likely: p'(i) = p(i) of the k, R / (V - k) of each other. What is lost, in nats, is

    KL(p || p') = sum over the others of p(i) log(p(i) (V - k) / R) = R (log(V - k) - H(p given the others))

This is what the forward KL lacks for a student to whom the others are all alike, so no student is needed to know it. As
p' is p averaged over the others, it is also H(p') - H(p), which no further token raises.
"""

from __future__ import annotations

import torch
from torch import Tensor

HALVINGS = 60
"""Of the price of a token, between none and what the first saves: to the last bits of a float64."""


def entropy(logits_PV: Tensor) -> Tensor:
    """Of each place's distribution, in nats, float64 [P]. A logit may be -inf."""
    z_PV = logits_PV - logits_PV.amax(-1, keepdim=True)
    p_PV, lowest = z_PV.exp(), torch.finfo(z_PV.dtype).min  # in place of -inf: 0 times it is 0
    total_P, products_P = p_PV.sum(-1), p_PV.mul_(z_PV.clamp_(min=lowest)).sum(-1)
    entropy_P: Tensor = total_P.log() - products_P / total_P
    return entropy_P.double()


def lost_by_count(log_p_PB: Tensor, rest_entropy_P: Tensor, vocab_size: int) -> Tensor:
    """KL(p || p') in nats, float64 [P, K]: at [:, k - 1] of sending k tokens, 1 to K.

    `log_p_PB` are those of the K likeliest, descending, and last of all others together, B = K + 1; `rest_entropy_P`
    is the entropy of these others given that it is one of them. Sums begin with the least likely.
    """
    log_p_PB = log_p_PB.double()
    p_PB = log_p_PB.exp()
    terms_PB: Tensor = torch.special.xlogy(p_PB, p_PB)
    terms_PB[:, -1] -= p_PB[:, -1] * rest_entropy_P
    mass_PK, terms_PK = (x_PB.flip(-1).cumsum(-1)[:, :-1].flip(-1) for x_PB in (p_PB, terms_PB))  # without the first k
    counts_K = torch.arange(1, log_p_PB.shape[-1], dtype=torch.float64)
    shared_PK: Tensor = torch.special.xlogy(mass_PK, mass_PK) - mass_PK * (vocab_size - counts_K).log()
    return (terms_PK - shared_PK).clamp(min=0)


def fewest_within(lost_PK: Tensor, budget: float) -> Tensor:
    """How many tokens to send of each place, int64 [P], so that the mean of what is lost is within `budget`.

    Each token has one price in nats, the highest with which the budget is held, and a place buys as long as that pays:
    no other choice of as many tokens loses less (Everett, 1963). Where even K of each place lose more, it is K of each.
    """
    counts_K = torch.arange(1, lost_PK.shape[-1] + 1, dtype=torch.float64)

    def bought(price: float) -> Tensor:
        return (lost_PK + price * counts_K).argmin(-1)

    def lost(at_P: Tensor) -> float:
        return float(lost_PK.gather(-1, at_P[:, None]).mean())

    low, high = 0.0, float(lost_PK.max()) + 1.0
    within_P, beyond_P = bought(low), bought(high)
    if lost(beyond_P) <= budget:
        return beyond_P + 1
    if lost(within_P) > budget:
        return torch.full_like(within_P, lost_PK.shape[-1])
    for _ in range(HALVINGS):
        price = (low + high) / 2
        at_P = bought(price)
        if lost(at_P) <= budget:
            low, within_P = price, at_P
        else:
            high, beyond_P = price, at_P
        if int((within_P - beyond_P).sum()) == 1:  # no price is between them
            break
    return within_P + 1
