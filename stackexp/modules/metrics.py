"""Evaluation metrics: float64 sums for each chunk or sequence, independent of batch size and number of ranks."""

import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric


class ItemSums(Metric):
    """Float64 sums for each of N items of an evaluation set, independent of which rank scores an item.

    Each item has its own column and is written once, so the results depend neither on the batch size nor on the number
    of ranks. Column N collects padding (index -1).
    """

    full_state_update = False
    sums: Tensor  # [K, N + 1]

    def __init__(self, num_items: int, num_sums: int) -> None:
        super().__init__()
        # All ranks but one hold zeros for an item, so the sum over ranks is exact.
        self.add_state("sums", torch.zeros(num_sums, num_items + 1, dtype=torch.float64), dist_reduce_fx="sum")

    def store(self, index: Tensor, *values: Tensor) -> None:
        """Write K values [B] for the items `index` [B]."""
        self.sums[:, index] = torch.stack(values)

    def compute(self) -> np.ndarray:
        """Return the sums of all items [K, N]. Every rank calls this."""
        return self.sums[:, :-1].cpu().numpy()


class ChunkLosses(ItemSums):
    """Loss in nats, number of predictions and bytes of text for each chunk of a set of tokens."""

    def __init__(self, num_chunks: int) -> None:
        super().__init__(num_chunks, 3)

    def update(self, index: Tensor, lengths: Tensor, losses: Tensor, num_bytes: Tensor) -> None:
        """Add a batch of chunks.

        Args:
            index: [B] Numbers of the chunks; -1 is padding.
            lengths: [B] Tokens of each chunk. The rest of a row is padding.
            losses: [B, T-1] Losses in nats of all tokens but the first.
            num_bytes: [B, T-1] Bytes of text that these tokens represent.
        """
        is_scored = torch.arange(1, losses.shape[1] + 1, device=losses.device) < lengths[:, None]  # [B, T-1]
        parts = (losses.double(), is_scored.double(), num_bytes.double())
        self.store(index, *(part.where(is_scored, 0.0).sum(1) for part in parts))


class SequenceScores(ItemSums):
    """Mean loss, correct symbols and counted symbols for each string of a formal language.

    For arithmetic, the strings are problems, and each whole answer counts as one symbol.
    """

    def __init__(self, num_sequences: int) -> None:
        super().__init__(num_sequences, 3)

    def update(self, index: Tensor, losses: Tensor, is_correct: Tensor, is_counted: Tensor) -> None:
        """Add a batch of strings.

        Args:
            index: [B] Numbers of the strings; -1 is padding.
            losses: [B, O] Losses in nats of all answer symbols.
            is_correct: [B, O] True for symbols that are correct and counted; [B, 1] for whole answers.
            is_counted: [B, O] True for symbols that accuracy counts; [B, 1] for whole answers.
        """
        self.store(index, losses.double().mean(1), is_correct.double().sum(1), is_counted.double().sum(1))

    def compute(self) -> dict[str, float]:
        """Return accuracy, loss in nats per symbol, and the number of sequences. Every rank calls this."""
        loss, correct, counted = (torch.from_numpy(row) for row in super().compute())
        return {
            "accuracy": (correct.sum() / counted.sum()).item(),
            "loss": loss.mean().item(),
            "sequences": len(loss),
        }
