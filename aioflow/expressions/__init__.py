"""Expressions: computations on one element written as data, and their compilation to Python
functions.
"""
