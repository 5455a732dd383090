"""Windows: assigners, triggers, and the operators that keep and fire them."""
