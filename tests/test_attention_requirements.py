"""Requirements of the attention backends: config errors, missing kernels, document bounds, and kernels on a GPU."""

import sys
from types import SimpleNamespace

import pytest
import torch
from attention_models import END, STACK, TOKENS, make_model
from small_models import VOCAB

from stackexp.config.compose import compose
from stackexp.data.documents import compute_document_ids, find_document_bounds
from stackexp.errors import ConfigError
from stackexp.modules.language_modeling import LanguageModeling


def compose_config(*overrides: str):
    small = ["model.hidden_size=16", "model.num_layers=1", "model.num_heads=2", "model.num_kv_heads=1"]
    return compose(["quickstart"], [*small, "data.kind=shards", "data.path=none", "data.vocab_size=50", *overrides])


def test_training_step_passes_document_bounds():
    lm = LanguageModeling(compose_config("data.document_mask=true", "trainer.precision=32-true"))
    documents = compute_document_ids(TOKENS, END)
    batch = {
        "tokens": TOKENS,
        "index": torch.arange(2),
        "documents": documents,
        "document_bounds": find_document_bounds(documents),
    }
    calls = []
    forward = lm.model.forward
    lm.model.forward = lambda *args, **options: calls.append(options) or forward(*args, **options)
    lm.training_step(batch, 0)
    assert calls[0]["documents"] is documents
    assert calls[0]["document_bounds"] is batch["document_bounds"]


def test_missing_kernels_are_one_line_errors(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    overrides = ("model.attention=flash_attn", "trainer.precision=bf16-mixed", "trainer.accelerator=cuda")
    with pytest.raises(ConfigError, match=r"^model\.attention=flash_attn needs the package flash-attn \(.*\); pip .*$"):
        LanguageModeling(compose_config(*overrides))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for backend in ("varlen", "flash_attn"):
        overrides = (f"model.attention={backend}", "trainer.precision=bf16-mixed", "trainer.accelerator=auto")
        with pytest.raises(ConfigError, match=rf"^model\.attention={backend} needs a CUDA device, not cpu; .*=sdpa$"):
            LanguageModeling(compose_config(*overrides))
        with pytest.raises(ConfigError, match="needs a CUDA device"):
            make_model(backend)(TOKENS)
    with pytest.raises(ConfigError, match="no backward pass on CPUs"):
        make_model("flex")(TOKENS)


def test_plan_needs_no_attention_kernel():
    from stackexp.planning.cost import build_meta_model, make_plan

    config = compose_config("model.attention=flash_attn", "trainer.precision=bf16-mixed", "trainer.accelerator=cuda")
    assert build_meta_model(config).config.attention == "sdpa"
    sdpa = compose_config("trainer.precision=bf16-mixed", "trainer.accelerator=cuda")
    assert make_plan(config).peak == make_plan(sdpa).peak


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["flex", "varlen", "flash_attn"])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_gpu_kernels_are_as_accurate_as_sdpa(backend, kv_heads):
    """Allow at most twice the bfloat16 error of sdpa, relative to sdpa in float64."""
    if backend == "flash_attn":
        pytest.importorskip("flash_attn")
    tokens = torch.randint(VOCAB, (4, 200), generator=torch.Generator().manual_seed(1))
    documents = compute_document_ids(tokens, END).cuda()
    options = {"hidden_size": 128, "num_kv_heads": kv_heads}  # heads of 32
    runs = SimpleNamespace()
    for name, dtype in (("exact", torch.float64), ("sdpa", torch.bfloat16), ("ours", torch.bfloat16)):
        model = make_model("sdpa" if name != "ours" else backend, STACK, dtype, **options).cuda()
        logits = model(tokens.cuda(), documents=documents).logits.double()
        gradients = torch.autograd.grad(logits.logsumexp(-1).sum(), list(model.parameters()))
        setattr(runs, name, [logits.detach(), *(g.double() for g in gradients)])
    for ours, theirs, exact in zip(runs.ours, runs.sdpa, runs.exact, strict=True):
        assert (ours - exact).norm() <= 2 * (theirs - exact).norm() + 1e-3 * exact.norm()
