"""Sharded initialization, and training with every strategy: the same as in one process."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import small_models
import torch
from records import assert_close, losses, only_run
from small_models import MEMORIES, make_tokens
from torch import distributed
from torch.distributed.tensor import DTensor

from stackexp.config.compose import compose
from stackexp.config.trainer import TrainerConfig
from stackexp.models.sharding import build_mesh, shard_model
from stackexp.modules.language_modeling import LanguageModeling
from stackexp.modules.metrics import StepMetrics
from stackexp.runs import RunFolder

PLUGIN = Path(__file__).with_name("linear_memory.py")
SMALL = ["hidden_size=32", "num_layers=3", "intermediate_size=40", "num_heads=2", "num_kv_heads=1", "vocab_size=301"]
SMALL = [f"model.{option}" for option in SMALL] + ["data.vocab_size=301", "seed=7"]
LARGE = ["hidden_size=512", "num_layers=12", "intermediate_size=512", "num_heads=8", "num_kv_heads=8", "vocab_size=512"]
LARGE = [f"model.{option}" for option in LARGE] + ["data.vocab_size=512"]
TWO = ["trainer.devices=2", "data.micro_batch_size=2"]
FEEDBACK = ["model.memory.axis=time", "model.memory.feedback=true"]
MODELS = {
    "stack": [],
    "stack-over-time": FEEDBACK,
    "hidden-feedback": [*FEEDBACK, "model.memory.feedback_activation=gated", "model.memory.feedback_hidden_size=10"],
    "plain": ["model.memory=null"],
    "untied-head": ["model.tie_embeddings=false", "model.init=normal"],
    "authors-code": ["model.memory.projection=shared_slices"],
    "plugin": [f"plugins=[{PLUGIN}]", "model.memory=null", "model.memory.kind=linear_memory"],
}
MODELS = {name: [*SMALL, *options] for name, options in MODELS.items()}
RECURRENT = ["model.hidden_size=32", "model.num_layers=3", "model.vocab_size=301", "data.vocab_size=301", "seed=7"]
MODELS |= {kind: [f"model.kind={kind}", *RECURRENT] for kind in ("lstm", "stack_rnn", "delta_net")}


def build(*overrides: str) -> LanguageModeling:
    """Build the module as `fit` has it at the start of training, sharded if `trainer.strategy` is."""
    config = compose(["quickstart"], overrides)
    pl.seed_everything(config.seed, verbose=False)
    module = LanguageModeling(config)
    if config.trainer.is_sharded:
        assert all(parameter.is_meta for parameter in module.parameters())
        module.trainer = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("cpu")))
    module.configure_model()
    return module


def compare_weights(options: dict[str, list[str]]) -> int:
    """Compare every model with its sharded copy, in each of two processes; print those that are equal."""
    distributed.init_process_group("gloo")
    for name, overrides in options.items():
        one = dict(build(*overrides).named_parameters())
        for strategy in ("fsdp", "hsdp"):
            two = dict(build(*overrides, *TWO, f"trainer.strategy={strategy}").named_parameters())
            whole = {key: weight.full_tensor() for key, weight in two.items() if isinstance(weight, DTensor)}
            is_equal = one.keys() == whole.keys() and all(torch.equal(whole[key], one[key]) for key in one)
            if is_equal and distributed.get_rank() == 0:
                print(f"{strategy} {name}")
    distributed.destroy_process_group()
    return 0


def test_sharded_weights_equal_those_of_one_process(forks):
    equal = forks.run(MODELS, ranks=2, function=compare_weights).splitlines()
    assert set(equal) >= {f"{strategy} {name}" for strategy in ("fsdp", "hsdp") for name in MODELS}


def compare_forwards(names: list[str]) -> int:
    """Compare logits and statistics of every memory with those of its sharded copy; print those that are equal.

    Scalars, such as gates, are changed by less than the precision of bfloat16.
    """
    distributed.init_process_group("gloo")
    for precision, name in product(("32-true", "bf16-mixed"), names):
        models = [small_models.make_model(MEMORIES[name], torch.float32, num_layers=2).eval() for _ in range(2)]
        for parameter in (p for model in models for memory in model.memories for p in memory.parameters()):
            parameter.data.mul_(1 + 1e-3 * (parameter.ndim < 2))
        trainer = TrainerConfig(strategy="fsdp", precision=precision, devices=2)
        shard_model(models[1], build_mesh("cpu", trainer), trainer)
        found = []
        for model in models:
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
                output = model(make_tokens(), probe=True)
            metrics = StepMetrics()
            for i, probe in enumerate(output.probes):
                for key, value in probe.items():
                    metrics.add(f"{i}/{key}", value)
            found.append((output.logits, metrics.drain()))
        (logits, expected), (other, statistics) = found
        is_equal = torch.allclose(logits, other, rtol=0, atol=1e-6) and statistics == pytest.approx(expected)
        if is_equal and distributed.get_rank() == 0:
            print(f"{precision} {name}")
    distributed.destroy_process_group()
    return 0


def test_sharded_memories_compute_what_one_process_computes(forks):
    equal = forks.run(list(MEMORIES), ranks=2, function=compare_forwards).splitlines()
    assert set(equal) >= {f"{precision} {name}" for precision in ("32-true", "bf16-mixed") for name in MEMORIES}


def measure_memory(overrides: list[str]) -> int:
    """Print the size of the model in bytes, and the peak growth of the process while building it."""
    if "trainer.strategy=fsdp" in overrides:
        distributed.init_process_group("gloo")
    build(*SMALL, *overrides)  # imports everything first
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = read_peak_memory()
    module = build(*LARGE, *overrides)
    size = sum(p.numel() * p.element_size() for p in module.parameters())
    print(f"{size} {read_peak_memory() - before}")
    if distributed.is_initialized():
        distributed.destroy_process_group()
    return 0


def read_peak_memory() -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return 1024 * int(line.split()[1])


def test_no_process_holds_the_full_model(forks):
    """Each of two processes holds half of it, and one more weight at a time."""
    (alone,) = forks.run([], function=measure_memory).splitlines()
    both = forks.run([*TWO, "trainer.strategy=fsdp"], ranks=2, function=measure_memory).splitlines()
    size, peak = map(int, alone.split())
    assert size <= peak, "the measurement detects a whole model"
    assert len(both) == 2
    for line in both:
        sharded_size, peak = map(int, line.split())
        assert sharded_size == size
        assert 0.5 * size < peak < 0.75 * size


STEPS = ("trainer.max_steps=20", "trainer.val_check_interval=10", "trainer.checkpoint_interval=20")
CLIPPED = "trainer.gradient_clip_val=0.3"
QUIET = ("logging.progress_bar=false",)
TWO = ("trainer.devices=2", "data.micro_batch_size=2")  # two micro-batches per step, as in one process
TWO_NODES = ("trainer.num_nodes=2", "data.micro_batch_size=2")
STRATEGIES = {
    "ddp": ("trainer.strategy=ddp", *TWO),
    "fsdp": ("trainer.strategy=fsdp", *TWO),
    "hsdp-inside": ("trainer.strategy=hsdp", *TWO),  # mesh (1, 2): sharded
    "hsdp-across": ("trainer.strategy=hsdp", *TWO_NODES),  # mesh (2, 1): replicated
}
CHEAPER = ("trainer.reshard_after_forward=false", "trainer.activation_checkpointing=true")


@pytest.fixture
def train(tiny, forks, tmp_path) -> Callable[..., RunFolder]:
    """Run `fit` with a name, in as many processes as the options require, and return the run folder."""

    def fit(name: str, *options: str) -> RunFolder:
        nodes = 2 if "trainer.num_nodes=2" in options else 1
        ranks = 2 if "trainer.devices=2" in options else nodes
        command = ("fit", "--config", tiny, *STEPS, CLIPPED, *QUIET, f"name={name}", *options)
        forks.run(*command, ranks=ranks, nodes=nodes)
        return only_run(tmp_path / "runs", name)

    return fit


def norms(run: RunFolder) -> list[float]:
    return [line["train/grad_norm"] for line in run.read_metrics() if "train/grad_norm" in line]


@pytest.mark.process
def test_two_processes_train_like_one(train):
    one = train("one")
    assert min(norms(one)) > 0.3, "every gradient is clipped"
    for strategy, options in STRATEGIES.items():
        assert_close(train(strategy, *options), one)
    assert_close(train("cheaper", *STRATEGIES["fsdp"], *CHEAPER), one)


@pytest.mark.slow
def test_two_processes_train_a_transformer_without_memory_like_one(train):
    one = train("one", "model.memory=null")
    for strategy in ("ddp", "fsdp", "hsdp-across"):
        assert_close(train(strategy, "model.memory=null", *STRATEGIES[strategy]), one)


@pytest.mark.process
def test_bfloat16_matches_one_process_within_rounding(train):
    """FSDP computes a block's gradients from bfloat16 weights; one process casts each weight by itself."""
    full, bf16 = train("full"), "trainer.precision=bf16-mixed"
    one, two = train("one", bf16), train("two", bf16, *STRATEGIES["fsdp"])
    assert losses(two) != pytest.approx(losses(full), abs=1e-5, rel=0), "the run is in bfloat16"
    assert losses(two) == pytest.approx(losses(one), abs=3e-3, rel=0)
    assert norms(two) == pytest.approx(norms(one), abs=1e-2, rel=0)
