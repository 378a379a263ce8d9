"""The loss of bigram counts on a run's evaluation sets: a baseline from its training tokens, without a network."""

import itertools
import math
from types import SimpleNamespace
from typing import Any

from stackexp.config.experiment import ExperimentConfig
from stackexp.data.bigrams import BigramModel
from stackexp.modules.scores import Scores, compute_perplexity

MAX_TOKENS = 50_000_000  # counting the tokens of longer runs would take minutes


def score_bigrams(config: ExperimentConfig, data: Any) -> dict[str, Scores]:
    """Return loss and perplexity of the data module's validation sets under bigram counts of the training tokens.

    Reads the run's training batches again. Returns {} for runs on more than MAX_TOKENS tokens.
    """
    if config.total_tokens > MAX_TOKENS:
        return {}
    trainer = SimpleNamespace(global_rank=0, world_size=1, num_devices=1, global_step=0)  # all a loader reads
    loader = data.train_set.build_loader(trainer)
    epochs = itertools.chain.from_iterable(itertools.repeat(loader))
    num_batches = config.total_tokens // (config.micro_batch_size * config.data.context_length)
    batches = (batch["tokens"].numpy() for batch in itertools.islice(epochs, num_batches))
    model = BigramModel(batches, config.data.vocab_size)
    scores = {}
    for dataset in data.sets("validate"):
        total, count = 0.0, 0
        for i in range(len(dataset.chunks)):
            losses = model.compute_losses(dataset.chunks[i])
            total, count = total + math.fsum(losses), count + len(losses)
        loss = total / count
        scores[dataset.name] = {"loss": loss, "perplexity": compute_perplexity(loss)}
    return scores
