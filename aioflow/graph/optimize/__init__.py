"""The passes of the planner over a flow. They read the traits of operators."""
