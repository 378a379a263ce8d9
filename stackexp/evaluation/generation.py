"""The engine of `generate`: continue a prompt with a run's model."""

from typing import Any

import torch
from tokenizers import Tokenizer

from stackexp.data.tokenizer import get_end_of_text_id, load_tokenizer
from stackexp.datamodules.arithmetic import check_symbols
from stackexp.evaluation.loading import open_text_run
from stackexp.models import checkpoints
from stackexp.models.generation import generate
from stackexp.models.transformer import Transformer
from stackexp.training.objectives import build_objective
from stackexp.training.trainer import find_device_type


def run(run: str, ckpt_path: str | None, prompt: str, **sampling: Any) -> int:
    """Print the prompt and its continuation by a run's newest checkpoint, or by `ckpt_path`."""
    folder, config = open_text_run(run)
    if config.data.objective == "arithmetic":
        check_symbols("generate: --prompt", prompt)
    checkpoint = checkpoints.find_checkpoint(folder, ckpt_path)
    tokenizer = load_tokenizer(folder.find_tokenizer(checkpoint) or folder.tokenizer)
    module = build_objective(config).build_module(weights=checkpoint)
    module.to(find_device_type(config))
    print(continue_text(module.model, tokenizer, prompt, **sampling))
    return 0


def continue_text(model: Transformer, tokenizer: Tokenizer, prompt: str, *, seed: int, **sampling: Any) -> str:
    """Return the prompt and its continuation, up to the end of the document. An empty prompt starts a document.

    `sampling` are max_new_tokens, temperature and top_p of `models.generation.generate`.
    """
    device = next(model.parameters()).device
    end = get_end_of_text_id(tokenizer)
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids  # as in the training data
    tokens = torch.tensor([ids or [end]], device=device)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.compiler.set_stance("force_eager"):  # a few tokens are not worth compiling for
        tokens = generate(model, tokens, generator=generator, stop_token=end, **sampling)
    return tokenizer.decode(tokens[0].tolist())
