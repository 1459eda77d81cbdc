"""The version, in one place that anything may import."""

__version__ = "0.1.0"
