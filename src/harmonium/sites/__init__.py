"""Real sites: the federation's folder, signed messages, what a site accepts and records."""
