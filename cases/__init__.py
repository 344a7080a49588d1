"""What is asked of a backend: the gate's pytest suite and its data."""
