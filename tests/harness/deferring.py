"""Deferred texts whose values a test chooses."""

from __future__ import annotations

from langchain_parrot.deferred import DeferredText


class Book:
    """Values by reference, as a resolver, and how often it was asked."""

    def __init__(self, **values: str | Exception) -> None:
        self.values = values
        self.asked: list[str] = []

    def text(self, name: str) -> DeferredText:
        """A deferred text of one of the values."""
        return DeferredText(f"[[{name}]]", self)

    def get(self, reference: str, timeout: float) -> str:
        self.asked.append(reference)
        value = self.values[reference.strip("[]")]
        if isinstance(value, Exception):
            raise value
        return value

    async def aget(self, reference: str, timeout: float) -> str:
        return self.get(reference, timeout)

    def get_all(self, references: list[str], timeout: float) -> list[str]:
        return [self.get(reference, timeout) for reference in references]

    async def aget_all(self, references: list[str], timeout: float) -> list[str]:
        return self.get_all(references, timeout)
