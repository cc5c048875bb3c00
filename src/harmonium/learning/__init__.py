"""Learning at one client: encoders, objectives, terms, and the local training loop."""
