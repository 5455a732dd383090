"""Sources and sinks of the tables of databases."""
