"""A sharded model begins with the weights one process would have drawn, and is never whole anywhere."""

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
MODELS = {
    "stack": [],
    "stack-over-time": ["model.memory.axis=time", "model.memory.feedback=true"],
    "hidden-feedback": [
        "model.memory.axis=time",
        "model.memory.feedback=true",
        "model.memory.feedback_activation=gated",
        "model.memory.feedback_hidden_size=10",
    ],
    "plain": ["model.memory=null"],
    "untied-head": ["model.tie_embeddings=false", "model.init=normal"],
    "authors-code": ["model.memory.projection=shared_slices"],
    "plugin": [f"plugins=[{PLUGIN}]", "model.memory=null", "model.memory.kind=linear_memory"],
}


def build(*overrides: str) -> LanguageModeling:
    """The module as `fit` has it when training begins; `trainer.strategy` of the overrides is set up."""
    config = compose(["quickstart"], overrides)
    pl.seed_everything(config.seed, verbose=False)
    module = LanguageModeling(config)
    if config.trainer.sharded:
        assert all(parameter.is_meta for parameter in module.parameters())
        module.trainer = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("cpu")))
    module.configure_model()
    return module


def compare_weights(options: dict[str, list[str]]) -> int:
    """In each of two processes, for fsdp and hsdp; the first prints which models were equal, weight by weight."""
    distributed.init_process_group("gloo")
    for name, overrides in options.items():
        one = dict(build(*SMALL, *overrides).named_parameters())
        for strategy in ("fsdp", "hsdp"):
            two = dict(build(*SMALL, *overrides, *TWO, f"trainer.strategy={strategy}").named_parameters())
            whole = {key: weight.full_tensor() for key, weight in two.items() if isinstance(weight, DTensor)}
            equal = one.keys() == whole.keys() and all(torch.equal(whole[key], one[key]) for key in one)
            if equal and distributed.get_rank() == 0:
                print(f"{strategy} {name}")
    distributed.destroy_process_group()
    return 0


def test_weights_are_those_of_one_process(tmp_path):
    equal = Forks(tmp_path).run(MODELS, ranks=2, function=compare_weights).splitlines()
    assert set(equal) >= {f"{strategy} {name}" for strategy in ("fsdp", "hsdp") for name in MODELS}


def measure(overrides: list[str]) -> int:
    """Print the bytes of the model, and by how much the process has grown at most while it was built."""
    if "trainer.strategy=fsdp" in overrides:
        distributed.init_process_group("gloo")
    build(*SMALL, *overrides)  # what is imported on the way counts as well
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = peak_memory()
    module = build(*LARGE, *overrides)
    size = sum(p.numel() * p.element_size() for p in module.parameters())
    print(f"{size} {peak_memory() - before}")
    if distributed.is_initialized():
        distributed.destroy_process_group()
    return 0


def peak_memory() -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return 1024 * int(line.split()[1])


def test_no_process_ever_holds_the_whole_model(tmp_path):
    """Half of it, and one weight more at a time."""
    forks = Forks(tmp_path)
    (alone,) = forks.run([], function=measure).splitlines()
    each = forks.run([*TWO, "trainer.strategy=fsdp"], ranks=2, function=measure).splitlines()
    size, peak = map(int, alone.split())
    assert size <= peak, "the measure sees a whole model"
    assert len(each) == 2
    for line in each:
        sharded_size, peak = map(int, line.split())
        assert sharded_size == size
        assert 0.5 * size < peak < 0.75 * size
