"""The models that lm-eval scores: the program's own decoder, and a Hugging Face folder."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import Collator, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tokenizers import Tokenizer
from torch.nn import functional as F

from stackexp.data.tokenizer import encode_text, get_end_of_text_id
from stackexp.errors import RunError
from stackexp.evaluation.generation import inference_mode
from stackexp.models.generation import NonFiniteLogitsError, generate
from stackexp.models.transformer import Transformer

Request = tuple[Any, list[int], list[int]]
"""The arguments by which lm-eval caches a response, the tokens of a prompt, and those of an answer."""


def limit_new_tokens(options: dict[str, Any], max_length: int) -> int:
    """Return the maximum number of tokens to generate for a task: its own limit, or half of the model's context."""
    return min(normalize_gen_kwargs(options)["max_gen_toks"], max_length // 2)


def count_scored_bytes(*texts: str) -> int:
    """Return the bytes of an answer and of the spaces at the end of its prompt, if any, which are scored with it."""
    prompt, answer = "".join(texts[:-1]), texts[-1]
    return len((prompt[len(prompt.rstrip()) :] + answer).encode())


class WholeAnswers(TemplateLM):
    """A base class that scores every token of an answer. lm-eval itself skips a token that also ends the prompt.

    An answer of more than `max_length` tokens is scored in parts of this length, each after those before it.
    """

    max_length: int

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each answer in nats, and whether greedy decoding would produce it.

        Raises RunError for an answer without tokens.
        """
        windows: list[Request] = []
        counts = []
        for request in requests:
            before, after = self._encode_pair(*request.args)
            if not after:
                where = f"{request.task_name}: document {request.doc_id}"
                raise RunError(f"{where}: the answer {request.args[1]!r} has no token; remove the document")
            starts = range(0, len(after), self.max_length)
            key = request.args if len(starts) == 1 else None
            windows += [(key, [*before, *after[:i]], after[i : i + self.max_length]) for i in starts]
            counts.append(len(starts))
        scored = iter(self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm))
        answers = [list(itertools.islice(scored, count)) for count in counts]
        return [(sum(score for score, _ in parts), all(greedy for _, greedy in parts)) for parts in answers]

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Return the tokens of both texts; spaces at the end of the prompt become part of the answer."""
        prompt = context.rstrip()
        continuation = context[len(prompt) :] + continuation
        before, whole = self.tok_encode(prompt), self.tok_encode(prompt + continuation)
        if whole[: len(before)] == before:
            after = whole[len(before) :]
        else:
            after = self.tok_encode(continuation, add_special_tokens=False)
        return before or [self.prefix_token_id], after


class RunModel(WholeAnswers):
    """A decoder and its tokenizer, for lm-eval's tasks.

    With several processes, each receives all requests, computes every n-th batch, and gathers the results of the
    others. lm-eval would divide the documents instead, and each rank would draw different shots.
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
            max_length: Maximum number of tokens in a sequence; longer prompts lose their first tokens.
            batch_size: Sequences per forward pass.
            precision: `trainer.precision`; bf16-mixed computes under autocast.
            is_sharded: Each process has a part of every weight, so all must run the same number of forward passes.
            after_batch: Called on each process after every batch with the numbers of finished and of all batches.
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
        """The token that ends a document; it also precedes an answer without a prompt."""
        return self._end

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the token ids of a text, without special tokens, as in the training data."""
        return encode_text(self._tokenizer, string)

    def _loglikelihood_tokens(self, requests: list[Request], **kwargs: Any) -> list[tuple[float, bool]]:
        order = Collator(requests, sort_fn=lambda request: (-len(request[1] + request[2]), request[1:]))
        return self._run("loglikelihood", order, self._score)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        """Return the log-likelihood of each text in nats; long texts are scored in windows of `max_length` tokens."""
        windows: list[Request] = []
        owners = []
        for owner, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            for window in get_rolling_token_windows(tokens, self._end, self.max_length, 1):
                windows.append((None, *make_disjoint_window(window)))
                owners.append(owner)
        totals = [0.0] * len(requests)
        for owner, (score, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[owner] += score
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        """Return the greedy continuation of each prompt, up to a stop string, the end of the document or the limit.

        Prompts of equal length share a batch, because the decoder's cache has no padding. The limit is at most half of
        `max_length`, and longer prompts lose their first tokens. Raises RunError for tasks that sample, and for sharded
        models, whose processes would need equally long generations.
        """
        if self._is_sharded:
            raise RunError("generation: not supported for sharded weights; use `evaluate`, or trainer.strategy=ddp")
        items = []
        for request in requests:
            options = normalize_gen_kwargs(request.args[1])
            if options["do_sample"] and options.get("temperature", 1):
                raise RunError(f"{request.task_name}: samples its answers; only greedy decoding is supported")
            limit = limit_new_tokens(request.args[1], self.max_length)
            prompt = (self.tok_encode(request.args[0]) or [self._end])[-(self.max_length - limit) :]
            kind = {"length": len(prompt), "limit": limit, "until": tuple(filter(None, options["until"]))}
            items.append((request.args, prompt, kind))
        order = Collator(items, sort_fn=lambda item: item[1], group_by="gen_kwargs", group_fn=lambda item: item[2])
        return self._run("generate_until", order, self._generate)

    def _generate(self, batch: Sequence[Any]) -> list[str]:
        limit, stops = batch[0][2]["limit"], batch[0][2]["until"]
        tokens = torch.tensor([prompt for _, prompt, _ in batch], device=self.device)
        start = tokens.shape[1]

        def should_stop(new: torch.Tensor) -> list[bool]:
            return [any(stop in self._decode(row) for stop in stops) for row in new.tolist()]

        try:
            output = generate(self.model, tokens, limit, temperature=0, stop_token=self._end, should_stop=should_stop)
        except NonFiniteLogitsError:  # a diverged model has no answers
            return [""] * len(batch)
        return [postprocess_generated_text(self._decode(row), list(stops), None) for row in output[:, start:].tolist()]

    def _decode(self, tokens: list[int]) -> str:
        end = tokens.index(self._end) if self._end in tokens else len(tokens)
        return self._tokenizer.decode(tokens[:end])

    def _score(self, batch: Sequence[Request]) -> list[tuple[float, bool]]:
        """Return the score of each answer. Rows are padded on the right, which cannot change earlier positions."""
        answers = [after for _, _, after in batch]
        inputs = [[*before, *after[:-1]][-self.max_length :] for _, before, after in batch]
        longest = max(map(len, inputs))
        padded = torch.tensor([[*row, *[self._end] * (longest - len(row))] for row in inputs], device=self.device)
        hidden = self.model(padded, return_hidden=True).hidden
        predicting = [
            hidden[row, len(tokens) - len(answer) : len(tokens)]
            for row, (tokens, answer) in enumerate(zip(inputs, answers, strict=True))
        ]
        weight, bias = self.model.output_head
        logits = F.linear(torch.cat(predicting), weight, bias)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        targets = torch.tensor([token for answer in answers for token in answer], device=self.device)
        lengths = list(map(len, answers))
        scores = -F.cross_entropy(logits, targets, reduction="none").cpu()
        is_greedy = (logits.argmax(-1) == targets).cpu()
        parts = zip(scores.split(lengths), is_greedy.split(lengths), strict=True)
        return [(score.double().sum().item(), bool(greedy.all())) for score, greedy in parts]

    def _run(self, kind: str, order: Collator, compute: Callable[[Any], list[Any]]) -> list[Any]:
        """Compute this process's share of the batches, and return the results of all processes in request order."""
        batches: list[Any] = list(order.get_batched(n=self.batch_size))
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        own: dict[int, list[Any]] = {}
        with inference_mode(self.model, self._precision):
            for number in range(rank, len(batches), size):
                own[number] = compute(batches[number])
                for (arguments, *_), result in zip(batches[number], own[number], strict=True):
                    if arguments is not None:
                        self.cache_hook.add_partial(kind, arguments, result)
                self._after_batch(number + 1, len(batches))
            if self._is_sharded and 0 < len(batches) % size <= rank:
                compute(batches[0])  # the others gather weights for one more batch
        shares: list[Any] = [own]
        if size > 1:
            shares = [None] * size
            dist.all_gather_object(shares, own)
        results = {number: found for share in shares for number, found in share.items()}
        return order.get_original([result for number in range(len(batches)) for result in results[number]])


def load_hugging_face_model(folder: Path, batch_size: int, trust_remote_code: bool) -> TemplateLM:
    """Load a Hugging Face folder with lm-eval's own class.

    Raises RunError if transformers cannot load it, or its tokenizer has no end-of-sequence token.
    """
    from lm_eval.models.huggingface import HFLM  # requires transformers and accelerate

    class FolderModel(WholeAnswers, HFLM):
        """lm-eval's class, with the answers of `WholeAnswers` and the limit of `limit_new_tokens`."""

        def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
            """Raise RunError for an id outside the vocabulary: transformers adds missing special tokens."""
            before, after = super()._encode_pair(context, continuation)
            largest, limit = max([*before, *after]), self.model.get_input_embeddings().num_embeddings
            if largest >= limit:
                found = f"token id {largest} is outside the vocabulary of {limit}"
                raise RunError(f"{folder}: {found}; copy tokenizer_config.json and tokenizer.json of the model")
            return before, after

        def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
            limited = []
            for request in requests:
                prompt, options = request.args
                options = {**options, "max_gen_toks": limit_new_tokens(options, self.max_length)}
                limited.append(dataclasses.replace(request, arguments=(prompt, options)))
            return super().generate_until(limited, disable_tqdm=disable_tqdm)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = {"batch_size": batch_size, "device": device, "trust_remote_code": trust_remote_code}
    try:
        lm = FolderModel(str(folder), backend="causal", **options)
    except Exception as error:  # transformers or the code in the folder may raise any error
        text = " ".join(str(error).split())[:300] or type(error).__name__
        raise RunError(f"{folder}: cannot load the model ({text}); check the folder") from None
    if lm.eot_token_id is None:
        raise RunError(f"{folder}: the tokenizer has no eos_token; name one in tokenizer_config.json")
    if not isinstance(limit := lm.tokenizer.model_max_length, int | float):
        raise RunError(f"{folder}: model_max_length is {limit!r:.40}, not a number; correct tokenizer_config.json")
    return lm
