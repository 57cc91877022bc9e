"""Every metric: its name, type, labels, and what it means.

`vllm:` names are those of vLLM, and mean the same; `gen_ai_` names are OpenTelemetry's, as
Prometheus writes them; `parrot_` names are the gateway's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True, eq=False)
class Definition:
    """One metric.

    Attributes:
        name: of the family; a counter's samples have `_total` behind it.
        buckets: upper bounds of a histogram, without infinity.
    """

    name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str
    buckets: tuple[float, ...] = ()

    @property
    def sample_names(self) -> tuple[str, ...]:
        """Names as queries use them."""
        if self.kind == "counter":
            return (f"{self.name}_total",)
        if self.kind == "histogram":
            return tuple(f"{self.name}_{part}" for part in ("bucket", "count", "sum"))
        return (self.name,)


#: All of them, in the order of the page.
DEFINITIONS: list[Definition] = []


def _define(
    kind: Kind, name: str, labels: str, help: str, buckets: tuple[float, ...] = ()
) -> Definition:
    definition = Definition(name, kind, tuple(labels.split()), help, buckets)
    DEFINITIONS.append(definition)
    return definition


def _gauge(name: str, labels: str, help: str) -> Definition:
    return _define("gauge", name, labels, help)


def _counter(name: str, labels: str, help: str) -> Definition:
    return _define("counter", name, labels, help)


def _histogram(name: str, labels: str, help: str, buckets: tuple[float, ...]) -> Definition:
    return _define("histogram", name, labels, help, buckets)


# The gateway

INFO = _gauge("parrot_gateway_info", "version", "1, with the version of the gateway.")
READY = _gauge("parrot_gateway_ready", "", "Whether calls can be answered (/health/readiness).")
DRAINING = _gauge("parrot_gateway_draining", "", "Whether new calls are refused.")
REQUESTS_RUNNING = _gauge("parrot_requests_running", "", "Requests in work over HTTP.")
REQUESTS_ACCEPTED = _counter(
    "parrot_requests_accepted",
    "",
    "Requests over HTTP that were let in (server.max_running_calls).",
)
REQUESTS_REFUSED = _counter(
    "parrot_requests_refused", "", "Requests refused because the gateway was full or closing."
)

# Engines

_ENGINE = "model_name engine"
NUM_RUNNING = _gauge("vllm:num_requests_running", _ENGINE, "Contexts in the engine's batch.")
NUM_WAITING = _gauge(
    "vllm:num_requests_waiting",
    _ENGINE,
    'Contexts that wait in an engine; with engine="gateway" calls that wait there for an engine.',
)
KV_USAGE = _gauge(
    "vllm:kv_cache_usage_perc", _ENGINE, "Share of KV blocks in use, 1 for all of them."
)
PREFIX_QUERIES = _counter(
    "vllm:prefix_cache_queries", _ENGINE, "Prompt tokens looked up in the prefix cache."
)
PREFIX_HITS = _counter("vllm:prefix_cache_hits", _ENGINE, "Those of them that were found.")
PREEMPTIONS = _counter(
    "vllm:num_preemptions", _ENGINE, "Contexts preempted because KV blocks ran out."
)
DRAFTED = _counter("vllm:spec_decode_num_draft_tokens", _ENGINE, "Tokens drafted ahead.")
ACCEPTED = _counter("vllm:spec_decode_num_accepted_tokens", _ENGINE, "Drafts that were right.")
ENGINES = _gauge("parrot_engines", "model_name kind state", "Joined engines.")
ENGINE_PROMPT = _counter(
    "parrot_engine_prompt_tokens",
    f"{_ENGINE} source",
    "Prompt tokens filled: computed, or reused from the prefix cache.",
)
ENGINE_GENERATED = _counter("parrot_engine_generated_tokens", _ENGINE, "Tokens generated.")
ENGINE_STEPS = _counter("parrot_engine_steps", _ENGINE, "Steps (batches) computed.")
ENGINE_BUSY = _counter("parrot_engine_busy_seconds", _ENGINE, "Seconds spent in steps.")
ENGINE_BLOCKS = _gauge(
    "parrot_engine_kv_blocks",
    f"{_ENGINE} state",
    "KV blocks: used, cached (free, and can be found again), empty; host: copies in the host tier.",
)
ENGINE_HOST_MOVES = _counter(
    "parrot_engine_host_blocks_moved",
    f"{_ENGINE} direction",
    "KV blocks copied to the host tier and back (out, in).",
)
ENGINE_QUEUED_TOKENS = _gauge(
    "parrot_engine_queued_tokens", _ENGINE, "Prompt tokens sent to the engine and not filled yet."
)
ENGINE_HEARTBEAT_AGE = _gauge(
    "parrot_engine_heartbeat_age_seconds", _ENGINE, "Seconds since the engine's last heartbeat."
)
PROCESS_STATES = _gauge(
    "parrot_engine_processes", "model_name state", "Engine processes of the gateway's own."
)
PROCESS_RESTARTS = _counter(
    "parrot_engine_process_restarts", "model_name", "Restarts of engine processes."
)

# Upstreams

UPSTREAM_READY = _gauge(
    "parrot_upstream_ready", "upstream", "Whether the upstream's models are known."
)
UPSTREAM_BREAKER = _gauge(
    "parrot_upstream_breaker_open",
    "upstream",
    "1 while the circuit breaker is open, 0.5 half open.",
)
UPSTREAM_OPENINGS = _counter(
    "parrot_upstream_breaker_openings", "upstream", "Times that the circuit breaker opened."
)
UPSTREAM_RUNNING = _gauge("parrot_upstream_requests_running", "upstream", "Requests in flight.")
UPSTREAM_WAITING = _gauge(
    "parrot_upstream_requests_waiting", "upstream", "Requests that wait for max_concurrency."
)
UPSTREAM_RETRIES = _counter("parrot_upstream_retries", "upstream", "Tries after the first.")
UPSTREAM_FAILURES = _counter(
    "parrot_upstream_failures", "upstream", "Tries that failed: no connection, time-out, 5xx."
)
UPSTREAM_TOKENS = _counter(
    "parrot_upstream_tokens",
    "upstream type",
    "Tokens as the upstream reports them (prompt, cached, output).",
)

# The scheduler

QUEUED = _gauge("parrot_scheduler_queued_calls", "model_name", "Calls that wait for an engine.")
OLDEST_WAIT = _gauge(
    "parrot_scheduler_oldest_wait_seconds", "model_name", "How long the oldest of them has waited."
)
APPLICATIONS = _gauge(
    "parrot_scheduler_applications", "model_name", "Applications with calls that wait or run."
)
HELD_APPLICATIONS = _gauge(
    "parrot_scheduler_held_applications", "model_name", "Applications held by admission control."
)
HELD_CALLS = _gauge("parrot_scheduler_held_calls", "model_name", "Calls of held applications.")
HOLDS = _counter("parrot_scheduler_holds", "", "Times that an application was held.")
PLACEMENTS = _counter(
    "parrot_scheduler_placements", "reason", "Calls placed on an engine, by what decided."
)
REFUSALS = _counter("parrot_scheduler_refusals", "code", "Calls refused by the scheduler.")
GROUPED = _counter("parrot_scheduler_grouped_calls", "", "Calls submitted as part of a task group.")
MEMORY_NEEDED = _gauge(
    "parrot_scheduler_memory_needed_ratio",
    "model_name",
    "Share of the engines' KV that running calls and kept contexts need.",
)

# Applications

SESSIONS = _gauge("parrot_sessions", "", "Sessions kept.")
SESSIONS_CREATED = _counter("parrot_sessions_created", "", "Sessions made.")
SESSIONS_ENDED = _counter(
    "parrot_sessions_ended",
    "reason",
    "Sessions forgotten: closed, evicted (room), expired (unused).",
)
SESSION_VARIABLES = _gauge("parrot_session_variables", "", "Semantic variables kept.")
SESSION_BYTES = _gauge("parrot_session_value_bytes", "", "Bytes of values and contexts kept.")
SESSION_READERS = _gauge("parrot_session_readers", "", "Clients that wait for a variable.")
GRAPH_DEPTH = _histogram(
    "parrot_session_graph_depth",
    "",
    "Calls on the longest path of a session's graph, at its end.",
    (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256, 512, 1024),
)
GRAPH_WIDTH = _histogram(
    "parrot_session_graph_width",
    "",
    "Calls of the widest stage of a session's graph, at its end.",
    (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256, 512, 1024),
)
GRAPH_CALLS = _histogram(
    "parrot_session_graph_calls",
    "",
    "Calls that a session's graph holds at its end.",
    (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000),
)
GRAPH_UNFINISHED = _gauge(
    "parrot_graph_calls_unfinished",
    "state",
    "Calls with semantic fields: waiting for inputs, in_line for a free place, running.",
)
GRAPH_ENDED = _counter(
    "parrot_graph_calls", "outcome", "Ended calls with semantic fields (done, failed, cancelled)."
)
DEDUPLICATED = _counter(
    "parrot_deferred_calls_deduplicated", "", "Deferred calls that took an identical call's value."
)
DEFERRED_RETRIES = _counter("parrot_deferred_call_retries", "", "Tries after the first.")
ROUND_TRIPS_SAVED = _counter(
    "parrot_deferred_round_trips_saved",
    "",
    "Calls that started when their last input came, without a round trip of their client.",
)
HEAD_START = _counter(
    "parrot_deferred_head_start_seconds",
    "",
    "Seconds by which such calls were known before they could start.",
)
RECORDED = _counter(
    "parrot_recorded_calls", "outcome", "Ordinary calls that name a session: recorded, skipped."
)
FILL_AHEAD_HELD = _gauge(
    "parrot_fill_ahead_held_tokens", "", "Prompt tokens filled for calls that still wait."
)
FILL_AHEAD_FILLS = _counter(
    "parrot_fill_ahead_fills", "outcome", "Prefixes of waiting calls: done, cut_off."
)
FILL_AHEAD_TOKENS = _counter(
    "parrot_fill_ahead_tokens", "", "Prompt tokens filled ahead, those found in a cache included."
)
FILL_AHEAD_CACHED = _counter("parrot_fill_ahead_cached_tokens", "", "Those found in a cache.")
STORED_RESPONSES = _gauge("parrot_stored_responses", "", "Responses and conversations kept.")
BATCHES_RUNNING = _gauge("parrot_batches_running", "", "Batches in work.")
BATCH_LINES = _gauge("parrot_batch_lines_running", "", "Lines of batches that run as calls.")

# Linking

LINK_CALLS = _counter("parrot_linking_calls", "", "Calls that the linking process has read.")
LINK_EDGES = _counter("parrot_linking_edges", "kind", "Edges inferred between calls.")
LINK_SESSIONS = _gauge("parrot_linking_sessions", "", "Sessions inferred, of the calls remembered.")
LINK_SKIPPED = _counter("parrot_linking_skipped", "", "Messages not read: too long, or too late.")
LINK_BEHIND = _gauge("parrot_linking_behind_seconds", "", "Age of the oldest message not yet read.")
LINK_BYTES = _gauge("parrot_linking_bytes", "", "Bytes that the linking process keeps.")
LINK_RESTARTS = _counter("parrot_linking_restarts", "", "Restarts of the linking process.")
LINK_LATE = _counter(
    "parrot_linking_late_sessions", "", "Calls that went on before their session was known."
)
LINK_TEMPLATES = _gauge("parrot_linking_templates", "", "Prompt templates with a profile.")
