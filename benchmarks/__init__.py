"""Benchmarks: each `bench_*.py` is a program that prints a table and JSON.

How to read them stands in README.md.
"""
