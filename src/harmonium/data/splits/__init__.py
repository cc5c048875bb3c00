"""The split rules, one idea per module: the values of `split` in a recipe.

The registry is `harmonium.data.partition.splits`; it finds new modules here by itself.
"""
