"""Nodes: one per Dask worker, and what they say to each other."""
