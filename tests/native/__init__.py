"""Comparisons that need a GPU: run by hand on one, never part of the test suite."""
