"""Forecasts for an arriving call, from earlier calls of its template.

The linking process learns them and sends changes to the gateway, where a look-up is local.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from parrot_gateway.linking.profiles.templates import Template, TemplateTable, prompt_of

#: Calls behind a template's profile before it is preferred to that of a shorter template.
ENOUGH = 8.0


class Forecast(msgspec.Struct, frozen=True, array_like=True):
    """The usual behaviour of one template's calls. Unknown figures are 0.

    Attributes:
        template: key, stable across restarts.
        weight: number of calls behind it; old ones count less.
        output_tokens: p50 and p90 of one choice.
        feeds_fan_in: share of its calls whose answer was read together with the answer of at
            least one concurrent call.
        fan_in: mean number of answers of such a reader.
        siblings: mean number of calls of this template among them.
        returns: share of its calls that another call continued, so that their KV is useful again.
        gap_s: p50 and p90 of the time from its answer to the first call that uses it, such
            as a tool's run or a user's pause.
        successors: for each template of calls that use its answer: the share of its calls that have
            such a user, and the number of users; likeliest first.
        settled: number of calls whose answer was used or never will be; the base of all shares.
        is_outer: true if longer templates begin with this one. Their calls were counted here before
            they were known, so shares say little about calls without a longer template.
        prefix_bytes: bytes of the template, including the common start of an API's prompts.
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
    """A template and the forecast for its calls."""

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
    """The forecasts of all tenants, each separately."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}

    def of(self, tenant: str, body: bytes) -> Forecast | None:
        """Return the forecast for a call; None if its template is unknown.

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
        """Apply changes.

        Args:
            tenant: whose templates these are.
            removed: keys of forgotten templates.
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
