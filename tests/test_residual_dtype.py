"""A residual stream in bfloat16."""

import pytest
import small_models
import torch
from small_models import MEMORIES, make_tokens


def compute_gradients(model, output):
    score = output.hidden.logsumexp(-1).sum() + output.entropy
    return torch.autograd.grad(score, list(model.parameters()), allow_unused=True)


@pytest.mark.parametrize("variant", MEMORIES)
def test_hidden_states_are_bfloat16_and_gradients_float32(variant):
    """The results differ from those of a float32 stream by the rounding of a few layers."""
    model, tokens = small_models.make_model(MEMORIES[variant], torch.float32, num_layers=2), make_tokens()
    results, dtypes = [], []
    for layer in model.layers:
        layer.register_forward_hook(lambda module, inputs, outputs: dtypes.append(outputs[0].dtype))
    for dtype in ("float32", "bfloat16"):
        model.config.residual_dtype = dtype
        torch.manual_seed(2)
        with torch.autocast("cpu", torch.bfloat16):
            output = model(tokens, return_hidden=True)
        results.append((output.hidden.float(), compute_gradients(model, output)))
    calls = len(dtypes) // 2  # once per token for token_major
    assert dtypes == [torch.float32] * calls + [torch.bfloat16] * calls
    (wanted, gradients), (got, got_gradients) = results
    assert 0 < (got - wanted).norm() < 0.02 * wanted.norm()
    for name, gradient, other in zip(dict(model.named_parameters()), got_gradients, gradients, strict=True):
        assert (gradient is None) == (other is None), name
        if gradient is not None:
            assert gradient.dtype == torch.float32
            assert (gradient - other).norm() < 0.1 * other.norm() + 0.01, name


def test_without_autocast_the_stream_has_the_precision_of_the_weights():
    model = small_models.make_model({}, torch.float64, residual_dtype="bfloat16")
    assert model(make_tokens(), return_hidden=True).hidden.dtype == torch.float64
