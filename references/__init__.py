"""The truth a kernel is held to: formats, the fp32 reference, the fp64 oracle and the error budget."""
