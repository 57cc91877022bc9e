"""The gateway's shell round the scheduler: its clock, its events, its actions."""
