"""Seeing a run: figures of a batch, the log, the live pages, Prometheus metrics, and the report after it."""
