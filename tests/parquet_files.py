"""Parquet files with FineWeb-Edu's columns, and helpers to read them."""

from pathlib import Path

import pyarrow as pa
from corpora import STDLIB
from pyarrow import parquet

from stackexp.data import readers
from stackexp.data.columns import Columns, parse_filter
from stackexp.data.readers import BadLine, FilteredOut, Piece
from stackexp.data.sources import find_sources

WORDS = (STDLIB / "argparse.py").read_text().splitlines()


def make_rows(count: int, first: int = 0) -> list[dict]:
    """Return documents with FineWeb-Edu's columns; every third has int_score 4."""
    return [
        {
            "text": "\n".join(WORDS[n % 900 : n % 900 + 20]) + f"\n{n}",
            "id": f"<urn:uuid:{n}>",
            "dump": "CC-MAIN-2013-20",
            "url": f"http://example.org/{n}",
            "file_path": "s3://commoncrawl/x.warc.gz",
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
