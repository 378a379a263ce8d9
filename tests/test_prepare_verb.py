"""The command line of `data prepare`."""

import os

import numpy as np
import pytest
from corpora import write_many

from stackexp.cli import main
from stackexp.data.shards import TokenSet


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("a", "expected SOURCE --to FOLDER"),
        ("a --to b", "give either --tokenizer FILE, or --vocab-size N"),
        ("a --to b --vocab-size 3", "--vocab-size: expected an integer >= 300, found 3"),
        ("a --config quickstart", "takes neither SOURCE nor --to"),
        ("--config formal/quick", "has no corpus of its own"),
        ("a --to b --vocab-size 300 --part 3/2", "--part: expected I/N with 1 <= I <= N, such as 3/64, found 3/2"),
        ("a --to b --vocab-size 300 --tasks 2", "--tasks requires --launcher slurm"),
        ("a --to b --vocab-size 300 --launcher slurm", "--launcher slurm requires --tasks N"),
        ("a --to b --vocab-size 300 --launcher slurm --tasks 2 --part 1/2", "--part and --launcher slurm exclude"),
    ],
)
def test_errors_are_one_line(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["data", "prepare", *arguments.split()]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: data prepare: ")
    assert message in line
    assert not list(tmp_path.iterdir())


def test_part_prints_the_next_step(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("RAYON_NUM_THREADS", "to be restored")
    monkeypatch.delenv("RAYON_NUM_THREADS")
    source = write_many(tmp_path / "source", 1)
    command = ["data", "prepare", str(source), "--to", str(tmp_path / "set"), "--vocab-size", "300", "--workers", "1"]
    command += ["--context-length", "64"]
    assert main([*command, "--part", "1/1"]) == 0
    assert capsys.readouterr().out.endswith(
        "part 1 of 1 is done; after the last part, run the command without --part\n"
    )
    assert main(command) == 0
    assert os.environ["RAYON_NUM_THREADS"] == "1", "the threads of the tokenizers library"
    assert np.array(TokenSet(tmp_path / "set")[0]).shape == (64,)
