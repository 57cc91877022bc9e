"""Configurations of LiteLLM proxies become settings under which the same names are served."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import yaml
from harness.scripted_upstream import ScriptedUpstream
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from parrot_gateway.backends.upstreams.client import Upstream
from parrot_gateway.routing.model_directory import Catalog, Target
from parrot_gateway.server.app import create_app
from parrot_gateway.server.gateway import Gateway
from parrot_gateway.settings.litellm import PROVIDERS, Conversion, convert
from parrot_gateway.settings.model import Settings, UpstreamSettings


def converted(text: str, **environment: str) -> Conversion:
    found = convert(yaml.safe_load(text), environment)
    Settings(**found.settings)
    return found


def catalog(found: Conversion) -> Catalog:
    settings = Settings(**found.settings)
    upstreams = {each.name: Upstream(each, "key") for each in settings.upstreams}
    return Catalog(list, upstreams, settings.aliases)


def upstream(found: Conversion, name: str) -> dict[str, Any]:
    return next(each for each in found.settings["upstreams"] if each["name"] == name)


def lost(found: Conversion) -> dict[str, str]:
    return {remark.path: remark.text for remark in found.lost}


#: One provider with a few models, a key, a master key.
SMALL = """
model_list:
  - model_name: gpt-4o
    litellm_params: {model: openai/gpt-4o, api_key: os.environ/OPENAI_API_KEY}
  - model_name: fast
    litellm_params: {model: gpt-4o-mini, api_key: os.environ/OPENAI_API_KEY}
  - model_name: openai/o3
    litellm_params: {model: openai/o3}
general_settings: {master_key: os.environ/LITELLM_MASTER_KEY, background_health_checks: false}
litellm_settings: {set_verbose: false, cache: false, callbacks: []}
"""

#: Several servers of a model, of other kinds too, with fallbacks.
FLEET = """
model_list:
  - &one
    model_name: llama
    litellm_params: &server
      model: hosted_vllm/meta-llama/Llama-3.1-8B
      api_base: http://10.0.0.1:8000/v1
      api_key: none
      timeout: 30
  - model_name: llama
    litellm_params: {<<: *server, api_base: "http://10.0.0.2:8000/v1/"}
  - model_name: llama
    litellm_params: {<<: *server, api_base: "http://10.0.0.3:8000/v1", max_parallel_requests: 4}
  - model_name: gpt-4o
    litellm_params: {model: openai/gpt-4o, max_retries: 99}
  - model_name: gpt-4o
    litellm_params:
      {model: azure/gpt-4o-eu, api_base: os.environ/EU, api_key: os.environ/EU_KEY,
       api_version: "2024-02-01"}
  - model_name: claude
    litellm_params: {model: claude-sonnet-4-5}
environment_variables: {EU: "https://eu.openai.azure.com/", UNUSED: x}
litellm_settings:
  num_retries: 1
  request_timeout: 1200
  fallbacks: [{gpt-4o: [claude, llama]}, {nobody: [llama]}]
router_settings:
  num_retries: 3
  allowed_fails: 2
  cooldown_time: 45
  retry_after: 12
  model_group_alias: {gpt-4: gpt-4o, hidden-one: {model: llama, hidden: true}, gone: nothing}
"""

#: What is named by patterns.
WILDCARDS = """
model_list:
  - {model_name: openai/*, litellm_params: {model: openai/*}}
  - {model_name: openrouter/*, litellm_params: {model: openrouter/*}}
  - {model_name: mine/*, litellm_params: {model: groq/*}}
  - {model_name: "claude-*", litellm_params: {model: "anthropic/claude-*"}}
  - {model_name: "claude-*", litellm_params: {model: "openrouter/claude-*"}}
  - {model_name: "gpt-*", litellm_params: {model: mistral/mistral-large}}
  - {model_name: "*-x", litellm_params: {model: "mistral/*-y"}}
  - {model_name: "*", litellm_params: {model: "litellm_proxy/*", api_base: "http://old:4000"}}
  - {model_name: gpt-4o, litellm_params: {model: openai/gpt-4o}}
"""


def test_one_provider() -> None:
    found = converted(SMALL)
    assert found.settings == {
        "server": {"api_key": "env:LITELLM_MASTER_KEY"},
        "upstreams": [
            {
                "name": "openai",
                "url": "https://api.openai.com/v1",
                "api_key": "env:OPENAI_API_KEY",
                "models": ["gpt-4o", "gpt-4o-mini", "o3"],
            }
        ],
        "aliases": {"fast": "openai/gpt-4o-mini"},
    }
    names = catalog(found)
    assert names.resolve("gpt-4o") == Target("gpt-4o", "openai")
    assert names.resolve("fast") == Target("gpt-4o-mini", "openai")
    assert names.resolve("openai/o3") == Target("o3", "openai")
    assert found.lost == []
    assert set(found.variables) == {"OPENAI_API_KEY", "LITELLM_MASTER_KEY"}


def test_several_servers_of_one_model_are_one_upstream() -> None:
    found = converted(FLEET)
    fleet = upstream(found, "hosted_vllm")
    assert fleet["urls"] == [f"http://10.0.0.{number}:8000/v1" for number in (1, 2)]
    assert fleet["read_timeout_s"] == 30
    assert "api_key" not in fleet
    assert catalog(found).resolve("llama").model == "meta-llama/Llama-3.1-8B"
    other = upstream(found, "hosted_vllm-3")
    assert (other["url"], other["max_concurrency"]) == ("http://10.0.0.3:8000/v1", 4)
    assert fleet["fallback"] == "hosted_vllm-3/meta-llama/Llama-3.1-8B"


def test_servers_of_other_kinds_follow_as_fallbacks() -> None:
    found = converted(FLEET)
    first, second = upstream(found, "openai"), upstream(found, "azure")
    assert second["url"] == "https://eu.openai.azure.com/openai/v1"
    assert first["fallback"] == "azure/gpt-4o-eu"
    assert second["fallback"] == "claude"
    names = catalog(found)
    assert names.resolve("gpt-4o") == names.resolve("gpt-4") == Target("gpt-4o", "openai")
    assert names.resolve("azure/gpt-4o-eu") == Target("gpt-4o-eu", "azure")
    assert names.resolve("claude") == Target("claude-sonnet-4-5", "anthropic")
    assert upstream(found, "anthropic")["api"] == "anthropic"


def test_retries_time_outs_and_breakers() -> None:
    found = converted(FLEET)
    settings = upstream(found, "anthropic")
    assert settings["max_retries"] == 3
    assert settings["read_timeout_s"] == 1200
    assert settings["breaker_failures"] == 3
    assert settings["breaker_open_s"] == 45
    assert (settings["backoff_s"], settings["max_backoff_s"]) == (12, 12)
    assert upstream(found, "openai")["max_retries"] == 10
    assert found.settings["server"] == {"call_timeout_s": 1200}


def test_what_has_no_counterpart_is_named_with_its_path() -> None:
    found = lost(converted(FLEET))
    assert "one fallback, here 'claude'" in found["litellm_settings.fallbacks[0].gpt-4o"]
    assert "not carried over" in found["litellm_settings.fallbacks[1].nobody"]
    assert "not carried over" in found["router_settings.model_group_alias.gone"]
    assert found["model_list[4].litellm_params.api_version"] == "has no counterpart here"
    assert found["environment_variables.UNUSED"] == "has no counterpart here"
    assert "environment_variables.EU" not in found


def test_patterns() -> None:
    found = converted(WILDCARDS)
    names = catalog(found)
    assert names.resolve("openai/gpt-5") == Target("gpt-5", "openai")
    assert names.resolve("openrouter/openai/o3") == Target("openai/o3", "openrouter")
    assert names.resolve("mine/llama") == Target("llama", "mine")
    assert upstream(found, "mine")["url"] == PROVIDERS["groq"].url
    assert names.resolve("gpt-4o") == Target("gpt-4o", "openai-2")
    assert names.resolve("anything") == Target("anything", "litellm_proxy")
    assert "models" not in upstream(found, "anthropic")
    told = lost(found)
    assert told.pop("model_list[4]") == "a pattern has one server here, its first"
    assert set(told) == {"model_list[5]", "model_list[6]"}
    assert all("a pattern stands for the same names" in text for text in told.values())


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        (
            "{model: bedrock/anthropic.claude-v2, aws_region_name: us-east-1}",
            "passed on to bedrock",
        ),
        ("{model: vertex_ai/gemini-2.5-pro, vertex_project: p}", "passed on to vertex_ai"),
        ("{model: nobody-knows/it}", "no OpenAI-compatible address"),
        ("{model: llama3}", "passed on to its provider"),
        ("{model: hosted_vllm/x}", "api_base is missing"),
        ("{model: openai/x, api_base: 'ftp://a.b'}", "http://"),
        ("{model: openai/x, api_base: os.environ/NOT_SET}", "variable is not set"),
        ("{model: openai/x, api_base: 'https://user:pass@a.b/v1'}", "password"),
        ("{model: openai/x, api_base: [1]}", "api_base is missing"),
        ("{model: openai/*}", "a pattern stands for the same names"),
        ("{model: openai/x, api_key: os.environ/a b}", "os.environ/NAME"),
        ("{model: openai/x, api_base: 'http://[::1'}", "http://"),
        ("{model: 5}", "not the name of a model"),
        ("[]", "litellm_params"),
    ],
)
def test_models_that_cannot_be_served(params: str, reason: str) -> None:
    found = converted(f"model_list: [{{model_name: m, litellm_params: {params}}}]")
    assert "upstreams" not in found.settings
    (remark,) = found.lost
    assert remark.location[:2] == ("model_list", 0)
    assert reason in remark.text


def test_no_secret_leaves_the_file() -> None:
    found = converted(
        """
        environment_variables: {OPENAI_API_KEY: sk-secret-4}
        model_list:
          - {model_name: a, litellm_params: {model: openai/a, api_key: sk-secret-1}}
          - {model_name: b, litellm_params: {model: openai/b, api_key: sk-secret-2}}
          - {model_name: c, litellm_params: {model: groq/c, api_key: sk-secret-3}}
          - {model_name: d, litellm_params: {model: openai/d, api_key: sk-secret-1}}
          - {model_name: e, litellm_params: {model: openai/e}}
          - {model_name: g, litellm_params: {model: bedrock/g, aws_secret_access_key: sk-secret-5}}
        general_settings: {master_key: 12345678, database_url: "postgres://u:sk-secret-6@h"}
        """
    )
    shown = repr(found.settings) + repr([(each.path, each.text) for each in found.lost])
    assert "sk-secret" not in shown
    assert "12345678" not in shown
    keys = {each["models"][0]: each.get("api_key") for each in found.settings["upstreams"]}
    # OPENAI_API_KEY is taken by another key.
    assert keys["a"] == "env:OPENAI_API_KEY_2"
    assert keys["b"] == "env:OPENAI_API_KEY_3"
    assert keys["c"] == "env:GROQ_API_KEY"
    assert keys["e"] == "env:OPENAI_API_KEY"
    assert len(keys) == 4
    assert found.variables == {
        "OPENAI_API_KEY_2": "the value of model_list[0].litellm_params.api_key",
        "OPENAI_API_KEY_3": "the value of model_list[1].litellm_params.api_key",
        "GROQ_API_KEY": "the value of model_list[2].litellm_params.api_key",
        "PARROT_API_KEY": "the value of general_settings.master_key",
        "OPENAI_API_KEY": "the value of environment_variables.OPENAI_API_KEY",
    }


def test_no_key_of_a_provider_goes_to_another_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    found = converted(
        "model_list: [{model_name: m, litellm_params: {model: openai/m, api_base: 'http://a/v1'}}]"
    )
    (server,) = TypeAdapter(list[UpstreamSettings]).validate_python(found.settings["upstreams"])
    assert server.key_reference() is None
    assert "gets no key" in lost(found)["model_list[0].litellm_params.api_base"]


def test_a_name_of_an_upstream_hides_no_model() -> None:
    found = converted(
        """
        model_list:
          - {model_name: router, litellm_params: {model: openrouter/openai/gpt-4o}}
          - {model_name: direct, litellm_params: {model: openai/gpt-4o}}
          - {model_name: again, litellm_params: {model: openai/gpt-4o, timeout: 5}}
        """
    )
    names = catalog(found)
    assert names.resolve("router") == Target("openai/gpt-4o", "openrouter")
    assert names.resolve("direct") == Target("gpt-4o", "openai-2")
    assert names.resolve("again") == Target("gpt-4o", "openai-3")


@pytest.mark.parametrize(
    ("model", "url", "name"),
    [
        ("ollama_chat/llama3", "http://localhost:11434/v1", "llama3"),
        ("gemini/gemini-2.5-pro", PROVIDERS["gemini"].url, "gemini-2.5-pro"),
        ("openai/responses/gpt-5", "https://api.openai.com/v1", "gpt-5"),
        ("text-embedding-3-small", "https://api.openai.com/v1", "text-embedding-3-small"),
    ],
)
def test_providers(model: str, url: str, name: str) -> None:
    found = converted(f"model_list: [{{model_name: m, litellm_params: {{model: {model}}}}}]")
    (only,) = found.settings["upstreams"]
    assert (only["url"], only["models"]) == (url, [name])


def test_every_known_provider_is_a_valid_upstream() -> None:
    models = [
        {"model_name": name, "litellm_params": {"model": f"{name}/m", "api_base": "http://a/v1"}}
        for name in PROVIDERS
    ]
    found = convert({"model_list": models}, {})
    assert Settings(**found.settings)
    assert {remark.text.partition(":")[0] for remark in found.lost} == {"gets no key"}
    for provider in PROVIDERS.values():
        assert provider.url.startswith("http") or not provider.url


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "model_list: nothing",
        "model_list: [1, null, {}, {model_name: a}, {litellm_params: {model: [1]}}]",
        "{model_list: [], router_settings: 5, general_settings: [1], litellm_settings: x}",
        "router_settings: {fallbacks: {a: b}, timeout: never, num_retries: -4}",
        "litellm_settings: {fallbacks: [1, {a: 2}, {b: [{model: c}]}], default_fallbacks: 3}",
        "{model_list: [{model_name: a, litellm_params: {model: gpt-4, timeout: .inf, rpm: {}}}]}",
        "{1: 2, null: 3, true: [4], credential_list: 5, environment_variables: [6]}",
        "general_settings: {master_key: [1], global_max_parallel_requests: 1.0e+300}",
    ],
)
def test_strange_files_are_reported_not_refused(text: str) -> None:
    assert converted(text).lost


async def test_calls_reach_the_servers_and_their_fallbacks(upstream: ScriptedUpstream) -> None:
    url = upstream.base_url
    found = converted(
        f"""
        model_list:
          - model_name: big
            litellm_params: {{model: hosted_vllm/gone, api_base: "http://127.0.0.1:1/v1"}}
          - model_name: big
            litellm_params: {{model: hosted_vllm/fake, api_base: "{url}", api_key: none}}
          - model_name: small
            litellm_params: {{model: xinference/gone, api_base: "http://127.0.0.1:1/v1"}}
          - {{model_name: "mine/*", litellm_params: {{model: lm_studio/*, api_base: "{url}"}}}}
        router_settings: {{num_retries: 0, fallbacks: [{{small: [big]}}]}}
        """
    )
    gateway = Gateway(Settings(**found.settings))
    for each in gateway.upstreams.values():
        await each.start()
    transport = httpx.ASGITransport(app=create_app(gateway))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        for name, reached in (("big", "fake"), ("small", "fake"), ("mine/fake-2", "fake-2")):
            body = {"model": name, "messages": [{"role": "user", "content": "Hello"}]}
            answer = await client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            assert json.loads(upstream.received[-1].body)["model"] == reached
    for each in gateway.upstreams.values():
        await each.close()


#: A file with a bit of everything. What is worth nothing by itself is left out: a default repeated,
#: a model's name that is the server's too.
FULL = """
model_list:
  - model_name: chat
    litellm_params:
      model: openai/gpt-4o
      api_key: os.environ/KEY_A
      rpm: 100
      tpm: 1000
      weight: 2
      timeout: 30
      stream_timeout: 20
      max_retries: 4
      organization: org-1
      extra_headers: {x-team: a}
      temperature: 0.1
      tags: [free]
    model_info: {id: one, mode: chat, base_model: gpt-4o}
    tpm: 5
  - {model_name: chat, litellm_params: {model: azure/d1, api_base: "https://a.example.com",
     api_version: "2024-02-01", litellm_credential_name: shared, order: 2}}
  - {model_name: claude, litellm_params: {model: anthropic/claude-x, api_key: sk-ant-1}}
  - {model_name: quick, litellm_params: {model: groq/plain}}
  - {model_name: signed, litellm_params: {model: bedrock/titan, aws_region_name: us-east-1}}
  - {model_name: far, litellm_params: {model: openai/x, api_base: os.environ/NOT_SET}}
  - {model_name: "any/*", litellm_params: {model: "openrouter/*", api_key: os.environ/KEY_B}}
credential_list:
  - {credential_name: shared, credential_values: {api_key: os.environ/KEY_C}}
  - {credential_name: unused, credential_values: {api_key: os.environ/KEY_D}}
router_settings:
  routing_strategy: latency-based-routing
  routing_strategy_args: {ttl: 10}
  model_group_alias: {best: chat, hidden: {model: claude}}
  fallbacks: [{chat: [claude, signed]}, {nobody: [chat]}]
  context_window_fallbacks: [{chat: [claude]}]
  allowed_fails: 3
  cooldown_time: 20
  retry_after: 2
  redis_host: os.environ/REDIS_HOST
  enable_pre_call_checks: true
litellm_settings: {request_timeout: 77, drop_params: true, callbacks: [x], cache: true,
  cache_params: {type: redis}, default_fallbacks: [claude], json_logs: true, set_verbose: true}
general_settings: {master_key: os.environ/MASTER, database_url: "postgres://u:p@h/d", alerting: [s],
  global_max_parallel_requests: 50, max_parallel_requests: 9, custom_auth: a.b, ui: {x: 1}}
environment_variables: {KEY_B: sk-or-1, LANGFUSE_HOST: there}
guardrails: [{guardrail_name: g}]
include: [other.yaml]
mcp_servers: {a: {url: "http://b"}}
new_section: {x: 1}
"""


def leaves(value: Any, *path: Any) -> Iterator[tuple[Any, ...]]:
    parts = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in parts:
        if isinstance(each, dict | list):
            yield from leaves(each, *path, key)
        else:
            yield (*path, key)


def test_nothing_is_dropped_in_silence() -> None:
    """Each value of a file is reported, or what comes out is another without it."""
    config = yaml.safe_load(FULL)
    whole = converted(FULL)
    told = [remark.location for remark in whole.lost]
    found = [*leaves(config)]
    assert len(found) > 60
    for path in found:
        if any(path[: len(location)] == location for location in told):
            continue
        less = yaml.safe_load(FULL)
        within = less
        for part in path[:-1]:
            within = within[part]
        del within[path[-1]]
        other = convert(less, {})
        assert other != whole, path


#: Keys that files have, and values that they have not.
_KEYS = sorted({str(part) for path in leaves(yaml.safe_load(FULL)) for part in path} | {"*", ""})
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.dates()
    | st.sampled_from(["openai/gpt", "os.environ/A", "os.environ/", "http://[", "azure/", "/", "*"])
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(_KEYS) | st.integers() | st.none(), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip
_PARAMS = st.dictionaries(st.sampled_from(_KEYS), _VALUES, max_size=6)
_MODELS = st.fixed_dictionaries(
    {"model_name": _VALUES | st.sampled_from(["a", "b/*", "*"]), "litellm_params": _PARAMS},
    optional={"model_info": _VALUES},
)


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(st.sampled_from(_KEYS), _VALUES, max_size=4),
    st.lists(_MODELS | _VALUES, max_size=4),
    st.sampled_from(["openai/gpt-4o", "*", "azure/d"]),
)
def test_any_file_becomes_valid_settings(rest: dict[str, Any], models: Any, name: str) -> None:
    for each in models:
        if isinstance(each, dict) and isinstance(each.get("litellm_params"), dict):
            each["litellm_params"].setdefault("model", name)
    found = convert({**rest, "model_list": models}, {"A": "http://a/v1"})
    Settings(**found.settings)
