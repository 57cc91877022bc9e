"""Every metric: its name, type, labels, and meaning.

`vllm:` names are vLLM's, with the same meaning; `gen_ai_` names are OpenTelemetry's in Prometheus's
form; `parrot_` names are the gateway's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True, eq=False)
class Definition:
    """One metric.

    Attributes:
        name: name of the family; a counter's samples append `_total`.
        buckets: upper bounds of a histogram, without infinity.
        same_as: the counter or gauge whose values it repeats, under a name that dashboards use.
    """

    name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str
    buckets: tuple[float, ...] = ()
    same_as: Definition | None = None

    @property
    def sample_names(self) -> tuple[str, ...]:
        """Return the names that queries use."""
        if self.kind == "counter":
            return (f"{self.name}_total",)
        if self.kind == "histogram":
            return tuple(f"{self.name}_{part}" for part in ("bucket", "count", "sum"))
        return (self.name,)


#: All definitions, in the order of the page.
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


def _alias(same_as: Definition, name: str, help: str) -> None:
    DEFINITIONS.append(Definition(name, same_as.kind, same_as.labels, help, same_as=same_as))


# The gateway

INFO = _gauge("parrot_gateway_info", "version", "1, with the version of the gateway.")
READY = _gauge("parrot_gateway_ready", "", "Whether calls can be answered (/health/readiness).")
DRAINING = _gauge("parrot_gateway_draining", "", "Whether the gateway shuts down or is drained.")
REQUESTS_RUNNING = _gauge("parrot_requests_running", "", "Requests in work over HTTP.")
REQUESTS_ACCEPTED = _counter(
    "parrot_requests_accepted",
    "",
    "Requests over HTTP that were let in (server.max_running_calls).",
)
REQUESTS_REFUSED = _counter(
    "parrot_requests_refused", "", "Requests refused because the gateway was full or closing."
)

# Calls

_MODEL = "model_name"
# NOTE: vLLM's bounds, plus smaller ones for small models and fast devices.
_SECONDS = (0.005, 0.02, 0.05, 0.1, 0.2,
            0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
            120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)  # fmt: skip
_FIRST_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5,
                  5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)  # fmt: skip
_TOKEN_SECONDS = (0.001, 0.0025, 0.005,
                  0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0,
                  7.5, 10.0, 20.0, 40.0, 80.0)  # fmt: skip
_STAGE_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25,
                  0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)  # fmt: skip
_TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))

TTFT = _histogram(
    "vllm:time_to_first_token_seconds",
    _MODEL,
    "From a call's arrival, or that of its last input, to its first token; of upstreams: streams.",
    _FIRST_SECONDS,
)
TOKEN_GAPS = _histogram(
    "vllm:inter_token_latency_seconds",
    _MODEL,
    "Time between tokens; each gap of a call counts as the mean of them.",
    _TOKEN_SECONDS,
)
TOKEN_GAPS_EARLIER = _histogram(
    "vllm:time_per_output_token_seconds",
    _MODEL,
    "The same, by an earlier name of vLLM's.",
    _TOKEN_SECONDS,
)
TOKEN_MEAN = _histogram(
    "vllm:request_time_per_output_token_seconds",
    _MODEL,
    "The mean time between tokens of a call.",
    _TOKEN_SECONDS,
)
E2E = _histogram(
    "vllm:e2e_request_latency_seconds",
    _MODEL,
    "From a call's arrival, or that of its last input, to its end.",
    _SECONDS,
)
QUEUE = _histogram(
    "vllm:request_queue_time_seconds", _MODEL, "How long a call waited for an engine.", _SECONDS
)
PREFILL = _histogram(
    "vllm:request_prefill_time_seconds",
    _MODEL,
    "From a call's place on an engine to its first token.",
    _SECONDS,
)
DECODE = _histogram(
    "vllm:request_decode_time_seconds", _MODEL, "From a call's first token to its end.", _SECONDS
)
INFERENCE = _histogram("vllm:request_inference_time_seconds", _MODEL, "Both together.", _SECONDS)
PROMPT_LENGTH = _histogram(
    "vllm:request_prompt_tokens", _MODEL, "Prompt tokens of a call.", _TOKENS
)
OUTPUT_LENGTH = _histogram(
    "vllm:request_generation_tokens", _MODEL, "Tokens that a call generated.", _TOKENS
)
PROMPT_TOKENS = _counter("vllm:prompt_tokens", "model_name engine", "Prompt tokens of calls.")
OUTPUT_TOKENS = _counter(
    "vllm:generation_tokens", "model_name engine", "Tokens that calls generated."
)
CACHED_TOKENS = _counter(
    "parrot_cached_prompt_tokens",
    "model_name engine",
    "Prompt tokens of calls that were found in a prefix cache, as engines and upstreams report.",
)
_alias(CACHED_TOKENS, "vllm:prompt_tokens_cached", "The same, by vLLM's name.")
SUCCESS = _counter(
    "vllm:request_success",
    "model_name engine finished_reason",
    "Calls that were answered: stop, length, abort (its client left), unknown (not read).",
)
_GEN_AI = "gen_ai_operation_name gen_ai_provider_name gen_ai_request_model"
GEN_AI_DURATION = _histogram(
    "gen_ai_server_request_duration_seconds",
    f"{_GEN_AI} error_type",
    "gen_ai.server.request.duration: from arrival to end; error_type is the code of an error.",
    (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
)
GEN_AI_TTFT = _histogram(
    "gen_ai_server_time_to_first_token_seconds",
    _GEN_AI,
    "gen_ai.server.time_to_first_token: as vllm:time_to_first_token_seconds.",
    _FIRST_SECONDS[:16],
)
GEN_AI_TOKEN_MEAN = _histogram(
    "gen_ai_server_time_per_output_token_seconds",
    _GEN_AI,
    "gen_ai.server.time_per_output_token: as vllm:request_time_per_output_token_seconds.",
    _TOKEN_SECONDS[:16],
)
GEN_AI_USAGE = _histogram(
    "gen_ai_client_token_usage",
    f"{_GEN_AI} gen_ai_token_type",
    "gen_ai.client.token.usage: tokens of a call (input, output).",
    tuple(float(4**power) for power in range(14)),
)
CALLS = _counter("parrot_calls", "path code", "Ended calls by route and HTTP status.")
CALL_ERRORS = _counter(
    "parrot_call_errors", "model_name error", "Calls that ended with an error, by its code."
)
CALLS_LEFT = _counter("parrot_calls_abandoned", "", "Calls whose client left before their end.")
CALLS_DEFERRED = _counter(
    "parrot_deferred_calls", "", "Calls answered with a reference or in the background."
)
FAILOVERS = _counter(
    "parrot_call_engine_losses",
    "model_name reason",
    "Times that a running call lost its engine: link, silent, stalled, crashed, protocol, left, "
    "unloaded; or an upstream's server, by the word of its fault.",
)
FAILOVER_REFILLED = _counter(
    "parrot_failover_refilled_tokens", "model_name", "Tokens computed again on another engine."
)
FAILOVER_PAUSES = _histogram(
    "parrot_failover_pause_seconds",
    "",
    "From noticing that a call's engine was lost until another one had gone on.",
    _STAGE_SECONDS,
)
STAGES = _histogram(
    "parrot_call_stage_seconds",
    "stage",
    "Where calls spend their time: inputs (waiting for them), prepare (reading, checking, "
    "tokenizing), queue, first_token, generate.",
    _STAGE_SECONDS,
)
TENANT_CALLS = _counter("parrot_tenant_calls", "tenant", "Ended calls of a tenant.")
TENANT_ERRORS = _counter("parrot_tenant_errors", "tenant", "Those of them with an error.")
TENANT_TOKENS = _counter(
    "parrot_tenant_tokens", "tenant type", "Tokens of a tenant's calls (prompt, cached, output)."
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
_alias(KV_USAGE, "vllm:gpu_cache_usage_perc", "The same, by an earlier name of vLLM's.")
CACHE_CONFIG = _gauge(
    "vllm:cache_config_info",
    f"{_ENGINE} block_size num_gpu_blocks",
    "1, with the tokens of a KV block and the number of blocks.",
)
PREFIX_QUERIES = _counter(
    "vllm:prefix_cache_queries", _ENGINE, "Prompt tokens looked up in the prefix cache."
)
PREFIX_HITS = _counter("vllm:prefix_cache_hits", _ENGINE, "Those of them that were found.")
_alias(PREFIX_QUERIES, "vllm:gpu_prefix_cache_queries", "Queries, by an earlier name of vLLM's.")
_alias(PREFIX_HITS, "vllm:gpu_prefix_cache_hits", "Hits, by an earlier name of vLLM's.")
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
ENGINE_SHARED = _gauge(
    "parrot_engine_shared_prompt_tokens",
    _ENGINE,
    "Prompt tokens of running calls that the engine holds, and can read, once for many of them.",
)
ENGINE_READ_ONCE = _counter(
    "parrot_engine_read_once_tokens",
    _ENGINE,
    "Tokens of contexts that attention did not read again in a step: read once for many calls.",
)
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
ENGINE_LOSSES = _counter(
    "parrot_engines_lost",
    "model_name reason",
    "Engines that left, in good order (left) or not; reasons as of parrot_call_engine_losses.",
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
UPSTREAM_FALLBACKS = _counter(
    "parrot_upstream_fallbacks",
    "upstream reason",
    "Calls that left a server for another, or for the next fallback, before their answer began.",
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
