"""SIGHUP on a gateway process: its settings file is taken over whole, or not at all."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import openai
from harness.processes import GatewayProcess, upstream_settings, wait_until
from harness.scripted_upstream import ScriptedUpstream, chat_events, document, event_stream
from harness.scripted_upstream import chat_document as answer_of

HELLO: Any = [{"role": "user", "content": "Hello"}]


def test_a_hangup_takes_the_file_over_whole_or_not_at_all(
    upstream: ScriptedUpstream, tmp_path: Path
) -> None:
    gate = upstream.gate()
    first, *rest = chat_events(["One", " two"])
    slow = upstream.script(event_stream(first, gate, *rest))
    key = tmp_path / "key"
    key.write_text("first-key\n")
    settings: dict[str, Any] = {
        "upstreams": [upstream_settings("up", upstream.base_url, api_key=f"file:{key}")],
        "aliases": {"slow": slow},
    }
    with GatewayProcess(config=settings, environment={"PARROT_ADMIN_KEY": "operator"}) as gateway:
        client = openai.OpenAI(base_url=gateway.base_url, api_key="none", max_retries=0)

        def reload(text: str, expected: str) -> None:
            """Write the file, hang up, and wait for one more line with this in the log."""
            before = gateway.stderr().count(expected)
            gateway.config_path.write_text(text, encoding="utf-8")
            gateway.signal(signal.SIGHUP)
            wait_until(lambda: gateway.stderr().count(expected) > before, expected)

        stream = client.chat.completions.create(model="slow", messages=HELLO, stream=True)
        received = [next(stream)]
        base = {**settings, "server": {"port": 0}}
        # Bad files: what is wrong stands in one line, and nothing changes.
        reload("server: {port: 0\n", "settings not reloaded, nothing has changed: ")
        reload(
            json.dumps({**base, "server": {"port": 0, "prot": 1}, "aliases": {}}),
            "server.prot: unknown setting",
        )
        reload(json.dumps({**base, "server": {"port": 1}, "aliases": {}}), "server.port: changed")
        assert {"slow"} <= {model.id for model in client.models.list().data}

        quick = upstream.script(document(answer_of("quick")))
        renamed = [upstream_settings("renamed", upstream.base_url)]
        reload(
            json.dumps({**base, "upstreams": renamed, "aliases": {"quick": quick}}),
            "settings reloaded: upstreams, aliases",
        )
        raw = client.chat.completions.with_raw_response.create(model="quick", messages=HELLO)
        assert raw.headers["x-parrot-engine"] == "renamed"
        assert raw.parse().choices[0].message.content == "quick"
        assert "slow" not in {model.id for model in client.models.list().data}
        # The call that began before ends as if nothing had been.
        gate.open()
        received += stream
        text = "".join(each.choices[0].delta.content or "" for each in received if each.choices)
        assert text == "One two"
        # Keys in files are read anew with it.
        reload(json.dumps(base), "settings reloaded: upstreams, aliases")
        key.write_text("second-key\n")
        base["aliases"] = {"quick": quick}
        reload(json.dumps(base), "settings reloaded: aliases, upstreams.api_key")
        client.chat.completions.create(model="quick", messages=HELLO)
        headers = upstream.calls(quick)[-1].headers
        assert headers["authorization"] == "Bearer second-key"
        key.unlink()
        reload(json.dumps(base), "cannot be read: No such file or directory")
        client.chat.completions.create(model="quick", messages=HELLO)
        assert gateway.process.poll() is None
