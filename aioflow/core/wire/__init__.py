"""Encodes values as bytes: single values, and batches of rows and of columns."""
