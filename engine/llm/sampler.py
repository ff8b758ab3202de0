"""Owns the choice of a token: a pure function of logits, parameters and one uniform number.

Knows no sequence and no device: rows are numpy arrays. token = f(logits, history, parameters, u), where u =
uniform(seed, choice, position): the same wherever, whenever and beside whomever it runs. Ties go to the lowest id;
probabilities are float64.
"""

from collections.abc import Sequence as Seq
from hashlib import blake2b
from struct import pack
from typing import Final

import numpy as np
from numpy.typing import NDArray

from engine.llm.runner import Logprob
from engine.llm.sequence import Sampling

Logits = NDArray[np.float32]
LOGPROB_MIN: Final = -9999.0
PREFILTER: Final = 256  # candidates looked at before a whole row is sorted


class NonFiniteLogits(ValueError):
    """A row that holds NaN or infinity, or nothing else than excluded tokens: its request fails, neighbours do not."""


def uniform(seed: int, choice: int, position: int) -> float:
    """The one random number of a token, in [0, 1): 53 bits of blake2b over (seed, choice, position)."""
    digest = blake2b(pack("<QIQ", seed & (1 << 64) - 1, choice, position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)


def check(logits: Logits) -> None:
    """Raises NonFiniteLogits when a raw row [vocab] cannot be sampled from: NaN, infinity, or nothing finite."""
    if not np.isfinite(logits.max()):  # the maximum of a row with NaN is NaN
        raise NonFiniteLogits("the model's logits are not finite")


def adjust(
    logits: Logits, sampling: Sampling | None, history: Seq[int], num_prompt: int, banned: frozenset[int]
) -> Logits:
    """A row as penalties, biases and bans make it, in this order; the row itself where there are none.

    `history` is prompt and output. Repetition (Keskar et al. 2019) divides positive logits of what has occurred and
    multiplies negative ones; presence and frequency are taken off what the output holds. Changes nothing.
    """
    changed = logits
    if sampling is not None and sampling.repetition_penalty != 1:
        changed = changed.copy()
        seen = np.unique(np.asarray(history, dtype=np.int64))
        values = changed[seen]
        changed[seen] = np.where(values > 0, values / sampling.repetition_penalty, values * sampling.repetition_penalty)
    if sampling is not None and (sampling.presence_penalty or sampling.frequency_penalty):
        changed = changed.copy()
        ids, counts = np.unique(np.asarray(history[num_prompt:], dtype=np.int64), return_counts=True)
        changed[ids] -= (sampling.presence_penalty + sampling.frequency_penalty * counts).astype(np.float32)
    if sampling is not None and sampling.logit_bias:
        changed = changed.copy()
        for id, bias in sampling.logit_bias:
            changed[id] += bias
    if banned:
        changed = changed.copy()
        changed[list(banned)] = -np.inf
    return changed


def sample(logits: Logits, sampling: Sampling | None, u: float) -> int:
    """One token id from a row [vocab]. Raises NonFiniteLogits. Changes nothing."""
    best = int(logits.argmax())  # the first of equals
    if not np.isfinite(logits[best]):
        raise NonFiniteLogits("no token is left to sample")
    if sampling is None or sampling.temperature == 0:
        return best
    ids, weights, mass = _candidates(logits, sampling)
    if sampling.top_p < 1 or sampling.min_p > 0:
        ids, weights = _truncate(ids, weights, mass, sampling)
    cumulative = weights.cumsum()
    index = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
    return int(ids[min(index, len(ids) - 1)])


def score(logits: Logits, id: int, num_top: int) -> Logprob:
    """Log probability of `id` and of the `num_top` likeliest in a raw row [vocab], in float64. Changes nothing.

    Finite: what is less likely than LOGPROB_MIN, or impossible, is told as that.
    """
    wide = logits.astype(np.float64)
    best = wide.max()
    norm = best + np.log(np.exp(wide - best).sum())
    likeliest = _top(logits, min(num_top, len(logits))) if num_top else ()
    top = [(int(each), max(LOGPROB_MIN, float(wide[each] - norm))) for each in likeliest]
    return Logprob(id, max(LOGPROB_MIN, float(wide[id] - norm)), top)


def _candidates(logits: Logits, sampling: Sampling) -> tuple[NDArray[np.int64], NDArray[np.float64], float]:
    """Ids, their weights exp((logit - best) / temperature), and the mass that top_p is a share of.

    In id order when nothing is cut, else by falling logit, then id. top_p follows top_k: a share of what that left.
    """
    size = len(logits)
    is_cut = sampling.top_p < 1 or sampling.min_p > 0
    if 0 < sampling.top_k < size:
        ids = _top(logits, sampling.top_k)
        weights = _weights(logits[ids], sampling)
        return ids, weights, float(weights.sum())
    everything = _weights(logits, sampling)
    mass = float(everything.sum())
    if not is_cut:
        return np.arange(size), everything, mass
    if size > PREFILTER and sampling.top_p < 1:
        ids = _top(logits, PREFILTER)
        if everything[ids].sum() >= sampling.top_p * mass:
            return ids, everything[ids], mass
    ids = _top(logits, size)
    return ids, everything[ids], mass


def _weights(logits: Logits, sampling: Sampling) -> NDArray[np.float64]:
    wide = logits.astype(np.float64)
    with np.errstate(over="ignore"):  # under the least temperatures all but the best are infinitely far away
        weights: NDArray[np.float64] = np.exp((wide - wide.max()) / sampling.temperature)
    return weights


def _top(logits: Logits, count: int) -> NDArray[np.int64]:
    """The ids of the `count` largest, by falling logit, then rising id; exact also when equals meet at the edge."""
    edge = np.partition(logits, -count)[-count]
    above = np.flatnonzero(logits > edge)
    equal = np.flatnonzero(logits == edge)[: count - len(above)]
    ids = np.concatenate([above, equal])
    return ids[np.lexsort((ids, -logits[ids]))]


def _truncate(
    ids: NDArray[np.int64], weights: NDArray[np.float64], mass: float, sampling: Sampling
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """top_p: the shortest beginning whose weight reaches that share of `mass`. min_p: at least that of the best."""
    count = len(ids)
    if sampling.top_p < 1:
        count = int(np.searchsorted(weights.cumsum(), sampling.top_p * mass)) + 1
    kept = weights[:count] >= sampling.min_p * weights[0]
    return ids[:count][kept], weights[:count][kept]
