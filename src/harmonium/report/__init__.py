"""What a run found, for people: tables for a terminal, a page or a sheet, and plots.

matplotlib and rich are imported only by the functions that draw with them.
"""

from harmonium.report.arms import arms_plot
from harmonium.report.look import formats
from harmonium.report.plots import bars, curves, run_picture
from harmonium.report.split_plots import contact_sheet, split_map, split_sizes
from harmonium.report.tables import csv_text, estimate, markdown, plus_minus, table

__all__ = [
    "arms_plot",
    "bars",
    "contact_sheet",
    "csv_text",
    "curves",
    "estimate",
    "formats",
    "markdown",
    "plus_minus",
    "run_picture",
    "split_map",
    "split_sizes",
    "table",
]
