"""Constants for a budget: the noise for a target epsilon, and the steps for epochs.

No guarantee depends on this room: what it finds is declared in a plan, and the accountants state the epsilon of that.
"""
