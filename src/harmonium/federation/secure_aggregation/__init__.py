"""Secure aggregation: the server learns the sum of updates and no single one."""
