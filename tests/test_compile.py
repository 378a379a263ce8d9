"""torch.compile of the full model: one graph and the same results for every memory variant."""

from types import SimpleNamespace

import pytest
import small_models
import torch
from small_models import VOCAB, B, make_tokens
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from stackexp import stack
from stackexp.config.compose import compose
from stackexp.config.memory import (
    AttentionResidualConfig,
    DenseFormerConfig,
    HyperConnectionsConfig,
    ManifoldHyperConnectionsConfig,
    ResidualScaleConfig,
    ResidualStackConfig,
    ValueSkipConfig,
)
from stackexp.data.documents import compute_document_ids
from stackexp.evaluation.generation import continue_text
from stackexp.models.transformer import Cache, Transformer
from stackexp.modules.language_modeling import LanguageModeling
from stackexp.modules.metrics import probe_memories

VARIANTS = {
    "transformer": None,
    "stacktrans": {},
    "queue": {"discipline": "queue", "site": "after_attention", "num_heads": 1, "read": "top"},
    "push_only": {"discipline": "push_only", "read_mask": "log"},
    "full_dim": {"projection": "none", "head_dim": 8, "action_noise": 0.5, "action_sharpness": 2.0},
    "authors_code": {"site": "after_attention", "projection": "shared_slices", "residual_gate": "read"}
    | {"action_input": "hidden", "action_scale": "slice", "read_mask": "additive"},
    "attention_residual": AttentionResidualConfig(),
    "dense_former": DenseFormerConfig(),
    "hyper_connections": HyperConnectionsConfig(),
    "mhc": ManifoldHyperConnectionsConfig(),
    "residual_scale": ResidualScaleConfig(),
    "residual_stack": ResidualStackConfig(),
    "value_skip": ValueSkipConfig(rank=3),
}


@pytest.fixture(autouse=True)
def reset_dynamo():
    torch._dynamo.reset()
    counters.clear()


def make_model(variant: str, num_layers: int = 2) -> Transformer:
    return small_models.make_model(VARIANTS[variant], torch.float32, num_layers=num_layers)


def run(model, tokens, **options) -> tuple:
    """Return all outputs and the gradients of all parameters."""
    torch.manual_seed(2)
    output = model(tokens, **options)
    weights = list(getattr(model, "_orig_mod", model).parameters())
    score = output.hidden if output.logits is None else output.logits
    return output, torch.autograd.grad(score.logsumexp(-1).sum() + output.entropy, weights, allow_unused=True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_depth_axis_variants_compile_to_one_graph(variant):
    model, tokens = make_model(variant), make_tokens()
    counter = CompileCounterWithBackend("eager")
    with stack.use_implementation("eager"):
        got = run(torch.compile(model, fullgraph=True, backend=counter), tokens, probe=True)
        wanted = run(model, tokens, probe=True)
    assert counter.frame_count == 1
    assert counter.op_count > 50
    torch.testing.assert_close(got, wanted)


def test_forward_and_backward_compile_to_one_graph_each():
    """Call the model like a training step: under autocast, with hidden states as output."""
    model, tokens = make_model("stacktrans", num_layers=1), make_tokens()
    model.checkpoint_blocks = "selective"
    counter = CompileCounterWithBackend("aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        got = run(torch.compile(model, fullgraph=True, backend=counter), tokens, return_hidden=True)
        wanted = run(model, tokens, return_hidden=True)
    assert counter.frame_count == 1
    torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2)


def test_documents_compile_to_one_graph():
    model, tokens = make_model("stacktrans", num_layers=1), make_tokens()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    documents = compute_document_ids(tokens, 0)
    torch.testing.assert_close(run(compiled, tokens, documents=documents), run(model, tokens, documents=documents))


@torch.no_grad()
def test_prefill_and_decoding_compile_without_breaks():
    model, tokens = make_model("stacktrans", num_layers=1).eval(), make_tokens()
    counter = CompileCounterWithBackend("eager")
    compiled, cache = torch.compile(model, fullgraph=True, backend=counter), Cache()
    logits = [compiled(part, cache).logits for part in tokens.split([5, 1, 1, 1, 1], 1)]
    torch.testing.assert_close(torch.cat(logits, 1), model(tokens).logits)
    assert counter.frame_count <= 3, "one graph each for prefill, first token and further tokens"


@torch.no_grad()
def test_probes_of_a_compiled_model_neither_use_nor_change_its_graph():
    model, tokens = make_model("stacktrans").eval(), make_tokens()
    wanted = probe_memories(model, tokens)
    counter = CompileCounterWithBackend("eager")
    model.compile(fullgraph=True, backend=counter)
    logits = model(tokens).logits
    torch.testing.assert_close(probe_memories(model, tokens), wanted)
    torch.testing.assert_close(model(tokens).logits, logits, rtol=0, atol=0)
    assert counter.frame_count == 1
    assert {"push", "overflow", "read_slot", "read_sharpness"} <= wanted[0].keys()


def test_the_sample_of_a_compiled_model_compiles_nothing(monkeypatch):
    monkeypatch.setattr("stackexp.evaluation.generation.get_end_of_text_id", lambda tokenizer: 0)
    model, counter = make_model("stacktrans"), CompileCounterWithBackend("eager")
    model.compile(backend=counter)
    tokenizer = SimpleNamespace(encode=lambda *_, **__: SimpleNamespace(ids=[]), decode=len)
    assert 1 < continue_text(model, tokenizer, "", seed=0, max_new_tokens=8) <= 9
    assert counter.frame_count == 0


def make_language_model(monkeypatch, **compile_options) -> LanguageModeling:
    """Return a language model with trainer.compile=true."""
    compile_module = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda self, *a, **o: compile_module(self, *a, **o | compile_options)
    )
    small = ["model.hidden_size=16", "model.num_layers=2", "model.num_heads=2", "model.num_kv_heads=1"]
    small += ["model.intermediate_size=16", "data.kind=shards", "data.path=none", f"data.vocab_size={VOCAB}"]
    small += ["trainer.precision=32-true", "trainer.z_loss=0.1", "trainer.cross_entropy_chunk=6"]
    torch.manual_seed(0)
    return LanguageModeling(compose(["quickstart"], [*small, "trainer.compile=true", "model.memory=stacktrans"]))


def step(lm: LanguageModeling) -> list[torch.Tensor]:
    loss = lm.training_step({"tokens": make_tokens(), "index": torch.arange(B)}, 0)
    return [loss, *torch.autograd.grad(loss, list(lm.parameters()))]


def test_trainer_compile_has_no_graph_breaks(monkeypatch):
    """Compile the model and the chunked loss with the eager backend; the inductor takes a minute."""
    monkeypatch.setattr("stackexp.models.cross_entropy._compile", lambda f: torch.compile(f, backend="eager"))
    lm = make_language_model(monkeypatch, backend="eager")
    compiled = step(lm)
    assert counters["stats"]["unique_graphs"] == 2, "one graph for the model and one for the loss chunk"
    assert not counters["graph_break"]
    with torch.compiler.set_stance("force_eager"):
        torch.testing.assert_close(compiled, step(lm))
