"""Beginnings of prompts by the engines that hold them, and those that placed tasks need."""
