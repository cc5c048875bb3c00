"""Hand-over: a run's encoder as a bundle of files for others to use, and the check of a bundle."""
