"""Generation: greedy and sampled, with the cache of every axis."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stackexp.config.memory import StackMemoryConfig
from stackexp.config.model import TransformerConfig
from stackexp.models.generation import generate, nucleus, sample
from stackexp.models.transformer import Transformer

VOCAB = 17


def make_model(axis=None, **memory):
    torch.manual_seed(0)
    if axis:
        memory = StackMemoryConfig(axis=axis, num_heads=2, head_dim=4, num_slots=3, **memory)
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1}
    return Transformer(TransformerConfig(**sizes, intermediate_size=24, memory=memory or None)).double()


PROMPT = torch.tensor([[1, 2, 3], [4, 5, 6]])


@pytest.mark.parametrize("axis", [None, "depth", "time", "token_major"])
def test_greedy_is_the_argmax_of_the_whole_sequence_each_time(axis):
    model = make_model(axis, eval_num_slots=5) if axis else make_model()
    expected = PROMPT
    model.eval()
    for _ in range(8):
        token = model(expected).logits[:, -1].argmax(-1, keepdim=True)
        expected = torch.cat([expected, token], 1)
    model.train()
    assert torch.equal(generate(model, PROMPT, 8, temperature=0), expected)
    assert model.training


def test_a_generator_makes_sampling_repeatable():
    model = make_model("depth")
    draws = [generate(model, PROMPT, 12, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert draws[0].shape == (2, 15)
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert torch.equal(draws[0][:, :3], PROMPT)


def test_no_new_tokens():
    assert torch.equal(generate(make_model(), PROMPT, 0), PROMPT)


def test_stop_token_ends_a_row_and_all_rows_end_the_loop():
    model, prompt = make_model().eval(), torch.randint(VOCAB, (4, 3), generator=torch.Generator().manual_seed(0))
    free = generate(model, prompt, 90, generator=torch.Generator().manual_seed(3))
    stop = free[0, 6].item()
    stopped = generate(model, prompt, 90, generator=torch.Generator().manual_seed(3), stop_token=stop)
    firsts = [(row[3:] == stop).nonzero()[0].item() + 3 for row in stopped]
    assert len(set(firsts)) > 1
    assert stopped.shape[1] == max(firsts) + 1
    for row, first in zip(stopped, firsts, strict=True):
        assert (row[first:] == stop).all()
    assert torch.equal(stopped[0, : firsts[0]], free[0, : firsts[0]])
    assert not model.training


def test_temperature_divides_the_logits():
    logits = torch.tensor([[0.0, 1.0, 2.0]]).expand(20_000, 3)
    for temperature in (0.5, 2.0):
        tokens = sample(logits, temperature, 1.0, torch.Generator().manual_seed(0))
        frequencies = torch.bincount(tokens, minlength=3) / len(tokens)
        torch.testing.assert_close(frequencies, (logits[0] / temperature).softmax(-1), rtol=0, atol=0.015)


def test_nucleus_by_hand():
    probabilities = torch.tensor([[0.1, 0.5, 0.15, 0.25]])
    assert nucleus(probabilities, 0.7).tolist() == [[0, 0.5, 0, 0.25]]
    assert nucleus(probabilities, 0.5).tolist() == [[0, 0.5, 0, 0]]
    assert nucleus(probabilities, 0.0).tolist() == [[0, 0.5, 0, 0]]


@settings(deadline=None)
@given(logits=st.lists(st.floats(-8, 8), min_size=2, max_size=12), top_p=st.floats(0.01, 0.99))
def test_nucleus_is_the_smallest_set_with_the_probability(logits, top_p):
    probabilities = torch.tensor([logits]).softmax(-1)
    kept = nucleus(probabilities, top_p)[0]
    inside = kept[kept > 0]
    assert inside.sum() >= top_p - 1e-6
    assert inside.sum() - inside.min() < top_p + 1e-6
    assert (probabilities[0][kept == 0] <= inside.min()).all()
    drawn = sample(torch.tensor([logits] * 50), 1.0, top_p, torch.Generator().manual_seed(0))
    assert (kept[drawn] > 0).all()
