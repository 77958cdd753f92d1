"""The files of a run and the terminal: settings from YAML, its folder, metrics, rollouts, checkpoints, console."""
