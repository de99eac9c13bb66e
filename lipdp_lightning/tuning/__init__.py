"""Searches settings: what is tried, what it costs, and selection that is accounted for (docs/tune.md)."""
