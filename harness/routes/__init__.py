"""Routes: what an engine does between its decode step and a kernel, as data and small steps."""
