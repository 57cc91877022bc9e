"""LangChain on Parrot Gateway."""
