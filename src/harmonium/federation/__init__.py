"""Federated algorithms: exchanges between server and clients, and aggregation of uploads."""
