"""The lowest layer: types and interfaces that at least two layers share.

Imports no other package of aioflow.
"""
