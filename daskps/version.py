"""Versions of daskps, its numerics and its key rule. Every module may import this; DESIGN.md lists the numbers."""

__version__ = "0.1.0"

# Raised by every change that gives other bits for equal settings and data. A run can be resumed only with the number
# in its snapshot; a snapshot without one has 1.
NUMERICS = 2
KEY_RULE = 2  # the newest rule by which values become keys; a model keeps the rule that it was created with
