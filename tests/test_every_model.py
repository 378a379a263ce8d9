"""Properties of every model: causality, cached decoding, documents, recomputation, gradients, precision and FLOPs."""

import copy
import functools

import attention_models
import pytest
import small_models
import test_depth_memories
import test_recurrent
import test_stack_baselines
import torch
from attention_models import BACKENDS, END, STACK, TOKENS
from small_models import TOKEN_MEMORIES, T
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from stackexp import stack
from stackexp.data.documents import compute_document_ids, find_document_bounds
from stackexp.models.transformer import Cache, Transformer

MEMORIES = small_models.MEMORIES | test_depth_memories.MEMORIES | test_stack_baselines.MEMORIES
POSITIONS = {name: {"positional": name} for name in ("none", "sinusoidal", "alibi")}
POSITIONS |= {"log_scale": {"positional": "none", "attention_log_base": 5}, "rope": {}}

DECODERS = {name: functools.partial(small_models.make_model, memory) for name, memory in MEMORIES.items()}
RECURRENT = {name: functools.partial(test_recurrent.make_model, name) for name in test_recurrent.KINDS}
ATTENTION = {name: functools.partial(attention_models.make_model, name, STACK) for name in BACKENDS}
ATTENTION |= {
    f"{name} window {window}": functools.partial(small_models.make_model, attention_window=window, **options)
    for name, options in POSITIONS.items()
    for window in (None, 3)
}
MODELS = DECODERS | RECURRENT
EVERY = MODELS | ATTENTION


@pytest.fixture(autouse=True)
def replacement_kernels(monkeypatch):
    attention_models.replace_kernels(monkeypatch)


def build(name, dtype=torch.float64, is_random=True, **options):
    """Return a model; `is_random` moves its memories from their initial values, at which most do nothing."""
    model = EVERY[name](dtype=torch.float64, **options)
    with torch.no_grad():
        for memory in model.memories if is_random else []:
            for parameter in memory.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to(dtype)


def make_tokens(model):
    return small_models.make_tokens() % model.config.vocab_size


def is_parallel(model):
    """Return True for a decoder without states from token to token."""
    return isinstance(model, Transformer) and model.axis not in ("time", "token_major")


@pytest.mark.parametrize("name", EVERY)
@torch.no_grad()
def test_later_tokens_and_other_rows_do_not_change_logits(name):
    model = build(name).eval()
    tokens = make_tokens(model)
    changed = tokens.clone()
    changed[0, 4] = (changed[0, 4] + 1) % model.config.vocab_size
    difference = (model(changed).logits - model(tokens).logits).abs().amax(-1)
    assert difference[0, :4].max() < 1e-12
    assert difference[1].max() < 1e-12
    assert difference[0, 4:].min() > 1e-9


@pytest.mark.parametrize("name", EVERY)
@torch.no_grad()
def test_cached_logits_equal_one_pass_and_states_are_not_changed_in_place(name):
    model, cache, kept, parts = build(name).eval(), Cache(), [], []
    tokens = make_tokens(model)
    for part in tokens.split([5, 1, 3], 1):
        parts.append(model(part, cache).logits)
        kept += [(tensor, tensor.clone()) for state in cache.states.values() for tensor in state]
    torch.testing.assert_close(torch.cat(parts, 1), model(tokens).logits)
    assert cache.length == T
    assert all(torch.equal(now, then) for now, then in kept)


@pytest.mark.parametrize("name", EVERY)
@torch.no_grad()
def test_packed_documents_match_separate_documents(name):
    model, documents = build(name, num_layers=2).eval(), compute_document_ids(TOKENS, END)
    if not is_parallel(model):
        with pytest.raises(ValueError, match=r"set (model\.memory\.axis=depth|data\.document_mask=false)"):
            model(TOKENS, documents=documents)
        return
    together = model(TOKENS, documents=documents).logits
    for row, numbers, logits in zip(TOKENS, documents, together, strict=True):
        for number in numbers.unique():
            torch.testing.assert_close(logits[numbers == number], model(row[numbers == number][None]).logits[0])
    assert not torch.allclose(together, model(TOKENS).logits), "the document mask must change the logits"
    bounds = find_document_bounds(documents)
    torch.testing.assert_close(model(TOKENS, documents=documents, document_bounds=bounds).logits, together)


@pytest.mark.parametrize("name", [*MODELS, *BACKENDS])
def test_recomputed_gradients_are_identical(name):
    """Use the eager stack step, because `auto` may choose differently under a dispatch mode."""
    model, calls, gradients = build(name, torch.float32, num_layers=2), [], []
    weights = list(model.parameters())
    first = getattr(model.layers[0], "attention", model.layers[0])
    first.register_forward_pre_hook(lambda *_: calls.append(1))
    tokens = TOKENS[:, :6] % model.config.vocab_size
    options = {"documents": compute_document_ids(tokens, END)} if is_parallel(model) else {}
    modes = (False, True, "selective") if is_parallel(model) else (False, True)
    for model.checkpoint_blocks in modes:
        torch.manual_seed(2)
        with stack.use_implementation("eager"):
            with torch.autocast("cpu", torch.bfloat16):
                output = model(tokens, **options)
            loss = output.logits.logsumexp(-1).sum() + output.entropy
            gradients.append(torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True))
        assert all(map(torch.equal, gradients[0], gradients[-1]))
    runs = 6 if model.axis == "token_major" else 1
    assert len(calls) == (2 * len(modes) - 1) * runs, "each block runs again in the backward pass"


def get_names_without_gradient(name):
    """Return the parameters that a loss does not depend on."""
    first = "layers.0.attention_memory."  # where all slots and streams are equal, moving or mixing them has no effect
    if name == "residual_stack":
        return [f"{first}actions", f"{first}action_bias"]
    if name in ("mhc", "mhc_static"):
        return [f"{first}residual"]
    if name == "authors_code":  # the softmax of an additive mask is one-hot
        return [f"layers.{i}.memory.query" for i in range(3)]
    return []


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_has_a_gradient(name):
    model = build(name, is_random=name not in TOKEN_MEMORIES)
    output = model(make_tokens(model))
    (output.logits.logsumexp(-1).square().sum() + output.entropy).backward()
    without = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 1e-12]
    assert without == get_names_without_gradient(name)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("precision", ["float32", "bf16_autocast", "bfloat16"])
def test_lower_precision_is_close_to_float64(name, precision):
    exact = build(name).eval()
    model, tokens, dtypes = copy.deepcopy(exact), make_tokens(exact), set()
    model.to(torch.bfloat16 if precision == "bfloat16" else torch.float32)
    for layer in model.layers:
        layer.register_forward_hook(lambda *call: dtypes.add(call[2][0].dtype))
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16_autocast"):
        output = model(tokens)
    expected = exact(tokens).logits
    error = (output.logits.double() - expected).abs().max() / expected.abs().max()
    assert error < (1e-5 if precision == "float32" else 0.05)
    assert output.entropy.dtype == torch.float32
    assert name in RECURRENT or dtypes == {model.embedding.weight.dtype}, "the residual stream"
    output.logits.float().sum().backward()
    assert model.embedding.weight.grad.dtype == model.embedding.weight.dtype


FLOPS = dict.fromkeys(test_depth_memories.MEMORIES, (1, 1.2)) | {
    "value_skip": (1, 1),
    "stack_attention": (1, 1.1),
    "stratified_stack": (0.99, 1.01),
    "nondeterministic_stack": (0.9, 1),  # torch counts both halves of the triangle of pairs
    "nondeterministic_middle": (0.9, 1),
    "stack_rnn": (1.2, 1.4),  # elementwise updates, which torch does not count
    "delta_net": (0.7, 1),  # the chunked form has more products than the recurrence
    "delta_net_positive": (0.9, 1),
    "delta_product": (0.4, 1),
}
"""The least and the largest ratio of predicted FLOPs to those that torch counts. `test_cost` compares stacks."""


@pytest.mark.parametrize(("name", "bounds"), FLOPS.items())
def test_flops_are_close_to_those_that_torch_counts(name, bounds):
    model = build(name, torch.float32, num_layers=2)
    tokens = make_tokens(model)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens).logits.sum().backward()
    assert bounds[0] <= model.flops_per_token(T) * tokens.numel() / counter.get_total_flops() <= bounds[1]
