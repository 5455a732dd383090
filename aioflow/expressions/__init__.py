"""Computations on one element written as data, and what they compile to over rows."""
