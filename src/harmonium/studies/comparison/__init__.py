"""Comparisons of methods under one budget, over several seeds, with references."""
