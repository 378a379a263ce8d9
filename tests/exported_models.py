"""Check an exported folder with transformers alone; also run as a script, with another version of transformers.

    python exported_models.py FOLDER ...

Each FOLDER.pt holds the tokens [B, T], the logits of the original model and its greedy continuation.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

TOLERANCE = 1e-5


def load(folder: Path, dtype: torch.dtype | str = torch.float32):
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=dtype).eval()


def assert_close(found, expected, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


@torch.no_grad()
def check_model(folder: Path) -> None:
    """Compare logits, greedy tokens, padding, the cache, beams and a saved copy with the original model."""
    expected = torch.load(folder.with_suffix(".pt"))
    tokens, logits = expected["tokens"], expected["logits"]
    model = load(folder, logits.dtype)
    assert_close(model(tokens).logits, logits)
    check_padding(model, tokens, logits)
    check_cache(model, tokens, logits)
    found = model.generate(tokens, attention_mask=torch.ones_like(tokens), **greedy(expected))
    assert found.tolist() == expected["greedy"].tolist()
    memory = getattr(model.config, "memory", None)  # a model without memory is a Llama
    if memory is None or memory["axis"] == "depth":
        static = {"cache_implementation": "static", "disable_compile": True}
        found = model.generate(tokens, attention_mask=torch.ones_like(tokens), **static, **greedy(expected))
        assert found.tolist() == expected["greedy"].tolist()
    if memory is not None:
        check_refusals(model, tokens)
    beams = {"max_new_tokens": 6, "num_beams": 3, "do_sample": False, "attention_mask": torch.ones_like(tokens)}
    cached, uncached = (model.generate(tokens, use_cache=use_cache, **beams) for use_cache in (True, False))
    assert cached.tolist() == uncached.tolist()
    copy = folder.with_name(f"{folder.name}-copy")
    model.save_pretrained(copy)
    assert_close(load(copy, logits.dtype)(tokens).logits, logits)


def greedy(expected) -> dict[str, int | bool | None]:
    new = expected["greedy"].shape[1] - expected["tokens"].shape[1]
    return {"max_new_tokens": new, "do_sample": False, "eos_token_id": None}


def check_padding(model, tokens, logits) -> None:
    """Pad the second row on the left by three tokens."""
    padded, mask = tokens.clone(), torch.ones_like(tokens)
    padded[1, 3:], padded[1, :3], mask[1, :3] = tokens[1, :-3], 7, 0
    found = model(padded, attention_mask=mask).logits
    assert_close(found[0], logits[0])
    assert_close(found[1, 3:], logits[1, :-3])


def check_cache(model, tokens, logits) -> None:
    """Feed four tokens, then three, then the rest one by one."""
    output = model(tokens[:, :4], use_cache=True)
    parts = [output.logits]
    for part in (tokens[:, 4:7], *tokens[:, 7:].split(1, 1)):
        output = model(part, use_cache=True, **{get_cache_name(output): output[get_cache_name(output)]})
        parts.append(output.logits)
    assert_close(torch.cat(parts, 1), logits)


def check_refusals(model, tokens) -> None:
    """Check that options without an effect raise an error; `model.model` can also return a tuple."""
    assert type(model.model(tokens, return_dict=False)) is tuple
    packed = {"position_ids": torch.arange(tokens.shape[1])[None] % 4}
    for options in [{"output_attentions": True}, *[packed] * (model.config.memory["axis"] != "depth")]:
        assert get_refusal(model, tokens, options).startswith("StackTrans: "), options


def get_refusal(model, tokens, options) -> str:
    try:
        model(tokens, **options)
    except ValueError as error:
        return str(error)
    return ""


def get_cache_name(output) -> str:
    return "cache" if "cache" in output else "past_key_values"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        check_model(Path(name))
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
    print(tokenizer("a <|endoftext|> b").input_ids)
    assert "stackexp" not in sys.modules
