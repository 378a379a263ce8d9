"""The main CPU tests on a CUDA device. Run with `pytest -m gpu`."""

from collections.abc import Iterator

import pytest
import small_models
import torch
from depth_steps import cases, check
from small_models import STACKS
from torch.nn import functional as F

from stackexp.models.generation import Decoder, generate
from stackexp.models.transformer import Cache, Transformer

pytestmark = pytest.mark.gpu

B, T = 4, 24


@pytest.fixture(autouse=True)
def exact_float32() -> Iterator[None]:
    """Disable TF32 during each test."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def make_model(name: str) -> Transformer:
    memory = STACKS[name] and {"head_dim": 8} | STACKS[name]
    sizes = {"hidden_size": 64, "num_layers": 4, "intermediate_size": 96}
    return small_models.make_model(memory, torch.float32, **sizes).cuda()


def make_tokens() -> torch.Tensor:
    return small_models.make_tokens(T, B).cuda()


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_eager_steps_match_the_reference(case):
    check("eager", case, "cuda")


@pytest.mark.parametrize("name", STACKS)
def test_float32_matches_the_cpu(name):
    model, tokens = make_model(name), make_tokens()
    on_gpu = model(tokens, probe=True)
    on_gpu.logits.square().mean().backward()
    gradients = [p.grad.cpu() for p in model.parameters()]
    model.zero_grad()
    on_cpu = model.cpu()(tokens.cpu(), probe=True)
    on_cpu.logits.square().mean().backward()
    torch.testing.assert_close(on_gpu.logits.cpu(), on_cpu.logits, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(on_gpu.entropy.cpu(), on_cpu.entropy, rtol=1e-4, atol=1e-5)
    for ours, parameter in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(ours, parameter.grad, rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize("name", STACKS)
def test_bf16_autocast_is_finite_and_close_to_float32(name):
    model, tokens = make_model(name), make_tokens()
    with torch.no_grad():
        exact = model(tokens).logits
    with torch.autocast("cuda", torch.bfloat16):
        output = model(tokens, probe=True)
        loss = F.cross_entropy(output.logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten()) + output.entropy
    loss.backward()
    assert loss.isfinite()
    assert output.entropy.dtype == torch.float32
    error = (output.logits.float() - exact).abs().max() / exact.abs().max()
    assert error < (0.1 if name == "token_major" else 0.05)  # eager on a CPU, 12 seeds: 0.01 to 0.06, others 0.02
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all(), parameter_name


@pytest.mark.parametrize("name", STACKS)
@pytest.mark.parametrize("chunks", [[1] * T, [5, 1, T - 6], [T - 1, 1]])
def test_cached_logits_match_full_forward(name, chunks):
    model, tokens, cache = make_model(name).eval(), make_tokens(), Cache()
    with torch.no_grad():
        logits = torch.cat([model(part, cache).logits for part in tokens.split(chunks, 1)], 1)
        torch.testing.assert_close(logits, model(tokens).logits, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", STACKS)
@torch.no_grad()
def test_the_graph_of_a_decoding_step_matches_a_growing_cache(name, precision):
    model, tokens = make_model(name).eval(), make_tokens()
    caches = Cache(), Cache()
    with torch.autocast("cuda", torch.bfloat16, enabled=precision == torch.bfloat16):
        for cache in caches:
            model(tokens[:, :8], cache)
        decoder = Decoder(model, caches[0], B, T)
        for new in tokens[:, 8:].split(1, 1):
            expected = model(new, caches[1]).logits[:, -1]
            tolerance = {"rtol": 1e-3, "atol": 1e-4} if precision == torch.float32 else {"rtol": 0.05, "atol": 0.1}
            torch.testing.assert_close(decoder(new[:, 0]), expected, **tolerance)
    assert decoder.graph is not None


@pytest.mark.parametrize("name", STACKS)
def test_greedy_tokens_on_the_gpu_match_the_cpu(name):
    model, tokens = make_model(name).double(), make_tokens()[:, :5]
    on_gpu = generate(model, tokens, 20, temperature=0).cpu()
    assert torch.equal(on_gpu, generate(model.cpu(), tokens.cpu(), 20, temperature=0))


@pytest.mark.parametrize("name", ["depth", "queue"])
def test_compiled_matches_eager(name):
    model, tokens = make_model(name), make_tokens()
    results = []
    for run in (model, torch.compile(model)):
        output = run(tokens)
        loss = output.logits.logsumexp(-1).mean() + output.entropy
        results.append((output.logits, torch.autograd.grad(loss, list(model.parameters()))))
    torch.testing.assert_close(results[0], results[1], rtol=1e-2, atol=1e-4)
