"""Where a step gets its rows from: engine, queue, environments, agents."""
