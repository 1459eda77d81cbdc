"""Input data, from files to batches: formats, readers, key hashing, OP+OSRP, synthetic data."""
