"""`head_dropout`: in training what a head reads is left out of a whole sequence."""

import pytest
import torch

from stackexp.config.compose import compose
from stackexp.config.schema import StackMemoryConfig, TransformerConfig
from stackexp.errors import ConfigError
from stackexp.models.memory import StackMemory
from stackexp.models.transformer import Transformer

B, T, H, D = 400, 5, 4, 3


def memory(axis="time", dropout=0.25) -> StackMemory:
    torch.manual_seed(0)
    config = StackMemoryConfig(axis=axis, num_heads=H, head_dim=D, num_slots=4, head_dropout=dropout)
    made = StackMemory(config, TransformerConfig(hidden_size=12, memory=config), 0)
    made.init_weights()
    return made


def reads_of(made: StackMemory) -> torch.Tensor:
    """What goes into W_up [B, T, H, D], of the same h each time."""
    seen = []
    made._read_out, read_out = lambda read: seen.append(read) or read_out(read), made._read_out
    h = torch.randn(B, T, 12, generator=torch.Generator().manual_seed(1))
    made(h, made.empty_state(h))
    made._read_out = read_out
    return seen[0]


@pytest.mark.parametrize("axis", ["time", "depth"])
def test_heads_are_left_out_of_whole_sequences_and_the_others_are_larger(axis):
    made = memory(axis)
    whole, dropped = reads_of(made.eval()), reads_of(made.train())
    left_out = (dropped == 0).all((1, 3))  # [B, H]
    expected = torch.where(left_out[:, None, :, None], 0.0, whole / 0.75)
    torch.testing.assert_close(dropped, expected)
    assert abs(left_out.float().mean() - 0.25) < 4 * (0.25 * 0.75 / (B * H)) ** 0.5
    assert len(left_out.unique(dim=0)) == 2**H, "each head by itself"
    assert not torch.equal(reads_of(made), dropped), "drawn anew"


def test_nothing_is_left_out_in_evaluation():
    assert torch.equal(reads_of(memory(dropout=0.9).eval()), reads_of(memory(dropout=0.0).train()))


def test_a_decoder_trains_with_it_and_draws_by_torchs_seed():
    config = TransformerConfig(vocab_size=7, hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=2)
    config.memory = StackMemoryConfig(axis="time", num_heads=2, head_dim=4, num_slots=3, head_dropout=0.5)
    torch.manual_seed(0)
    model, tokens = Transformer(config), torch.zeros(64, 6, dtype=torch.int64)
    logits = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        logits.append(model(tokens).logits)
    assert torch.equal(logits[0], logits[1])
    assert len(logits[2].unique(dim=0)) > 4, "of 64 sequences that are alike, 2^(2 x 2) at most come out different"
    assert not torch.equal(logits[0], logits[2])
    logits[0].square().sum().backward()
    assert all(parameter.grad.any() for layer in model.memories for parameter in (layer.down, layer.up))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.memory.head_dropout=1", "model.memory.head_dropout"),
        ("model.memory.axis=token_major", "model.memory.head_dropout: a head is left out of a sequence"),
    ],
)
def test_mistakes_name_the_key(override, words):
    with pytest.raises(ConfigError, match=words):
        compose(["formal/stacktrans"], ["model.memory.head_dropout=0.5", override])
