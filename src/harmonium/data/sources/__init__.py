"""Fetching published data sets: downloads, packages, and copies that the user supplies."""
