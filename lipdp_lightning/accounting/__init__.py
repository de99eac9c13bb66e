"""Accounting: the cost of releases with Gaussian noise, and the noise that a budget needs.

This room knows nothing of data, networks or training.

================  ===================================================================================
events            the entries of a ledger, how several queries on one sample join, the range of constants
accountants       epsilon of a ledger by three accountants, and their comparison
privacy_curves    upper bounds delta(epsilon) of compositions, by each accounting library
calibrate         noise for a budget, and steps within a budget
spending          epsilon during a run
================  ===================================================================================
"""
