"""One tenant cannot notice what another one has had filled."""

from __future__ import annotations

from harness.processes import API_KEY, DEMO_MODEL, GatewayProcess
from harness.raw_http import RawConnection

#: Several blocks of the cache.
PROMPT = "Once upon a time there was a parrot who " * 20


def tell_as_guest(gateway: GatewayProcess, end: str) -> None:
    """Let a call without a key fill the prompt."""
    with RawConnection(gateway.port) as connection:
        session = connection.ask("POST", "/v1/session", {}).json
        out = {"name": "out", "is_output": True, "sampling_config": {"max_gen_length": 2}}
        call = {"session_id": session["session_id"], "template": PROMPT + end + "{{out}}",
                "parameters": [out]}  # fmt: skip
        (made,) = connection.ask("POST", "/v1/semantic_call", call).json["param_info"]
        answer = connection.ask("GET", f"/v1/semantic_var/{made['var_id']}", session)
        assert answer.status == 200, answer.body


def cached(gateway: GatewayProcess, end: str) -> int:
    """Tokens of the prompt that were found, as a call with the key is told."""
    body = {"model": DEMO_MODEL, "prompt": PROMPT + end, "max_tokens": 2}
    usage = gateway.ask("POST", "/v1/completions", body).json["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def test_guests_and_owners_share_no_prefix() -> None:
    with GatewayProcess(
        config={
            "models": [{"model": DEMO_MODEL, "num_blocks": 512}],
            "parrot_v3": {"keyless": True, "keyless_tenant": "guests"},
        },
        api_key=API_KEY,
    ) as gateway:
        tell_as_guest(gateway, "sang.")
        assert cached(gateway, "sang.") == 0
        # Within a tenant it is shared.
        assert cached(gateway, "flew.") > 0
