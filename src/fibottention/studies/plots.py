"""Pictures of a study: every run beside the mean of its variant, the grid, and the curves."""

from collections.abc import Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fibottention.analysis.colours import COLOURS
from fibottention.studies.plan import Study
from fibottention.studies.results import VariantResult

__all__ = ["curves_figure", "results_figure"]

_MOST_CURVES = 16


def results_figure(study: Study, results: Sequence[VariantResult]) -> Figure:
    """Every run as a dot, every variant as its mean and standard deviation; a grid of two options as a table too."""
    axes_of_grid = list(next(iter(study.cells.values()))) if study.cells else []
    has_grid = len(axes_of_grid) == 2
    columns = len(study.settings)
    height = 0.3 * len(study.variants) + 1.1
    grid_height = 0.0
    if has_grid:
        grid_height = 0.5 * len({str(cell[axes_of_grid[0]]) for cell in study.cells.values()}) + 1.0
    figure = Figure(figsize=(2.6 + 4.2 * columns, height + grid_height), layout="constrained")
    ratios = [height, grid_height] if has_grid else [height]
    panels = figure.subplots(len(ratios), columns, squeeze=False, height_ratios=ratios, sharey="row")
    for column, setting in enumerate(study.settings):
        own = [result for result in results if result.setting == setting]
        _dots(panels[0, column], study, own)
        if has_grid:
            _cells(panels[1, column], study, own, axes_of_grid)
        if setting:
            panels[0, column].set_title(setting, fontsize=10)
    return figure


def _dots(axis: Axes, study: Study, results: Sequence[VariantResult]) -> None:
    for row, result in enumerate(results):
        is_reference = result.variant == study.reference
        colour = COLOURS[1] if is_reference else COLOURS[0]
        values = [run.last for run in result.finished]
        axis.plot(values, [row] * len(values), "o", markersize=4, markerfacecolor="none", color=colour, alpha=0.7)
        if result.last is None:
            continue
        mean, deviation = result.last.mean, result.last.deviation
        axis.errorbar(mean, row, xerr=deviation, fmt="D", markersize=5, capsize=3, color=colour)
        if is_reference:
            axis.axvline(mean, color=colour, linestyle="--", linewidth=1, zorder=0)
    axis.set_yticks(range(len(results)), [result.variant for result in results], fontsize=8)
    axis.set_ylim(len(results) - 0.5, -0.5)
    axis.set_xlabel(f"{study.score.label} after the last epoch{study.score.unit}")
    axis.grid(axis="x", alpha=0.3)


def _cells(axis: Axes, study: Study, results: Sequence[VariantResult], options: Sequence[str]) -> None:
    rows, columns = (list(dict.fromkeys(str(cell[option]) for cell in study.cells.values())) for option in options)
    values = np.full((len(rows), len(columns)), np.nan)
    for result in results:
        cell = study.cells.get(result.variant)
        if cell is not None and result.last is not None:
            values[rows.index(str(cell[options[0]])), columns.index(str(cell[options[1]]))] = result.last.mean
    # Light colours only, so that black numbers can be read on all of them.
    colours = colormaps["YlGnBu"].with_extremes(bad="white")
    low, high = (np.nanmin(values), np.nanmax(values)) if np.isfinite(values).any() else (0, 1)
    axis.imshow(values, cmap=colours, vmin=low, vmax=high + max(high - low, 0.01), aspect="auto")
    for result in results:
        cell = study.cells.get(result.variant)
        if cell is not None and result.last is not None:
            place = (columns.index(str(cell[options[1]])), rows.index(str(cell[options[0]])))
            axis.text(*place, result.last.text(study.score), ha="center", va="center", fontsize=8)
    names = [option.partition(".")[2] for option in options]
    axis.set_yticks(range(len(rows)), rows)
    axis.set_xticks(range(len(columns)), columns)
    axis.set_ylabel(names[0])
    axis.set_xlabel(names[1])


def curves_figure(study: Study, results: Sequence[VariantResult]) -> Figure | None:
    """Mean score of each variant by epoch, with the range over the seeds; None for too many variants or no curve."""
    if len(study.variants) > _MOST_CURVES or not any(len(run.curve) > 1 for r in results for run in r.finished):
        return None
    columns = len(study.settings)
    rows_of_legend = -(-len(study.variants) // 3)
    figure = Figure(figsize=(2.0 + 5.0 * columns, 3.6 + 0.22 * rows_of_legend), layout="constrained")
    panels = figure.subplots(1, columns, squeeze=False)[0]
    for axis, setting in zip(panels, study.settings, strict=True):
        for index, result in enumerate(r for r in results if r.setting == setting):
            if not result.finished:
                continue
            epochs = [epoch for epoch, _ in result.finished[0].curve]
            curves = np.array([[value for _, value in run.curve] for run in result.finished])
            colour, line = COLOURS[index % len(COLOURS)], "-" if index < len(COLOURS) else "--"
            axis.plot(epochs, curves.mean(0), line, color=colour, label=result.variant)
            axis.fill_between(epochs, curves.min(0), curves.max(0), color=colour, alpha=0.15, linewidth=0)
        axis.set_xlabel("epoch")
        axis.set_ylabel(f"{study.score.label}{study.score.unit}")
        axis.set_title(setting, fontsize=10)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.3)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8)
    return figure
