"""Results for people: tables for a terminal, a page or a sheet, and plots.

matplotlib and rich are imported only by the functions that draw with them.
"""
