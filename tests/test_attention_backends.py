"""Attention backends: each equals sdpa, and documents run one by one. The kernels of CUDA have stand-ins on a CPU."""

import functools
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from stackexp.config.compose import compose
from stackexp.config.memory import StackMemoryConfig
from stackexp.config.model import TransformerConfig
from stackexp.data.documents import compute_document_ids, find_document_bounds
from stackexp.datamodules.loader import collate
from stackexp.errors import ConfigError
from stackexp.models import attention_backends
from stackexp.models.activation_checkpointing import SAVED_OPERATOR_PREFIXES
from stackexp.models.generation import generate
from stackexp.models.transformer import Cache, Transformer
from stackexp.modules.language_modeling import LanguageModeling

END, VOCAB = 0, 13
TOKENS = torch.tensor([[3, 4, END, 5, END, END, 6, 7, 8], [END, 1, 2, 3, 4, 5, 6, 7, END]])
STACK = {"num_heads": 2, "head_dim": 4, "num_slots": 3, "axis": "depth"}
BACKENDS = ["flex", "varlen", "varlen of torch 2.11", "flash_attn"]


def seen_within(length, window_size):
    """Return the attention mask of a window, bool [T, T]: (keys before, keys after) each query; -1 means all."""
    ahead = torch.arange(length) - torch.arange(length)[:, None]
    before, after = (length if size == -1 else size for size in window_size)
    return (ahead >= -before) & (ahead <= after)


def packed_attention(q, k, v, starts_q, starts_k, longest_q, longest_k, causal, window_size=(-1, -1)):
    """What a kernel for packed sequences computes, [tokens, heads, D], one sequence at a time."""
    assert causal == (window_size[1] == 0)
    assert q.shape[0] == k.shape[0] == starts_q[-1]
    assert starts_q is starts_k
    assert starts_q.dtype == torch.int32
    pieces = []
    for start, stop in zip(starts_q.tolist()[:-1], starts_q.tolist()[1:], strict=True):
        assert 0 <= stop - start <= min(longest_q, longest_k)
        of_one = (x[start:stop].transpose(0, 1)[None] for x in (q, k, v))
        seen = seen_within(int(stop - start), window_size)
        y = F.scaled_dot_product_attention(*of_one, seen, enable_gqa=q.shape[1] != k.shape[1])
        pieces.append(y[0].transpose(0, 1))
    return torch.cat(pieces)


def varlen_attn(q, k, v, starts_q, starts_k, longest_q, longest_k, *, window_size, enable_gqa=False):
    assert enable_gqa == (q.shape[1] != k.shape[1])
    return packed_attention(q, k, v, starts_q, starts_k, longest_q, longest_k, window_size[1] == 0, window_size)


def flash_attn_func(q, k, v, *, causal, window_size):
    assert causal == (window_size[1] == 0)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # it takes [B, T, heads, D]
    return F.scaled_dot_product_attention(q, k, v, seen_within(q.shape[2], window_size), enable_gqa=True).transpose(
        1, 2
    )


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    """The kernels of CUDA, by name and signature; and flex_attention's backward pass, which torch closes on a CPU."""
    package = ModuleType("flash_attn")
    package.flash_attn_func, package.flash_attn_varlen_func = flash_attn_func, packed_attention
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    monkeypatch.setattr(attention_backends, "_require_cuda", lambda *_: None)
    monkeypatch.setattr(attention_backends, "_require_backward", lambda *_: None)


def make_model(backend, memory=None, dtype=torch.float64, **options) -> Transformer:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "num_layers": 2, "intermediate_size": 24}
    sizes |= {"num_heads": 4, "num_kv_heads": 2}
    memory = memory and StackMemoryConfig(**memory)
    config = TransformerConfig(**sizes | options, attention=backend.split()[0], memory=memory)
    model = Transformer(config).to(dtype)
    if backend == "varlen of torch 2.11":
        for layer in model.layers:
            kernel, groups, window = layer.attention.attend.args
            assert groups, "the replacement kernel supports grouped queries"
            layer.attention.attend = functools.partial(attention_backends.varlen, kernel, False, window)
    return model


def test_bounds_are_where_documents_begin():
    """A sequence's end is a document's; empty documents at the end make the number of documents a power of two."""
    documents = compute_document_ids(TOKENS, END)
    assert find_document_bounds(documents).tolist() == [0, 3, 5, 6, 9, 10, 18, 18, 18]
    assert find_document_bounds(documents).dtype == torch.int32
    assert find_document_bounds(documents[1:, 1:]).tolist() == [0, 8]
    assert find_document_bounds(documents[:1, :5]).tolist() == [0, 3, 5]


def test_a_batch_brings_its_bounds_along():
    samples = [{"tokens": row.numpy(), "index": 0, "source": 0, "hash": 0} for row in TOKENS]
    batch = collate(samples, END)
    assert torch.equal(batch["document_bounds"], find_document_bounds(batch["documents"]))
    assert "document_bounds" not in collate(samples)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("memory", "given"), [(None, True), (STACK, False)])
def test_documents_in_one_sequence_are_as_if_run_one_by_one(backend, memory, given):
    model = make_model(backend, memory)
    documents = compute_document_ids(TOKENS, END)
    found = find_document_bounds(documents) if given else None
    together = model(TOKENS, documents=documents, document_bounds=found).logits
    for row, numbers, logits in zip(TOKENS, documents, together, strict=True):
        for number in numbers.unique():
            torch.testing.assert_close(logits[numbers == number], model(row[numbers == number][None]).logits[0])
    assert not torch.allclose(together, model(TOKENS).logits), "the documents make no difference: this proves nothing"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("documents", [None, compute_document_ids(TOKENS, END)])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_values_and_gradients_are_sdpa_s(backend, documents, kv_heads):
    results = []
    for name in ("sdpa", backend):
        model = make_model(name, num_kv_heads=kv_heads)
        logits = model(TOKENS, documents=documents).logits
        results.append((logits, torch.autograd.grad(logits.logsumexp(-1).sum(), list(model.parameters()))))
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("documents", [None, compute_document_ids(TOKENS, END)])
@pytest.mark.parametrize("window", [1, 3, 9])
def test_a_window_is_sdpa_s(backend, documents, window):
    wanted = make_model("sdpa", attention_window=window)(TOKENS, documents=documents).logits
    got = make_model(backend, attention_window=window)(TOKENS, documents=documents).logits
    torch.testing.assert_close(got, wanted)
    of_all = make_model("sdpa")(TOKENS, documents=documents).logits
    assert torch.allclose(of_all, wanted) == (window == 9), "only one as long as the sequence makes no difference"


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_may_see_all(backend):
    wanted = make_model("sdpa", causal=False, positional="sinusoidal")(TOKENS).logits
    torch.testing.assert_close(make_model(backend, causal=False, positional="sinusoidal")(TOKENS).logits, wanted)


@pytest.mark.parametrize(
    ("causal", "documents"), [(True, None), (False, None), (True, compute_document_ids(TOKENS, END))]
)
def test_flex_adds_alibi(causal, documents):
    wanted, got = (make_model(b, positional="alibi", causal=causal) for b in ("sdpa", "flex"))
    torch.testing.assert_close(got(TOKENS, documents=documents).logits, wanted(TOKENS, documents=documents).logits)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("chunks", [[1] * 9, [5, 1, 3]])
@torch.no_grad()
def test_cached_logits_equal_those_of_the_whole(backend, chunks):
    model, cache = make_model(backend, STACK).eval(), Cache()
    logits = torch.cat([model(part, cache).logits for part in TOKENS.split(chunks, 1)], 1)
    torch.testing.assert_close(logits, model(TOKENS).logits)
    assert generate(model, TOKENS[:, :3], 4).shape == (2, 7)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("recompute", [True, "selective"])
def test_recomputed_blocks_have_the_same_gradients(backend, recompute):
    model, documents = make_model(backend, STACK), compute_document_ids(TOKENS, END)
    gradients = []
    for model.checkpoint_blocks in (False, recompute):
        loss = model(TOKENS, documents=documents).logits.logsumexp(-1).sum()
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    if recompute == "selective":  # a dispatch mode: the stack is updated by plain torch, not by compiled code
        torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-13)
    else:
        assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


class KernelCalls(TorchDispatchMode):
    """The names of all operators called, flex_attention's among them."""

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls):
        return True  # flex_attention, uncompiled, compiles a little: it stands no other mode

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@torch.library.custom_op("flash_attn::_flash_attn_stand_in", mutates_args=())
def flash_kernel(q: torch.Tensor) -> torch.Tensor:
    return q.clone()


flash_kernel.register_autograd(lambda ctx, gradient: gradient)


@torch.library.custom_op("torch_attn::_varlen_attn_stand_in", mutates_args=())
def varlen_kernel(q: torch.Tensor) -> torch.Tensor:
    return q.clone()


varlen_kernel.register_autograd(lambda ctx, gradient: gradient)


@pytest.mark.parametrize(
    ("backend", "again"), [("flex", True), ("flex", "selective"), ("varlen", "selective"), ("flash_attn", "selective")]
)
def test_selective_recomputation_does_not_compute_attention_twice(backend, again, monkeypatch):
    """The kernels go by names under torch.ops.torch_attn and torch.ops.flash_attn, as these stand-ins do."""
    model = make_model(backend, num_kv_heads=4)
    model.checkpoint_blocks = again
    stand_in = {"varlen": varlen_kernel, "flash_attn": flash_kernel}.get(backend)
    for layer in model.layers if stand_in else []:
        layer.attention.attend = lambda q, *_: stand_in(q)
    with KernelCalls() as calls:
        loss = model(TOKENS).logits.sum()
        forward = len(calls.names)
        loss.backward()
    kernels = [name.startswith(SAVED_OPERATOR_PREFIXES) and "backward" not in name for name in calls.names]
    assert sum(kernels[:forward]) == 2, "one in each layer"
    assert sum(kernels[forward:]) == (2 if again is True else 0)


def test_the_kernel_of_torch_goes_by_the_name_that_is_kept():
    assert torch.nn.attention.varlen
    assert str(torch.ops.torch_attn._varlen_attn.default).startswith(SAVED_OPERATOR_PREFIXES)


@torch.no_grad()
def test_flex_compiles_as_one_graph():
    model, documents = make_model("flex", dtype=torch.float32, num_layers=1), compute_document_ids(TOKENS, END)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(TOKENS, documents=documents).logits, model(TOKENS, documents=documents).logits)


def test_varlen_and_flash_attn_compile_as_one_graph():
    """With bounds given: to find them the GPU would have to be waited for."""
    documents = compute_document_ids(TOKENS, END)

    def kernel(q, k, v, *_, **__):
        return q + (k + v).repeat_interleave(2, 1)

    for backend in ("varlen", "flash_attn"):
        sys.modules["flash_attn"].flash_attn_varlen_func = kernel
        model = make_model(backend, dtype=torch.float32, num_layers=1)
        for layer in model.layers if backend == "varlen" else []:
            layer.attention.attend = functools.partial(attention_backends.varlen, kernel, True, (-1, 0))
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        options = {"documents": documents, "document_bounds": find_document_bounds(documents)}
        torch.testing.assert_close(compiled(TOKENS, **options).logits, model(TOKENS, **options).logits)


def config_of(*overrides: str):
    small = ["model.hidden_size=16", "model.num_layers=1", "model.num_heads=2", "model.num_kv_heads=1"]
    return compose(["quickstart"], [*small, "data.kind=shards", "data.path=none", "data.vocab_size=50", *overrides])


def test_training_hands_the_bounds_on():
    lm = LanguageModeling(config_of("data.document_mask=true", "trainer.precision=32-true"))
    documents = compute_document_ids(TOKENS, END)
    batch = {
        "tokens": TOKENS,
        "index": torch.arange(2),
        "documents": documents,
        "document_bounds": find_document_bounds(documents),
    }
    calls = []
    forward = lm.model.forward
    lm.model.forward = lambda *args, **options: calls.append(options) or forward(*args, **options)
    lm.training_step(batch, 0)
    assert calls[0]["documents"] is documents
    assert calls[0]["document_bounds"] is batch["document_bounds"]


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        (
            ["model.attention=varlen", "trainer.precision=32-true"],
            "varlen requires",
        ),
        (["model.attention=flash_attn", "model.positional=alibi"], "flash_attn does not support positional: alibi"),
        (["model.attention=flex", "trainer.accelerator=cpu"], "flex requires CUDA, found trainer.accelerator cpu"),
        (["model.attention=flash"], "expected one of sdpa, flex, varlen, flash_attn, found 'flash'; did you mean"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_built(overrides, found):
    with pytest.raises(ConfigError, match=r"model\.attention") as error:
        config_of("trainer.precision=bf16-mixed", *overrides)
    assert found in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("backend", ["varlen", "flash_attn"])
def test_without_cuda_one_line_says_so(backend, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = config_of(f"model.attention={backend}", "trainer.precision=bf16-mixed", "trainer.accelerator=auto")
    with pytest.raises(ConfigError, match=rf"^model\.attention={backend} needs a CUDA device, not cpu; set .*=sdpa$"):
        LanguageModeling(config)


def test_without_flash_attn_one_line_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    config = config_of("model.attention=flash_attn", "trainer.precision=bf16-mixed", "trainer.accelerator=cuda")
    with pytest.raises(ConfigError, match=r"^model\.attention=flash_attn needs the package flash-attn \(.*\); pip .*$"):
        LanguageModeling(config)


def test_where_kernels_are_missing_the_model_says_so(monkeypatch):
    monkeypatch.undo()
    for backend in ("varlen", "flash_attn"):
        with pytest.raises(ConfigError, match="needs a CUDA device"):
            make_model(backend)(TOKENS)
    with pytest.raises(ConfigError, match="no backward pass on CPUs"):
        make_model("flex")(TOKENS)


def test_a_plan_needs_no_kernel():
    from stackexp.planning.cost import build_meta_model, make_plan

    config = config_of("model.attention=flash_attn", "trainer.precision=bf16-mixed", "trainer.accelerator=cuda")
    assert build_meta_model(config).config.attention == "sdpa"
    assert (
        make_plan(config).peak == make_plan(config_of("trainer.precision=bf16-mixed", "trainer.accelerator=cuda")).peak
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("backend", ["flex", "varlen", "flash_attn"])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_kernels_on_a_gpu(backend, kv_heads, monkeypatch):
    """In bfloat16, against documents one by one by sdpa in float64; at most twice the error of sdpa in bfloat16."""
    monkeypatch.undo()
    if backend == "flash_attn":
        pytest.importorskip("flash_attn")
    tokens = torch.randint(VOCAB, (4, 200), generator=torch.Generator().manual_seed(1))
    documents = compute_document_ids(tokens, END).cuda()
    options = {"hidden_size": 128, "num_kv_heads": kv_heads}  # heads of 32
    runs = SimpleNamespace()
    for name, dtype in (("exact", torch.float64), ("sdpa", torch.bfloat16), ("ours", torch.bfloat16)):
        model = make_model("sdpa" if name != "ours" else backend, STACK, dtype, **options).cuda()
        logits = model(tokens.cuda(), documents=documents).logits.double()
        gradients = torch.autograd.grad(logits.logsumexp(-1).sum(), list(model.parameters()))
        setattr(runs, name, [logits.detach(), *(g.double() for g in gradients)])
    for ours, theirs, exact in zip(runs.ours, runs.sdpa, runs.exact, strict=True):
        assert (ours - exact).norm() <= 2 * (theirs - exact).norm() + 1e-3 * exact.norm()
