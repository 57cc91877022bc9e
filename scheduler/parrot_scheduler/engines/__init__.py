"""The engines of one model as the scheduler accounts for them."""
