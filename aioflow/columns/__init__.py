"""Processes whole batches of records as numpy columns.

This package is loaded only by operators that receive a batch of columns, and by sources that make
such batches. Its modules use these terms:

* Rows: the code path that processes one record after the other. The code for columns gives the same
  results.
* Coded column: small ints (codes) that are indices into a list of distinct values (entries).
* `NotOnColumns`: the exception that tells the caller to process a batch as rows.
"""
