"""The dense network, losses, optimizers and streaming metrics.

architecture  kinds, shapes and names of parameters       initial     their first values, a function of the seed
engine        where it computes: array module, launches   blas        NumPy's BLAS held to one thread, and named
block         one block of examples, forward and back     workspace   a thread's arrays, sums and flags
network       a step over all blocks, and the state       metrics     AUC, log loss, calibration, as data streams by
optimizer     SGD, Adagrad, Adam on fixed-point sums      diagnosis   why a step is not finite
"""
