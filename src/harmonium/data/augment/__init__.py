"""Random augmentations: the views that self-supervised learning compares."""
