"""One typed model of all that can be set.

The gateway's defaults are here. A test compares those that it shares with `SchedulerConfig`. An
engine's own, None here, are in `parrot_engine.settings`. Where values come from is in `sources`.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from parrot_scheduler.config import SchedulerConfig
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from parrot_gateway.settings.memory_shares import share_conflict
from parrot_gateway.settings.secret_reference import SecretReference, read_secret

Seconds: TypeAlias = Annotated[float, Field(gt=0)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ServerSettings(_Section):
    """The HTTP server."""

    host: str = "127.0.0.1"
    #: 0 takes a free port.
    port: int = Field(default=8000, ge=0, le=65535)
    #: Key that clients must send as `Authorization: Bearer …`. Without one, only loopback
    #: addresses are served. `PARROT_API_KEY` is used when it is set and this is not.
    api_key: SecretReference | None = None
    #: Key of the admin routes, another than that of calls. Without one they answer with a 403.
    #: `PARROT_ADMIN_KEY` is used when it is set and this is not.
    admin_key: SecretReference | None = None
    #: Names by which a gateway without a key may be called, beside loopback's, its own address and
    #: names that only a private network has; `*`: any.
    allowed_hosts: list[str] = []
    #: Web pages that may use the gateway (CORS): `https://app.example.com`, or `*` for any.
    cors_origins: list[str] = []
    #: Largest request body accepted, also after decompression.
    max_body_bytes: int = Field(default=64 * 1024 * 1024, gt=0)
    #: Calls in work at once, over all models; further ones get a 503.
    max_running_calls: int = Field(default=8192, gt=0)
    #: A call that takes longer is ended with a 504.
    call_timeout_s: Seconds = 600.0
    #: Longest wait for a client: for the end of a request's head, for every
    #: 256 KiB of its body (a 408 follows), and while 64 KiB of an answer wait for it to read.
    client_timeout_s: Seconds = 60.0
    #: Time for running calls to finish after Ctrl-C.
    drain_timeout_s: Seconds = 30.0
    #: A comment is sent into a stream that has been silent for this long.
    keep_alive_s: Seconds = 15.0
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    #: Log a line for each call and each other request, at info. Calls that fail by no fault of
    #: their caller are logged as warnings in any case.
    access_log: bool = False

    @field_validator("cors_origins")
    @classmethod
    def _check_origins(cls, value: list[str]) -> list[str]:
        for origin in value:
            if not re.fullmatch(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s]+", origin):
                raise ValueError(
                    f"{origin!r} is no origin: scheme and host alone, as in https://app.example.com"
                )
        return value


class UISettings(_Section):
    """The live page."""

    #: Streams of events that are open at once; further ones get a 503.
    max_streams: int = Field(default=64, ge=0)


class ModelSettings(_Section):
    """A model run by this gateway's own engine processes."""

    #: A folder, a hub id, or `parrot-demo`.
    model: str
    #: The name clients use; by default the hub id, or the folder's name.
    name: str | None = None
    kind: Literal["auto", "builtin", "huggingface"] = "auto"
    #: Engine processes for this model.
    engines: int = Field(default=1, ge=1, le=64)
    #: Where they run; several with commas between are taken in turn.
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    #: Tokens in one block of the KV cache; the engine's own default when not given.
    block_size: int | None = Field(default=None, ge=1, le=256)
    #: Blocks of the KV cache; sized from memory when not given.
    num_blocks: int | None = Field(default=None, ge=1)
    #: Memory for the KV cache in bytes; `num_blocks` wins over it.
    kv_cache_bytes: int | None = Field(default=None, ge=1)
    #: How keys and values are stored: in the model's dtype, or in 8 bits with scales.
    kv_cache_dtype: Literal["auto", "fp8_e4m3"] | None = None
    #: Share of a GPU's memory that may be used where neither is given.
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    #: In its place the share of a device's memory that each engine of this model may use, whatever
    #: others on the device do; those of all models on one device must not exceed 1.
    memory_share: float | None = Field(default=None, gt=0, le=1)
    #: GPUs of this host that hold the model together, `device` and those behind it; the builtin
    #: engine only.
    tensor_parallel: int | None = Field(default=None, ge=1, le=64)
    #: Of mixtures of experts each of those GPUs holds whole experts, not a part of every expert.
    enable_expert_parallel: bool | None = None
    deterministic: bool | None = None
    #: Whether those GPUs read each other's memory for small sums; NCCL's messages otherwise.
    peer_memory: bool | None = None
    #: Memory of the host for KV blocks that leave the device, in GB of 10^9 bytes, or in blocks.
    host_memory_gb: float | None = Field(default=None, ge=0)
    host_blocks: int | None = Field(default=None, ge=0)
    #: Fewest tokens that are brought back from there rather than computed; measured when not given.
    host_min_tokens: int | None = Field(default=None, ge=1)
    #: LoRA adapters, PEFT folders by the names that clients use; the builtin engine only.
    adapters: dict[str, str] = {}
    #: Folders from which `POST /v1/load_lora_adapter` may load others.
    adapter_folders: list[str] = []
    #: Adapters of one step, and their largest rank, for which there is room on the device; 8, and
    #: the largest of `adapters`, where one of these two settings is given.
    max_loras: int | None = Field(default=None, ge=0, le=1024)
    max_lora_rank: int | None = Field(default=None, ge=1, le=256)
    #: CUDA graphs: captured at the start, when first needed, or never.
    cuda_graphs: Literal["auto", "start", "lazy", "off"] | None = None
    #: Draft tokens at a time, from what a text repeats (0: none); how many tokens have
    #: to agree with an earlier place, and are compared at most; and up to how many tokens of a step
    #: drafts are made.
    speculative_tokens: int | None = Field(default=None, ge=0, le=7)
    speculative_min_ngram: int | None = Field(default=None, ge=1, le=64)
    speculative_max_ngram: int | None = Field(default=None, ge=1, le=64)
    speculative_batch_tokens: int | None = Field(default=None, ge=1)
    #: Sequences in one engine step, and its token budget; the engine's own defaults (larger on a
    #: GPU) when not given.
    max_batch_size: int | None = Field(default=None, ge=1, le=1024)
    max_batch_tokens: int | None = Field(default=None, ge=1)
    #: Tokens of prompts that can wait, in a step in which something more urgent gets a token.
    max_background_tokens: int | None = Field(default=None, ge=1)
    #: The same at most, where earlier steps left some of it.
    background_burst_tokens: int | None = Field(default=None, ge=1)
    #: Prompts of more new tokens than this can wait for generations of the same priority.
    long_prompt_tokens: int | None = Field(default=None, ge=1)
    #: Longest context served; the model's own limit when not given.
    max_context_tokens: int | None = Field(default=None, ge=1)
    prefix_caching: bool = True
    #: Seeds generations whose calls give no seed; fresh at each start when not given.
    seed: int | None = None
    #: CPU threads of the engine. More than one pays only on an otherwise idle machine.
    num_threads: int = Field(default=1, ge=1, le=256)
    #: Run Python code that comes with the checkpoint (huggingface engine only).
    trust_remote_code: bool = False
    #: Whether reasoning between `<think>` and `</think>` is parted from the content of chats: where
    #: the chat template knows the markers, or never.
    reasoning_parser: Literal["auto", "off"] = "auto"
    #: After so long without a call the engines end, and the next call starts them again; never when
    #: neither this nor `engines.idle_unload_s` is given.
    idle_unload_s: Seconds | None = None

    def on_device(self, index: int) -> ModelSettings:
        """For the engine process with this number: with its own device."""
        devices = self.device.split(",")
        return self.model_copy(update={"device": devices[index % len(devices)].strip()})

    @property
    def served_name(self) -> str:
        if self.name is not None:
            return self.name
        path = Path(self.model).expanduser()
        return path.resolve().name if path.is_dir() else self.model


class StreamFailureSettings(_Section):
    """How an upstream's stream ends that breaks off after its beginning."""

    #: `continue`: another server goes on with the text, where that can be; see `continuation`.
    mode: Literal["terminate", "continue"] = "terminate"
    #: Faults after which it does.
    on: tuple[Literal["transport_error", "read_timeout", "malformed", "in_band_error"], ...] = (
        "transport_error",
        "read_timeout",
        "malformed",
        "in_band_error",
    )
    #: Requests to go on with one answer, to other servers of the upstream and to its `fallback`.
    max_fallbacks: int = Field(default=2, ge=0, le=10)


class UpstreamSettings(_Section):
    """A server that calls are passed on to, or several of the same models: OpenAI-compatible, or
    Anthropic's."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    #: Base URL, usually ending in `/v1`.
    url: str = ""
    #: In its place those of several servers of the same models: each call goes to one of them, as
    #: the scheduler decides.
    urls: list[str] = []
    #: The API that it speaks. Calls of `/v1/messages` pass unchanged to `anthropic`, whose key is
    #: sent as `x-api-key`; for `openai` they are translated into chats.
    api: Literal["openai", "anthropic"] = "openai"
    #: By default the variable `<NAME>_API_KEY` (upper case, other characters as `_`) if it is set.
    api_key: SecretReference | None = None
    #: Models it serves; None reads `GET /models`, `*` passes any name on.
    models: list[str] | Literal["*"] | None = None
    #: Requests in flight at once, at each of several servers; further ones wait, bounded by
    #: `max_waiting`.
    max_concurrency: int = Field(default=1024, gt=0)
    max_waiting: int = Field(default=4096, ge=0)
    #: Tokens of prompts that one of several servers is taken to find again in its prefix cache.
    cached_tokens: int = Field(default=500_000, ge=0)
    connect_timeout_s: Seconds = 5.0
    #: Longest silence of the upstream: to the first byte, and between bytes.
    read_timeout_s: Seconds = 600.0
    #: Further tries after a refused connection, 408, 429, 500, 502, 503 or 504.
    max_retries: int = Field(default=2, ge=0, le=10)
    #: First back-off; doubles each time, with jitter, up to `max_backoff_s`. An answer whose
    #: `retry-after` is longer than that goes to the client, which can wait for itself.
    backoff_s: Seconds = 0.25
    max_backoff_s: Seconds = 8.0
    #: Circuit breaker: failures in a row within `breaker_window_s` that open it, for
    #: `breaker_open_s`. Connection errors, time-outs, broken streams and 5xx count; no 4xx does.
    breaker_failures: int = Field(default=5, gt=0)
    breaker_window_s: Seconds = 60.0
    breaker_open_s: Seconds = 30.0
    #: Successes in a row that close a half-open breaker.
    breaker_successes: int = Field(default=2, gt=0)
    #: Model to use instead when this upstream cannot answer (any name this gateway serves).
    fallback: str | None = None
    stream_failure: StreamFailureSettings = StreamFailureSettings()
    #: How this upstream is told to go on with a chat's answer that broke off: vLLM's and SGLang's
    #: `continue_final_message`, a last message of the assistant (`prefill`), the same marked as a
    #: `prefix` (Mistral, DeepSeek); `none`: it cannot. `auto` knows the usual hosts, and takes the
    #: first for all others.
    continuation: Literal["auto", "continue_final_message", "prefill", "prefix", "none"] = "auto"
    #: Pass a call's objective on, as a `priority` in the body of completions and chats, unless the
    #: caller gives one: as vLLM (`--scheduling-policy priority`) or as SGLang
    #: (`--enable-priority-scheduling`) reads it.
    hints: Literal["none", "vllm", "sglang"] = "none"
    #: Pass the caller's Authorization on. By default only when neither this upstream nor the
    #: gateway has a key of its own.
    forward_authorization: bool | None = None

    @field_validator("url")
    @classmethod
    def _check_url(cls, value: str) -> str:
        if not re.match(r"^https?://[^/\s]+", value):
            raise ValueError("an upstream's URL begins with http:// or https://")
        if "?" in value or "#" in value:
            raise ValueError("an upstream's URL has no query: paths follow it; its key is api_key")
        return value.rstrip("/")

    @field_validator("urls")
    @classmethod
    def _check_urls(cls, value: list[str]) -> list[str]:
        urls = [cls._check_url(url) for url in value]
        if len(set(urls)) < len(urls):
            raise ValueError("a server is named twice")
        return urls

    @model_validator(mode="after")
    def _check_servers(self) -> UpstreamSettings:
        if bool(self.url) == bool(self.urls):
            raise ValueError("an upstream has a url, or several urls")
        return self

    @property
    def servers(self) -> dict[str, str]:
        """URLs by the names of its servers: its own, or with a number for each of several."""
        urls = self.urls or [self.url]
        if len(urls) == 1:
            return {self.name: urls[0]}
        return {f"{self.name}-{number}": url for number, url in enumerate(urls, 1)}

    def key_reference(self) -> str | None:
        """The place of this upstream's key, if it has one."""
        if self.api_key is not None:
            return self.api_key
        variable = self.key_variable()
        return f"env:{variable}" if os.environ.get(variable) else None

    def key_variable(self) -> str:
        """The environment variable that its key is read from where no other is named."""
        return re.sub(r"[^A-Za-z0-9]", "_", self.name).upper() + "_API_KEY"


class EngineLinkSettings(_Section):
    """How engines join this gateway."""

    #: Key of engines on other hosts; a fresh one is made for own child processes at each start.
    join_key: SecretReference | None = None
    heartbeat_s: Seconds = 2.0
    #: An engine that has work and runs no step for so long is lost, whatever its heartbeats say.
    #: Kernels that are compiled in a first step take their time, and so do grammars.
    stall_s: Seconds = 120.0
    #: Joined engines at most.
    max_engines: int = Field(default=1024, gt=0)
    #: For models that give no `idle_unload_s` of their own.
    idle_unload_s: Seconds | None = None
    #: Keep a spare engine process that has imported torch, for models that are started again; None:
    #: on a machine with an NVIDIA GPU. It takes memory of the host, none of a GPU.
    standby: bool | None = None
    #: How long a call waits for a model that is being loaded, and how many calls do at once;
    #: further ones get a 503, as do those whose wait ends.
    load_wait_s: Seconds = 60.0
    max_load_waiters: int = Field(default=1024, ge=0)
    #: How long calls, those in mid-answer included, wait while a model's only engines are started
    #: again; then they get a 503. Long enough for a large model.
    restart_wait_s: Seconds = 300.0
    #: How long running calls may take to finish when their model is unloaded.
    unload_timeout_s: Seconds = 30.0
    #: What may be loaded by the admin routes beside the models of these settings: folders below
    #: these, and hub ids that match one of these patterns (`*` stands for any characters).
    model_folders: list[Path] = []
    hub_models: tuple[str, ...] = ("*",)
    #: Models that are served by own engines at once.
    max_models: int = Field(default=64, gt=0)
    #: Downloads at once, and what the files of one model may come to.
    max_downloads: int = Field(default=2, gt=0)
    max_download_bytes: int = Field(default=1_000_000_000_000, gt=0)
    #: A download of which no byte comes for so long has failed.
    download_stall_s: Seconds = 300.0
    #: A model that takes longer to load counts as failed.
    load_timeout_s: Seconds = 1800.0


class SchedulerSettings(_Section):
    """The placement of calls on engines of our own, in space and time."""

    #: A whole set-up: `parrot`, or a class by its import path (`package.module:Class`).
    policy: str = "parrot"
    #: Single policies in the place of that set-up's, by name or import path.
    admission: str | None = None
    order: str | None = None
    place: str | None = None
    keep: str | None = None
    #: Calls that wait for an engine, and the time after which one is refused. Other bounds are
    #: those of calls that wait for an upstream (`max_waiting`), for inputs
    #: (`sessions.max_waiting_calls`), for a model that is being loaded
    #: (`engines.max_load_waiters`), and in an engine (its own `max_waiting`).
    max_queued: int = Field(default=100_000, gt=0)
    max_wait_s: Seconds = 600.0
    #: An application is held in the admission queue no longer than this.
    max_hold_s: Seconds = 120.0
    #: Share of an engine's KV that the applications which run may fill.
    working_set_target: float = Field(default=0.85, gt=0, le=1)
    #: Keep for the latest calls what they would have taken on other engines.
    explain_calls: bool = True
    #: A file that gets every event and decision, for `parrot-gateway replay`.
    record: Path | None = None
    #: The recording stops at this size.
    record_max_bytes: int = Field(default=1024 * 1024 * 1024, gt=0)

    @field_validator("policy", "admission", "order", "place", "keep")
    @classmethod
    def _check_policy(cls, name: str | None, info: ValidationInfo) -> str | None:
        """Check a name. Settings may come over the network, so that no class is loaded here."""
        if name is not None and info.field_name is not None:
            # Imported here because it loads numpy, which most commands do without.
            from parrot_scheduler.policies import check_name

            check_name(info.field_name, name)
        return name

    @property
    def config(self) -> SchedulerConfig:
        """The same as the scheduler takes it. Loads the class that `policy` names.

        Raises:
            ValueError: it cannot be loaded; begins with the field.
        """
        from parrot_scheduler.policies import preset_of

        preset = preset_of(self.policy)
        excluded = {"policy", "explain_calls", "record", "record_max_bytes"}
        given = self.model_dump(exclude=excluded, exclude_none=True)
        return replace(preset, explain=self.explain_calls, **given)


#: Where a call's session may be named, strongest first, besides `X-Parrot-Session`.
SESSION_SOURCES = (
    "previous_response_id",
    "conversation",
    "x-session-id",
    "x-session-affinity",
    "x-aibrix-session-key",
    "agents",
    "x-*-session-id",
    "baggage",
    "traceparent",
    "prompt_cache_key",
    "metadata.session_id",
)
_OWN_SOURCE = re.compile(r"header:[A-Za-z0-9!#$%&'*+.^_`|~-]+")


LinkUse: TypeAlias = Literal["lengths", "groups", "sessions", "prefixes"]


class LinkingSettings(_Section):
    """Edges and sessions inferred from the texts of calls, in a process of its own."""

    #: Whether calls are linked at all.
    enabled: bool = True
    #: Answers name the call and its session in `X-Parrot-Call` and `X-Parrot-Session`, for which
    #: each call waits for the linking process.
    headers: bool = False
    #: What the scheduler uses of what is inferred, for calls to own engines. `lengths`: lengths of
    #: answers by template. `groups`: calls whose answers are usually read together are throughput
    #: work of a task group. `sessions`: calls of a session are one application. `prefixes`:
    #: calls go where what is their own is cached, not where many share the beginning.
    use: tuple[LinkUse, ...] = ("lengths", "groups", "sessions", "prefixes")
    #: A call to an own engine that shows that others precede it waits so long for its session; 0:
    #: none waits, and only sessions foretold from their first call are known.
    session_wait_s: float = Field(default=0.02, ge=0, le=1)
    #: They wait while calls and retained contexts need at least this share of the engines' KV.
    session_wait_memory: float = Field(default=0.5, ge=0)
    #: Header in which calls that are passed on name their session; empty: none. Each call whose
    #: client does not send it then waits `session_wait_s` at most.
    session_header: str = ""
    #: Tenants whose calls are not linked.
    exclude_tenants: tuple[str, ...] = ()
    #: Requests and answers longer than this are not looked at.
    max_body_bytes: int = Field(default=8 * 1024 * 1024, gt=0)
    #: Tenants remembered; the one that was quiet longest makes room.
    max_tenants: int = Field(default=1000, gt=0)
    #: Calls of one tenant that others can be linked to, and characters of their answers.
    max_calls: int = Field(default=20_000, gt=0)
    max_text: int = Field(default=16_000_000, gt=0)
    #: Fingerprints of one tenant's answers, 8 bytes each; a power of two.
    max_fingerprints: int = Field(default=2_097_152, gt=0)
    #: Characters of a prompt that are looked at, its newest.
    max_prompt_text: int = Field(default=400_000, gt=0)
    #: An answer older than this is linked to by prompts that go on from it, not by passages.
    horizon_s: Seconds = 3600.0
    #: Templates of one tenant whose calls are profiled; those used longest ago make room.
    max_templates: int = Field(default=1000, gt=0)
    #: A file that keeps profiles over a restart, of one gateway at a time; no text of prompts.
    profiles_file: Path | None = None


class SessionSettings(_Section):
    """Sessions, their variables and graphs: how much is kept, and for how long."""

    #: What names the session of a call that does not name one itself, strongest first; also
    #: `header:NAME`, for any header. Empty: nothing does.
    identity: tuple[str, ...] = SESSION_SOURCES
    #: A session unused for so long is forgotten, unless calls of it are still in work.
    ttl_s: Seconds = 3600.0
    #: Sessions kept, of all tenants and of one; idle ones make room, longest unused first.
    max_sessions: int = Field(default=10_000, gt=0)
    max_sessions_per_tenant: int = Field(default=5_000, gt=0)
    #: Variables of one session; those that nothing waits for make room, oldest first.
    max_variables: int = Field(default=10_000, gt=0)
    #: Variables of all sessions, which take memory also while they are empty; idle sessions make
    #: room.
    max_total_variables: int = Field(default=1_000_000, gt=0)
    #: Calls of one session that are waiting or running.
    max_calls: int = Field(default=10_000, gt=0)
    #: Finished calls of one session that its graph still shows.
    max_finished_calls: int = Field(default=1_000, ge=0)
    #: Named contexts of one session, and the text that one of them may come to.
    max_contexts: int = Field(default=64, gt=0)
    max_context_bytes: int = Field(default=4 * 1024 * 1024, gt=0)
    #: Values in UTF-8: one variable's, one session's, all of them.
    max_value_bytes: int = Field(default=4 * 1024 * 1024, gt=0)
    max_session_bytes: int = Field(default=64 * 1024 * 1024, gt=0)
    max_total_bytes: int = Field(default=1024 * 1024 * 1024, gt=0)
    #: Deferred calls of all sessions that run at once; further ones wait in line.
    max_running_calls: int = Field(default=4096, gt=0)
    #: Calls of all sessions that wait or run, and what their bodies come to.
    max_waiting_calls: int = Field(default=100_000, gt=0)
    max_waiting_bytes: int = Field(default=1024 * 1024 * 1024, gt=0)
    #: While a call waits for inputs, the constant prefix of its prompt is filled
    #: ahead if it has so many tokens, on builtin engines with nothing better to do; 0: never.
    fill_ahead_tokens: int = Field(default=64, ge=0)

    @field_validator("identity")
    @classmethod
    def _check_identity(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for source in value:
            if source not in SESSION_SOURCES and not _OWN_SOURCE.fullmatch(source):
                raise ValueError(
                    f"{source!r} is no source of sessions; there are "
                    f"{', '.join(SESSION_SOURCES)}, and header:NAME"
                )
        if len(set(value)) < len(value):
            raise ValueError("a source is named twice")
        return value


class ResponseSettings(_Section):
    """Responses and conversations of models of own engines that are kept for later calls."""

    #: One that is unused for so long is forgotten.
    ttl_s: Seconds = 86_400.0
    #: Kept at once, and what they may come to; those unused for longest make room.
    max_stored: int = Field(default=10_000, gt=0)
    max_bytes: int = Field(default=256 * 1024 * 1024, gt=0)
    #: Background responses that wait or run at once.
    max_background: int = Field(default=256, gt=0)


class StreamSettings(_Section):
    """Streams of calls whose clients want to resume them (`X-Parrot-Resume`)."""

    #: A call runs on for so long without a reader of its stream, and is then cancelled; a stream
    #: that has ended is kept for so long after its last reader has left.
    resume_s: Seconds = 60.0
    #: Kept at once, and what their events may come to; those that have ended make room first, the
    #: oldest of the tenant with most.
    max_kept: int = Field(default=1024, gt=0)
    max_bytes: int = Field(default=256 * 1024 * 1024, gt=0)
    #: Events of one stream: beyond it those that were read make room, oldest first, and a call
    #: waits while half of it is unread.
    max_stream_bytes: int = Field(default=8 * 1024 * 1024, gt=0)


class BatchSettings(_Section):
    """Files and batches of clients, kept on disk."""

    #: The folder that they are kept in, of one gateway at a time; by default `parrot-gateway` in
    #: `$XDG_DATA_HOME`, or else in `~/.local/share`.
    folder: Path | None = None
    #: Batches whose first line is for a model of an upstream: pass file and batch on to its own
    #: routes, or run the lines here as calls to it.
    upstream_batches: Literal["pass", "run"] = "pass"
    #: A file is deleted after so long, unless its upload says otherwise.
    file_ttl_s: Seconds = 2_592_000.0
    #: Files kept, one's size, and what all come to.
    max_files: int = Field(default=10_000, gt=0)
    max_file_bytes: int = Field(default=200 * 1024 * 1024, gt=0)
    max_total_bytes: int = Field(default=10 * 1024 * 1024 * 1024, gt=0)
    #: Batches that have not ended.
    max_batches: int = Field(default=1_000, gt=0)
    #: Lines of one batch, and bytes of one line.
    max_lines: int = Field(default=50_000, gt=0)
    max_line_bytes: int = Field(default=4 * 1024 * 1024, gt=0)
    #: Lines in work at once for one model; never more than half of what its engines or its
    #: upstream take at once.
    max_running_lines: int = Field(default=32, gt=0)

    @property
    def data_folder(self) -> Path:
        """The folder, absolute."""
        if self.folder is not None:
            return self.folder.expanduser().absolute()
        data = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
        return Path(data).expanduser().absolute() / "parrot-gateway"


class TelemetrySettings(_Section):
    """The metrics, traces and logs of a running gateway."""

    #: Whether `/metrics` is answered.
    metrics: bool = True
    #: Who may read it: callers with the gateway's key or the admin key, where there is one, or
    #: anybody.
    metrics_access: Literal["key", "open"] = "key"
    #: A port of its own for it, that takes no key, and the address to listen on; 0 takes a free
    #: port.
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    metrics_host: str = "127.0.0.1"
    #: Where traces go, by OTLP over HTTP: `http://127.0.0.1:4318/v1/traces`. None makes none. Keys
    #: of the receiver: `OTEL_EXPORTER_OTLP_HEADERS`, as OpenTelemetry's exporters read it.
    traces_endpoint: str | None = Field(default=None, pattern=r"^https?://")
    #: Share of the traces that are exported; what a client says of a trace of its own holds.
    traces_sample_ratio: float = Field(default=1.0, ge=0.0, le=1.0)
    traces_service_name: str = Field(default="parrot-gateway", min_length=1, max_length=256)
    #: A session without a call for so long gets its span.
    traces_session_idle_s: Seconds = 60.0
    #: Whether spans of calls have their prompts and answers.
    traces_content: bool = False
    #: Whether prompts and answers of the latest calls are kept in memory, for the live page, and
    #: what they may come to, in bytes.
    keep_content: bool = False
    max_content_bytes: int = Field(default=64 * 1024 * 1024, gt=0)
    #: Characters of the prompt and the answer of one call, on its span or kept; what is cut says
    #: so.
    max_content_characters: int = Field(default=65_536, gt=0, le=1_048_576)
    #: Tenants of whose calls neither is done, nor is any text shown on the live page.
    content_exclude_tenants: tuple[str, ...] = ()
    #: How the log is written: text for people, or a line of JSON each.
    log_format: Literal["text", "json"] = "text"

    @field_validator("traces_endpoint")
    @classmethod
    def _check_endpoint(cls, value: str | None) -> str | None:
        if value is not None and re.search(r"[@?#]", value):
            raise ValueError(
                "the receiver's URL has no password and no query, as it is shown; keys go into "
                "OTEL_EXPORTER_OTLP_HEADERS"
            )
        return value


class ParrotV3Settings(_Section):
    """Parrot's own API, whose original client sends no key and waits without a time-out."""

    #: Take calls without a key. By default only where the gateway has none, and so serves its own
    #: host only.
    keyless: bool | None = None
    #: The tenant that calls without a key belong to.
    keyless_tenant: str = Field(default="default", min_length=1, max_length=256)
    #: Longest wait of a client for a variable.
    get_timeout_s: Seconds = 3600.0


class Settings(BaseSettings):
    """Everything that can be set."""

    model_config = SettingsConfigDict(
        env_prefix="PARROT_",
        env_nested_delimiter="_",
        env_nested_max_split=1,
        extra="forbid",
        frozen=True,
    )

    server: ServerSettings = ServerSettings()
    models: list[ModelSettings] = []
    upstreams: list[UpstreamSettings] = []
    #: Other names for models: `{"gpt-4o": "parrot-demo", "*": "parrot-demo"}`; patterns may hold
    #: `*`. A served name is never shadowed by a pattern.
    aliases: dict[str, str] = {}
    engines: EngineLinkSettings = EngineLinkSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    sessions: SessionSettings = SessionSettings()
    linking: LinkingSettings = LinkingSettings()
    parrot_v3: ParrotV3Settings = ParrotV3Settings()
    responses: ResponseSettings = ResponseSettings()
    streams: StreamSettings = StreamSettings()
    batches: BatchSettings = BatchSettings()
    telemetry: TelemetrySettings = TelemetrySettings()
    ui: UISettings = UISettings()

    @field_validator("models", mode="before")
    @classmethod
    def _accept_plain_names(cls, value: Any) -> Any:
        if isinstance(value, list):
            return [{"model": item} if isinstance(item, str) else item for item in value]
        return value

    @model_validator(mode="after")
    def _check_names(self) -> Settings:
        names = [model.served_name for model in self.models]
        names += [name for model in self.models for name in model.adapters]
        for upstream in self.upstreams:
            names += {upstream.name, *upstream.servers}
        doubles = sorted({name for name in names if names.count(name) > 1})
        if doubles:
            raise ValueError(f"these names are given twice: {', '.join(doubles)}")
        conflict = share_conflict(self.models)
        if conflict is not None:
            raise ValueError(f"models: {conflict}")
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags and file both arrive as init values, merged by `load_settings`."""
        return (init_settings,)


def api_key_of(settings: Settings) -> str | None:
    """The key clients must present, or None when the gateway is open to its own host."""
    if settings.server.api_key is not None:
        return read_secret(settings.server.api_key)
    return os.environ.get("PARROT_API_KEY") or None


def admin_key_of(settings: Settings) -> str | None:
    """The key of the admin routes, or None where they are off."""
    if settings.server.admin_key is not None:
        return read_secret(settings.server.admin_key)
    return os.environ.get("PARROT_ADMIN_KEY") or None
