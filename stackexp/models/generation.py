"""Autoregressive sampling from a decoder, with its cache."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from stackexp.errors import RunError
from stackexp.models.transformer import Cache, Transformer

MASK_ALIGNMENT = 16  # kernels of masked attention copy a mask whose length is not a multiple of this


class Decoder:
    """Runs a model on one new token per sequence, on CUDA by replaying a CUDA graph.

    Weights are cast only once, by the cache of autocast, if all calls are within one autocast context.

    A graph requires constant shapes. Keys and values are allocated in full; the states of memories over time may grow
    first, and some (stack attention) always grow, so that there is never a graph.
    """

    def __init__(self, model: Transformer, cache: Cache, batch_size: int, max_length: int) -> None:
        """Prepare to extend the sequences in `cache`, which no other caller uses then, to `max_length` tokens."""
        device = next(model.parameters()).device
        cache.fix_size(-(-max_length // MASK_ALIGNMENT) * MASK_ALIGNMENT, device)
        self.model, self.cache = model, cache
        self.tokens = torch.empty(batch_size, 1, dtype=torch.int64, device=device)
        self.has_fixed_states = False
        self.graph: torch.cuda.CUDAGraph | None = None

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> Tensor:
        """Return the logits [B, V] after the next tokens [B]. The next call may overwrite them."""
        self.tokens.copy_(tokens[:, None])
        if not self.has_fixed_states:
            return self._grow()
        if self.tokens.device.type != "cuda":
            return self.step()
        if self.graph is None:
            self.graph, device = torch.cuda.CUDAGraph(), self.tokens.device
            stream = torch.cuda.Stream(device)  # the default one may be on another device
            with (
                torch.cuda.device(device),
                torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"),  # others may load data
            ):
                self.logits = self.step()
        self.graph.replay()
        return self.logits

    def _grow(self) -> Tensor:
        """Run a step whose memory states may have other shapes than before."""
        before = _list_shapes(self.cache.states)
        logits = self.model(self.tokens, self.cache).logits[:, -1]
        self.has_fixed_states = None not in before and _list_shapes(self.cache.states) == before
        if self.has_fixed_states:
            self.cache.states = tree_map_only(Tensor, Tensor.clone, self.cache.states)  # none shares its memory
        return logits

    def step(self) -> Tensor:
        """Run `self.tokens` and update all states in place; without synchronization, for a CUDA graph."""
        states = dict(self.cache.states)
        logits = self.model(self.tokens, self.cache).logits[:, -1]
        new = [state.clone() for state in tree_leaves(self.cache.states)]  # a new state may be part of another old one
        for state, value in zip(tree_leaves(states), new, strict=True):
            state.copy_(value)
        self.cache.states = states
        return logits


def _list_shapes(states: dict) -> list[torch.Size | None]:
    """Return the shape of each tensor in the states; None for other objects."""
    return [leaf.shape if isinstance(leaf, Tensor) else None for leaf in tree_leaves(states)]


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
    (batch_size, start), cache = tokens.shape, Cache()
    has_stopped = torch.zeros(batch_size, dtype=torch.bool, device=tokens.device)
    try:
        for n in range(max_new_tokens):
            if n == 0:
                logits = model(tokens, cache).logits[:, -1]
                decoder = Decoder(model, cache, batch_size, start + max_new_tokens - 1)
            else:
                logits = decoder(tokens[:, -1])
            new = sample_tokens(logits, temperature, top_p, generator)
            if stop_token is not None:
                new = torch.where(has_stopped, stop_token, new)
                has_stopped = new == stop_token
            tokens = torch.cat([tokens, new[:, None]], 1)
            if should_stop is not None:
                has_stopped |= has_stopped.new_tensor(should_stop(tokens[:, start:]))
            if has_stopped.all():
                break
    finally:
        model.train(was_training)
    return tokens


class NonFiniteLogitsError(RunError):
    """The model predicts NaN or infinity."""


def sample_tokens(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator | None = None) -> Tensor:
    """Sample one token for each row of logits [B, V]: [B]. Raises NonFiniteLogitsError for NaN and infinity."""
    if not logits.isfinite().all():
        raise NonFiniteLogitsError("the logits are not finite: the weights have diverged; use an earlier checkpoint")
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
