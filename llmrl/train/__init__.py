"""Training: models, tasks, plans, distributed set-up, updates and evaluation, shared by the recipes."""
