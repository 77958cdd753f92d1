"""Tasks: a dataset, a prompt and a reward each. Users import them from `llmrl.envs.llm`."""
