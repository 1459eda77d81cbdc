"""The model directory on disk: files, commit log, snapshots, record of batches, and the partition of a key."""
