"""Choosing settings without labels: the grid, the runs, and what came out."""
