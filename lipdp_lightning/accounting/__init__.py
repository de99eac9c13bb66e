"""Accounting: the cost of releases with Gaussian noise.

This room knows nothing of data, networks or training.

================  ===================================================================================
events            the entries of a ledger, how several queries on one sample join, the range of constants
accountants       epsilon of a ledger by three accountants, and during a run
privacy_curves    upper bounds delta(epsilon) of compositions, by each accounting library
================  ===================================================================================
"""
