"""The command line of `data prepare`."""

import os

import numpy as np
from corpora import write_many

from stackexp.cli import main
from stackexp.data.shards import TokenSet


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
