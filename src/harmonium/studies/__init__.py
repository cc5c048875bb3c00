"""Work made of many runs: comparisons, sweeps, tuning, and the diagnosis of clients."""
