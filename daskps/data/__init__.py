"""Files to batches: readers, key hashing, OP+OSRP, synthetic data."""
