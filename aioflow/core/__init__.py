"""The floor: vocabulary and seams that at least two layers share.

Imports nothing of the package above it.
"""
