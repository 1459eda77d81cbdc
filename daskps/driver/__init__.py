"""The driver of a run, in the client or in a Dask task: batches, tasks, batch sizes, snapshots, recovery."""
