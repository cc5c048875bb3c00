"""The data sets, one module each: the values of `data` in a recipe.

The registry is `harmonium.data.datasets.datasets`; it finds new modules here by itself.
"""
