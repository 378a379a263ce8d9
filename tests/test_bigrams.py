"""The bigram baseline against counts in plain Python."""

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stackexp.data import bigrams
from stackexp.data.bigrams import BigramModel

VOCABULARY = 5
rows = st.lists(st.lists(st.integers(0, VOCABULARY - 1), min_size=4, max_size=4), min_size=1, max_size=6)


@given(trained=rows, scored=rows, batch=st.integers(1, 3), block=st.integers(1, 9))
def test_losses_are_those_of_smoothed_counts(trained, scored, batch, block):
    pairs = Counter((a, b) for row in trained for a, b in pairwise(row))
    tokens = Counter(token for row in trained for token in row)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bigrams, "BLOCK", block)
        model = BigramModel((np.array(trained[i : i + batch]) for i in range(0, len(trained), batch)), VOCABULARY)
    for row in scored:
        for (a, b), loss in zip(pairwise(row), model.compute_losses(np.array(row)), strict=True):
            unigram = (tokens[b] + 1) / (tokens.total() + VOCABULARY)
            total = sum(n for (first, _), n in pairs.items() if first == a)
            successors = sum(first == a for first, _ in pairs)
            weight = successors or 1
            assert loss == pytest.approx(-math.log((pairs[a, b] + weight * unigram) / (total + weight)))
