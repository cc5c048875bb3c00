"""The ways to share images out among clients, one idea a file: what a recipe may call `split`.

The table of their names is `harmonium.data.partition.splits`; a new file here needs no other edit.
"""
