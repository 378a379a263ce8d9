"""Two-digit problems as text: the split, the batches, accuracy, exact resume, and the report of actions."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from language_runs import finish, write_run
from records import losses, only_run
from safetensors.torch import save_file

from stackexp import runs
from stackexp.config.compose import compose
from stackexp.config.data import ArithmeticConfig
from stackexp.datamodules.arithmetic import ArithmeticData, build_tokenizer, split_problems
from stackexp.datamodules.base import PADDING
from stackexp.errors import ConfigError
from stackexp.evaluation.loading import load_run
from stackexp.models.generation import generate
from stackexp.training.objectives import build_objective

SMALL = (
    *("model.hidden_size=32", "model.num_layers=3", "model.num_heads=2", "model.num_kv_heads=2"),
    *("model.intermediate_size=64", "schedule.warmup_steps=0", "trainer.accelerator=cpu", "name=tiny"),
)


def decode(problems: np.ndarray) -> list[str]:
    tokenizer = build_tokenizer()
    return [tokenizer.decode(row.tolist(), skip_special_tokens=True) for row in problems]


@pytest.mark.parametrize(("operation", "symbol"), [("addition", "+"), ("multiplication", "*")])
def test_problems_are_right_and_split_once(operation, symbol):
    config = ArithmeticConfig(operation=operation)
    training, held_out = split_problems(config)
    assert (len(training), len(held_out)) == (7290, 810)
    trained = {frozenset(text.split("=")[0].split(symbol)) for text in decode(training)}
    assert not [text for text in decode(held_out) if frozenset(text.split("=")[0].split(symbol)) in trained]
    problems = np.concatenate([training, held_out])
    texts = decode(problems)
    assert len(set(texts)) == 8100
    assert [*build_tokenizer().encode(texts[0]).ids, 13] == problems[0].tolist()[: len(texts[0]) + 1]
    for text in texts:
        problem, answer = text.split("=")
        assert 10 <= min(map(int, problem.split(symbol))) <= max(map(int, problem.split(symbol))) <= 99
        assert eval(problem) == int(answer)
    swapped = split_problems(ArithmeticConfig(operation=operation, reversed_answers=True))[1]
    pairs = zip(decode(held_out), decode(swapped), strict=True)
    assert all(text.split("=")[1] == other.split("=")[1][::-1] for text, other in pairs)
    other = split_problems(ArithmeticConfig(operation=operation, split_seed=1))[1]
    assert set(decode(other)) != set(decode(held_out))


class Trainer:
    accumulate_grad_batches = 1

    def __init__(self, step: int, rank: int = 0, world_size: int = 1):
        self.global_step, self.global_rank, self.world_size = step, rank, world_size


def first_batch(seed: int, trainer: Trainer) -> dict[str, torch.Tensor]:
    data = ArithmeticData(ArithmeticConfig(batch_size=8), seed)
    data.trainer = trainer
    return next(iter(data.train_dataloader()))


def test_training_batches_depend_on_seed_and_step_and_are_split_over_ranks():
    batch = first_batch(0, Trainer(5))
    assert torch.equal(batch["tokens"], first_batch(0, Trainer(5))["tokens"])
    assert not torch.equal(batch["tokens"], first_batch(0, Trainer(6))["tokens"])
    assert not torch.equal(batch["tokens"], first_batch(1, Trainer(5))["tokens"])
    halves = [first_batch(0, Trainer(5, rank, 2))["index"] for rank in range(2)]
    assert torch.equal(torch.stack(halves, 1).flatten(), batch["index"])
    assert torch.equal(batch["tokens"][:, -2:], batch["targets"][:, :-1]), "the answer is read up to its last symbol"


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_problem_is_scored_once(world_size):
    data = ArithmeticData(ArithmeticConfig(eval_batch_size=100))
    (dataset,) = data.sets("validate")
    loaders = [data.build_eval_loader(dataset, rank, world_size) for rank in range(world_size)]
    index = torch.cat([batch["index"] for loader in loaders for batch in loader])
    assert sorted(index[index != PADDING].tolist()) == list(range(810))


def test_mistakes_are_one_line():
    data = ArithmeticData(ArithmeticConfig())
    with pytest.raises(ConfigError, match="--sets: no set 'v2'; the only set of arithmetic is held-out"):
        data.select_sets("validate", ["v2"])
    with pytest.raises(ConfigError, match="test: arithmetic has no test set; use `validate`"):
        data.sets("test")
    for override, message in {
        "data.operation=division": "data.operation: expected one of addition, multiplication",
        "data.batch_size=7 trainer.devices=2": "data.batch_size: 7 is not a multiple of",
        "model.causal=false": "model.causal: arithmetic requires model.causal: true",
        "model.vocab_size=13": "model.vocab_size: 13 is smaller than data.vocab_size 14",
    }.items():
        with pytest.raises(ConfigError, match=message):
            compose(["arithmetic/addition"], override.split())


@pytest.mark.process
def test_a_run_resumes_exactly_and_its_accuracy_is_that_of_generation(forks, tmp_path, monkeypatch, invoke):
    steps = ("trainer.max_steps=60", "trainer.val_check_interval=60", "trainer.checkpoint_interval=30")
    printed = forks.run("fit", "--config", "arithmetic/addition", *SMALL, *steps, "optimizer.lr=1e-2")
    assert "held-out       810" in printed
    run = only_run(tmp_path / "runs")
    result = json.loads(run.result.read_text())
    assert result["held_out_accuracy"] == result["sets"]["held-out"]["accuracy"] > 0.005

    loaded = load_run(run.path)
    problems = torch.from_numpy(split_problems(loaded.config.data)[1])
    answers = generate(loaded.model, problems[:, :6], 3, temperature=0.0)[:, 6:]
    is_right = (answers == problems[:, 6:]).all(1).double().mean().item()
    assert is_right == pytest.approx(result["held_out_accuracy"], abs=1e-12)

    forks.run("validate", "--run", run.path)
    assert json.loads((run.path / "validate.json").read_text())["sets"] == result["sets"]

    run.result.unlink()
    shutil.rmtree(run.path / "checkpoints" / "00000060")
    before = losses(run)
    forks.run("fit", "--run", run.path)
    assert losses(run) == before
    assert json.loads(run.result.read_text())["sets"] == result["sets"]

    monkeypatch.chdir(tmp_path)
    outputs = ("--figure", "actions.png", "--csv", "actions.csv")
    printed = invoke("report actions runs --chunks 16", *outputs)
    assert "tiny: measured on held-out" in printed
    assert len(Path("actions.csv").read_text().splitlines()) == 1 + 3
    assert Path("actions.png").read_bytes().startswith(b"\x89PNG")
    assert invoke("generate --run", run.path, "--prompt", "37+58=", "--max_new_tokens", "3").startswith("37+58=")
    error = invoke("report actions nowhere", expect=1)
    assert error == ("error: nowhere: no such folder; give run folders or folders of them")


def test_the_report_of_actions_needs_a_stack(empty_folder, invoke):
    for name in ("a", "b"):
        finish(write_run(Path("plain", name), "model.memory=value_skip"), loss=3.0)
    assert "without a stack: plain/b; give finished runs with" in invoke("report actions plain", expect=1)
    finish(write_run(Path("plain", "c"), "model.memory=stacktrans"), loss=3.0)
    error = invoke("report actions plain", expect=1)
    assert re.search("plain: skipped plain/c: .*checkpoint.*", error)
    assert "give finished runs" not in error
    write_run(Path("started", "d"), "model.memory=stacktrans")
    assert "`python -m stackexp fit --run RUN` resumes one: started/d;" in invoke("report actions started", expect=1)


def test_inspect_accepts_the_symbols_and_the_set_of_arithmetic(tmp_path, invoke):
    config = compose(["arithmetic/addition"], [*SMALL, f"logging.root={tmp_path}"])
    run = runs.allocate_run(config)
    with run.start_session(config):
        save_file(dict(build_objective(config).build_module().model.state_dict()), run.path / "weights.safetensors")
    build_tokenizer().save(str(run.tokenizer))
    inspect = ["inspect", "--run", str(run.path), "--ckpt_path", str(run.path / "weights.safetensors")]
    for option, value, message in (
        ("--text", "37+58=ab", "inspect: --text: the model has no symbol 'a'; use 0-9 + * ="),
        ("--text", "37+58=95<|endoftext|>", "inspect: --text: the model has no symbol '<'; use 0-9 + * ="),
        ("--set", "foo", "--set: no set 'foo'; the only set of arithmetic is held-out"),
    ):
        assert invoke(*inspect, option, value, expect=2) == f"error: {message}"
    generate = ["generate", *inspect[1:], "--max_new_tokens", "3", "--prompt"]
    error = invoke(*generate, "37 + 58 =", expect=2)
    assert error == "error: generate: the text: the model has no symbol ' '; use 0-9 + * ="
    invoke(*generate, "37+58=")
    error = invoke("validate --run", run.path, "--score-remainder", expect=2)
    assert "--score-remainder requires a run on text" in error
    invoke(*inspect, "--text", "37+58=95")
    assert "reads dropped" in invoke(*inspect, "--set", "held-out", "--chunks", "4")
