"""Tuning without labels: the grid, its runs, and the result."""
