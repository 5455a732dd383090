"""Sources and sinks of files: local files, and objects of an object store."""
