"""`validate --by_position`: the loss at each position of sequences of four training contexts."""

import shutil

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from stackexp.cli import main
from stackexp.evaluation.loading import load_run
from stackexp.files import read_json

CONTEXT, VOCAB = 32, 300  # of the fixture `trained`


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


def write_set(path, length):
    tokens = np.random.default_rng(0).integers(1, VOCAB, length).astype("<u2")
    path.write_bytes(tokens.tobytes())
    return tokens


def test_the_loss_at_each_position_is_that_of_plain_forward_passes(run, tmp_path, invoke):
    tokens = write_set(tmp_path / "long.npy", 11 * CONTEXT)
    write_set(tmp_path / "short.npy", 2 * CONTEXT)
    sets = f"long={tmp_path / 'long.npy'},short={tmp_path / 'short.npy'}"
    printed = invoke("validate --run", run, "--by_position", "--sets", sets)
    assert "skipped, shorter than 128 tokens: short" in printed
    (output,) = run.glob("by_position-long+short-*.json")
    record = read_json(output)
    assert (record["context_length"], record["evaluated_length"], record["step"]) == (CONTEXT, 4 * CONTEXT, 12)
    model = load_run(run, "last").model.eval()
    rows = torch.from_numpy(tokens[: 8 * CONTEXT].astype(np.int64)).view(2, -1)
    with torch.no_grad():
        logits = model(rows).logits[:, :-1]
    expected = F.cross_entropy(logits.transpose(1, 2), rows[:, 1:], reduction="none").mean(0)
    found = record["sets"]["long"]
    assert found["sequences"] == 2
    assert found["losses"] == pytest.approx(expected.tolist(), abs=1e-5)
    assert list(found["ranges"]) == ["1-7", "8-15", "16-31", "32-63", "64-95", "96-127"]
    assert found["ranges"]["96-127"] == pytest.approx(expected[95:].mean().item(), abs=1e-5)
    assert output.with_suffix(".png").stat().st_size > 5000

    first = tmp_path / "first.json"
    options = ("--sets", sets, "--out", str(first), "data.max_chunks=1")
    invoke("validate --run", run, "--by_position", *options)
    found = read_json(first)["sets"]["long"]
    assert found["sequences"] == 1
    assert found["losses"] == pytest.approx(
        F.cross_entropy(logits[0], rows[0, 1:], reduction="none").tolist(), abs=1e-5
    )


def test_other_commands_do_not_take_the_file_for_scores_of_sets(run, tmp_path):
    """It has the losses of V2's sets by position, but no mean loss."""
    write_set(tmp_path / "long.npy", 8 * CONTEXT)
    for checkpoint in ("last", "00000008"):
        path = checkpoint if checkpoint == "last" else str(run / "checkpoints" / checkpoint)
        command = ["validate", "--run", str(run), "--by_position", "--sets", f"long={tmp_path / 'long.npy'}"]
        assert main([*command, "--ckpt_path", path]) == 0
    assert len(list(run.glob("by_position-*.json"))) == 2, "one for each checkpoint"
    assert not list(run.glob("validate*.json")), "reports and model cards read these"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--score-remainder"], "validate: --by_position scores whole sequences only; omit --score-remainder"),
        (["--sets", "short={path}"], "--by_position: no set has 128 tokens (4 x data.context_length)"),
    ],
)
def test_mistakes(trained, options, message, tmp_path, capsys):
    write_set(tmp_path / "short.npy", 2 * CONTEXT)
    given = [option.format(path=tmp_path / "short.npy") for option in options]
    assert main(["validate", "--run", str(trained), *given, "--by_position"]) != 0
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", [("validate",), ("validate", "--by_position"), ("inspect", "--set", "left"), ("generate",)]
)
def test_the_tokenizer_of_the_checkpoint_is_required(run, invoke, command):
    """The environment.json of the run does not record it."""
    tokenizer = run / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + " ")
    (run / "environment.json").write_text("[]")
    error = invoke(*command[:1], "--run", run, *command[1:], expect=1)
    assert f"not the tokenizer that {run}/checkpoints/00000012 was trained with" in error
