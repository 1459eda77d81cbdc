"""Devices: the only code that distinguishes CPU and GPU. Kernels by name, the compute pool, devices, host memory."""
