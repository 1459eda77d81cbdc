"""HBM-PS: the rows of one batch in device memory, sharded over the devices of a node. `table.py` is the entry point."""
