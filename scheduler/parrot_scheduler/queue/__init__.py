"""Queues: held applications, waiting and blocked tasks, and the known applications."""
