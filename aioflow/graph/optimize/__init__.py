"""The optimisations of a flow's graph before it runs. They read the traits of operators."""
