"""The command `python -m stackexp plan`: tables, JSON and errors."""

import pytest
from test_cost import STACKS, small

from stackexp.config.compose import compose
from stackexp.config.layers import list_config_names
from stackexp.planning import memory_use
from stackexp.planning.cost import make_plan, suggest_changes
from stackexp.planning.devices import DEVICES, HEADROOM, Device

ON_CPU = "trainer.accelerator=cpu"
TINY = ["--config", "quickstart", "model.num_layers=2", "data.context_length=64", "data.micro_batch_size=2"]


def test_plan_prints_size_time_and_memory(invoke):
    output = invoke("plan", *TINY, "trainer.devices=2", "--device", "h200", "--mfu", "0.5")
    planned = make_plan(compose(TINY[1:2], [*TINY[2:], "trainer.devices=2"]), "h200", 0.5)
    for text in (
        "quickstart on 2 h200, ddp, 32-true",
        f"{planned.parameters:,}, including {planned.memory_parameters:,} of the memory",
        "4 micro-batches of 2 x 64 tokens on each device",
        "not estimated on CPUs",
        f"{planned.training.logits / 2**20:,.2f} MiB",
        *("\nweights", "\nactivations", "\nstack", "\nlogits", "validation"),
    ):
        assert text in output


def test_speed_is_estimated_for_large_models_on_gpus():
    large = make_plan(compose(["pretrain/stacktrans-360m"]))
    devices = large.config.trainer.world_size
    assert large.hours == pytest.approx(large.flops / (0.4 * 989.4e12 * devices) / 3600, rel=0.01)
    assert large.gpu_hours == large.hours * devices
    others = [ON_CPU, "trainer.precision=32-true", "model.memory.axis=time", "model.memory.axis=token_major"]
    for config, override in (
        ("quickstart", "trainer.accelerator=auto"),
        *(("pretrain/stacktrans-360m", o) for o in others),
    ):
        plan = make_plan(compose([config], [override]))
        assert (plan.tokens_per_second, plan.hours, plan.gpu_hours) == (None, None, None)


def test_out_of_memory_is_one_line_after_the_table(capture, monkeypatch):
    monkeypatch.setitem(DEVICES, "a100", Device("A100", 312e12, 0.01))
    output, error = capture("plan", *TINY, "--device", "a100", expect=1)
    assert "memory per rank" in output
    assert "exceeds the usable 9.63 MiB by " in error
    assert (error.startswith("error: plan: "), "--device h200" in error, error.count("\n")) == (True, True, 1)


LARGE = [name for name in list_config_names() if name.startswith(("pretrain/", "ablation/"))]
LARGE.remove("ablation/small")  # its batch of 4,096 tokens is for one device


@pytest.mark.slow  # 15 plans
@pytest.mark.parametrize("name", LARGE)
def test_large_configs_fit_on_eight_80_gb_devices(name, invoke):
    assert "peak, of 74.35 GiB usable" in invoke("plan trainer=fsdp --config", name), "the exit code is 0: it fits"


def test_formal_language_plan_uses_actual_string_lengths(invoke):
    """Token counts use the mean length and memory uses the maximum length. A batch spans all devices."""
    steps = ["data.batch_size=128", "trainer.max_steps=10", "schedule.warmup_steps=0", "data.max_length=9"]
    one = compose(["formal/transformer"], [*steps, "data.task=duplicate_string"])
    assert (one.data.context_length, one.data.global_batch_tokens) == (27, 128 * 15)
    root = compose(["formal/transformer"], [*steps, "data.task=compute_sqrt", "data.max_length=3"])
    assert (root.data.context_length, root.total_tokens) == (5, 10 * round(128 * (2 + 3 + 5) / 3))
    addition = compose(["formal/transformer"], [*steps, "data.task=binary_addition"])
    assert addition.data.global_batch_tokens == 128 * (6 + 7), "strings have at least 3 symbols"
    two = compose(["formal/transformer"], [*steps, "data.task=duplicate_string", "trainer.devices=2"])
    assert make_plan(two).training.activations == pytest.approx(make_plan(one).training.activations / 2, rel=0.1)
    assert two.accumulate_grad_batches == one.accumulate_grad_batches == 1
    output = invoke("plan --config formal/transformer", *steps, "trainer.devices=2")
    assert "10 of about 1,280 tokens, 12,800 in total" in output


@pytest.mark.parametrize(("model", "largest_ratio"), [("transformer", 1), ("stacktrans", 2)])
def test_the_memory_of_evaluation_is_that_of_the_longest_test_strings(model, largest_ratio):
    options = ["trainer.accelerator=cpu", "model.num_layers=3", "data.task=reverse_string", "data.max_length=10"]
    options += ["data.validation_max_length=12", "data.eval_max_length=20", "data.eval_sequences=16"]
    if model == "stacktrans":
        options += ["model.memory.num_slots=4", "model.memory.eval_num_slots=16"]
    config = compose([f"formal/{model}"], options)
    counted = memory_use.measure_peak(config, is_training=False)
    expected = memory_use.measure_pass(config, is_training=False, layers=3, batch=16, length=2 * 20)
    assert counted["stack"] == pytest.approx(expected["stack"], rel=0.01)
    assert expected["activations"] <= counted["activations"] <= largest_ratio * expected["activations"]
    assert make_plan(config).validation.stack == counted["stack"]


def test_suggests_no_smaller_batch_that_changes_the_training(monkeypatch):
    config = compose(["formal/transformer"], ["data.batch_size=32", "data.eval_batch_size=1"])
    usable = make_plan(config).training.peak - 1
    monkeypatch.setitem(DEVICES, "h100", Device("H100", 989e12, usable / (1 - HEADROOM) / 2**30))
    text = suggest_changes(make_plan(config))
    assert text.startswith("any of these would fit: trainer.activation_checkpointing=true (")
    assert "data.batch_size" not in text


@pytest.mark.parametrize("name", ["stacktrans", "full_dim", "queue"])
def test_on_cuda_the_tensors_of_the_triton_step_are_counted(name):
    """The kernel saves its inputs and the states before every few layers; eager saves every state."""
    planned = {
        accelerator: memory_use.measure_peak(small(*STACKS[name], f"trainer.accelerator={accelerator}"), True)
        for accelerator in ("cpu", "cuda", "auto")
    }
    assert planned["auto"] == planned["cuda"], "a plan is for GPUs unless the config asks for the CPU"
    assert planned["cuda"]["stack"] < planned["cpu"]["stack"]
    assert planned["cuda"]["logits"] == planned["cpu"]["logits"]
