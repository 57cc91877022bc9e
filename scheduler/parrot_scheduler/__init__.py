"""Which task runs where and when: pure decisions, no I/O, no clock, no torch."""
