"""The roles of FLIP-6: the Dispatcher accepts jobs, a JobMaster runs one job, and TaskManagers run
its tasks. The ResourceManager assigns their slots.

A run in a single process is a cluster of one.
"""
