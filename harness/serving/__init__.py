"""The serving machine: what an engine does to one paged pool between two decodes, and what must hold after each step."""
