"""Templates of prompts, and what calls of each template do."""
