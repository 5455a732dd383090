"""Aggregates: the built-in functions, their bulk form, and running results."""
