"""A meaning on the CPU for kernels written for a GPU."""
