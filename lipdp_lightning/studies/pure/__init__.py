"""Sensitivities in l1 and in the largest entry, Laplace noise for them, and private choices (004, 5.2 and 3.1)."""
