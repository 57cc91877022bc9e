"""Which engines hold which beginnings of prompts, and which of them placed tasks need."""
