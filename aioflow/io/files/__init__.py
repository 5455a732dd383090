"""Sources and sinks of files, local ones and objects of a store."""
