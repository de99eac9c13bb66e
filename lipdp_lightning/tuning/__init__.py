"""Searches over settings: what is tried, what it costs, and selection that is accounted (docs/tune.md)."""
