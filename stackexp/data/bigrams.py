"""A bigram model from counts: a baseline for small language models, which first learn pairs of tokens."""

from collections.abc import Iterable

import numpy as np

BLOCK = 1 << 22  # pairs that are counted at once


class BigramModel:
    """Witten-Bell smoothed bigrams: p(b | a) = (c(a, b) + t(a) u(b)) / (c(a) + t(a)).

    c counts pairs, t(a) is the number of different successors of a, and u(b) = (c(b) + 1) / (N + V) is the smoothed
    unigram model, which is also used after tokens without counts.
    """

    def __init__(self, sequences: Iterable[np.ndarray], vocab_size: int) -> None:
        """Count the pairs within each row of `sequences`, integer arrays [..., T]."""
        self.vocab_size = vocab_size
        self._pairs = np.empty(0, np.int64)  # a V + b, sorted
        self._counts = np.empty(0, np.int64)
        unigrams = np.zeros(vocab_size, np.int64)
        codes: list[np.ndarray] = []
        for tokens in sequences:
            unigrams += np.bincount(tokens.ravel(), minlength=vocab_size)
            codes.append((tokens[..., :-1].astype(np.int64) * vocab_size + tokens[..., 1:]).ravel())
            if sum(map(len, codes)) > BLOCK:
                self._add(codes)
                codes.clear()
        self._add(codes)
        firsts = self._pairs // vocab_size
        self._totals = np.bincount(firsts, self._counts, minlength=vocab_size)  # c(a)
        self._successors = np.bincount(firsts, minlength=vocab_size)  # t(a)
        self._unigrams = (unigrams + 1) / (unigrams.sum() + vocab_size)

    def _add(self, codes: list[np.ndarray]) -> None:
        new, counts = np.unique(np.concatenate([np.empty(0, np.int64), *codes]), return_counts=True)
        self._pairs, inverse = np.unique(np.concatenate([self._pairs, new]), return_inverse=True)
        self._counts = np.bincount(inverse, np.concatenate([self._counts, counts])).astype(np.int64)

    def compute_losses(self, tokens: np.ndarray) -> np.ndarray:
        """Return -log p of all tokens but the first of each row: [..., T] -> [..., T-1], in nats."""
        first, second = tokens[..., :-1].astype(np.int64), tokens[..., 1:].astype(np.int64)
        codes = first * self.vocab_size + second
        found = np.searchsorted(self._pairs, codes).clip(max=max(len(self._pairs) - 1, 0))
        seen = np.where(self._pairs[found] == codes, self._counts[found], 0) if len(self._pairs) else 0 * codes
        weight = np.where(self._successors[first] > 0, self._successors[first], 1)
        return -np.log((seen + weight * self._unigrams[second]) / (self._totals[first] + weight))
