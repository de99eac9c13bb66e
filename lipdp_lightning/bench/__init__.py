"""Measures the cost of private steps, always as ratios within one run."""
