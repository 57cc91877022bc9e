"""The form of a structured answer: bounded, so that it ends with any model."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class Weather(BaseModel):
    """The weather of a city."""

    model_config = ConfigDict(extra="forbid")

    city: str = Field(max_length=40)
    temperature: int = Field(ge=-100, le=100)
