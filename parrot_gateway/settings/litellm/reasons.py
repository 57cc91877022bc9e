"""Why something of a file is not carried over."""

from __future__ import annotations

_SIGNED = "its calls are signed with AWS credentials"
_TOKENS = "its calls carry Google tokens that live for an hour"
#: Why calls cannot be passed on to a provider, where that is known.
NOT_PASSED_ON: dict[str, str] = {
    "bedrock": _SIGNED,
    "bedrock_converse": _SIGNED,
    "sagemaker": _SIGNED,
    "sagemaker_chat": _SIGNED,
    "vertex_ai": _TOKENS,
    "vertex_ai_beta": _TOKENS,
    "watsonx": "its calls carry IBM tokens that live for an hour",
    "oci": "its calls are signed with Oracle credentials",
    "replicate": "its predictions are an API of its own",
    "vllm": "it runs inside the proxy; serve the model with vLLM, or here under `models`",
    "petals": "it runs inside the proxy",
}


def not_passed_on(provider: str) -> str:
    """Why calls cannot be passed on to a provider, and where it says what to do."""
    if not provider:
        return "its provider cannot be told: name it, as in openai/MODEL"
    why = NOT_PASSED_ON.get(provider, "no OpenAI-compatible address of it is known here")
    return (
        f'calls cannot be passed on to {provider[:40]}: {why} (see "From LiteLLM" in '
        "docs/operations.md)"
    )


OF_CALLERS = "parameters of calls are the callers': bodies pass unchanged"
_LIMITS = "requests and tokens a minute are not limited here; `max_parallel_requests` is kept"
_HEADERS = "no headers are added for an upstream"
_CALLBACKS = "no callbacks; /metrics, logs and traces tell of calls"
_STORE = "keys, teams, budgets and logs in a database are not kept: all clients have one key"
_CACHE = "answers are not cached; own engines keep the KV of prompts"
_REDIS = "nothing is shared over Redis"
#: Why, by the name of a parameter of a model.
PARAMS: dict[str, str] = {
    **dict.fromkeys(("rpm", "tpm", "itpm", "otpm"), _LIMITS),
    "weight": "the scheduler chooses among servers, by their load and what they have cached",
    "stream_timeout": "`timeout` is the only one",
    "drop_params": "bodies pass unchanged, also what a server does not know",
    "tags": "calls are not chosen for by tags",
    "organization": _HEADERS,
    "headers": _HEADERS,
    "extra_headers": _HEADERS,
    "mock_response": "no answers are made up",
    "max_budget": "there are no budgets",
    "budget_duration": "there are no budgets",
    "api_version": "addresses have no versions; write them into `api_base`",
}
#: Why, by the name of a setting beside the models.
SETTINGS: dict[str, str] = {
    **dict.fromkeys(("success_callback", "failure_callback", "callbacks", "service_callbacks"),
                    _CALLBACKS),
    **dict.fromkeys(("cache", "cache_params", "cache_responses", "caching_groups"), _CACHE),
    **dict.fromkeys(("redis_host", "redis_port", "redis_password", "redis_url",
                     "redis_db"), _REDIS),
    **dict.fromkeys(("database_url", "store_model_in_db", "max_budget", "budget_duration",
                     "store_prompts_in_spend_logs", "database_connection_pool_limit"), _STORE),
    **dict.fromkeys(("context_window_fallbacks", "content_policy_fallbacks"),
                    "the fallback of a model is for failures of its server, not for these"),
    **dict.fromkeys(("retry_policy", "model_group_retry_policy", "allowed_fails_policy"),
                    "retries and failures are counted the same for all errors"),
    "disable_cooldowns": "the circuit breaker is always there; `breaker_failures` sets it",
    "drop_params": PARAMS["drop_params"],
    "completion_model": "calls have to name their model; an alias `*` takes any name",
    "custom_auth": "clients are known by one key",
    "enable_jwt_auth": "clients are known by one key",
    "alerting": "alerts are made from /metrics",
}  # fmt: skip
#: The same of whole sections.
SECTIONS: dict[str, str] = {
    "include": "other files are not read: import them too",
    "guardrails": "answers and prompts pass unchanged",
    "callback_settings": _CALLBACKS,
    "mcp_servers": "tools are not served here",
}
