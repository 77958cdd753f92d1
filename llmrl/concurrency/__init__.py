"""Threads, processes, locks and deadlines."""
