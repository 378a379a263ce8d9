"""The program's own decoder as a language model of lm-eval."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tokenizers import Tokenizer
from torch.nn import functional as F

from stackexp.data.tokenizer import get_end_of_text_id
from stackexp.errors import RunError
from stackexp.evaluation.benchmarks.batching import Batch, Pair, limit_new_tokens, plan_batches, plan_generation
from stackexp.evaluation.inference import inference_mode
from stackexp.models.generation import generate
from stackexp.models.transformer import Cache, Transformer


class RunModel(TemplateLM):
    """A decoder and its tokenizer, for lm-eval's tasks.

    With several processes, each receives all requests, computes every n-th batch, and gathers the results of the
    others. The batches do not depend on the number of processes, so neither do the results.
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        max_length: int,
        *,
        batch_size: int = 16,
        precision: str = "32-true",
        is_sharded: bool = False,
        after_batch: Callable[[int, int], None] = lambda done, total: None,
    ):
        """Wrap a model that is on its device.

        Args:
            model: The decoder. It is in eval mode during each call.
            tokenizer: The tokenizer of the training data.
            max_length: The most tokens of one sequence; longer contexts lose their first tokens.
            batch_size: Sequences per forward pass.
            precision: `trainer.precision`; bf16-mixed computes under autocast.
            is_sharded: Each process has a part of every weight, so all must run the same number of forward passes.
            after_batch: Called on each process after every batch with the number of finished batches and of all.
        """
        super().__init__()
        self.model, self.batch_size, self.max_length = model, batch_size, max_length
        self._tokenizer, self._end = tokenizer, get_end_of_text_id(tokenizer)
        self._precision, self._is_sharded, self._after_batch = precision, is_sharded, after_batch

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.model.parameters()).device

    @property
    def eot_token_id(self) -> int:
        """The token that ends a document; it also precedes a continuation without context."""
        return self._end

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the token ids of a text, without special tokens, as in the training data."""
        return self._tokenizer.encode(string, add_special_tokens=False).ids

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation in nats, and whether greedy decoding would produce it."""
        pairs = [Pair(i, context, continuation) for i, (_, context, continuation) in enumerate(requests)]
        batches = plan_batches(pairs, self.batch_size, self.max_length, shares_prefixes=not self._is_sharded)
        return self._run(batches, self._score, len(pairs))

    def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = True) -> list[float]:
        """Return the log-likelihood of each text in nats; long texts are scored in windows of `max_length` tokens."""
        pairs, owners = [], []
        for owner, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            for window in get_rolling_token_windows(tokens, self._end, self.max_length, 1):
                pairs.append((("", ""), *make_disjoint_window(window)))
                owners.append(owner)
        totals = [0.0] * len(requests)
        for owner, (score, _) in zip(owners, self._loglikelihood_tokens(pairs), strict=True):
            totals[owner] += score
        return totals

    def generate_until(self, requests: list, disable_tqdm: bool = True) -> list[str]:
        """Return the greedy continuation of each prompt, up to a stop string, the end of the document or the limit.

        Prompts of equal length share a batch, because the decoder's cache has no padding. The limit is at most half of
        `max_length`, and longer prompts lose their first tokens. Raises RunError for tasks that sample, and for sharded
        models, whose processes would need equally long generations.
        """
        if self._is_sharded:
            raise RunError("generation: not supported for sharded weights; use `evaluate`, or trainer.strategy=ddp")
        prompts, options = [], []
        for request in requests:
            text, given = request.args[0], dict(request.args[1])
            if given.get("do_sample") and given.get("temperature", 1):
                raise RunError(f"{request.task_name}: samples its answers; only greedy decoding is supported")
            limit = limit_new_tokens(given, self.max_length)
            until = given.get("until") or []
            prompts.append((self.tok_encode(text) or [self._end])[-(self.max_length - limit) :])
            options.append((limit, tuple([until] if isinstance(until, str) else until)))
        batches = plan_generation(prompts, options, self.batch_size)
        return self._run(batches, lambda rows: self._generate(rows, prompts, options[rows[0]]), len(requests))

    def _generate(self, rows: list[int], prompts: list[list[int]], options: tuple[int, tuple[str, ...]]) -> Any:
        limit, stops = options
        tokens = torch.tensor([prompts[row] for row in rows], device=self.device)
        start = tokens.shape[1]

        def should_stop(new: torch.Tensor) -> list[bool]:
            return [any(stop in self._decode(row) for stop in stops) for row in new.tolist()]

        output = generate(self.model, tokens, limit, temperature=0, stop_token=self._end, should_stop=should_stop)
        texts = [postprocess_generated_text(self._decode(row), list(stops), None) for row in output[:, start:].tolist()]
        return list(zip(rows, texts, strict=True))

    def _decode(self, tokens: list[int]) -> str:
        end = tokens.index(self._end) if self._end in tokens else len(tokens)
        return self._tokenizer.decode(tokens[:end])

    def _score(self, batch: Batch) -> list[tuple[int, tuple[float, bool]]]:
        """Return the index and the score of each pair in a batch."""
        cache = None
        if batch.prefixes[0]:
            cache = Cache()
            self.model(self._pad(batch.prefixes), cache, return_hidden=True)
            cache = cache.select_rows(torch.tensor(batch.owners, device=self.device))
        hidden = self.model(self._pad(batch.inputs), cache, return_hidden=True).hidden
        rows, columns, tokens = batch.list_predictions()
        lengths = [len(pair.continuation) for pair in batch.pairs]
        weight, bias = self.model.output_head
        logits = F.linear(hidden[rows, columns], weight, bias)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        targets = torch.tensor(tokens, device=self.device)
        scores = -F.cross_entropy(logits, targets, reduction="none")
        is_greedy = logits.argmax(-1) == targets
        parts = zip(batch.pairs, scores.cpu().split(lengths), is_greedy.cpu().split(lengths), strict=True)
        return [(pair.index, (score.double().sum().item(), bool(greedy.all()))) for pair, score, greedy in parts]

    def _pad(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return tokens [B, T], padded on the right, where padding cannot change earlier positions."""
        longest = max(map(len, rows))
        return torch.tensor([[*row, *[self._end] * (longest - len(row))] for row in rows], device=self.device)

    def _run(self, batches: Sequence[Any], compute: Callable[[Any], list[tuple[int, Any]]], count: int) -> list[Any]:
        """Compute this process's share of the batches, and return the results of all processes in request order."""
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        own: list[tuple[int, Any]] = []
        with inference_mode(self.model, self._precision):
            for number in range(rank, len(batches), size):
                own += compute(batches[number])
                self._after_batch(number + 1, len(batches))
            if self._is_sharded and 0 < len(batches) % size <= rank:
                compute(batches[0])  # the others gather weights for one more batch
        shares: list[Any] = [own]
        if size > 1:
            shares = [None] * size
            dist.all_gather_object(shares, own)
        results = dict(pair for share in shares for pair in share)
        return [results[i] for i in range(count)]
