"""Sampling in plain PyTorch: the twins of `_custom_ops/sampling.py`.

Read by tests and by anyone who wants to know what the ops mean: sorts whole rows, keeps masses in
float64. Never called by the engine.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

GREEDY_TEMPERATURE = 1e-5
_MASK32 = 0xFFFFFFFF


def draw_uniform(seed: int, offset: int) -> float:
    """Return the number in [0, 1) that belongs to (seed, offset): Philox4x32-10, 53 bits.

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    key = [seed & _MASK32, (seed >> 32) & _MASK32]
    words = [offset & _MASK32, (offset >> 32) & _MASK32, 0, 0]
    for _ in range(10):
        low, high = words[0] * 0xD2511F53, words[2] * 0xCD9E8D57
        words = [
            (high >> 32) ^ words[1] ^ key[0],
            high & _MASK32,
            (low >> 32) ^ words[3] ^ key[1],
            low & _MASK32,
        ]
        key = [(key[0] + 0x9E3779B9) & _MASK32, (key[1] + 0xBB67AE85) & _MASK32]
    return (((words[1] << 32) | words[0]) >> 11) * 2.0**-53


def clean_logits(logits: Tensor) -> Tensor:
    """Return logits with NaN as -inf and +inf as the largest float32, as every op reads them."""
    return torch.nan_to_num(
        logits, nan=float("-inf"), posinf=torch.finfo(torch.float32).max, neginf=float("-inf")
    )


def is_greedy(logits_V: Tensor, temperature: float) -> bool:
    """Return whether a row takes its most likely token: cold, or no finite logit after scaling."""
    return temperature < GREEDY_TEMPERATURE or float((logits_V / temperature).max()) == -math.inf


def weigh_tokens(logits_V: Tensor, temperature: float) -> Tensor:
    """Return e^(logit / temperature) of cleaned logits, scaled so that the largest is 1.

    Tokens further than e^-87.3 below the largest have no mass.
    """
    scaled = torch.clamp(logits_V / temperature, max=torch.finfo(torch.float32).max)
    distance = scaled - scaled.max()
    return torch.where(distance < -87.3, 0.0, torch.exp(distance))


def keep_tokens(logits_V: Tensor, mass_V: Tensor, top_p: float, top_k: int, min_p: float) -> Tensor:
    """Return which tokens of one row survive top-k, then top-p, then min-p.

    Args:
        logits_V: cleaned logits; they give the order, equal ones go by id.
        mass_V: what `weigh_tokens` made of them.
        top_p: mass to reach, relative to what top-k leaves.
        top_k: number of tokens; 0 or less = off.
        min_p: least mass, relative to the most likely token's.

    Returns:
        bool [V]. The most likely token always survives.
    """
    order = torch.sort(logits_V, descending=True, stable=True).indices
    mass = mass_V.double()[order]
    kept = mass.shape[0] if top_k <= 0 else min(top_k, mass.shape[0])
    if top_p < 1.0:
        reached = torch.cumsum(mass[:kept], 0) >= top_p * mass[:kept].sum()
        kept = int(reached.int().argmax()) + 1 if bool(reached.any()) else kept
    mask = torch.zeros(logits_V.shape, dtype=torch.bool)
    mask[order[:kept]] = True
    return mask & (mass_V >= min(min_p, 1.0)) & (mass_V > 0)


def argmax(out_ids: Tensor, logits: Tensor) -> None:
    """Write the id of the largest logit of each row, the lowest id where several are equal."""
    out_ids.copy_(clean_logits(logits).argmax(-1))


def sample(
    out_ids: Tensor,
    logits: Tensor,
    temperature: Tensor,
    top_p: Tensor,
    top_k: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    offsets: Tensor,
) -> None:
    """Draw one token a row by inverse CDF over the kept tokens in order of their ids."""
    argmax(out_ids, logits)
    for row in range(logits.shape[0]):
        cleaned = clean_logits(logits[row])
        if is_greedy(cleaned, float(temperature[row])):
            continue
        mass = weigh_tokens(cleaned, float(temperature[row]))
        mask = keep_tokens(cleaned, mass, float(top_p[row]), int(top_k[row]), float(min_p[row]))
        cumulative = torch.where(mask, mass, 0.0).double().cumsum(0)
        target = draw_uniform(int(seeds[row]), int(offsets[row])) * cumulative[-1]
        out_ids[row] = torch.nonzero(cumulative > target).flatten()[0]


def keep_possible(out_ids: Tensor, ids: Tensor, logits: Tensor) -> None:
    """The ids, -1 where the logit is -inf or NaN."""
    chosen = logits.gather(1, ids.unsqueeze(1)).squeeze(1)
    out_ids.copy_(torch.where(chosen > -math.inf, ids, -1))


def filter_logits(
    logits: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor, min_p: Tensor
) -> None:
    """Divide by the temperature and set what `sample` would never draw to -inf, in place."""
    for row in range(logits.shape[0]):
        cleaned = clean_logits(logits[row])
        if is_greedy(cleaned, float(temperature[row])):
            continue
        largest = torch.finfo(torch.float32).max
        scaled = torch.clamp(cleaned / float(temperature[row]), max=largest)
        if top_p[row] < 1.0 or top_k[row] > 0 or min_p[row] > 0.0:
            mass = weigh_tokens(cleaned, float(temperature[row]))
            mask = keep_tokens(cleaned, mass, float(top_p[row]), int(top_k[row]), float(min_p[row]))
            scaled = torch.where(mask, scaled, float("-inf"))
        logits[row] = scaled


def apply_penalties(
    logits: Tensor,
    cu_tokens: Tensor,
    token_ids: Tensor,
    output_counts: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> None:
    """Apply repetition, then frequency, then presence penalties to the listed tokens, in place."""
    for row in range(logits.shape[0]):
        listed = slice(int(cu_tokens[row]), int(cu_tokens[row + 1]))
        ids, counts = token_ids[listed], output_counts[listed]
        values = logits[row, ids]
        values = torch.where(values > 0, values / repetition[row], values * repetition[row])
        values = values - frequency[row] * counts
        logits[row, ids] = values - presence[row] * (counts > 0)


def apply_token_bitmask(logits: Tensor, rows: Tensor, bitmask: Tensor) -> None:
    """Set the logits of tokens whose bit is 0 to -inf, in place; words run from bit 0 upwards."""
    bits = (bitmask.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32)) & 1
    allowed = bits.flatten(1).bool()
    for index, row in enumerate(rows.tolist()):
        width = min(allowed.shape[1], logits.shape[1])
        logits[row, :width].masked_fill_(~allowed[index, :width], float("-inf"))
        logits[row, width:] = float("-inf")


def topk_logprobs(
    out_logprobs: Tensor, out_ids: Tensor, out_ranks: Tensor, logits: Tensor, chosen_ids: Tensor
) -> None:
    """Write log-softmax values of the chosen token and of the k most likely ones."""
    cleaned = clean_logits(logits)
    logprobs = torch.log_softmax(cleaned.double(), -1).float()
    logprobs = torch.where(logprobs.isnan(), float("-inf"), logprobs)
    chosen = logprobs.gather(-1, chosen_ids.unsqueeze(-1))
    k = out_ids.shape[1] - 1
    order = torch.sort(cleaned, dim=-1, descending=True, stable=True).indices[:, :k]
    out_ids.copy_(torch.cat((chosen_ids.unsqueeze(-1), order), -1))
    out_logprobs.copy_(torch.cat((chosen, logprobs.gather(-1, order)), -1))
    above = cleaned > cleaned.gather(-1, chosen_ids.unsqueeze(-1))
    out_ranks.copy_(above.sum(-1) + 1)
