"""Work on whole columns with numpy.

Loaded by nothing but an operator that meets a batch of columns, or a source that makes one.
"""
