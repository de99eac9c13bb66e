"""Examines a machine before its first private run, for ``lipdp doctor``."""
