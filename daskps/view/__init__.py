"""Views of a run: figures of a batch, the log, the live dashboard pages, Prometheus metrics, the report at the end."""
