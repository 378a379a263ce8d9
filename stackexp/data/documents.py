"""Which document a token belongs to, and where in it, from the token that ends documents."""

import torch
from torch import Tensor
from torch.nn import functional as F


def compute_document_ids(tokens: Tensor, end: int) -> Tensor:
    """The number of each token's document in its sequence, int64 [B, T], of tokens [B, T].

    The token `end` belongs to the document it ends. A sequence may begin in the middle of a document: that is its
    document 0.
    """
    ends = (tokens == end).long()
    return ends.cumsum(1) - ends


def compute_document_positions(documents: Tensor) -> Tensor:
    """The place of each token in its document, int64 [B, T], of document ids [B, T]: 0 for the first one seen."""
    length = documents.shape[1]
    places = torch.arange(length, device=documents.device).expand_as(documents)
    return places - torch.where(_begins(documents), places, 0).cummax(1).values


def find_document_bounds(documents: Tensor) -> Tensor:
    """Where documents begin in B * T tokens one sequence after another, and their end B * T, int32 [n + 1].

    Of document ids [B, T]; no document goes on into the next sequence. n is rounded up to a power of two by empty
    documents at the end, so that few lengths occur. On a GPU this waits for it: better called where batches are made.
    """
    begins = _begins(documents).flatten().nonzero()[:, 0].int()
    rounded = 1 << (len(begins) - 1).bit_length()
    return F.pad(begins, (0, rounded + 1 - len(begins)), value=documents.numel())


def _begins(documents: Tensor) -> Tensor:
    """Whether a token is its document's first in its sequence, bool [B, T]."""
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return begins


def build_document_mask(documents: Tensor) -> Tensor:
    """Who may look at whom, bool [B, 1, T, T]: a query (third axis) at keys of its document that are not after it."""
    same = documents[:, :, None] == documents[:, None, :]
    return same.tril()[:, None]
