"""Sans-IO protocols: bytes and stimuli in, events and bytes out. No loop, no socket, no clock."""
