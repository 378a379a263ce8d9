"""Inspect any dataset: choose the inspection for a path, and draw the document lengths."""

from pathlib import Path

from stackexp.data.evaluation_sets import find_sets
from stackexp.data.sources import JSON_LINES_SUFFIXES, TEXT_SUFFIXES, TOKEN_SUFFIXES
from stackexp.errors import RunError
from stackexp.reports.data.inspection import Inspection, InspectOptions
from stackexp.reports.data.lengths import draw_lengths
from stackexp.reports.data.mds_shards import inspect_mds_shards
from stackexp.reports.data.prepared_sets import inspect_prepared_set
from stackexp.reports.data.token_files import inspect_token_file


def inspect_path(path: Path, options: InspectOptions) -> list[Inspection]:
    """Inspect a prepared set, a token file, a folder of MDS shards, or each dataset in a folder of these.

    Raises RunError if the path is none of these. In a folder of several datasets, an unreadable one is reported as
    damaged.
    """
    if (path / "plan.json").exists() and not (path / "corpus.json").exists():
        count = len(list(path.glob("unit.*")))
        raise RunError(f"{path}: not finished, {count} units so far; run the same data prepare command to resume")
    datasets = find_sets(path.name, path)
    if not path.is_dir() and path.name.lower().endswith(TEXT_SUFFIXES + JSON_LINES_SUFFIXES):
        command = f"python -m stackexp data prepare {path} --to FOLDER"
        raise RunError(f"{path}: text, not tokens; tokenize it with: {command}")
    if len(datasets) == 1:
        return [_inspect_dataset(dataset, options) for dataset in datasets.values()]
    return [_inspect_member(dataset, options) for dataset in datasets.values()]


def _inspect_member(path: Path, options: InspectOptions) -> Inspection:
    try:
        return _inspect_dataset(path, options)
    except RunError as error:
        return Inspection(path, "cannot be read", damage=[str(error)])


def _inspect_dataset(path: Path, options: InspectOptions) -> Inspection:
    if path.is_dir():
        is_prepared = (path / "corpus.json").exists()
        return inspect_prepared_set(path, options) if is_prepared else inspect_mds_shards(path, options)
    if path.name.lower().endswith(TOKEN_SUFFIXES):
        return inspect_token_file(path, options)
    size = path.stat().st_size
    return Inspection(path, "text", {"file_bytes": size})


def draw_figures(inspections: list[Inspection], path: Path) -> list[Path]:
    """Draw the document lengths to `path`, or for several datasets to <stem>-<dataset> each; return the files."""
    known = [inspection for inspection in inspections if inspection.has_lengths]
    files = []
    for inspection in known:
        name = path if len(known) == 1 else path.with_name(f"{path.stem}-{inspection.path.stem}{path.suffix}")
        assert inspection.lengths is not None
        title = f"{inspection.path.name}: {inspection.lengths.total:,} documents"
        draw_lengths(
            inspection.lengths, name, title=title, unit=inspection.unit, context_length=inspection.context_length
        )
        files.append(name)
    return files
