"""Supports batch jobs on Slurm: what a process can know of its job, the signals it gets, and the scripts
that start it.
"""
