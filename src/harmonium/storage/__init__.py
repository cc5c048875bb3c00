"""What a run keeps on disk: its folder with commits, and the states of its clients."""
