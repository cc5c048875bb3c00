"""The recipe: a validated tree of settings, its presets, and changes to it."""
