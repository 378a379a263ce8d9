"""Chunked cross entropy, compared with unchunked cross entropy: values, gradients, memory."""

import pytest
import torch
from operators import OperatorRecord, list_tensors
from torch.nn import functional as F

from stackexp.config import registry
from stackexp.config.compose import compose
from stackexp.config.memory import StackMemoryConfig
from stackexp.config.model import LSTMConfig, TransformerConfig
from stackexp.models import cross_entropy
from stackexp.models.cross_entropy import (
    NO_TARGET,
    Head,
    NextTokenLoss,
    compute_linear_token_losses,
    compute_losses,
    linear_cross_entropy,
)
from stackexp.models.transformer import Transformer
from stackexp.modules.language_modeling import LanguageModeling

B, T, D, V = 3, 8, 6, 29
CHUNKS = [1, 5, 100]  # one token, a remainder, more than all


def make_inputs(dtype=torch.float64, bias=False, scale=1.0):
    generator = torch.Generator().manual_seed(0)
    shapes = [(B, T, D), (V, D), (V,)][: 3 if bias else 2]
    numbers = [scale * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    tokens = torch.randint(V, (B, T), generator=generator)
    return [x.to(dtype).requires_grad_() for x in numbers], tokens


def compute_unchunked(inputs, tokens, z_loss):
    """Compute the total loss, cross entropy and z-loss without chunks."""
    logits = F.linear(*inputs)[:, :-1]
    cross_entropy = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    z = logits.logsumexp(-1).square().mean()
    return cross_entropy + z_loss * z, cross_entropy, z


def test_the_z_loss_is_a_mean_over_positions_with_a_target():
    (hidden, weight), tokens = make_inputs()
    logits, targets = F.linear(hidden, weight), tokens.clone()
    targets[:, 1::2] = NO_TARGET
    losses = compute_losses(logits, targets, z_loss=0.25)
    torch.testing.assert_close(losses.z, logits[:, ::2].logsumexp(-1).square().mean())
    torch.testing.assert_close(losses.total, losses.cross_entropy + 0.25 * losses.z)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("z_loss", [0.0, 0.25])
@pytest.mark.parametrize("scale", [1.0, 30.0])  # 30: predictions that are certain, and wrong
def test_chunked_loss_and_gradients_match_unchunked(chunk, bias, z_loss, scale):
    inputs, tokens = make_inputs(bias=bias, scale=scale)
    losses = linear_cross_entropy(inputs[0], Head(*inputs[1:]), tokens, z_loss=z_loss, chunk=chunk)
    expected = compute_unchunked(inputs, tokens, z_loss)
    torch.testing.assert_close(losses.total, expected[0])
    torch.testing.assert_close(losses.cross_entropy, expected[1].detach())
    assert (losses.z is None) == (z_loss == 0)
    if losses.z is not None:
        torch.testing.assert_close(losses.z, expected[2].detach())
    gradients = torch.autograd.grad(3 * losses.total, inputs)
    torch.testing.assert_close(gradients, torch.autograd.grad(3 * expected[0], inputs))


def test_second_backward_pass_raises():
    """The gradients are computed once and scaled in place, so a second pass would return wrong values."""
    inputs, tokens = make_inputs()
    total = linear_cross_entropy(inputs[0], Head(inputs[1]), tokens).total
    (2 * total).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


@pytest.mark.parametrize("chunk", CHUNKS)
def test_token_losses_match_unchunked(chunk):
    inputs, tokens = make_inputs(torch.float32)
    expected = cross_entropy.compute_token_losses(F.linear(*inputs), tokens)
    losses = compute_linear_token_losses(inputs[0], Head(inputs[1]), tokens, chunk)
    assert losses.shape == (B, T - 1)
    torch.testing.assert_close(losses, expected)
    assert not losses.requires_grad


def test_label_smoothing_affects_only_the_total():
    (hidden, weight), tokens = make_inputs()
    logits, targets = F.linear(hidden, weight)[:, :-1], tokens[:, 1:]
    plain, smooth = (cross_entropy.compute_losses(logits, targets, 0.1, share) for share in (0.0, 0.2))
    torch.testing.assert_close(smooth.cross_entropy, plain.cross_entropy)
    of_all = -logits.log_softmax(-1).mean()
    expected = 0.8 * plain.cross_entropy + 0.2 * of_all + 0.1 * plain.z
    torch.testing.assert_close(smooth.total, expected)
    assert smooth.total > plain.total


@pytest.mark.parametrize("chunk", [7, 100])
@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16_chunks_are_as_accurate_as_unchunked(chunk, autocast):
    """Compare the bfloat16 errors (autocast or full bfloat16) relative to float64.

    The gradient of a bfloat16 weight is rounded in each chunk and in the sum, which allows sqrt(2) times the error.
    """
    exact, tokens = make_inputs(scale=3.0)
    wanted = torch.autograd.grad(compute_unchunked(exact, tokens, 0.1)[0], exact)
    inputs = [x.detach().to(torch.float32 if autocast else torch.bfloat16).requires_grad_() for x in exact]
    errors = {}
    for name in ("whole", "chunked"):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            if name == "whole":
                losses = cross_entropy.compute_losses(F.linear(*inputs)[:, :-1], tokens[:, 1:], 0.1)
            else:
                losses = linear_cross_entropy(inputs[0], Head(inputs[1]), tokens, z_loss=0.1, chunk=chunk)
        assert losses.total.dtype == losses.cross_entropy.dtype == losses.z.dtype == torch.float32
        found = torch.autograd.grad(losses.total, inputs)
        assert [x.dtype for x in found] == [x.dtype for x in inputs]
        errors[name] = [((x - y).norm() / y.norm()).item() for x, y in zip(found, wanted, strict=True)]
    for ours, theirs in zip(errors["chunked"], errors["whole"], strict=True):
        assert ours <= (1.1 if autocast or chunk > B * T else 1.5) * theirs < 0.02, errors


@pytest.mark.parametrize("kind", ["chunked", "whole"])
def test_chunks_never_hold_logits_of_the_full_batch(kind):
    model, tokens = make_model(), make_tokens()
    criterion = NextTokenLoss(kind, chunk=D + 1, z_loss=0.1)  # the weight itself, transposed, has D rows
    with OperatorRecord() as record:
        with torch.autocast("cpu", torch.bfloat16):
            loss = criterion(model, model(tokens, return_hidden=criterion.needs_hidden), tokens).total
        loss.backward()
        with torch.no_grad():
            criterion.compute_token_losses(model, model(tokens, return_hidden=criterion.needs_hidden), tokens)
    most = {"chunked": D + 1, "whole": B * T}[kind]
    rows = {torch.float32: 0, torch.bfloat16: 0}
    for tensor in list_tensors([output for *_, output in record.calls]):
        if tensor.ndim and tensor.shape[-1] == V:
            rows[tensor.dtype] = max(rows[tensor.dtype], tensor.numel() // V)
    assert rows == {torch.float32: most, torch.bfloat16: most}


def make_model(kind="tied"):
    torch.manual_seed(0)
    if kind == "lstm":
        return registry.build("model", LSTMConfig(vocab_size=V, hidden_size=D, num_layers=1))
    sizes = {"vocab_size": V, "hidden_size": D, "num_layers": 2, "intermediate_size": 8, "num_heads": 1}
    stack = StackMemoryConfig(num_heads=2, head_dim=3, num_slots=4)
    return Transformer(TransformerConfig(**sizes, num_kv_heads=1, tie_embeddings=kind == "tied", memory=stack))


def make_tokens():
    return torch.randint(V, (B, T), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", ["tied", "untied", "lstm"])
def test_chunked_loss_gives_the_same_model_gradients(kind):
    """The output projection of a recurrent model has a bias."""
    model, tokens = make_model(kind).double(), make_tokens()
    gradients = {}
    for criterion in (NextTokenLoss("whole", z_loss=0.1), NextTokenLoss("chunked", chunk=5, z_loss=0.1)):
        output = model(tokens, return_hidden=criterion.needs_hidden)
        assert (output.logits is None) == (output.hidden is not None) == (criterion.kind == "chunked")
        loss = criterion(model, output, tokens).total + 0.5 * output.entropy
        gradients[criterion.kind] = torch.autograd.grad(loss, list(model.parameters()))
    torch.testing.assert_close(gradients["chunked"], gradients["whole"])


@pytest.mark.parametrize("kind", ["chunked", "whole"])
def test_config_selects_the_loss_in_training_and_evaluation(kind, monkeypatch):
    options = ["model.hidden_size=6", "model.num_layers=1", "model.num_heads=1", "model.num_kv_heads=1"]
    options += [f"model.vocab_size={V}", "data.kind=shards", "data.path=none", f"data.vocab_size={V}"]
    options += [
        f"trainer.cross_entropy={kind}",
        "trainer.cross_entropy_chunk=7",
        "trainer.z_loss=0.1",
        "model.memory.entropy_weight=0.5",
    ]
    torch.manual_seed(0)
    lm = LanguageModeling(compose(["quickstart"], [*options, f"data.context_length={T}", "optimizer.lr=0.01"]))
    batch = {"tokens": make_tokens(), "index": torch.arange(B)}
    chunks = []
    run_chunk = cross_entropy._compute_chunk
    monkeypatch.setattr(cross_entropy, "_compute_chunk", lambda x, *rest: chunks.append(len(x)) or run_chunk(x, *rest))
    loss = lm.training_step(batch, 0)
    assert chunks == ([7, 7, 7, 3] if kind == "chunked" else [])
    output = lm.model(batch["tokens"])
    total, alone, z = compute_unchunked([output.logits, torch.eye(V)], batch["tokens"], 0.1)
    torch.testing.assert_close(loss, total + lm.model.entropy_weight * output.entropy)
    metrics = lm.step_metrics.drain()
    assert (metrics["train/loss"], metrics["train/z_loss"]) == pytest.approx((alone.item(), z.item()), rel=1e-5)


def test_chunked_loss_in_float64_has_no_float32_constant():
    """1 / count in float32 had a relative error of 1e-8."""
    torch.manual_seed(0)
    hidden = torch.randn(1, 8, 4, dtype=torch.float64)
    weight = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)
    tokens = torch.randint(0, 9, (1, 8))
    losses = linear_cross_entropy(hidden, Head(weight), tokens)
    (gradient,) = torch.autograd.grad(losses.total, weight)
    expected = F.cross_entropy((hidden @ weight.T)[0, :-1], tokens[0, 1:])
    torch.testing.assert_close(losses.total, expected, rtol=1e-14, atol=0)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, weight)[0], rtol=1e-13, atol=1e-15)
