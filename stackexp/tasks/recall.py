"""Multi-query associative recall, MQAR (Arora et al. 2023, "Zoology", arXiv 2312.04927).

A string is P pairs of a key and its value, then each key a second time among random symbols. The answer after such a
key is its value. As published, the gaps before repeated keys follow a power law with exponent 0.01 - 1, strings of 4,
8, 16 or 64 pairs have 64, 128, 256 or 512 symbols, and the vocabulary has 8,192: keys in the first half, values in the
second. `mqar_4_small` and so on have a vocabulary of 64 symbols (256 for 64 pairs), for small models on CPUs.

Differences from the published generator (HazyResearch/zoology, commit d88d6f5, zoology/data/multiquery_ar.py):
- Repeated keys may follow directly: with N symbols after the pairs, gaps are 0..N-1. There, gaps are the even numbers
  below N, with the power law over their halves, so no two of these keys are neighbors.
- The order of the repeated keys does not depend on that of the pairs. There, earlier pairs tend to shorter gaps.
- Symbol 0 is a key like others. There, it is never a key.
- A shorter string has fewer pairs, at most a third of its length. `data.longest_fraction=1` trains at the published
  length alone.
- The output ids are the values alone.
"""

from __future__ import annotations

from stackexp.tasks.definition import NO_TARGET, Drawn, np, task

PUBLISHED_LENGTHS = {4: 64, 8: 128, 16: 256, 64: 512}  # by number of pairs
VOCABULARY = 8192
GAP_EXPONENT = 0.01 - 1


def register_recall(name: str, max_pairs: int, vocabulary: int) -> None:
    """Register the recall of up to `max_pairs` pairs."""
    length_of_all, half = PUBLISHED_LENGTHS[max_pairs], vocabulary // 2

    @task(
        "associative recall",
        name=name,
        symbols=[f"k{i}" for i in range(half)] + [f"v{i}" for i in range(half)],
        answer_symbols=[f"v{i}" for i in range(half)],
        answers_every_token=True,
        min_length=3,
        max_length=length_of_all,
        validation_max_length=length_of_all + 8,
        eval_max_length=2 * length_of_all,
    )
    def generate(rng: np.random.Generator, batch_size: int, length: int) -> Drawn:
        pairs = min(max_pairs, length // 3)
        space = length - 2 * pairs
        keys, values = (rng.random((batch_size, half)).argpartition(pairs - 1, 1)[:, :pairs] for _ in range(2))
        order = rng.permuted(np.broadcast_to(np.arange(pairs), (batch_size, pairs)), axis=1)
        weights = GAP_EXPONENT * np.log(np.arange(1, space + 1))
        positions = (-weights - rng.gumbel(size=(batch_size, space))).argsort(1)[:, :pairs]  # without replacement
        strings = rng.integers(0, vocabulary, (batch_size, length))
        targets = np.full((batch_size, length), NO_TARGET)
        strings[:, : 2 * pairs : 2], strings[:, 1 : 2 * pairs : 2] = keys, values + half
        np.put_along_axis(strings, 2 * pairs + positions, np.take_along_axis(keys, order, 1), 1)
        np.put_along_axis(targets, 2 * pairs + positions, np.take_along_axis(values, order, 1), 1)
        return strings, targets


for _pairs in PUBLISHED_LENGTHS:
    register_recall(f"mqar_{_pairs}", _pairs, VOCABULARY)
    register_recall(f"mqar_{_pairs}_small", _pairs, max(64, 4 * _pairs))
