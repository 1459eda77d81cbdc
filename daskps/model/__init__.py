"""The dense network, losses, optimizers and streaming metrics."""
