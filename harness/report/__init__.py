"""What people and programs read of a run: one module a form."""
