"""Training with every strategy matches one process within rounding, with and without a memory."""

from collections.abc import Callable

import pytest
from forks import Forks
from records import assert_close, losses, only_run

from stackexp.runs import RunFolder

STEPS = ("trainer.max_steps=20", "trainer.val_check_interval=10", "trainer.checkpoint_interval=20")
CLIPPED = "trainer.gradient_clip_val=0.3"
CHEAP = ("data.eval_batch_size=64", "logging.loggers=[]", "logging.progress_bar=false")
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
def train(tiny, tmp_path) -> Callable[..., RunFolder]:
    """Run `fit` with a name, in as many processes as the options require, and return the run folder."""
    forks = Forks(tmp_path)

    def fit(name: str, *options: str) -> RunFolder:
        nodes = 2 if "trainer.num_nodes=2" in options else 1
        ranks = 2 if "trainer.devices=2" in options else nodes
        command = ("fit", "--config", tiny, *STEPS, CLIPPED, *CHEAP, f"name={name}", *options)
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
