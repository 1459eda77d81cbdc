"""Input data, from files to batches: formats, readers, key hashing, OP+OSRP, synthetic data.

Here `row` in a name (`first_row`, `rows`, `shuffle_rows`) means one example of the data, not a row of parameters.
"""
