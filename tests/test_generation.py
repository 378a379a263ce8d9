"""Text generation: greedy and sampled, the cache of fixed size, and the verb `generate`."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from operators import OperatorRecord, list_tensors
from small_models import VOCAB, make_model
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend

from stackexp.config.memory import (
    AttentionResidualConfig,
    HyperConnectionsConfig,
    NondeterministicStackConfig,
    StackAttentionConfig,
    StratifiedStackConfig,
)
from stackexp.config.model import DeltaNetConfig, LSTMConfig, StackRNNConfig
from stackexp.errors import RunError
from stackexp.evaluation.loading import load_run
from stackexp.models import attention
from stackexp.models.delta import DeltaNet
from stackexp.models.generation import Decoder, generate, keep_nucleus, sample_tokens
from stackexp.models.recurrent import LSTM, StackRNN
from stackexp.models.transformer import Cache, Transformer

PROMPT = torch.tensor([[1, 2, 3], [4, 5, 6]])
MEMORIES = {
    "none": None,
    "depth": {"axis": "depth", "eval_num_slots": 5},
    "queue": {"axis": "depth", "discipline": "queue", "site": "each_sublayer"},
    "time": {"axis": "time", "eval_num_slots": 5},
    "feedback": {"axis": "time", "feedback": True, "read": "top"},
    "token_major": {"axis": "token_major", "site": "each_sublayer"},
    "attention_residual": AttentionResidualConfig(),
    "hyper_connections": HyperConnectionsConfig(),
    "stack_attention": StackAttentionConfig(),
    "stratified_stack": StratifiedStackConfig(),
    "nondeterministic_stack": NondeterministicStackConfig(),
}
GROWING = ("stack_attention", "stratified_stack", "nondeterministic_stack")  # states that grow with the tokens
POSITIONS = {
    "rope": {},
    "alibi": {"positional": "alibi"},
    "sinusoidal": {"positional": "sinusoidal", "attention_log_base": 2},
    "window_1": {"attention_window": 1},
    "window_4": {"attention_window": 4},
    "alibi_window": {"attention_window": 6, "positional": "alibi"},
}
RECURRENT = {"vocab_size": VOCAB, "hidden_size": 16, "num_layers": 2}


def make_decoder(model: torch.nn.Module, prompt_length: int, max_length: int = 40, **options) -> Decoder:
    """Return a decoder after a prompt and enough tokens to fill all slots."""
    tokens, cache = torch.arange(2 * prompt_length, **options).view(2, -1) % VOCAB, Cache()
    with torch.no_grad():
        model(tokens, cache)
    decoder = Decoder(model, cache, batch_size=2, max_length=max_length)
    decoder(tokens[:, 0])
    assert decoder.has_fixed_states
    return decoder


@torch.no_grad()
def check_greedy_decoding(model: torch.nn.Module, prompt: torch.Tensor, num_tokens: int) -> None:
    """Compare with full forward passes and with a growing cache."""
    expected, new, cache = prompt, prompt, Cache()
    model.eval()
    for _ in range(num_tokens):
        logits = model(expected).logits[:, -1]
        torch.testing.assert_close(model(new, cache).logits[:, -1], logits)
        new = logits.argmax(-1, keepdim=True)
        expected = torch.cat([expected, new], 1)
    model.train()
    assert torch.equal(generate(model, prompt, num_tokens, temperature=0), expected)
    assert model.training


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("memory", MEMORIES)
def test_greedy_decoding_matches_full_forward_passes(memory, positions):
    model = make_model(MEMORIES[memory], **POSITIONS[positions])
    for length, num_tokens in ((1, 9), (3, 1), (3, 0), (7, 12)):
        check_greedy_decoding(model, torch.arange(2 * length).view(2, -1) % VOCAB, num_tokens)


def test_recurrent_models_decode_greedily():
    torch.manual_seed(0)
    stack_rnn, delta_product = {"slot_size": 4, "num_slots": 5}, {"num_heads": 2, "num_householder": 3}
    check_greedy_decoding(LSTM(LSTMConfig(**RECURRENT)), PROMPT, 9)
    check_greedy_decoding(StackRNN(StackRNNConfig(**RECURRENT, **stack_rnn)), PROMPT, 9)
    check_greedy_decoding(DeltaNet(DeltaNetConfig(**RECURRENT, **delta_product)).double(), PROMPT, 9)


GRAPHS = [(name, "rope") for name in MEMORIES if name not in GROWING]
GRAPHS += [("none", name) for name in POSITIONS if name != "rope"]


@pytest.mark.parametrize(("memory", "positions"), GRAPHS)
@torch.no_grad()
def test_all_decoding_steps_are_one_graph(memory, positions):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    model = make_model(MEMORIES[memory], num_layers=2, **POSITIONS[positions]).eval()
    compiled, plain = make_decoder(model, 8), make_decoder(model, 8)
    compiled.step = torch.compile(compiled.step, fullgraph=True, backend=counter)
    for token in range(6):
        new = torch.tensor([token, token + 1])
        torch.testing.assert_close(compiled(new), plain(new))
    assert counter.frame_count == 1
    assert compiled.cache.length.tolist() == [15]


@pytest.mark.parametrize(
    ("memory", "positions"), [case for case in GRAPHS if case[0] in ("none", "depth", "time", "token_major")]
)
def test_a_decoding_step_on_cuda_neither_waits_for_the_gpu_nor_copies_to_it(memory, positions, monkeypatch):
    """With fake tensors, which raise an error if a value is needed on the CPU."""
    monkeypatch.setattr("torch.nn.init.trunc_normal_", lambda weight, **_: weight)
    monkeypatch.setattr(attention, "choose_cuda_kernel", lambda *_: ("MATH", False))  # of the prompt; it asks the GPU
    monkeypatch.setattr(attention, "CUDA_KERNELS", [SDPBackend.MATH])
    config = make_model(MEMORIES[memory], num_layers=1, **POSITIONS[positions]).config
    with FakeTensorMode(), torch.device("cuda"):
        decoder = make_decoder(Transformer(config).eval(), 5)
        with OperatorRecord() as record, torch.no_grad():
            assert decoder.step().shape == (2, VOCAB)
    assert len(record.calls) > 30
    assert {tensor.device.type for _, *values in record.calls for tensor in list_tensors(values)} == {"cuda"}


@pytest.mark.parametrize("memory", ["none", "depth", "time"])
def test_weights_are_cast_once(memory):
    model = make_model(MEMORIES[memory], torch.float32).eval()
    with torch.autocast("cpu", torch.bfloat16):
        decoder = make_decoder(model, 8)
        with OperatorRecord() as record:
            decoder(PROMPT[:, 0])
    weights = {weight.data_ptr() for weight in model.parameters() if weight.dim() == 2}
    readers = {str(f) for f, *values in record.calls if any(x.data_ptr() in weights for x in list_tensors(values))}
    assert "aten.embedding.default" in readers
    assert readers.isdisjoint(f"aten.{name}.default" for name in ("_to_copy", "cat", "mm", "addmm", "bmm"))


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


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_logits_of_diverged_weights_are_an_error(value, temperature):
    with pytest.raises(RunError, match=r"^the logits are not finite: the weights have diverged"):
        sample_tokens(torch.tensor([[0.0, value, 1.0]]), temperature, 0.9)


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


def test_generate_prints_what_a_loaded_run_generates(trained, capture):
    printed = capture("generate --prompt def --max_new_tokens 4 --seed 7 --run", trained)
    expected = load_run(trained, "last").generate("def", max_new_tokens=4, seed=7)
    assert (printed.out, printed.err) == (expected + "\n", "")
    assert expected.startswith("def")


def test_a_prompt_longer_than_the_context_is_reported(trained, caplog):
    load_run(trained).generate("x = 1\n" * 40, max_new_tokens=1)
    (message,) = caplog.messages
    assert message.startswith("the prompt has ")
    assert "more than the 32 of a training sequence" in message
