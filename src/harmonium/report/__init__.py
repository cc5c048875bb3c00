"""What a run found, for people: tables for a terminal, a page or a sheet, and pictures.

matplotlib and rich are imported only by the functions that draw with them.
"""

from harmonium.report.plots import bars, curves, run_picture, split_map
from harmonium.report.tables import csv_text, estimate, markdown, plus_minus, table

__all__ = [
    "bars",
    "csv_text",
    "curves",
    "estimate",
    "markdown",
    "plus_minus",
    "run_picture",
    "split_map",
    "table",
]
