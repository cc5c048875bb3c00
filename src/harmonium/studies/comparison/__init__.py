"""Methods under one budget, over seeds, beside the references that give their figures a meaning."""
