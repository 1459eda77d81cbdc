"""The only place that knows CPU from GPU: kernels by name, the compute pool, devices."""
