"""Templates of prompts, and the behaviour of each template's calls."""
