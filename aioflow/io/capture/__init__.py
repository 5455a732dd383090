"""Sources of the changes that a database records."""
