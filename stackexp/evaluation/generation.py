"""Run a model for evaluation: without gradients, and to continue a text."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn

from stackexp.data.tokenizer import encode_text, get_end_of_text_id
from stackexp.models.generation import generate
from stackexp.models.transformer import Transformer


@contextlib.contextmanager
def inference_mode(model: nn.Module, precision: str) -> Iterator[None]:
    """Run a model in eval mode, without gradients and compilation, in the precision of `trainer.precision`.

    Compilation is off because inputs of many lengths would each compile again. Under bf16-mixed, weights are cast once.
    """
    was_training, device = model.training, next(model.parameters()).device
    model.eval()
    try:
        with (
            torch.no_grad(),
            torch.compiler.set_stance("force_eager"),
            torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16-mixed"),
        ):
            yield
    finally:
        model.train(was_training)


def continue_text(
    model: Transformer, tokenizer: Tokenizer, prompt: str, *, precision: str, seed: int, **sampling: Any
) -> str:
    """Return the prompt and its continuation, up to the end of the document. An empty prompt starts a document.

    `precision` is `trainer.precision`. `sampling` are max_new_tokens, temperature and top_p of
    `models.generation.generate`.
    """
    device = next(model.parameters()).device
    end = get_end_of_text_id(tokenizer)
    ids = encode_text(tokenizer, prompt)
    tokens = torch.tensor([ids or [end]], device=device)
    generator = torch.Generator(device).manual_seed(seed)
    with inference_mode(model, precision):
        tokens = generate(model, tokens, generator=generator, stop_token=end, **sampling)
    return tokenizer.decode(tokens[0].tolist())
