"""Rows in Criteo's layout, made here: skewed integers and hexadecimal categories, some of them missing."""

import numpy as np


def criteo_text(rows: int, seed: int = 0, missing: float = 0.15) -> bytes:
    """`rows` lines as Criteo writes them."""
    rng = np.random.default_rng(seed)
    integers = np.floor(rng.lognormal(1.5, 2.5, (rows, 13))).astype(np.int64) - 2
    categories = rng.zipf(1.3, (rows, 26)).astype(np.uint64) * np.uint64(2654435761) % np.uint64(2**32)
    absent = rng.random((rows, 39)) < missing
    labels = rng.random(rows) < 0.26
    lines = []
    for row in range(rows):
        fields = [str(x) for x in integers[row]] + [f"{x:08x}" for x in categories[row]]
        fields = ["" if gone else field for field, gone in zip(fields, absent[row], strict=True)]
        lines.append("\t".join([str(int(labels[row])), *fields]))
    return ("\n".join(lines) + "\n").encode() if rows else b""
