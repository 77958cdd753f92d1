"""What several test files use: rows, engines, runs. A test file imports it as ``tests.support``."""
