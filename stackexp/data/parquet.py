"""Read the rows of a parquet file in batches, so that memory does not grow with the file or its row groups."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

from stackexp.data.columns import Columns
from stackexp.data.sources import Source, UnreadableSourceError
from stackexp.errors import RunError, first_line, suggest_name

if TYPE_CHECKING:
    import pyarrow as pa

BATCH_ROWS = 256
BUFFER_BYTES = 1 << 20  # per column; without it, pyarrow reads the whole column of a row group


def read_rows(
    source: Source, raw: BinaryIO, columns: Columns, advance: Callable[[int], object]
) -> Iterator[tuple[bytes | None, list[Any]]]:
    """Yield the text of each row as UTF-8 bytes, and the values of the filters' columns.

    Text in those columns is UTF-8 bytes, too; both may be invalid. `advance` is called with each batch's share of the
    file size in bytes. Raises UnreadableSourceError if the file is damaged, and RunError if it lacks a column or one
    has a type that cannot be read or compared.
    """
    import pyarrow as pa
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(raw, pre_buffer=False, buffer_size=BUFFER_BYTES, page_checksum_verification=True)
        paths = _find_columns(source, file.schema_arrow, columns)
        rows = position = 0
        for batch in file.iter_batches(BATCH_ROWS, columns=[".".join(path) for path in paths], use_threads=False):
            for text, *values in zip(*(_get_values(batch, path) for path in paths), strict=True):
                yield text, values
            rows += batch.num_rows
            done = source.size * rows // file.metadata.num_rows
            advance(done - position)
            position = done
    except (pa.ArrowException, OSError) as e:
        if isinstance(e, OSError) and e.errno:  # of the file system
            raise
        message = f"{source.path}: corrupt or cut short ({first_line(e)}); replace the file or remove it"
        raise UnreadableSourceError(message) from e


def check_columns(source: Source, columns: Columns) -> None:
    """Raise RunError if an intact file lacks a column, or one has a type that cannot be read or compared."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        schema = parquet.read_schema(source.path)
    except (pa.ArrowException, OSError):  # reported with the other damaged files when they are read
        return
    _find_columns(source, schema, columns)


def _find_columns(source: Source, schema: "pa.Schema", columns: Columns) -> list[list[str]]:
    """Return the paths of the text column and of those of the filters."""
    names = [columns.text, *(condition.column for condition in columns.filters)]
    paths, types = zip(*(_find_column(source, schema, name) for name in names), strict=True)
    _check_types(source, columns, types)
    return list(paths)


def _find_column(source: Source, schema: "pa.Schema", name: str) -> tuple[list[str], "pa.DataType"]:
    """Return the names that lead to a column, [name] or for a.b [a, b], and its type."""
    import pyarrow as pa

    path = [name] if name in schema.names else name.split(".")
    if (count := schema.names.count(path[0])) > 1:
        raise RunError(f"{source.path}: {count} columns are named {path[0]!r}; rename all but one")
    fields, kind = list(schema), None
    for number, part in enumerate(path):
        kind = next((field.type for field in fields if field.name == part), None)
        if kind is None:
            known = [".".join([*path[:number], field.name]) for field in fields]
            hint = suggest_name(name, known) or f"; it has {', '.join(known[:20]) or 'no such field'}"
            raise RunError(f"{source.path}: no column {name!r}{hint}")
        if pa.types.is_null(kind):  # a column without any value, which has no fields either
            return path[: number + 1], kind
        fields = list(kind) if pa.types.is_struct(kind) else []
    return path, kind


def _get_values(batch: "pa.RecordBatch", path: list[str]) -> list[Any]:
    """Return the values of a column, with dictionary codes replaced; a field of a missing parent is missing.

    Text is returned as UTF-8 bytes. Decimals and 32-bit floats become the nearest float64 of their decimal digits, so
    that a stored 0.65 equals the 0.65 of a filter.
    """
    import pyarrow as pa
    from pyarrow import compute

    column = batch.column(path[0])
    if path[1:]:
        column = compute.struct_field(column, path[1:])
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    kind = column.type
    if pa.types.is_float32(kind) or (pa.types.is_decimal(kind) and kind.scale > 0):
        return column.cast(pa.string()).cast(pa.float64()).to_pylist()
    return (column.cast(pa.large_binary()) if _name_kind(kind) == "text" else column).to_pylist()


def _check_types(source: Source, columns: Columns, types: Sequence["pa.DataType"]) -> None:
    """Raise RunError if the text column has no text, or if a filter cannot compare its column."""
    text, *others = map(_name_kind, types)
    if text not in ("text", "null"):
        raise RunError(f"{source.path}: column {columns.text!r} is {types[0]}, not text; choose another --text-column")
    for condition, kind in zip(columns.filters, others, strict=True):
        if mismatch := condition.find_mismatch(kind):
            raise RunError(f"{source.path}: --filter '{condition}': {mismatch}; correct or remove the filter")


def _name_kind(kind: "pa.DataType") -> str:
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return "text"
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    return "number" if is_number else str(kind)
