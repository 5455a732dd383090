"""Work on whole columns with numpy.

Only operators that meet a batch of columns, and sources that make one, load this package.
"""
