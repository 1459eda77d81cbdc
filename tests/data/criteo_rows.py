"""Examples in Criteo's layout, made here: skewed integers and hexadecimal categories, some of them missing."""

import numpy as np


def criteo_text(examples: int, seed: int = 0, missing: float = 0.15) -> bytes:
    """Return `examples` lines of text in Criteo's format."""
    rng = np.random.default_rng(seed)
    integers = np.floor(rng.lognormal(1.5, 2.5, (examples, 13))).astype(np.int64) - 2
    categories = rng.zipf(1.3, (examples, 26)).astype(np.uint64) * np.uint64(2654435761) % np.uint64(2**32)
    absent = rng.random((examples, 39)) < missing
    labels = rng.random(examples) < 0.26
    lines = []
    for example in range(examples):
        fields = [str(x) for x in integers[example]] + [f"{x:08x}" for x in categories[example]]
        fields = ["" if gone else field for field, gone in zip(fields, absent[example], strict=True)]
        lines.append("\t".join([str(int(labels[example])), *fields]))
    return ("\n".join(lines) + "\n").encode() if examples else b""
