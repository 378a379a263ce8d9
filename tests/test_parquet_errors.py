"""Wrong filters, missing columns and damaged parquet files."""

import pyarrow as pa
import pytest
from corpora import prepare_set
from parquet_files import make_rows, read, write_rows
from pyarrow import parquet

from stackexp.cli import main
from stackexp.data.columns import Columns, parse_filter
from stackexp.data.sources import UnreadableSourceError
from stackexp.errors import RunError


@pytest.mark.parametrize(
    ("filters", "text", "message"),
    [
        (["int_scor>=3"], "text", "no column 'int_scor'; did you mean 'int_score'?"),
        (["metadata.int_score>=3"], "text", "no column 'metadata.int_score'; did you mean 'int_score'?"),
        ([], "content", "no column 'content'; it has text, id"),
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


@pytest.mark.parametrize("name", ["text", "n"])
def test_columns_of_the_same_name_are_a_one_line_error(tmp_path, name):
    table = pa.table([["a"], [1], ["b"]], names=["text", "n", name])
    parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(RunError, match=f"a.parquet: 2 columns are named '{name}'; rename all but one"):
        read(tmp_path / "a.parquet", "n>=1")


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-100],
        lambda data: data[: len(data) // 2],
        lambda data: b"",
        lambda data: data[:1000] + b"\0" * 3000 + data[4000:],
    ],
    ids=["no footer", "half", "empty", "zeros"],
)
def test_damaged_file_is_a_one_line_error(tmp_path, damage):
    path = write_rows(tmp_path / "a.parquet", make_rows(600), row_group_size=200, compression="zstd")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UnreadableSourceError, match=r"a\.parquet: corrupt or cut short \(.*\); replace") as error:
        read(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["int_score=3", "int_score", ">=3", "int_score>=", "int_score=>3", ""])
def test_wrong_filter_syntax_is_a_one_line_error(tmp_path, monkeypatch, capsys, text):
    monkeypatch.chdir(tmp_path)
    assert main(["data", "prepare", "a", "--to", "b", "--vocab-size", "300", "--filter", text]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert f"--filter: expected COLUMN OPERATOR VALUE, quoted, such as 'int_score>=3', found {text!r}" in line


def test_filter_of_files_without_columns_is_refused(tmp_path):
    write_rows(tmp_path / "data" / "a.parquet", make_rows(3))
    (tmp_path / "data" / "README.md").write_text("# FineWeb-Edu")
    with pytest.raises(RunError, match=r"README\.md: has no columns, but --filter and --text-column require"):
        prepare_set(tmp_path / "data", tmp_path / "set", columns=Columns(filters=(parse_filter("int_score>=3"),)))


def test_mistaken_filter_leaves_no_plan_behind(tmp_path):
    write_rows(tmp_path / "a.parquet", make_rows(30))
    with pytest.raises(RunError, match="did you mean 'int_score'"):
        prepare_set(tmp_path / "a.parquet", tmp_path / "set", columns=Columns(filters=(parse_filter("int_scor>=3"),)))
    assert not (tmp_path / "set").exists()
    prepare_set(tmp_path / "a.parquet", tmp_path / "set", columns=Columns(filters=(parse_filter("int_score>=3"),)))
