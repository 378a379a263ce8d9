"""Text generation: greedy and sampled, with the cache of every memory axis, and the verb `generate`."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import VOCAB, make_model

from stackexp.cli import main
from stackexp.evaluation.loading import load_run
from stackexp.models.generation import generate, keep_nucleus, sample_tokens

PROMPT = torch.tensor([[1, 2, 3], [4, 5, 6]])


@pytest.mark.parametrize("axis", [None, "depth", "time", "token_major"])
def test_greedy_decoding_matches_full_forward_passes(axis):
    model = make_model({"axis": axis, "eval_num_slots": 5} if axis else None)
    expected = PROMPT
    model.eval()
    for _ in range(8):
        token = model(expected).logits[:, -1].argmax(-1, keepdim=True)
        expected = torch.cat([expected, token], 1)
    model.train()
    assert torch.equal(generate(model, PROMPT, 8, temperature=0), expected)
    assert model.training
    assert torch.equal(generate(model, PROMPT, 0), PROMPT), "no new tokens"


def test_sampling_is_reproducible_with_a_generator():
    model = make_model({"axis": "depth"})
    draws = [generate(model, PROMPT, 12, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert draws[0].shape == (2, 15)
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert torch.equal(draws[0][:, :3], PROMPT)


def test_generation_ends_once_every_row_has_the_stop_token():
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


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature_divides_the_logits(temperature):
    logits = torch.tensor([[0.0, 1.0, 2.0]]).expand(20_000, 3)
    tokens = sample_tokens(logits, temperature, 1.0, torch.Generator().manual_seed(0))
    frequencies = torch.bincount(tokens, minlength=3) / len(tokens)
    torch.testing.assert_close(frequencies, (logits[0] / temperature).softmax(-1), rtol=0, atol=0.015)


def test_top_p_of_four_tokens():
    for top_p, kept in {0.7: [0, 0.5, 0, 0.25], 0.5: [0, 0.5, 0, 0], 0.0: [0, 0.5, 0, 0]}.items():
        assert keep_nucleus(torch.tensor([[0.1, 0.5, 0.15, 0.25]]), top_p).tolist() == [kept]


@settings(deadline=None)
@given(logits=st.lists(st.floats(-8, 8), min_size=2, max_size=12), top_p=st.floats(0.01, 0.99))
def test_top_p_keeps_the_smallest_set_with_the_probability(logits, top_p):
    probabilities = torch.tensor([logits]).softmax(-1)
    kept = keep_nucleus(probabilities, top_p)[0]
    inside = kept[kept > 0]
    assert inside.sum() >= top_p - 1e-6
    assert inside.sum() - inside.min() < top_p + 1e-6
    assert (probabilities[0][kept == 0] <= inside.min()).all()
    drawn = sample_tokens(torch.tensor([logits] * 50), 1.0, top_p, torch.Generator().manual_seed(0))
    assert (kept[drawn] > 0).all()


def test_generate_prints_what_a_loaded_run_generates(trained, capsys):
    options = ("--prompt", "def", "--max_new_tokens", "4", "--seed", "7")
    assert main(["generate", "--run", str(trained), *options]) == 0
    printed = capsys.readouterr()
    expected = load_run(trained, "last").generate("def", max_new_tokens=4, seed=7)
    assert (printed.out, printed.err) == (expected + "\n", "")
    assert expected.startswith("def")


def test_a_prompt_longer_than_the_context_is_reported(trained, caplog):
    load_run(trained).generate("x = 1\n" * 40, max_new_tokens=1)
    (message,) = caplog.messages
    assert message.startswith("the prompt has ")
    assert "more than the 32 of a training sequence" in message
