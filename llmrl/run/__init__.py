"""The command line: settings from YAML, run folders, metrics, rollout logs, checkpoints and the terminal."""
