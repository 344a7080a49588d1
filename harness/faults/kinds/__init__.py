"""The faults themselves, a module for each part of a kernel that goes wrong."""
