"""Parquet files and filters as sources of `data prepare`, with FineWeb-Edu's columns."""

import gzip
import json
import os
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from corpora import STDLIB, prepare_set, read_files
from pyarrow import parquet

from stackexp.data import readers
from stackexp.data.readers import BadLine, Columns, FilteredOut, Piece, parse_filter
from stackexp.data.sources import UnreadableSourceError, find_sources
from stackexp.errors import RunError
from stackexp.files import write_json_lines

WORDS = (STDLIB / "argparse.py").read_text().splitlines()


def make_rows(count: int, first: int = 0) -> list[dict]:
    """Return documents with FineWeb-Edu's columns; every third has int_score 4."""
    return [
        {
            "text": "\n".join(WORDS[n % 900 : n % 900 + 20]) + f"\n{n}",
            "url": f"http://example.org/{n}",
            "language": "en" if n % 5 else "de",
            "language_score": 0.5 + (n % 50) / 100,
            "token_count": 200 + n,
            "score": 2.5 + n % 3,
            "int_score": 2 + n % 3,
        }
        for n in range(first, first + count)
    ]


def write_rows(path: Path, rows: list[dict], **options) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.Table.from_pylist(rows), path, **options)
    return path


def read(path: Path, *filters: str, text: str = "text") -> list[Piece | BadLine | FilteredOut]:
    columns = Columns(text, tuple(map(parse_filter, filters)))
    return list(readers.read_pieces(find_sources(path)[0], columns))


def texts(items: list) -> list[str]:
    return [item.text for item in items if isinstance(item, Piece)]


def select(rows: list[dict], condition) -> list[str]:
    return [row["text"] for row in rows if condition(row)]


CONDITIONS = {
    "int_score>=3": lambda row: row["int_score"] >= 3,
    "score > 3.5": lambda row: row["score"] > 3.5,
    "language==en": lambda row: row["language"] == "en",
    "language != 'en'": lambda row: row["language"] != "en",
    "language_score<=0.7": lambda row: row["language_score"] <= 0.7,
    "token_count<1e3": lambda row: row["token_count"] < 1000,
}


@pytest.mark.parametrize("condition", CONDITIONS)
def test_filters_select_the_same_documents_of_parquet_and_json_lines(tmp_path, condition):
    rows = make_rows(1200)
    write_rows(tmp_path / "a.parquet", rows, row_group_size=500)
    write_json_lines(tmp_path / "b.jsonl", rows)
    expected = select(rows, CONDITIONS[condition])
    for name in ("a.parquet", "b.jsonl"):
        items = read(tmp_path / name, condition)
        assert texts(items) == expected
        assert sum(isinstance(item, FilteredOut) for item in items) == len(rows) - len(expected)


def test_fields_of_nested_columns_as_in_smollm_corpus(tmp_path):
    rows = [{"text": row.pop("text"), "metadata": row} for row in make_rows(9)] + [{"text": "x", "metadata": None}]
    write_rows(tmp_path / "a.parquet", rows)
    write_json_lines(tmp_path / "b.jsonl", rows[:-1])
    expected = [row["text"] for row in rows[:-1] if row["metadata"]["int_score"] == 4]
    assert len(expected) == 3
    for name in ("a.parquet", "b.jsonl"):
        assert texts(read(tmp_path / name, "metadata.int_score>=4")) == expected
        assert texts(read(tmp_path / name, text="metadata.url")) == [row["metadata"]["url"] for row in rows[:-1]]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
@pytest.mark.parametrize("compression", ["snappy", "zstd"])
def test_text_types_and_compressions(tmp_path, kind, compression):
    table = pa.table({"content": pa.array(["naïve 東京", "b", "b"], pa.string()).cast(kind)})
    parquet.write_table(table, tmp_path / "a.parquet", compression=compression)
    assert texts(read(tmp_path / "a.parquet", text="content")) == ["naïve 東京", "b", "b"]


def test_missing_values(tmp_path):
    """Rows without text are bad lines; documents without a value are filtered out."""
    rows = [{"text": "a", "n": 1}, {"text": None, "n": 1}, {"text": "", "n": 1}, {"text": "b", "n": None}]
    write_rows(tmp_path / "a.parquet", rows)
    items = read(tmp_path / "a.parquet", "n==1")
    assert [str(item) for item in items if isinstance(item, BadLine)] == [f"a.parquet:{n}: no text" for n in (2, 3)]
    assert (texts(items), items[-1]) == (["a"], FilteredOut())
    lines = [*(json.dumps(row) for row in rows), '{"text": "c"}', '{"text": "d", "n": [1]}', '{"text": "e", "n": "1"}']
    (tmp_path / "b.jsonl").write_text("\n".join(lines))
    items = read(tmp_path / "b.jsonl", "n>=1")
    reasons = ("2: no text", "3: no text", "5: no n", "6: n is of type list", "7: n is text")
    bad = [str(item) for item in items if isinstance(item, BadLine)]
    assert all(line.startswith(f"b.jsonl:{reason}") for line, reason in zip(bad, reasons, strict=True))


@pytest.mark.parametrize(("column", "kept"), [("text", ["good", "also good"]), ("language", ["a", "c"])])
def test_invalid_utf8_is_a_bad_line(tmp_path, column, kept):
    values = pa.array([b"good", b"\xff", b"also good"], pa.binary())
    text = pa.StringArray.from_buffers(3, *values.buffers()[1:])
    parquet.write_table(
        pa.table({"text": ["a", "b", "c"], "language": ["a", "b", "c"]} | {column: text}), tmp_path / "a.parquet"
    )
    items = read(tmp_path / "a.parquet", "language!=d")
    assert texts(items) == kept
    assert str(items[1]) == "a.parquet:2: invalid UTF-8"


def test_columns_without_any_value(tmp_path):
    """Other files of a folder may have values, so that the type of these columns is null only in some files."""
    parquet.write_table(pa.table({"text": ["a", "b"], "n": pa.nulls(2), "none": pa.nulls(2)}), tmp_path / "a.parquet")
    for condition in ("n>=1", "n==en", "none.score>=1"):
        assert read(tmp_path / "a.parquet", condition) == [FilteredOut(), FilteredOut()]
    assert [str(item) for item in read(tmp_path / "a.parquet", text="n")] == [
        f"a.parquet:{row}: no n" for row in (1, 2)
    ]


@pytest.mark.parametrize(
    "kind", [pa.float16(), pa.float32(), pa.float64(), pa.decimal128(5, 2), pa.dictionary(pa.int8(), pa.float32())]
)
def test_numbers_are_compared_by_their_decimal_digits(tmp_path, kind):
    # As float64, a 32-bit 0.65 is less than 0.65, and a decimal 0.1 is not equal to the float 0.1.
    is_decimal, is_encoded = pa.types.is_decimal(kind), pa.types.is_dictionary(kind)
    values = [value and (Decimal(value) if is_decimal else float(value)) for value in ("0.65", "0.1", "0.25", None)]
    scores = pa.array(values, kind.value_type).dictionary_encode() if is_encoded else pa.array(values, kind)
    parquet.write_table(pa.table({"text": ["a", "b", "c", "d"], "score": scores}), tmp_path / "a.parquet")
    for condition, kept in {"score>=0.65": "a", "score==0.1": "b", "score<=0.1": "b", "score!=0.65": "bc"}.items():
        assert texts(read(tmp_path / "a.parquet", condition)) == list(kept), condition


# Preparation


@pytest.mark.parametrize(("dtype", "limit"), [("float16", "s<70000"), ("float32", "s<1e39")])
def test_limits_beyond_the_type_of_a_column_are_accepted(tmp_path, dtype, limit):
    table = pa.table({"text": ["a", "b"], "s": pa.array(np.array([1, 2], dtype))})
    parquet.write_table(table, tmp_path / "a.parquet")
    assert texts(read(tmp_path / "a.parquet", limit)) == ["a", "b"]
    assert read(tmp_path / "a.parquet", limit.replace("<", ">")) == [FilteredOut()] * 2


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """Write four files of several row groups, one of them JSON Lines."""
    folder = tmp_path_factory.mktemp("source")
    for number in range(3):
        write_rows(folder / f"{number}.parquet", make_rows(300, 300 * number), row_group_size=100)
    lines = "".join(json.dumps(row) + "\n" for row in make_rows(300, 900))
    (folder / "3.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    return folder


COLUMNS = Columns(filters=(parse_filter("int_score>=3"), parse_filter("language==en")))


def test_result_does_not_depend_on_workers_or_parts(source, tmp_path):
    settings = {"columns": COLUMNS, "unit_bytes": 1}
    corpus = prepare_set(source, tmp_path / "one", **settings)
    rows = make_rows(1200)
    kept = select(rows, lambda row: row["int_score"] >= 3 and row["language"] == "en")
    assert (corpus.documents, corpus.filtered_documents, corpus.bad_lines) == (len(kept), len(rows) - len(kept), 0)
    assert corpus.bytes == sum(len(text.encode()) for text in kept)
    prepare_set(source, tmp_path / "two", **settings, workers=2)
    prepare_set(source, tmp_path / "parts", **settings, part=(2, 2))
    prepare_set(source, tmp_path / "parts", **settings)
    assert read_files(tmp_path / "one") == read_files(tmp_path / "two") == read_files(tmp_path / "parts")


def test_another_filter_or_column_needs_another_folder(source, tmp_path):
    prepare_set(source, tmp_path / "set", columns=COLUMNS)
    for columns in (Columns(), Columns(filters=COLUMNS.filters[:1])):
        with pytest.raises(RunError, match=r"prepared with another filter \(\['int_score>=3', 'language==en'\], not"):
            prepare_set(source, tmp_path / "set", columns=columns)
    with pytest.raises(RunError, match=r"prepared with another text column \(text, not url\)"):
        prepare_set(source, tmp_path / "set", columns=Columns("url", COLUMNS.filters))


@pytest.mark.process
def test_memory_does_not_grow_with_the_row_groups(tmp_path):
    """Read 160 MB of text in a single row group."""
    table = pa.table({"text": [os.urandom(1000).hex() for _ in range(80_000)]})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=80_000, use_dictionary=False)
    assert parquet.ParquetFile(tmp_path / "a.parquet").num_row_groups == 1
    script = f"""
import re
from pathlib import Path
import pyarrow.parquet
from stackexp.data.readers import read_pieces
from stackexp.data.sources import find_sources

def read_peak_kb():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

before = read_peak_kb()
[source] = find_sources(Path({str(tmp_path / "a.parquet")!r}))
assert sum(len(piece.text) for piece in read_pieces(source)) == 160_000_000
print(read_peak_kb() - before)
"""
    growth = int(subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout)
    assert growth < 100_000, "the row group alone has 160,000 kB"


@pytest.mark.parametrize("text", ["int_score>=3", 'tag!=""', "language==' en'", 'sign==">"', "quoted=='\"a\"'"])
def test_a_filter_is_parsed_again_from_its_text(text):
    assert parse_filter(str(parse_filter(text))) == parse_filter(text)


def test_a_missing_number_fulfills_no_condition():
    for text in ("score!=0", "score>=0"):
        assert [parse_filter(text).accepts(value) for value in (1.0, float("nan"), None)] == [True, False, False]


# Errors


@pytest.mark.parametrize(
    ("filters", "text", "message"),
    [
        (["metadata.int_score>=3"], "text", "no column 'metadata.int_score'; did you mean 'int_score'?"),
        ([], "content", "no column 'content'; it has text, url"),
        ([], "score", "column 'score' is double, not text; choose another --text-column"),
        (["int_score>=three"], "text", "--filter 'int_score>=three': int_score is a number, 'three' is not"),
        (["language>=3"], "text", "--filter 'language>=3': language is text, which >= compares as letters"),
        (["tags==x"], "text", "--filter 'tags==x': tags is of type list<element: string>, neither number nor text"),
    ],
)
def test_wrong_columns_are_one_line_errors(tmp_path, filters, text, message):
    write_rows(tmp_path / "a.parquet", [row | {"tags": ["x"]} for row in make_rows(3)])
    with pytest.raises(RunError) as error:
        read(tmp_path / "a.parquet", *filters, text=text)
    assert str(error.value).startswith(f"{tmp_path}/a.parquet: {message}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-100], lambda data: b"", lambda data: data[:1000] + b"\0" * 3000 + data[4000:]]
)
def test_damaged_file_is_a_one_line_error(tmp_path, damage):
    path = write_rows(tmp_path / "a.parquet", make_rows(600), row_group_size=200, compression="zstd")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UnreadableSourceError, match=r"a\.parquet: corrupt or cut short \(.*\); replace") as error:
        read(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["int_score=3", "int_score", ">=3", "int_score>=", "int_score=>3", " "])
def test_wrong_filter_syntax_is_a_one_line_error(empty_folder, invoke, text):
    line = invoke("data prepare a --to b --vocab-size 300 --filter", text, expect=2)
    assert f"--filter: expected COLUMN OPERATOR VALUE, quoted, such as 'int_score>=3', found {text!r}" in line


def test_mistaken_filters_leave_no_plan_behind(tmp_path):
    write_rows(tmp_path / "data" / "a.parquet", make_rows(30))
    with pytest.raises(RunError, match="did you mean 'int_score'"):
        prepare_set(tmp_path / "data", tmp_path / "set", columns=Columns(filters=(parse_filter("int_scor>=3"),)))
    assert not (tmp_path / "set").exists()
    (tmp_path / "data" / "README.md").write_text("# FineWeb-Edu")
    with pytest.raises(RunError, match=r"README\.md: has no columns, but --filter and --text-column require"):
        prepare_set(tmp_path / "data", tmp_path / "set", columns=COLUMNS)
