"""The form of a structured answer, as people write them: it says nothing of other fields, and has
no bounds."""

from __future__ import annotations

from pydantic import BaseModel


class Weather(BaseModel):
    """The weather of a city."""

    city: str
    temperature: int
