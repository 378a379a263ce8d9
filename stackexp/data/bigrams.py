"""A bigram model from counts: a baseline for small language models, which first learn pairs of tokens."""

from collections.abc import Iterable

import numpy as np
from scipy.sparse import coo_array, csr_array

BLOCK = 1 << 22  # pairs that are counted at once


class BigramModel:
    """Witten-Bell smoothed bigrams: p(b | a) = (c(a, b) + t(a) u(b)) / (c(a) + t(a)).

    c counts pairs, t(a) is the number of different successors of a, and u(b) = (c(b) + 1) / (N + V) is the smoothed
    unigram model, which is also used after tokens without counts.
    """

    def __init__(self, sequences: Iterable[np.ndarray], vocab_size: int) -> None:
        """Count the pairs within each row of `sequences`, integer arrays [..., T]."""
        self._counts = csr_array((vocab_size, vocab_size), dtype=np.int64)  # c(a, b)
        unigrams = np.zeros(vocab_size, np.int64)
        pairs: list[np.ndarray] = []  # [2, N]
        for tokens in sequences:
            unigrams += np.bincount(tokens.ravel(), minlength=vocab_size)
            pairs.append(np.stack([tokens[..., :-1].ravel(), tokens[..., 1:].ravel()]))
            if sum(block.shape[1] for block in pairs) > BLOCK:
                self._add(pairs)
                pairs.clear()
        self._add(pairs)
        self._totals = self._counts.sum(1)  # c(a)
        self._successors = np.diff(self._counts.indptr)  # t(a)
        self._unigrams = (unigrams + 1) / (unigrams.sum() + vocab_size)

    def _add(self, pairs: list[np.ndarray]) -> None:
        first, second = np.concatenate([np.empty((2, 0), np.int64), *pairs], 1)
        self._counts += coo_array((np.ones_like(first), (first, second)), self._counts.shape).tocsr()

    def compute_losses(self, tokens: np.ndarray) -> np.ndarray:
        """Return -log p of all tokens [T] but the first: [T - 1], in nats."""
        first, second = tokens[:-1], tokens[1:]
        seen = self._counts[first, second]
        weight = np.where(self._successors[first] > 0, self._successors[first], 1)
        return -np.log((seen + weight * self._unigrams[second]) / (self._totals[first] + weight))
