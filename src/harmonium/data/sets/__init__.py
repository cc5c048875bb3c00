"""The data sets, one file each: what a recipe may call `data`.

The table of their names is `harmonium.data.datasets.datasets`; a new file here needs no other edit.
"""
