"""Runs on one machine: their loop, how they start, resume and stop, and what they leave."""
