"""Planned FLOPs and memory, compared with torch's counters and allocators."""

import json
import re

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from stackexp.config.compose import compose
from stackexp.errors import RunError
from stackexp.models.cross_entropy import NextTokenLoss
from stackexp.modules.optimizers import build_adamw
from stackexp.planning import cost, memory_use
from stackexp.planning.cost import make_plan, suggest_changes
from stackexp.planning.devices import DEVICES, HEADROOM, Device
from stackexp.planning.memory_use import MemoryTracker
from stackexp.stack import use_implementation

SMALL = [
    *("model.hidden_size=64", "model.num_layers=3", "model.num_heads=4", "model.num_kv_heads=2"),
    *("model.intermediate_size=96", "model.vocab_size=500", "data.vocab_size=500", "data.context_length=64"),
    *("data.micro_batch_size=2", "data.global_batch_tokens=1024", "data.eval_batch_size=2"),
]
STACKS = {
    "transformer": ["model.memory=null"],
    "stacktrans": ["model.memory=stacktrans"],
    "queue": ["model.memory=queue"],
    "push_only": ["model.memory=push_only"],
    "full_dim": ["model.memory=full_dim"],
    "authors_code": ["model.memory=authors_code"],
    "time": ["model.memory=stacktrans", "model.memory.axis=time", "model.memory.num_slots=5"],
}


def small(*overrides):
    return compose(["quickstart"], [*SMALL, *overrides])


@pytest.mark.parametrize(("stack", "tied"), [*((stack, "true") for stack in STACKS), ("transformer", "false")])
def test_flops_match_torch_plus_elementwise_stack(stack, tied):
    """torch counts only matrix products; an element of a stack adds 3 or 2 multiply-adds to update and 2 to read."""
    config = small(*STACKS[stack], f"model.tie_embeddings={tied}")
    model = cost.build_meta_model(config).to_empty(device="cpu")
    tokens = torch.zeros(2, 64, dtype=torch.int64)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens).logits.sum().backward()
    elementwise = 0
    if memory := config.model.memory:
        of_time = sum(min(token, memory.num_slots) for token in range(1, 65)) / 64
        slots = [of_time if memory.axis == "time" else layer + 1 for layer in range(3)]
        per_slot = (4 if stack == "push_only" else 5) * memory.num_heads * memory.head_dim
        elementwise = sum(3 * 2 * per_slot * n for n in slots)
    expected = counter.get_total_flops() / tokens.numel() + elementwise
    assert make_plan(config).flops_per_token == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("stack", "precision", "checkpointing"),
    [
        ("transformer", "32-true", "false"),
        ("stacktrans", "bf16-mixed", "true"),
        ("stacktrans", "bf16-true", "false"),
        ("push_only", "32-true", "true"),
        ("authors_code", "bf16-mixed", "false"),
        ("time", "bf16-mixed", "true"),
    ],
)
def test_fake_tensor_memory_matches_real_tensors(stack, precision, checkpointing):
    config = small(
        *STACKS[stack], f"trainer.precision={precision}", f"trainer.activation_checkpointing={checkpointing}"
    )
    real = cost.build_meta_model(config).to_empty(device="cpu")
    mixed = precision == "bf16-mixed"
    length = 16 if stack == "time" else 64
    counted = run_pass(real, length, mixed, fused_norm=True)
    assert memory_use.track_pass(cost.build_meta_model(config), (2, length), mixed, NextTokenLoss()) == counted.peak


@pytest.mark.parametrize(
    ("stack", "checkpointing"), [("stacktrans", "true"), ("full_dim", "false"), ("authors_code", "true")]
)
def test_counted_memory_matches_the_allocator(stack, checkpointing, tmp_path):
    """Run on real tensors; torch's profiler records every allocation, including those inside kernels."""
    config = small(*STACKS[stack], f"trainer.activation_checkpointing={checkpointing}")
    model = cost.build_meta_model(config).to_empty(device="cpu")
    with use_implementation("eager"):  # auto would change with the profiler
        counted = run_pass(model).peak.total()
    for memory in model.memories:
        memory._forward_hooks.clear()
        memory._forward_pre_hooks.clear()
    with use_implementation("eager"), torch.profiler.profile(profile_memory=True) as profiler:
        before = torch.zeros(1)  # an event with the total so far
        loss = memory_use.compute_loss(model, torch.zeros(2, 64, dtype=torch.int64), NextTokenLoss())
        loss.backward()
    del before
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    totals = [event["args"]["Total Allocated"] for event in events if event["name"] == "[memory]"]
    assert counted == pytest.approx(max(totals) - totals[0], rel=1e-4)


def run_pass(model, length=64, mixed=False, fused_norm=False) -> MemoryTracker:
    """Run forward and backward on real tensors, freeing each weight gradient once it is computed."""
    if fused_norm:
        memory_use.fuse_norms(model)
    memory_use.free_gradients(model)
    with MemoryTracker(model) as counted:
        tokens = torch.zeros(2, length, dtype=torch.int64)
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            loss = memory_use.compute_loss(model, tokens, NextTokenLoss())
        loss.backward()
    return counted


@pytest.mark.gpu
@pytest.mark.parametrize("checkpointing", ["true", "false"])
@pytest.mark.parametrize("stack", ["transformer", "stacktrans", "full_dim"])
def test_gpu_memory_matches_the_count(stack, checkpointing):
    sizes = ["model.hidden_size=512", "model.num_heads=8", "model.num_kv_heads=8", "model.intermediate_size=1408"]
    config = small(
        *STACKS[stack], *sizes, "trainer.precision=bf16-mixed", f"trainer.activation_checkpointing={checkpointing}"
    )
    model = cost.build_meta_model(config).to_empty(device="cuda")
    model.init_weights()
    memory_use.free_gradients(model)
    for _ in range(2):  # the first pass initializes cuBLAS
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        tokens = torch.zeros(8, 1024, dtype=torch.int64, device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            loss = memory_use.compute_loss(model, tokens, NextTokenLoss())
        loss.backward()
    with use_implementation("triton"):
        counted = memory_use.track_pass(cost.build_meta_model(config), (8, 1024), True, NextTokenLoss()).total()
    tolerance = 0.1 if stack == "full_dim" else 0.05  # summing the query's gradient takes 34 MB
    assert counted == pytest.approx(torch.cuda.max_memory_allocated() - before, rel=tolerance)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "64-true"])
def test_weight_gradient_and_optimizer_memory_matches_a_real_step(precision):
    config = small(f"trainer.precision={precision}")
    model = cost.build_meta_model(config).to_empty(device="cpu")
    optimizer = build_adamw(config.optimizer, model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    state = sum(value.nbytes for values in optimizer.state.values() for value in values.values())
    training = make_plan(config).training
    assert training.weights == training.gradients == sum(p.nbytes for p in model.parameters())
    assert training.optimizer == state
    assert make_plan(config).checkpoint_bytes == training.weights + state


def test_autocast_counts_a_copy_of_each_matrix():
    training = make_plan(small("model.memory=null", "trainer.precision=bf16-mixed")).training
    matrices = [p for p in cost.build_meta_model(small("model.memory=null")).parameters() if p.ndim == 2]
    assert training.gathered == 2 * sum(p.numel() for p in matrices)
    assert make_plan(small("model.memory=null")).training.gathered == 0


@pytest.mark.process
@pytest.mark.parametrize("axis", ["time", pytest.param("token_major", marks=pytest.mark.slow)])  # 20 s
def test_token_scan_memory_is_extrapolated_from_short_scans(axis, monkeypatch):
    config = small(f"model.memory.axis={axis}", "model.memory.num_slots=3")
    whole = memory_use.measure_pass(config, is_training=True, layers=3, batch=2, length=64)
    monkeypatch.setattr(memory_use, "_pass_cache", {})
    counted = memory_use.measure_peak(config, is_training=True)
    assert {key.split()[-2] for key in memory_use._pass_cache} == {"4", "8"} | (
        {"16"} if axis == "token_major" else set()
    )
    assert counted.total() == pytest.approx(whole.total(), rel=0.01)
    if axis == "time":  # token_major: the samples peak with the logits, the whole pass after them
        assert counted.keys() == whole.keys()
        for kind, size in whole.items():
            assert counted[kind] == pytest.approx(size, rel=0.01, abs=whole.total() * 0.002), kind


def test_strategies_shard_weights_and_optimizer():
    """hsdp shards within a node and fsdp across all nodes; ddp also holds gradient buckets."""
    nodes = ["trainer.devices=4", "trainer.num_nodes=2", "model.vocab_size=512"]
    single, ddp, fsdp, hsdp = (
        make_plan(small(f"trainer.strategy={strategy}", *(nodes if strategy != "single" else nodes[2:]))).training
        for strategy in ("single", "ddp", "fsdp", "hsdp")
    )
    assert ddp.weights == single.weights
    assert ddp.gathered == single.gradients
    assert hsdp.weights == pytest.approx(single.weights / 4, rel=0.02)
    assert fsdp.weights == pytest.approx(single.weights / 8, rel=0.02)
    assert fsdp.optimizer == pytest.approx(single.optimizer / 8, rel=0.02)
    assert fsdp.activations == single.activations
    assert fsdp.gathered == hsdp.gathered > 0


def test_no_reshard_after_forward_keeps_blocks_gathered():
    sharded = ["trainer.strategy=fsdp", "trainer.devices=4", "trainer.precision=bf16-mixed", "model.num_layers=8"]
    resharded, kept = (
        make_plan(small(*sharded, f"trainer.reshard_after_forward={r}")).training for r in ("true", "false")
    )
    model = cost.build_meta_model(small(*sharded))
    memory = sum(p.numel() for p in model.layers[0].memory.parameters())
    block = sum(p.numel() for p in model.layers[0].parameters()) - memory
    assert kept.gathered - resharded.gathered == 7 * 2 * block
    root = model.num_parameters() - 8 * (block + memory)
    assert make_plan(small(*sharded)).validation.gathered >= 4 * (root + 8 * memory) + 2 * 2 * block, "in float32"


def test_recurrent_models_have_no_memories_to_gather():
    sharded = ["trainer.strategy=fsdp", "trainer.devices=4", "trainer.precision=bf16-mixed"]
    assert make_plan(compose(["formal/lstm"], sharded)).training.gathered > 0


def test_ddp_on_one_device_has_buckets_too():
    assert make_plan(small()).training.gathered == 0
    config = small("trainer.strategy=ddp")
    assert make_plan(config).training.gathered == 4 * cost.build_meta_model(config).num_parameters()


def test_the_mask_of_documents_is_counted():
    """At least the mask of each sequence, in float32; kernels other than sdpa need none."""
    base, options = "model.memory=null", "data.document_mask=true"
    plain, masked, flex = (
        make_plan(small(base, *more)).training.activations
        for more in ((), (options,), (options, "model.attention=flex", "trainer.accelerator=cuda"))
    )
    assert masked - plain >= 2 * 64 * 64 * 4
    assert flex == plain


def test_validation_memory_requires_validation_sets(tmp_path):
    wide = "data.eval_batch_size=64", "model.memory=null", "model.hidden_size=16"
    whole = make_plan(small(*wide, "trainer.cross_entropy=whole")).validation
    assert whole.logits == 64 * 64 * 500 * 4 * 3 - 64 * 500 * 4 * 2
    chunked = make_plan(small(*wide, "trainer.cross_entropy_chunk=2048")).validation
    assert chunked.logits == 2048 * 500 * 4 * 2, "logits and log-probabilities"
    shards = compose(["quickstart"], [*SMALL, "data.kind=shards", "data.path=x", "data.vocab_size=500"])
    assert make_plan(shards).validation is None


def test_plan_rejects_value_dependent_memory(monkeypatch):
    from stackexp.models.memories.stack import StackMemory

    project = StackMemory.project
    monkeypatch.setattr(StackMemory, "project", lambda self, h: project(self, h * h.max().item()))
    monkeypatch.setattr(memory_use, "_pass_cache", {})
    with pytest.raises(RunError, match=r"model.memory.kind stack: the forward pass depends on tensor values"):
        _ = make_plan(small()).peak


def plan_on_device(monkeypatch, mib: float, *overrides: str):
    """Return a plan in which every device type has `mib` MiB for tensors."""
    device = Device("H100", 989e12, mib / 1024 / (1 - HEADROOM))
    for name in DEVICES:
        monkeypatch.setitem(DEVICES, name, device)
    return make_plan(small("data.kind=shards", "data.path=x", *overrides))


def test_each_suggested_change_fits(monkeypatch):
    wide = ["data.micro_batch_size=4", "trainer.devices=2"]
    planned = plan_on_device(monkeypatch, 6, *wide)
    assert not planned.fits
    text = suggest_changes(planned)
    assert text.startswith("any of these would fit: trainer.activation_checkpointing=true (4.78 MiB), ")
    settings = re.findall(r"[a-z_]+\.[a-z_]+=\w+", text)
    assert settings == ["trainer.activation_checkpointing=true", "data.micro_batch_size=2"]
    assert all(plan_on_device(monkeypatch, 6, *wide, setting).fits for setting in settings)


def test_suggests_only_valid_changes(monkeypatch):
    tight = plan_on_device(monkeypatch, 2.1, "data.micro_batch_size=4").peak / 2**20 - 0.1
    assert "fsdp" in suggest_changes(plan_on_device(monkeypatch, tight, "trainer.devices=2", "data.micro_batch_size=4"))
    muon = plan_on_device(monkeypatch, tight, "trainer.devices=2", "data.micro_batch_size=4", "optimizer=muon")
    assert "fsdp" not in suggest_changes(muon)
    double = plan_on_device(monkeypatch, tight, "data.micro_batch_size=4", "trainer.precision=64-true")
    assert not double.fits
    assert "fsdp" not in suggest_changes(double), "64-true requires one device or ddp"


def test_suggests_a_larger_device_or_more_nodes_or_nothing(monkeypatch):
    planned = plan_on_device(monkeypatch, 5)
    monkeypatch.setitem(DEVICES, "h200", Device("H200", 989e12, 1.0))
    assert "--device h200 (962.56 MiB usable)" in suggest_changes(planned)
    text = suggest_changes(plan_on_device(monkeypatch, 0.5))
    assert text.endswith(" MiB; use a smaller model, a shorter data.context_length or larger devices")
    sharded = ["trainer.strategy=fsdp", "trainer.devices=2", "data.global_batch_tokens=2048"]
    peak = make_plan(small("data.kind=shards", "data.path=x", *sharded)).peak / 2**20
    assert "trainer.num_nodes=2" in suggest_changes(plan_on_device(monkeypatch, peak - 0.1, *sharded))
