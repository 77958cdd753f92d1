"""The training loops, one file each, and YAML files of runs that we have made."""
