"""Helpers in this folder (private_step.py) can be imported from every test below it."""
