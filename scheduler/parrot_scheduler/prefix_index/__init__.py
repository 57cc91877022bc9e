"""Prefixes of prompts by the engines that hold them and the placed tasks that need them."""
