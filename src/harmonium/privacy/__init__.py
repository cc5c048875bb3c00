"""Protection of what leaves a client: noise mechanisms and their records."""
