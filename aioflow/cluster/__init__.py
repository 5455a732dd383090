"""The roles of FLIP-6: who accepts jobs, who runs one, who runs its tasks.

One process is a cluster of one.
"""
