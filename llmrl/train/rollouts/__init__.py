"""Sources of a step's rows: engine, queue, environments, agents."""
