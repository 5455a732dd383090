"""Workers of the engine in Spark's executors."""
