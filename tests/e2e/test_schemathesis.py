"""Schemathesis, with our own OpenAPI document, against a running gateway with the demo model.

For every operation requests that the document allows and ones that it does not, the same ones in
each run. Whatever comes in, nothing breaks, and what comes back is as the document says. Bodies are
made cheap (few tokens) and half of the paths name what is really there; the rest is as generated.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from typing import Any

import httpx
import pytest
import schemathesis
from harness.processes import API_KEY, DEMO_MODEL, GatewayProcess
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, CheckContext, GenerationMode, Response
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

#: Requests of each kind for each operation.
MAX_EXAMPLES = 6
#: A call that waits for a value that never comes ends after this.
CALL_TIMEOUT_S = 1.0
#: Longest wait for one answer.
PATIENCE_S = 20.0
#: What makes a call long, and what it may be here.
AT_MOST = {
    "max_tokens": 3,
    "max_completion_tokens": 3,
    "max_output_tokens": 3,
    "n": 2,
    "best_of": 2,
}
_OWN_ERRORS = {502, 503, 504}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """A gateway of these tests' own, which waits for nothing for long."""
    config = {
        "models": [{"model": DEMO_MODEL, "max_batch_size": 8, "num_blocks": 512}],
        "server": {"call_timeout_s": CALL_TIMEOUT_S, "max_body_bytes": 1024 * 1024},
        "batches": {"folder": str(tmp_path_factory.mktemp("batches"))},
    }
    with GatewayProcess(config=config, api_key=API_KEY) as process:
        yield process


class Known:
    """Makes what paths can name: anew each time, as some operations delete it."""

    def __init__(self, gateway: GatewayProcess) -> None:
        self.gateway = gateway
        self._numbers = count()

    def ids(self, path: str) -> dict[str, str]:
        """Values of the parameters in a path, of things that are there."""
        if "{model}" in path:
            return {"model": DEMO_MODEL}
        if "/files/" in path:
            return {"file_id": self._file()}
        if "/batches/" in path:
            body = {"input_file_id": self._file(), "completion_window": "24h"}
            made = self._post("/v1/batches", {**body, "endpoint": "/v1/completions"})
            return {"batch_id": str(made["id"])}
        if "/responses/" in path:
            body = {"model": DEMO_MODEL, "input": "Once", "max_output_tokens": 1}
            return {"response_id": str(self._post("/v1/responses", body)["id"])}
        if "/conversations/" in path:
            item = {"role": "user", "content": "Once"}
            made = self._post("/v1/conversations", {"items": [item]})
            items = self.gateway.get(f"/v1/conversations/{made['id']}/items")["data"]
            return {"conversation_id": str(made["id"]), "item_id": str(items[0]["id"])}
        if "/semantic_var" in path or "/session/" in path:
            made = self._post("/v1/session", {})
            return {"session_id": str(made["session_id"])}
        return self._call(path)

    def _call(self, path: str) -> dict[str, str]:
        """Ids of a deferred call of a new session, of what it writes, and of its context."""
        parrot = {"session": f"known-{next(self._numbers)}", "output": "o", "context": "c"}
        body = {"model": DEMO_MODEL, "prompt": "Once", "max_tokens": 1}
        status, headers, _ = self.gateway.post(
            "/v1/completions", {**body, "parrot": {**parrot, "defer": True}}
        )
        assert status == 200
        kind = path.split("/")[2].removesuffix("s")
        return {"id": headers[f"x-parrot-{kind}"], "name": "c"}

    def _file(self) -> str:
        form = {"files": {"file": ("in.jsonl", b"{}")}, "data": {"purpose": "batch"}}
        headers = {"Authorization": f"Bearer {API_KEY}"}
        answer = httpx.post(f"{self.gateway.base_url}/files", headers=headers, **form)  # type: ignore[arg-type]
        return str(answer.json()["id"])

    def _post(self, path: str, body: Any) -> Any:
        status, _, answer = self.gateway.post(path, body)
        assert status < 300, answer
        return answer


def made_cheap(case: Case) -> None:
    """A model that there is, and few tokens; whatever is no sensible value stays as it is."""
    body = case.body
    if not isinstance(body, dict):
        return
    if isinstance(body.get("model"), str):
        body["model"] = DEMO_MODEL
    for name, most in AT_MOST.items():
        value = body.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > most:
            body[name] = most
    if "model" in body and "max_output_tokens" not in body:
        body.setdefault("max_tokens", AT_MOST["max_tokens"])


def nothing_broke(ctx: CheckContext, response: Response, case: Case) -> bool | None:
    """No status that says that the gateway is at fault, unless it says in which known way."""
    if response.status_code < 500:
        return None
    error = json.loads(response.content)["error"]
    assert response.status_code in _OWN_ERRORS, error
    # Anthropic's errors have a type alone.
    code = error["code"] if "code" in error else error["type"]
    assert code not in (None, "server_error", "internal_error", "api_error"), error
    return None


CHECKS: list[Any] = [
    nothing_broke,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    response_headers_conformance,
]


def ask_many(known: Known, operation: Any, mode: GenerationMode) -> set[int]:
    """Send what an operation allows, or what it does not; the statuses that came back."""
    turns, statuses = count(), set[int]()
    headers = {"Authorization": f"Bearer {API_KEY}"}

    @settings(
        max_examples=MAX_EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: Case) -> None:
        made_cheap(case)
        if case.path_parameters and next(turns) % 2 == 0:
            ids = known.ids(operation.path)
            case.path_parameters.update({n: ids[n] for n in case.path_parameters if n in ids})
        response = case.call(base_url=known.gateway.root, headers=headers, timeout=PATIENCE_S)
        statuses.add(response.status_code)
        case.validate_response(response, checks=CHECKS)

    ask()
    return statuses


def test_the_gateway_is_as_its_document_says(gateway: GatewayProcess) -> None:
    schema = schemathesis.openapi.from_dict(gateway.get("/openapi.json"))
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) > 40
    known, failures, statuses = Known(gateway), [], set[int]()
    for operation in operations:
        for mode in GenerationMode:
            if mode is GenerationMode.NEGATIVE and not operation.body:
                # Any text is a path: there is nothing to do wrong.
                continue
            try:
                statuses |= ask_many(known, operation, mode)
            except (Exception, FailureGroup) as error:
                failures.append(f"{operation.label} ({mode.value}): {error!r:.3000}")
    assert not failures, "\n\n".join(failures)
    assert {200, 400, 404} <= statuses
    assert gateway.health()["calls"]["running"] == 0
