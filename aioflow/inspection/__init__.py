"""What a process can report about itself: its event loop, its tasks and where they wait, its CPU
time, its last log records.
"""
