"""Measures that take minutes: run by hand, never part of the test suite."""
