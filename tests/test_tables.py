"""Tables fit the terminal: wrapped text, or several tables of fewer columns."""

import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stackexp.tables import RULE, format_table
from stackexp.terminal import wrap_text

HEADER = ["run", "state", "steps", "tokens", "parameters", "in the memory", "training loss", "average"]
ROW = ["quickstart/20261124-013245-715b", "finished", "720", "1,474,560", "1,807,488", "66,816", "4.8125", "5.1039"]


@pytest.fixture
def set_width(monkeypatch):
    def set_width(columns: int) -> None:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        monkeypatch.setenv("COLUMNS", str(columns))

    return set_width


def test_columns_that_do_not_fit_move_to_another_table(set_width):
    wide = format_table([ROW, RULE, ROW], header=HEADER, align="<<>>>>>>")
    assert max(map(len, wide.splitlines())) > 80
    set_width(80)
    first, second = format_table([ROW, RULE, ROW], header=HEADER, align="<<>>>>>>").split("\n\n")
    assert max(map(len, [*first.splitlines(), *second.splitlines()])) <= 80
    assert re.split(r"  +", first.splitlines()[0]) == HEADER[:5]
    assert re.split(r"  +", second.splitlines()[0]) == ["run", *HEADER[5:]]
    assert re.split(r"  +", second.splitlines()[2]) == [ROW[0], *ROW[5:]]


def test_wrapped_text_keeps_commands_whole(set_width):
    text = "Means over the seeds. missing Queue: `python -m stackexp sweep run ablation` and " + "more words " * 6
    assert wrap_text(text) == text, "a pipe gets one line"
    set_width(50)
    lines = wrap_text(text, indent=2).splitlines()
    assert max(map(len, lines)) <= 50
    assert any("`python -m stackexp sweep run ablation`" in line for line in lines)
    assert all(line.startswith("  ") for line in lines[1:])
    assert " ".join(line.strip() for line in lines) == text.strip()


def test_files_pipes_and_other_styles_are_not_fitted(set_width):
    assert len(format_table([ROW], header=HEADER).splitlines()) == 3
    set_width(40)
    for style in ("markdown", "latex"):
        lines = format_table([ROW], header=HEADER, style=style).splitlines()
        assert any(ROW[0] in line and ROW[-1] in line for line in lines)


@given(
    st.integers(1, 9).flatmap(
        lambda n: st.lists(st.lists(st.text("ab", min_size=1, max_size=12), min_size=n, max_size=n), min_size=1)
    ),
    st.integers(30, 100),
)
def test_every_cell_is_shown_and_every_line_fits(rows, width):
    header = [f"c{i}" for i in range(len(rows[0]))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.stdout, "isatty", lambda: True)
        patch.setenv("COLUMNS", str(width))
        table = format_table(rows, header=header, align=">" * len(header))
    assert max(map(len, table.splitlines())) <= width
    titles = [title for part in table.split("\n\n") for title in part.splitlines()[0].split()]
    assert list(dict.fromkeys(titles)) == header
