"""A trained encoder in use: features of many images, search, and classifiers from labels."""
