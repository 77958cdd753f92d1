"""The training loops, one file each, with the YAML files of the runs we have made beside them."""
