"""Attention backends return the same results as sdpa and keep documents apart.

On a CPU, plain torch functions replace the CUDA kernels.
"""

import functools
import sys

import pytest
import torch
from attention_models import BACKENDS, END, STACK, TOKENS, make_model, replace_kernels
from torch.utils._python_dispatch import TorchDispatchMode

from stackexp.config.compose import compose
from stackexp.data.documents import compute_document_ids, find_document_bounds
from stackexp.datamodules.token_stream import collate
from stackexp.models import attention
from stackexp.models.generation import generate
from stackexp.models.recomputation import SAVED_OPERATOR_PREFIXES
from stackexp.training.loop import describe_kernels


@pytest.fixture(autouse=True)
def replacement_kernels(monkeypatch):
    replace_kernels(monkeypatch)


def test_document_bounds_are_document_starts():
    """Each sequence end is a document end. Empty documents pad the number of documents to a power of two."""
    documents = compute_document_ids(TOKENS, END)
    assert find_document_bounds(documents).tolist() == [0, 3, 5, 6, 9, 10, 18, 18, 18]
    assert find_document_bounds(documents).dtype == torch.int32
    assert find_document_bounds(documents[1:, 1:]).tolist() == [0, 8]
    assert find_document_bounds(documents[:1, :5]).tolist() == [0, 3, 5]

    samples = [{"tokens": row.numpy(), "index": 0, "source": 0, "hash": 0} for row in TOKENS]
    batch = collate(samples, END)
    assert torch.equal(batch["document_bounds"], find_document_bounds(batch["documents"]))
    assert "document_bounds" not in collate(samples)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("kv_heads", "documents"), [(4, None), (1, compute_document_ids(TOKENS, END))])
def test_logits_and_gradients_match_sdpa(backend, documents, kv_heads):
    results = []
    for name in ("sdpa", backend):
        model = make_model(name, num_kv_heads=kv_heads)
        logits = model(TOKENS, documents=documents).logits
        results.append((logits, torch.autograd.grad(logits.logsumexp(-1).sum(), list(model.parameters()))))
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("backend", BACKENDS)
@torch.no_grad()
def test_window_and_direction_match_sdpa(backend):
    documents = compute_document_ids(TOKENS, END)
    for options in ({"attention_window": 1}, {"attention_window": 3}, {"causal": False, "positional": "sinusoidal"}):
        for ids in (None, documents) if options.get("causal", True) else (None,):
            wanted = make_model("sdpa", **options)(TOKENS, documents=ids).logits
            torch.testing.assert_close(make_model(backend, **options)(TOKENS, documents=ids).logits, wanted)
            assert not torch.allclose(make_model("sdpa")(TOKENS, documents=ids).logits, wanted)


@pytest.mark.parametrize(("causal", "has_documents"), [(True, False), (False, False), (True, True)])
def test_flex_alibi_matches_sdpa(causal, has_documents):
    documents = compute_document_ids(TOKENS, END) if has_documents else None
    wanted, got = (make_model(b, positional="alibi", causal=causal) for b in ("sdpa", "flex"))
    torch.testing.assert_close(got(TOKENS, documents=documents).logits, wanted(TOKENS, documents=documents).logits)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("backend", ["flex", "varlen", "flash_attn"])
def test_generation_uses_sdpa(backend, window):
    """The CUDA kernels need bfloat16, but a text sample is drawn in the dtype of the weights, maybe on a CPU."""
    wanted, got = (make_model(b, STACK, attention_window=window) for b in ("sdpa", backend))
    for layer in got.layers:
        layer.attention.attend = None
    assert torch.equal(generate(got, TOKENS, 4, temperature=0), generate(wanted, TOKENS, 4, temperature=0))


class KernelCalls(TorchDispatchMode):
    """A dispatch mode that records the names of all called operators, including flex_attention."""

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls):
        return True  # uncompiled flex_attention supports no other dispatch mode

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@torch.library.custom_op("flash_attn::_flash_attn_replacement", mutates_args=())
def flash_kernel(q: torch.Tensor) -> torch.Tensor:
    return q.clone()


flash_kernel.register_autograd(lambda ctx, gradient: gradient)


@torch.library.custom_op("torch_attn::_varlen_attn_replacement", mutates_args=())
def varlen_kernel(q: torch.Tensor) -> torch.Tensor:
    return q.clone()


varlen_kernel.register_autograd(lambda ctx, gradient: gradient)


@pytest.mark.parametrize(
    ("backend", "recompute"),
    [("flex", True), ("flex", "selective"), ("varlen", "selective"), ("flash_attn", "selective")],
)
def test_selective_recomputation_computes_attention_once(backend, recompute):
    """Use replacement operators in the torch_attn and flash_attn namespaces, like the real kernels."""
    model = make_model(backend, num_kv_heads=4)
    model.checkpoint_blocks = recompute
    replacement = {"varlen": varlen_kernel, "flash_attn": flash_kernel}.get(backend)
    for layer in model.layers if replacement else []:
        layer.attention.attend = lambda q, *_: replacement(q)
    with KernelCalls() as calls:
        loss = model(TOKENS).logits.sum()
        forward = len(calls.names)
        loss.backward()
    kernels = [name.startswith(SAVED_OPERATOR_PREFIXES) and "backward" not in name for name in calls.names]
    assert sum(kernels[:forward]) == 2, "one in each layer"
    assert sum(kernels[forward:]) == (2 if recompute is True else 0)


@torch.no_grad()
def test_backends_compile_to_one_graph():
    """Pass the document bounds: computing them in the graph would synchronize with the GPU."""
    documents = compute_document_ids(TOKENS, END)

    def kernel(q, k, v, *_, **__):
        return q + (k + v).repeat_interleave(2, 1)

    for backend in ("flex", "varlen", "flash_attn"):
        sys.modules["flash_attn"].flash_attn_varlen_func = kernel
        model = make_model(backend, dtype=torch.float32, num_layers=1)
        for layer in model.layers if backend == "varlen" else []:
            layer.attention.attend = functools.partial(attention.varlen, kernel, True, (-1, 0))
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        options = {"documents": documents}
        if backend != "flex":
            options["document_bounds"] = find_document_bounds(documents)
        torch.testing.assert_close(compiled(TOKENS, **options).logits, model(TOKENS, **options).logits)


@pytest.mark.parametrize(
    ("cudnn_takes", "expected"),
    [
        ({5, 15}, ("CUDNN_ATTENTION", False)),
        ({15}, ("CUDNN_ATTENTION", True)),
        (set(), ("FLASH_ATTENTION", False)),
    ],
)
def test_cuda_prefers_cudnn_and_repeats_keys_only_for_it(monkeypatch, cudnn_takes, expected):
    """`cudnn_takes`: the numbers of key heads with which cuDNN runs."""
    kernels = attention.SDPBackend

    def choose(q, k, v, *, is_causal, enable_gqa):
        assert enable_gqa == (k.shape[1] != q.shape[1])
        return (kernels.CUDNN_ATTENTION if k.shape[1] in cudnn_takes else kernels.FLASH_ATTENTION).value

    monkeypatch.setattr(torch, "_fused_sdp_choice", choose)
    attention.choose_cuda_kernel.cache_clear()
    assert attention.choose_cuda_kernel(torch.bfloat16, 15, 5, 64, "cpu") == expected
    config = compose(["pretrain/stacktrans-360m"])
    described = describe_kernels(config, is_compiled=True, device="cpu")
    assert described.startswith(f"attention sdpa with {expected[0]} (without a mask)")
    assert ("repeated" in described) == expected[1]
    attention.choose_cuda_kernel.cache_clear()


def test_repeated_keys_give_the_same_attention():
    q, k, v = (torch.randn(2, heads, 7, 8) for heads in (6, 2, 2))
    grouped = attention.sdpa(q, k, v, None, causal=True)
    torch.testing.assert_close(attention.sdpa(q, *(attention._repeat_heads(x, 6) for x in (k, v)), None, True), grouped)


def test_the_choice_of_kernels_is_part_of_a_graph(monkeypatch):
    """The path for CUDA, run on a CPU: the priority is a context inside the graph, without a break."""
    monkeypatch.setattr(attention, "choose_cuda_kernel", lambda *_: ("FLASH_ATTENTION", False))
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    q, k, v = (torch.randn(2, heads, 7, 8) for heads in (6, 2, 2))
    compiled = torch.compile(attention.sdpa, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(q, k, v, None, True), attention.sdpa(q, k, v, None, causal=True))
