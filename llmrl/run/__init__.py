"""What a run writes and reads: settings from YAML, its folder, metrics, rollouts, checkpoints and the terminal."""
