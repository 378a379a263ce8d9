"""Loss curves of each stack step implementation, which differ only by rounding."""

import functools

import pytest
import torch
from torch.nn import functional as F

from stackexp import stack
from stackexp.config.memory import StackMemoryConfig
from stackexp.config.model import TransformerConfig
from stackexp.models.transformer import Transformer

STEPS, VOCAB, LAYERS = 60, 17, 3
SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "num_layers": LAYERS, "intermediate_size": 48}
SIZES |= {"num_heads": 4, "num_kv_heads": 2}
MEMORIES = {
    "stacktrans": {"num_heads": 4, "head_dim": 8, "num_slots": 24},
    "queue": {"num_heads": 2, "head_dim": 8, "num_slots": 2, "discipline": "queue", "read": "top"},
}


@functools.cache
def compute_curve(memory: str, implementation: str, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """Return the training losses [STEPS] in float64. Each token is a function of the two tokens before it."""
    torch.manual_seed(0)
    config = StackMemoryConfig(**MEMORIES[memory], axis="depth", entropy_weight=0.01)
    model = Transformer(TransformerConfig(**SIZES, memory=config)).to(device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator, losses = torch.Generator().manual_seed(1), []
    for _ in range(STEPS):
        tokens = torch.randint(VOCAB, (4, 12), generator=generator)
        for t in range(2, 12):
            tokens[:, t] = (tokens[:, t - 1] + tokens[:, t - 2]) % VOCAB
        tokens = tokens.to(device)
        with stack.use_implementation(implementation):
            output = model(tokens)
            loss = F.cross_entropy(output.logits[:, 1:-1].flatten(0, 1), tokens[:, 2:].flatten())
            (loss + 0.01 * output.entropy).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return torch.tensor(losses, dtype=torch.float64)


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("implementation", ["eager", "numba"])
def test_loss_curve_matches_the_reference(memory, implementation):
    exact = compute_curve(memory, "reference", torch.float64)
    assert exact[-1] < 0.8 * exact[0], "the loss must decrease"  # 0.73 with the weights of torch 2.11
    drift = (compute_curve(memory, "reference", torch.float32) - exact).abs().max()
    assert (compute_curve(memory, implementation, torch.float32) - exact).abs().max() <= 4 * drift


@pytest.mark.gpu
@pytest.mark.parametrize("memory", MEMORIES)
def test_triton_loss_curve_matches_the_reference(memory):
    exact = compute_curve(memory, "reference", torch.float64, "cuda")
    drift = (compute_curve(memory, "reference", torch.float32, "cuda") - exact).abs().max()
    assert (compute_curve(memory, "triton", torch.float32, "cuda") - exact).abs().max() <= 4 * drift
