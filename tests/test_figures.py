"""Figures: readable numbers, and names next to curves even where these coincide."""

from pathlib import Path

import pytest
from formal_runs import ALL_LENGTHS, MODELS, finish, write_run

from stackexp.reports.formal import draw_bars, draw_curves
from stackexp.reports.formal_runs import collect_cells
from stackexp.reports.report import abbreviate_thousands, new_figure, save_figure


def test_thousands_are_abbreviated():
    figure, axes = new_figure(4, 3)
    axes.plot([0, 700_000], [0, 1])
    axes.set_xticks([0, 700_000, 1_500_000])
    abbreviate_thousands(axes.xaxis)
    figure.canvas.draw()
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "700k", "1.5M"]


def test_names_with_dollar_signs_are_drawn(tmp_path):
    figure, axes = new_figure(4, 3)
    axes.plot([0, 1], [2.0, 1.0], label=r"run $\x$")
    axes.set_yticks([1.0], labels=[r"$\x$"])
    axes.set_xlabel("$d_s$")
    axes.legend()
    save_figure(figure, tmp_path / "a.png")
    assert axes.xaxis.label.get_parse_math()
    assert not axes.get_legend().get_texts()[0].get_parse_math()


def test_the_legend_has_the_colors_of_the_bars(empty_folder):
    for model in MODELS:
        finish(write_run(Path("runs", model), model, "even_pairs"), beyond=0.5)
    figure = draw_bars(collect_cells([Path("runs")], ALL_LENGTHS))
    (legend,) = figure.legends
    shown = [patch.get_facecolor() for patch in legend.get_patches()]
    drawn = [bar.get_facecolor() for axes in figure.axes for bar in axes.patches]
    assert shown == drawn
    assert len(set(shown)) == len(MODELS) > 1


@pytest.mark.parametrize("models", [["StackTrans"], list(MODELS)])
def test_no_text_of_the_figures_is_cut(models, empty_folder):
    for model in models:
        finish(write_run(Path("runs", model), model, "even_pairs"), beyond=0.5)
    few = collect_cells([Path("runs")], ALL_LENGTHS)
    for figure in (draw_bars(few), draw_curves(few)):
        figure.draw_without_rendering()
        for text in [figure._supxlabel, *(label for legend in figure.legends for label in legend.get_texts())]:
            if text is not None:
                box = text.get_window_extent()
                assert 0 <= box.x0 < box.x1 <= figure.bbox.width, text
                assert 0 <= box.y0 < box.y1 <= figure.bbox.height, text
