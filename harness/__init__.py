"""Everything that asks, runs, judges, shrinks, explains and reports."""
