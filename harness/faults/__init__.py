"""Wrong kernels on purpose: the catalogue and what each of them needs to be seen."""
