"""Schemathesis, with our own OpenAPI document, against a running gateway with the demo model.

For every operation requests that the document allows and ones that it does not, the same ones in
each run. Whatever comes in, nothing breaks, and what comes back is as the document says. Bodies are
made cheap (few tokens) and half of the paths name what is really there; the rest is as generated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
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

ADMIN_KEY = "test-key-of-the-operator"
#: Requests of each kind for each operation.
MAX_EXAMPLES = 4
#: A call that waits for a value that never comes ends after this.
CALL_TIMEOUT_S = 1.0
#: Routes that take this key, and those whose answers do not end.
BEHIND_ADMIN_KEY = ("/admin/", "/ui/")
ENDLESS = ("/ui/api/events", "/ui/api/sessions/{id}/events")
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
_CHAT: dict[str, Any] = {"model": DEMO_MODEL, "messages": [{"role": "user", "content": "Hi"}]}
_ITEMS: dict[str, Any] = {"model": DEMO_MODEL, "input": "Hi"}
#: Routes whose bodies have to get beyond the checks of their fields, and the fields that each has
#: to have, as they are taken.
CALLS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": DEMO_MODEL, "prompt": "Hi"},
    "/v1/chat/completions": _CHAT,
    "/v1/messages": {**_CHAT, "max_tokens": 2},
    "/v1/messages/count_tokens": _CHAT,
    "/v1/responses": _ITEMS,
    "/v1/responses/input_tokens": _ITEMS,
}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """A gateway of these tests' own, which waits for nothing for long."""
    config = {
        "models": [{"model": DEMO_MODEL, "max_batch_size": 8, "num_blocks": 512}],
        "server": {"call_timeout_s": CALL_TIMEOUT_S, "max_body_bytes": 1024 * 1024},
        "batches": {"folder": str(tmp_path_factory.mktemp("batches"))},
        # Nothing is downloaded, and no folder loaded.
        "engines": {"hub_models": []},
    }
    admin = {"PARROT_ADMIN_KEY": ADMIN_KEY}
    with GatewayProcess(config=config, api_key=API_KEY, environment=admin) as process:
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
        if path.startswith("/admin/"):
            return {}
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
        if "/streams/" in path:
            return {"stream_id": self._stream()}
        return self._call(path)

    def _stream(self) -> str:
        body = {"model": DEMO_MODEL, "prompt": "Once", "max_tokens": 1, "stream": True}
        headers = {"Authorization": f"Bearer {API_KEY}", "X-Parrot-Resume": "true"}
        answer = httpx.post(f"{self.gateway.base_url}/completions", headers=headers, json=body)
        return answer.headers["x-parrot-stream"]

    def _call(self, path: str) -> dict[str, str]:
        """Ids of a deferred call of a new session, of what it writes, and of its context."""
        parrot = {"session": f"known-{next(self._numbers)}", "output": "o", "context": "c"}
        body = {"model": DEMO_MODEL, "prompt": "Once", "max_tokens": 1}
        status, headers, _ = self.gateway.post(
            "/v1/completions", {**body, "parrot": {**parrot, "defer": True}}
        )
        assert status == 200
        kind = path.removeprefix("/ui/api").removeprefix("/v1").split("/")[1].removesuffix("s")
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
    if "model" in body:
        length = "max_output_tokens" if "/responses" in case.path else "max_tokens"
        body.setdefault(length, AT_MOST[length])


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


def without_refused(case: Case, needed: dict[str, Any], send: Callable[[Case], Response]) -> int:
    """Send a request again and again, each time without the field that its refusal names, or with
    a good one where it is needed; the last status."""
    while True:
        response = send(case)
        if response.status_code not in (400, 404) or not isinstance(case.body, dict):
            return response.status_code
        error = response.json()["error"]
        names = re.findall(r"[A-Za-z_]+", error.get("param") or error["message"])
        known = [name for name in names if name in case.body or name in needed]
        if not known and (case.headers or "parrot" in case.body):
            # Semantic fields have one name, whether a header or the body gives them.
            case.headers.clear()
            case.body.pop("parrot", None)
            continue
        assert known, f"no field of {sorted(case.body)} is named: {error}"
        name = known[0]
        if name in needed:
            assert case.body.get(name) != needed[name], error
            case.body[name] = needed[name]
        else:
            del case.body[name]


def ask_many(known: Known, operation: Any, mode: GenerationMode) -> set[int]:
    """Send what an operation allows, or what it does not; the statuses that came back."""
    turns, statuses = count(), set[int]()
    headers = {"Authorization": f"Bearer {API_KEY}"}
    if operation.path.startswith(BEHIND_ADMIN_KEY):
        headers["x-api-key"] = ADMIN_KEY

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

        def send(case: Case) -> Response:
            response = case.call(base_url=known.gateway.root, headers=headers, timeout=PATIENCE_S)
            case.validate_response(response, checks=CHECKS)
            return response

        again = mode is GenerationMode.POSITIVE and operation.path in CALLS
        if again:
            statuses.add(without_refused(case, CALLS[operation.path], send))
        else:
            statuses.add(send(case).status_code)

    ask()
    return statuses


def follow(known: Known, path: str) -> None:
    """Check the beginning of a stream that does not end against the document."""
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    there = path.format(**known.ids(path)) if "{" in path else path
    url, timeout = known.gateway.root, PATIENCE_S
    with httpx.stream("GET", url + there, headers=headers, timeout=timeout) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert next(answer.iter_lines()).startswith("event: ")
    if there != path:
        none = httpx.get(url + path.format(id="none"), headers=headers, timeout=timeout)
        assert (none.status_code, none.json()["error"]["code"]) == (404, "session_not_found")


@pytest.mark.timeout(600)
def test_the_gateway_is_as_its_document_says(gateway: GatewayProcess) -> None:
    schema = schemathesis.openapi.from_dict(gateway.get("/openapi.json"))
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) > 40
    known, failures, statuses = Known(gateway), [], set[int]()
    for operation in operations:
        if operation.path in ENDLESS:
            follow(known, operation.path)
            continue
        for mode in GenerationMode:
            if mode is GenerationMode.NEGATIVE and not operation.body:
                # Any text is a path: there is nothing to do wrong.
                continue
            try:
                found = ask_many(known, operation, mode)
                statuses |= found
                if operation.path in CALLS and mode is GenerationMode.POSITIVE:
                    assert 200 in found, found
            except (Exception, FailureGroup) as error:
                failures.append(f"{operation.label} ({mode.value}): {error!r:.3000}")
    assert not failures, "\n\n".join(failures)
    assert {200, 400, 404} <= statuses
    assert gateway.health()["calls"]["running"] == 0
