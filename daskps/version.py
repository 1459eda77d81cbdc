"""The version, in one place that anything may import."""

VERSION = "0.1.0"
