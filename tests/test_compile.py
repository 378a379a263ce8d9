"""Compiled sublayers: graphs that all blocks share, and the results of eager code, for every memory."""

import functools
from types import SimpleNamespace

import pytest
import small_models
import torch
from small_models import VARIANTS, VOCAB, B, make_tokens
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from stackexp.config.compose import compose
from stackexp.data.documents import compute_document_ids
from stackexp.evaluation.generation import continue_text
from stackexp.models import cross_entropy, transformer
from stackexp.models.transformer import Transformer
from stackexp.modules.language_modeling import LanguageModeling
from stackexp.modules.metrics import probe_memories
from stackexp.modules.transduction import Transduction


@pytest.fixture(autouse=True)
def forget_graphs():
    torch._dynamo.reset()
    counters.clear()
    transformer._compile_part.cache_clear()
    cross_entropy._compile.cache_clear()


def make_model(variant: str, num_layers: int = 2) -> Transformer:
    return small_models.make_model(VARIANTS[variant], torch.float32, num_layers=num_layers)


def compile_body(model: Transformer, backend: str = "eager", **options) -> CompileCounterWithBackend:
    """Compile the sublayers; the result counts and keeps the graphs."""
    counter = CompileCounterWithBackend(backend)
    model.compile_body(backend=counter, dynamic=False, **options)
    return counter


def run(model, tokens, **options) -> tuple:
    """Return all outputs and the gradients of all parameters."""
    torch.manual_seed(2)
    output = model(tokens, **options)
    score = output.hidden if output.logits is None else output.logits
    weights = list(model.parameters())
    return output, torch.autograd.grad(score.logsumexp(-1).sum() + output.entropy, weights, allow_unused=True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_all_blocks_share_their_graphs(variant):
    tokens, counts = make_tokens(), []
    for num_layers in (2, 5):
        model = make_model(variant, num_layers)
        wanted = run(model, tokens, probe=True)
        counter = compile_body(model)
        torch.testing.assert_close(run(model, tokens, probe=True), wanted)
        run(model, tokens)  # without probes: no further graph
        counts.append(counter.frame_count)
    sites = {memory.site for memory in model.memories}
    assert counts == [2, 2] if "after_attention" in sites else [1, 1], "attention and feed-forward, or both in one"
    assert not counters["graph_break"]


@pytest.mark.parametrize("recompute", [True, "selective"])
def test_forward_and_backward_with_recomputation(recompute):
    """Call the model like a training step: under autocast, with hidden states as output."""
    model, tokens = make_model("stacktrans"), make_tokens()
    model.checkpoint_blocks = recompute
    with torch.autocast("cpu", torch.bfloat16):
        wanted = run(model, tokens, return_hidden=True)
        counter = compile_body(model, "aot_eager")
        got = run(model, tokens, return_hidden=True)
    torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2)
    assert counter.frame_count == 1
    targets = {str(node.target) for node in counter.graphs[0].graph.nodes}
    assert ("tag_activation_checkpoint" in targets) == (recompute == "selective"), "selective is part of the graph"


def test_documents_and_evaluation_have_graphs_of_their_own():
    model, tokens = make_model("stacktrans"), make_tokens()
    options = [{}, {"documents": compute_document_ids(tokens, 0)}]
    wanted = [run(model, tokens, **o) for o in options]
    counter = compile_body(model)
    torch.testing.assert_close([run(model, tokens, **o) for o in options], wanted)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(tokens), wanted[0][0])
    assert counter.frame_count == 3


@pytest.mark.parametrize("axis", ["time", "token_major"])
def test_lengths_that_vary_use_few_graphs(axis):
    model = small_models.make_model({"axis": axis}, torch.float32, num_layers=2)
    inputs = [make_tokens(length) for length in (5, 6, 7, 8, 9)]
    wanted = [run(model, tokens) for tokens in inputs]
    counter = CompileCounterWithBackend("eager")
    model.compile_body(backend=counter)
    torch.testing.assert_close([run(model, tokens) for tokens in inputs], wanted)
    assert counter.frame_count <= 8, "with and without a cache, a fixed length, then any length"


def test_one_product_for_maps_of_the_same_input():
    """Only in the graph: eager code keeps three products for q, k and v, and two for gate and up."""
    tokens = make_tokens(batch=16)
    model = small_models.make_model(None, torch.float32, num_layers=1, qkv_bias=True)
    wanted = run(model, tokens)
    counter = compile_body(model)
    torch.testing.assert_close(run(model, tokens), wanted)
    products = [node for node in counter.graphs[0].graph.nodes if "linear" in str(node.target)]
    assert len(products) == 4, "qkv, output, gate and up, down"
    few = compile_body(model)
    run(model, make_tokens(batch=1))
    products = [node for node in few.graphs[0].graph.nodes if "linear" in str(node.target)]
    assert len(products) == 7, "fewer tokens than outputs: copying the weights would take longer"


@torch.no_grad()
@pytest.mark.parametrize("variant", ["stacktrans", "residual_stack"])
def test_probes_of_a_compiled_model_compile_nothing(variant):
    model, tokens = make_model(variant).eval(), make_tokens()
    wanted = probe_memories(model, tokens)
    counter = compile_body(model)
    torch.testing.assert_close(probe_memories(model, tokens), wanted)
    assert counter.frame_count == 0
    names = {"push", "overflow", "read_slot", "read_sharpness"} if variant == "stacktrans" else {"push", "read_share"}
    assert names <= wanted[0].keys()


def test_the_sample_of_a_compiled_model_compiles_nothing(monkeypatch):
    monkeypatch.setattr("stackexp.evaluation.generation.get_end_of_text_id", lambda tokenizer: 0)
    monkeypatch.setattr("stackexp.evaluation.generation.encode_text", lambda tokenizer, text: [])
    model = make_model("stacktrans")
    counter = compile_body(model)
    tokenizer = SimpleNamespace(decode=len)
    assert 1 < continue_text(model, tokenizer, "", precision="32-true", seed=0, max_new_tokens=8) <= 9
    assert counter.frame_count == 0


SMALL = ["model.hidden_size=16", "model.num_layers=2", "model.num_heads=2", "model.num_kv_heads=1"]
SMALL += ["model.intermediate_size=16", "trainer.precision=32-true", "trainer.z_loss=0.1"]
TEXT = [*SMALL, "data.kind=shards", "data.path=none", f"data.vocab_size={VOCAB}", "trainer.cross_entropy_chunk=6"]


def build_language_model(*overrides: str) -> LanguageModeling:
    torch.manual_seed(0)
    return LanguageModeling(compose(["quickstart"], [*TEXT, *overrides]))


def step(lm: LanguageModeling) -> list[torch.Tensor]:
    loss = lm.training_step({"tokens": make_tokens(), "index": torch.arange(B)}, 0)
    return [loss, *torch.autograd.grad(loss, list(lm.parameters()))]


@pytest.mark.parametrize("loss", ["chunked", "whole"])
def test_trainer_compile_has_no_graph_breaks(monkeypatch, loss):
    """Compile with the eager backend; the inductor takes a minute."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    lm = build_language_model("trainer.compile=true", f"trainer.cross_entropy={loss}")
    compiled = step(lm)
    assert counters["stats"]["unique_graphs"] == 2, "one graph for the sublayers and one for the loss"
    lm.probe = True
    step(lm)
    assert counters["stats"]["unique_graphs"] == 2, "a step with probes uses the same graphs"
    lm.probe = False
    assert not counters["graph_break"]
    with torch.compiler.set_stance("force_eager"):
        torch.testing.assert_close(compiled, step(lm))


def test_auto_compiles_language_models_on_cuda(monkeypatch):
    language, formal = build_language_model, ["formal/quick"]
    assert not language().is_compiled, "not on a CPU"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("stackexp.modules.base.HAS_TRITON", True)
    lm = language()
    assert lm.is_compiled
    assert lm.criterion.compiled
    assert lm.model.layers[0].compile_options == (("dynamic", False),)
    assert not language("trainer.compile=false").is_compiled
    with pytest.MonkeyPatch.context() as without:
        without.setattr("stackexp.modules.base.HAS_TRITON", False)
        assert not language().is_compiled
    assert not language("model.memory.axis=token_major").is_compiled
    assert not Transduction(compose(formal, SMALL)).is_compiled
    assert Transduction(compose(formal, [*SMALL, "trainer.compile=true"])).is_compiled
