"""The paper's figures in the reports."""

from stackexp.reports.differences import COLUMNS
from stackexp.reports.paper import PAPER, contradicts_itself


def test_the_paper_contradicts_itself_in_four_cells():
    cells = {
        (variant, column): cell for variant, row in PAPER.items() for column, cell in zip(COLUMNS, row, strict=False)
    }
    found = {key for key, cell in cells.items() if contradicts_itself(*cell)}
    assert found == {("Queue", "V2"), ("Push-Only", "V2"), ("Push-Only", "V3"), ("Single-Head", "V2")}
