"""What a process can tell about itself: its event loop, its tasks and where they wait, what it
spends its time on, its last log records.
"""
