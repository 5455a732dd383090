"""The encoding of values: their trees, their types, and batches of rows and of columns."""
