"""Unusable evaluation sets: one error line that names the file."""

import gzip
import logging
from pathlib import Path

import numpy as np
import pytest
from evaluation_files import IDS, T, V, make_json_lines, open_one, read_tokens, write_raw
from test_retokenize import NEOX

from stackexp.data.evaluation_sets import find_sets
from stackexp.data.olmo import NAMES
from stackexp.data.token_files import write_token_file
from stackexp.data.tokenizer import KnownTokenizer
from stackexp.errors import RunError

pytestmark = pytest.mark.usefixtures("cache")


BAD = {
    "less than a chunk": (lambda f: write_raw(f / "x.npy", [1] * (T - 1)), "15 tokens do not fill one chunk of data"),
    "ids too large": (lambda f: write_raw(f / "x.npy", [1] * 50 + [V]), "token id 300 at position 50 is outside"),
    "negative ids": (lambda f: np.save(f / "x.npy", np.full(50, -1)), "token id -1"),
    "an unknown suffix": (lambda f: (f / "x.csv").write_bytes(b"x"), "unknown suffix; expected one of"),
    "no text": (lambda f: (f / "x.jsonl").write_bytes(b"\n"), "contains no tokens"),
    "text under another key": (
        lambda f: (f / "x.jsonl").write_bytes(b'{"content": "a"}\n'),
        r"x\.jsonl: no text can be read: .*x\.jsonl:1: ",
    ),
    "text in Latin-1": (lambda f: (f / "x.txt").write_bytes(b"\xfc ber"), r"no text can be read: .*x\.txt:1: "),
    "a corrupt gzip": (
        lambda f: (f / "x.jsonl.gz").write_bytes(gzip.compress(make_json_lines())[:-40]),
        "corrupt or cut short",
    ),
    "MDS shards of another program": (
        lambda f: ((f / "x").mkdir(), (f / "x/index.json").write_text('{"shards": []}')),
        "holds no finished set",
    ),
    "an unfinished set": (
        lambda f: ((f / "x").mkdir(), (f / "x/plan.json").write_text("{}")),
        "holds no finished set; make one with: stackexp data prepare",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_error_line_that_names_the_file(tmp_path, known, case):
    make, message = BAD[case]
    make(tmp_path)
    [path] = tmp_path.glob("x*")
    with pytest.raises(RunError, match=message) as error:
        open_one(path, known)
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)
    assert not list((tmp_path / "cache").rglob("*.npy*")), "nothing is left in the cache"


def test_text_needs_a_tokenizer(tmp_path):
    (tmp_path / "a.txt").write_text("a" * 100)
    with pytest.raises(RunError, match=r"a\.txt: is text, but the model's tokenizer is unknown; set data\.path"):
        open_one(tmp_path / "a.txt")


def test_two_files_with_one_name_are_refused(tmp_path):
    write_raw(tmp_path / "a.npy")
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(RunError, match=r"a\.npy and a\.txt are both g/a; rename one"):
        find_sets("g", tmp_path)


def test_a_missing_set_is_reported_with_the_command_that_creates_it(empty_folder, tmp_path, caplog):
    for name, path, message in (
        ("v2", "data/olmo/v2", r"data/olmo/v2: no such folder; .*: python -m stackexp data fetch v2$"),
        ("v3", "mine/v3", r"fetch v3; for another vocabulary .* data retokenize data/olmo/v3 --to mine/v3"),
        ("x", "nowhere", r"nowhere: no such file or folder for set x; .* data prepare SOURCE --to nowhere"),
    ):
        with pytest.raises(RunError, match=message):
            find_sets(name, Path(path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match=r"empty: contains no sets; expected .*\.npy"):
        find_sets("x", Path("empty"))
    for name in NAMES["v2"][2:]:
        write_raw(Path(f"data/olmo/v2/{name}.npy"))
    find_sets("v2", Path("data/olmo/v2"), warn_missing=False)
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert len(find_sets("v2", Path("data/olmo/v2"))) == 11
    assert (
        "v2: 2 sets are missing: 4chan, c4_100_domains; fetch them with: python -m stackexp data fetch" in caplog.text
    )


def test_a_cache_that_cannot_be_written_is_one_error_line(tmp_path, known, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("STACKEXP_CACHE", str(tmp_path / "file"))
    (tmp_path / "text.jsonl").write_bytes(make_json_lines())
    with pytest.raises(RunError, match=r"cannot be written .*; free space or set STACKEXP_CACHE") as error:
        open_one(tmp_path / "text.jsonl", known)
    assert "\n" not in str(error.value)


def test_olmo_files_need_their_own_vocabulary(tmp_path, known):
    path, ids = tmp_path / "4chan.npy", [50_279, *IDS]
    write_token_file(path, [np.array(ids)], vocab_size=50_280, tokenizer="gpt-neox-20b", source="https://x")
    for tokenizer in (None, KnownTokenizer(NEOX, tmp_path / "neox.json")):
        assert read_tokens(open_one(path, tokenizer, vocab_size=50_304)) == ids
    advice = r"convert it with: python -m stackexp data retokenize .*4chan\.npy --to FOLDER --from .* --tokenizer "
    with pytest.raises(
        RunError, match=rf"token ids of GPT-NeoX-20B, not of .*/tokenizer\.json; {advice}.*/tokenizer\.json"
    ):
        open_one(path, known, vocab_size=50_304)
    with pytest.raises(RunError, match=rf"token id 50,279 at position 0 is outside the vocabulary of 49,152; {advice}"):
        open_one(path, None, vocab_size=49_152)
    write_raw(tmp_path / "bare.npy", ids)
    with pytest.raises(RunError, match=r"token id 50,279 at position 0 is outside the vocabulary of 300; convert"):
        open_one(tmp_path / "bare.npy", known, vocab_size=50_304)


def test_a_record_of_another_tokenizer_is_refused(tmp_path, known):
    write_token_file(tmp_path / "a.npy", [np.array(IDS)], vocab_size=V, tokenizer="0" * 64, source="x")
    with pytest.raises(RunError, match=r"another tokenizer, not of .*tokenizer\.json; .*data retokenize"):
        open_one(tmp_path / "a.npy", known)
    write_token_file(tmp_path / "a.npy", [np.array(IDS)], vocab_size=V, tokenizer=known.fingerprint, source="x")
    assert read_tokens(open_one(tmp_path / "a.npy", known)) == IDS
