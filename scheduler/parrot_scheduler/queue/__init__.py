"""All that waits: held applications, waiting and blocked tasks, and the applications of both."""
