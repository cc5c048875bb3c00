"""Does content or style tell clients apart? `finding.diagnose` asks, and advises."""
