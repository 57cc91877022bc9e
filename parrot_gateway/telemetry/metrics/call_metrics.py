"""Counters and histograms of calls, fed with the record of each ended call.

One look-up finds everything that depends on a call's labels; the rest costs an addition per metric.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from parrot_gateway.telemetry.call_record import CallRecord
from parrot_gateway.telemetry.metrics import definitions as d
from parrot_gateway.telemetry.metrics.definitions import Definition
from parrot_gateway.telemetry.metrics.distribution import Distribution
from parrot_gateway.telemetry.metrics.labels import (
    MAX_ENGINES,
    MAX_MODELS,
    MAX_TENANTS,
    MAX_UNLISTED,
    MAX_WORDS,
    OTHER,
    BoundedValues,
    label_text,
)
from parrot_gateway.telemetry.operations import PROVIDER, operation_of
from parrot_gateway.telemetry.trace_context import CallTrace

#: Label of an unknown value.
UNKNOWN = "unknown"
#: Combinations of labels remembered; more are looked up again.
_MAX_REMEMBERED = 4096
#: vLLM's names of finish reasons.
_FINISHED = {"stop": "stop", "tool_calls": "stop", "function_call": "stop", "length": "length"}

_TOKENS = ((d.PROMPT_TOKENS, "prompt"), (d.CACHED_TOKENS, "cached"), (d.OUTPUT_TOKENS, "output"))

#: A counter's value in a list of its own, so that it can be incremented in place.
_Cell: TypeAlias = list[float]


class _ByModel(NamedTuple):
    """Distributions of the successful calls of one operation and model."""

    ttft: Distribution
    token_gaps: Distribution
    token_mean: Distribution
    e2e: Distribution
    queue: Distribution
    prefill: Distribution
    decode: Distribution
    inference: Distribution
    prompt: Distribution
    output: Distribution
    input_usage: Distribution
    output_usage: Distribution


class _Series(NamedTuple):
    """Counters and distributions for calls with one combination of labels."""

    calls: list[_Cell]
    duration: Distribution
    #: Of successful calls.
    model: _ByModel | None
    prompt: list[_Cell]
    cached: list[_Cell]
    output: list[_Cell]
    #: True if the time of the first token is meaningful.
    has_first: bool


class CallMetrics:
    """Counts calls. Used in the event loop's thread only.

    Args:
        engines: names of engines that have joined.
        upstreams: names of the servers of upstreams.
        is_served: returns true if an engine or upstream has a model of that name; others get
            a label at their first success.
    """

    def __init__(
        self,
        engines: Callable[[], Collection[str]] = tuple,
        upstreams: Callable[[], Collection[str]] = tuple,
        is_served: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self._engines_now = engines
        self._upstreams_now = upstreams
        self._is_served = is_served
        self._models = BoundedValues(MAX_MODELS)
        self._engines = BoundedValues(MAX_ENGINES)
        self._tenants = BoundedValues(MAX_TENANTS)
        self._servers = BoundedValues(MAX_ENGINES)
        self._errors = BoundedValues(MAX_WORDS)
        self._codes = BoundedValues(MAX_WORDS)
        self._cells: dict[Definition, dict[tuple[str, ...], _Cell]] = {}
        self._by_model: dict[tuple[str, str], _ByModel] = {}
        self._durations: dict[tuple[str, ...], Distribution] = {}
        self._stages = {
            name: Distribution(d.STAGES)
            for name in ("inputs", "prepare", "queue", "first_token", "generate")
        }
        self._pauses = Distribution(d.FAILOVER_PAUSES)
        self._remembered: dict[tuple[object, ...], _Series] = {}
        self._left = self._cell(d.CALLS_LEFT)
        self._deferred = self._cell(d.CALLS_DEFERRED)

    def count(self, records: Sequence[CallRecord]) -> None:
        """Count ended calls; a batch sink of `CallRecords`."""
        for record in records:
            self._count(record)

    def _count(self, record: CallRecord) -> None:
        key = (
            record.path, record.served_model, record.engine, record.tenant, record.status,
            record.error_code, record.finish_reason, record.client_left, record.streamed,
        )  # fmt: skip
        series = self._remembered.get(key)
        if series is None:
            series = self._remember(key, record)
        for cell in series.calls:
            cell[0] += 1
        assert record.ended is not None
        began = record.started if record.ready is None else record.ready
        took = record.ended - began
        series.duration.observe(took)
        self._time_stages(record, began)
        if record.deferred:
            self._deferred[0] += 1
        for tried in record.tried:
            server, _, reason = tried.rpartition("=")
            self._cell(d.UPSTREAM_FALLBACKS, self._servers.of(server), reason)[0] += 1
        if record.lost_engines:
            self._count_losses(record)
        prompt, output = record.prompt_tokens, record.output_tokens
        if prompt is not None:
            for cell in series.prompt:
                cell[0] += prompt
        if record.cached_tokens:
            for cell in series.cached:
                cell[0] += record.cached_tokens
        if output is not None:
            for cell in series.output:
                cell[0] += output
        model = series.model
        if record.trace is not None and record.trace.sampled:
            _exemplify(record, record.trace, series, began)
        if model is None:
            return
        model.e2e.observe(took)
        if record.queued_s is not None:
            model.queue.observe(record.queued_s)
        if prompt is not None:
            model.prompt.observe(prompt)
            model.input_usage.observe(prompt)
        if output is not None:
            model.output.observe(output)
            model.output_usage.observe(output)
        if series.has_first and record.first_token is not None:
            model.ttft.observe(record.first_token - began)
            model.decode.observe(record.ended - record.first_token)
            if record.placed is not None:
                model.prefill.observe(record.first_token - record.placed)
                model.inference.observe(record.ended - record.placed)
            if output is not None and output > 1:
                gap = (record.ended - record.first_token) / (output - 1)
                model.token_mean.observe(gap)
                model.token_gaps.observe(gap, output - 1)

    def _count_losses(self, record: CallRecord) -> None:
        model = self._models.of(record.served_model or UNKNOWN)
        for kind in record.loss_kinds:
            self._cell(d.FAILOVERS, model, kind)[0] += 1
        self._cell(d.FAILOVER_REFILLED, model)[0] += record.refilled_tokens
        for pause_s in record.pauses_s:
            self._pauses.observe(pause_s)

    def _time_stages(self, record: CallRecord, began: float) -> None:
        stages = self._stages
        if record.ready is not None:
            stages["inputs"].observe(record.ready - record.started)
        if record.submitted is None:
            return
        stages["prepare"].observe(record.submitted - began)
        if record.queued_s is None or record.placed is None:
            return
        stages["queue"].observe(record.queued_s)
        if record.first_token is not None and record.ended is not None:
            stages["first_token"].observe(record.first_token - record.placed)
            stages["generate"].observe(record.ended - record.first_token)

    def _remember(self, key: tuple[object, ...], record: CallRecord) -> _Series:
        failed = record.status >= 400 or record.error_code is not None
        upstreams = self._upstreams_now()
        if self._engines.is_full:
            self._forget_engines({*upstreams, *self._engines_now(), UNKNOWN})
        # Made-up names that nothing serves get no label. Unlisted names that an upstream accepts
        # leave some labels to the gateway's own models.
        name, known = record.served_model or UNKNOWN, len(self._models.shown)
        places = MAX_MODELS if self._is_served(name) else 0 if failed else MAX_UNLISTED
        model = self._models.of(name, places=places)
        if len(self._models.shown) > known:
            # Earlier failed calls to it are remembered as `other`.
            self._remembered.clear()
        engine = self._engines.of(record.engine or UNKNOWN)
        tenant = self._tenants.of(record.tenant)
        code = self._codes.of(str(record.status))
        operation = operation_of(record.path)
        calls = [self._cell(d.CALLS, record.path, code), self._cell(d.TENANT_CALLS, tenant)]
        if record.client_left:
            calls.append(self._left)
        error = ""
        by_model = None
        if failed and not record.client_left:
            error = self._errors.of(record.error_code or UNKNOWN)
            calls.append(self._cell(d.CALL_ERRORS, model, error))
            calls.append(self._cell(d.TENANT_ERRORS, tenant))
        else:
            reason = _FINISHED.get(record.finish_reason or "", UNKNOWN)
            reason = "abort" if record.client_left else reason
            calls.append(self._cell(d.SUCCESS, model, engine, reason))
            by_model = self._model(operation, model)
        if len(self._remembered) >= _MAX_REMEMBERED:
            self._remembered.clear()
        series = self._remembered[key] = _Series(
            calls,
            self._duration(operation, model, error),
            by_model,
            *self._token_cells(record.engine, model, engine, tenant),
            has_first=record.streamed or record.engine not in upstreams,
        )
        return series

    def _forget_engines(self, kept: Collection[str]) -> None:
        """Drop the series of departed engines, because each new process has a new name."""
        if not self._engines.keep(kept):
            return
        self._remembered.clear()
        shown = {OTHER, *self._engines.shown}
        for definition, cells in self._cells.items():
            if "engine" in definition.labels:
                place = definition.labels.index("engine")
                for labels in [each for each in cells if each[place] not in shown]:
                    del cells[labels]

    def _token_cells(
        self, taken_by: str | None, model: str, engine: str, tenant: str
    ) -> tuple[list[_Cell], list[_Cell], list[_Cell]]:
        """Return the counters of prompt, cached and output tokens; empty if no engine took the
        call.
        """
        if taken_by is None:
            return [], [], []
        prompt, cached, output = (
            [self._cell(definition, model, engine), self._cell(d.TENANT_TOKENS, tenant, kind)]
            for definition, kind in _TOKENS
        )
        return prompt, cached, output

    def _cell(self, definition: Definition, *labels: str) -> _Cell:
        return self._cells.setdefault(definition, {}).setdefault(labels, [0])

    def _model(self, operation: str, model: str) -> _ByModel:
        found = self._by_model.get((operation, model))
        if found is None:
            found = self._by_model[operation, model] = _ByModel(
                **{field: Distribution(definition) for definition, field in _BY_MODEL.items()},
                input_usage=Distribution(d.GEN_AI_USAGE),
                output_usage=Distribution(d.GEN_AI_USAGE),
            )
        return found

    def _duration(self, operation: str, model: str, error: str) -> Distribution:
        labels = (operation, PROVIDER, model, error)
        found = self._durations.get(labels)
        if found is None:
            found = self._durations[labels] = Distribution(d.GEN_AI_DURATION)
        return found

    def counters(self, definition: Definition) -> Mapping[str, float]:
        """Return values by labels, in the form of `label_text`; empty if the metric is not counted
        here.
        """
        cells = self._cells.get(definition, {})
        return {label_text(definition.labels, labels): cell[0] for labels, cell in cells.items()}

    def histogram(self, definition: Definition, *, has_exemplars: bool = False) -> Iterator[str]:
        """Yield the samples of a histogram; none if it is not counted here.

        Args:
            has_exemplars: as in `Distribution.lines`.
        """
        for labels, each in self._distributions(definition):
            text = label_text(definition.labels, labels)
            yield from each.lines(definition, text, has_exemplars=has_exemplars)

    def _distributions(
        self, definition: Definition
    ) -> Iterator[tuple[tuple[str, ...], Distribution]]:
        if definition is d.STAGES:
            for stage, each in self._stages.items():
                yield (stage,), each
        elif definition is d.FAILOVER_PAUSES:
            yield (), self._pauses
        elif definition is d.GEN_AI_DURATION:
            yield from list(self._durations.items())
        elif definition in _BY_MODEL:
            for model, each in self._summed_up(_BY_MODEL[definition], definition).items():
                yield (model,), each
        else:
            for (operation, model), group in list(self._by_model.items()):
                for field, *rest in _GEN_AI.get(definition, ()):
                    yield (operation, PROVIDER, model, *rest), getattr(group, field)

    def _summed_up(self, field: str, definition: Definition) -> dict[str, Distribution]:
        """Sum a field of `_ByModel` by model, over all operations."""
        summed: dict[str, Distribution] = {}
        for (_, model), group in self._by_model.items():
            summed.setdefault(model, Distribution(definition)).add(getattr(group, field))
        return summed


def _exemplify(record: CallRecord, trace: CallTrace, series: _Series, began: float) -> None:
    """Attach the call's trace to its times as exemplars."""
    assert record.ended is not None
    at = record.started_at + record.ended - record.started
    series.duration.exemplify(record.ended - began, trace, at)
    if series.model is not None:
        series.model.e2e.exemplify(record.ended - began, trace, at)
        if series.has_first and record.first_token is not None:
            series.model.ttft.exemplify(record.first_token - began, trace, at)


#: Metrics of `_ByModel`'s fields, by model.
_BY_MODEL = {
    d.TTFT: "ttft",
    d.TOKEN_GAPS: "token_gaps",
    d.TOKEN_GAPS_EARLIER: "token_gaps",
    d.TOKEN_MEAN: "token_mean",
    d.E2E: "e2e",
    d.QUEUE: "queue",
    d.PREFILL: "prefill",
    d.DECODE: "decode",
    d.INFERENCE: "inference",
    d.PROMPT_LENGTH: "prompt",
    d.OUTPUT_LENGTH: "output",
}
#: Metrics by operation too: fields, each with the last label if the metric has one more.
_GEN_AI: Mapping[Definition, Sequence[tuple[str, *tuple[str, ...]]]] = {
    d.GEN_AI_TTFT: [("ttft",)],
    d.GEN_AI_TOKEN_MEAN: [("token_mean",)],
    d.GEN_AI_USAGE: [("input_usage", "input"), ("output_usage", "output")],
}
