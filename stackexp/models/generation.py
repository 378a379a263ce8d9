"""Autoregressive sampling from a decoder, with its cache."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stackexp.models.transformer import Cache, Transformer


@torch.no_grad()
def generate(
    model: Transformer,
    tokens: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
    stop_token: int | None = None,
    should_stop: Callable[[Tensor], Sequence[bool]] | None = None,
) -> Tensor:
    """Continue tokens [B, T] by n <= max_new_tokens tokens: [B, T+n].

    Temperature 0 is greedy decoding. `top_p` < 1 samples from the nucleus: the smallest set of tokens with at least
    that total probability. After a row has sampled `stop_token`, it repeats that token; generation ends when all rows
    have sampled it. `should_stop` receives the new tokens [B, n] after every token and returns one flag per row;
    generation also ends when all rows have stopped. The model is in eval mode during the call.
    """
    was_training = model.training
    model.eval()
    cache, new, start = Cache(), tokens, tokens.shape[1]
    has_stopped = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
    try:
        for _ in range(max_new_tokens):
            logits = model(new, cache).logits[:, -1]
            token = sample_tokens(logits, temperature, top_p, generator)
            if stop_token is not None:
                token = torch.where(has_stopped, stop_token, token)
                has_stopped = token == stop_token
            new = token[:, None]
            tokens = torch.cat([tokens, new], 1)
            if should_stop is not None:
                has_stopped |= has_stopped.new_tensor(should_stop(tokens[:, start:]))
            if has_stopped.all():
                break
    finally:
        model.train(was_training)
    return tokens


def sample_tokens(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator | None = None) -> Tensor:
    """Sample one token for each row of logits [B, V]: [B]."""
    if temperature == 0:
        return logits.argmax(-1)
    probabilities = (logits.float() / temperature).softmax(-1)
    if top_p < 1:
        probabilities = keep_nucleus(probabilities, top_p)
    return torch.multinomial(probabilities, 1, generator=generator)[:, 0]


def keep_nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Zero the probabilities [B, V] outside the nucleus of `top_p`, without renormalizing."""
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered  # probability of all more probable tokens
    before[..., 0] = -1  # keep the first, whatever top_p and rounding
    return torch.zeros_like(probabilities).scatter(-1, order, ordered.where(before < top_p, 0))
