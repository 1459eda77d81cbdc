"""Dense networks, losses, dense optimizers and streaming metrics; formulas in OPTIMIZERS.md."""
