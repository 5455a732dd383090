"""Fuzzing of everything that reads bytes from outside: `make fuzz SECONDS=60`, or `python -m
tests.fuzz TARGET`.
"""
