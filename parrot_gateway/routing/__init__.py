"""Which backend answers a call: names of models, placement by the scheduler, explanations."""
