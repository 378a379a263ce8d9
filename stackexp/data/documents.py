"""Document boundaries within sequences, derived from the end-of-text token."""

import torch
from torch import Tensor


def compute_document_ids(tokens: Tensor, end: int) -> Tensor:
    """Return the document number of each token within its sequence: int64 [B, T] for tokens [B, T].

    The end-of-text token `end` belongs to the document that it ends. Document 0 of a sequence may be the rest of a
    document that began in an earlier sequence.
    """
    ends = (tokens == end).long()
    return ends.cumsum(1) - ends


def compute_document_positions(documents: Tensor) -> Tensor:
    """Return the position of each token in its document: int64 [B, T] for document ids [B, T].

    Positions start at 0 at the first token of a document in the sequence.
    """
    length = documents.shape[1]
    positions = torch.arange(length, device=documents.device).expand_as(documents)
    return positions - torch.where(_begins_document(documents), positions, 0).cummax(1).values


def find_document_bounds(documents: Tensor) -> Tensor:
    """Return the document starts in the flattened batch, then its end B * T: int32 [n + 1] for document ids [B, T].

    A document ends at the end of its sequence. Empty documents at the end round n up to a power of two, so that the
    shape rarely changes. On a GPU this call synchronizes, so call it on the CPU when a batch is made.
    """
    begins = _begins_document(documents).flatten().nonzero()[:, 0].int()
    rounded = 1 << (len(begins) - 1).bit_length()
    return torch.nn.functional.pad(begins, (0, rounded + 1 - len(begins)), value=documents.numel())


def build_document_mask(documents: Tensor) -> Tensor:
    """Return the causal attention mask within documents: bool [B, 1, T (queries), T (keys)] for document ids [B, T]."""
    same = documents[:, :, None] == documents[:, None, :]
    return same.tril()[:, None]


def _begins_document(documents: Tensor) -> Tensor:
    """Return True for the first token of each document in a sequence: bool [B, T]."""
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return begins
