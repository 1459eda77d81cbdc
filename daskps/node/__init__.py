"""The node: everything that lives on a Dask worker during a run, from opening the model to the stages of each batch."""
