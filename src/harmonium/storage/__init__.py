"""Files of a run: its folder with commits, and the stored states of its clients."""
