"""What a run will do, before it loads weights: the plan, memory, engines."""
