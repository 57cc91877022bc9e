"""Forecasts of a call when it arrives, from what earlier calls of its template did.

The linking process learns it and tells the gateway when it changes; looking it up asks nobody.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from parrot_gateway.linking.profiles.templates import Template, TemplateTable, prompt_of

#: Calls behind a template's profile before it is used rather than that of a shorter template.
ENOUGH = 8.0


class Forecast(msgspec.Struct, frozen=True, array_like=True):
    """The usual course of calls of one template. Where nothing is known, figures are 0.

    Attributes:
        template: key, the same across restarts.
        weight: calls behind it, old ones counted less.
        output_tokens: p50 and p90, of one choice.
        feeds_fan_in: share of its calls whose answer was read by a call that read two or more
            answers of calls that ran at the same time.
        fan_in: mean number of answers that such a reader reads.
        siblings: mean number of calls of this template among them.
        returns: share of its calls that another call continued: whether its KV is of use again.
        gap_s: p50 and p90 of the time from its answer to the first call that uses it: a tool's
            run, somebody's thinking.
        successors: of the calls that use its answer the template, the share of its calls that have
            one, and how many those have; likeliest first.
        settled: calls whose answer was used, or will not be: those behind all shares.
        is_outer: longer templates begin with this one, and their calls were counted here before
            they were known: shares say little of the calls that have no longer template.
        prefix_bytes: of the template, what all prompts of an API begin with included.
    """

    template: str
    weight: float
    output_tokens: tuple[float, float] = (0.0, 0.0)
    feeds_fan_in: float = 0.0
    fan_in: float = 0.0
    siblings: float = 0.0
    returns: float = 0.0
    gap_s: tuple[float, float] = (0.0, 0.0)
    successors: tuple[tuple[str, float, float], ...] = ()
    settled: float = 0.0
    is_outer: bool = False
    prefix_bytes: int = 0


class TemplateForecast(msgspec.Struct, frozen=True, array_like=True):
    """A template, and what its calls do."""

    template: Template
    forecast: Forecast


class ForecastsChanged(msgspec.Struct, tag="forecasts_changed", array_like=True):
    """The changed forecasts of a tenant's templates."""

    tenant: str
    changed: list[TemplateForecast]
    removed: list[str]


class _Tenant:
    __slots__ = ("forecasts", "table")

    def __init__(self) -> None:
        self.table = TemplateTable()
        self.forecasts: dict[str, Forecast] = {}


class Forecasts:
    """The forecasts of all tenants, each for itself."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}

    def of(self, tenant: str, body: bytes) -> Forecast | None:
        """The forecast of a call; None for one of no known template.

        Args:
            tenant: of the caller.
            body: of the request, JSON.
        """
        known = self._tenants.get(tenant)
        if known is None:
            return None
        found = known.table.find(prompt_of(body))
        if not found:
            return None
        for template in reversed(found):
            forecast = known.forecasts[template.key]
            if forecast.weight >= ENOUGH:
                return forecast
        return known.forecasts[found[-1].key]

    def update(
        self, tenant: str, changed: Iterable[TemplateForecast], removed: Iterable[str] = ()
    ) -> None:
        """Take what has changed.

        Args:
            tenant: whose templates these are.
            removed: keys of templates that are forgotten.
        """
        known = self._tenants.get(tenant)
        if known is None:
            known = self._tenants[tenant] = _Tenant()
        for key in removed:
            known.table.remove(key)
            known.forecasts.pop(key, None)
        for template, forecast in ((each.template, each.forecast) for each in changed):
            if known.table.add(template):
                known.forecasts[template.key] = forecast
        if not known.forecasts:
            del self._tenants[tenant]

    def clear(self) -> None:
        """Forget everything."""
        self._tenants.clear()
