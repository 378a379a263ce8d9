"""Sharded initialization: the same weights as one process, and no process ever holds the full model."""

from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import torch
from forks import Forks
from torch import distributed
from torch.distributed.tensor import DTensor

from stackexp.config.compose import compose
from stackexp.modules.language_modeling import LanguageModeling

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
MODELS |= {kind: [f"model.kind={kind}", *RECURRENT] for kind in ("lstm", "stack_rnn")}


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


def test_sharded_weights_equal_those_of_one_process(tmp_path):
    equal = Forks(tmp_path).run(MODELS, ranks=2, function=compare_weights).splitlines()
    assert set(equal) >= {f"{strategy} {name}" for strategy in ("fsdp", "hsdp") for name in MODELS}


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


def test_no_process_holds_the_full_model(tmp_path):
    """Each of two processes holds half of it, and one more weight at a time."""
    forks = Forks(tmp_path)
    (alone,) = forks.run([], function=measure_memory).splitlines()
    both = forks.run([*TWO, "trainer.strategy=fsdp"], ranks=2, function=measure_memory).splitlines()
    size, peak = map(int, alone.split())
    assert size <= peak, "the measurement detects a whole model"
    assert len(both) == 2
    for line in both:
        sharded_size, peak = map(int, line.split())
        assert sharded_size == size
        assert 0.5 * size < peak < 0.75 * size
