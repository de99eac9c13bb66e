"""Numbers from a ledger: what releases with Gaussian noise cost, and the noise that a budget needs.

This room knows nothing of data, networks or training.

================  ===================================================================================
events            the entries of a ledger, how several queries on one sample join, the range of constants
accountants       epsilon of a ledger: three of them, and a second opinion
privacy_curves    upper bounds delta(epsilon) of compositions, by each accounting library
calibrate         noise for a budget, and steps within a budget
spending          epsilon as a run goes on
budget_question   what `lipdp budget` computes
================  ===================================================================================
"""
