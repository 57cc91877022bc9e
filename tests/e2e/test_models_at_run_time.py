"""Models of a running gateway: downloaded, loaded, called, idle, unloaded; routes and commands."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from click.testing import Result
from harness.fake_hub import FakeHub, fake_hub
from harness.processes import DEMO_MODEL, GatewayProcess, wait_until
from harness.raw_http import Response
from parrot_engine.loading.hub import resolve_model
from typer.testing import CliRunner

from parrot_gateway.cli.main import app

ADMIN_KEY = "test-key-of-the-operator"


class Operated(GatewayProcess):
    """A gateway without models of its own, and its operator."""

    def command(self, *arguments: str, group: str = "models") -> str:
        """Return the output of `parrot-gateway models …`, or of another group of commands."""
        done = self.invoke(*arguments, admin_key=ADMIN_KEY, group=group)
        assert done.exit_code == 0, done.output
        return done.stdout

    def invoke(self, *arguments: str, admin_key: str | None, group: str = "models") -> Result:
        """The same, with how it ended."""
        environment = {"PARROT_ADMIN_KEY": admin_key, "OPENAI_BASE_URL": self.base_url}
        return CliRunner().invoke(app, [group, *arguments], env=environment)

    def headers(self) -> dict[str, str]:
        return {"Content-Type": "application/json", "Authorization": f"Bearer {ADMIN_KEY}"}

    def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> Response:
        return super().ask(method, path, body, {**self.headers(), **(headers or {})})

    def model(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.get(f"/admin/v1/models/{name}")
        return found

    def names(self) -> list[str]:
        """Models that clients are shown."""
        return [model.id for model in self.client().models.list().data]

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.base_url, api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeHub]:
    folder = tmp_path_factory.mktemp("hub") / "tiny"
    shutil.copytree(resolve_model(DEMO_MODEL), folder)
    with fake_hub({"own/tiny": folder}) as hub:
        yield hub


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the operator allows, with a model of an unknown format in it."""
    folders = tmp_path_factory.mktemp("models")
    shutil.copytree(resolve_model(DEMO_MODEL), folders / "odd")
    path = folders / "odd" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = {"quant_method": "runes"}
    path.write_text(json.dumps(config))
    return folders


@pytest.fixture(scope="module")
def gateway(
    hub: FakeHub, folders: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Operated]:
    config = {
        "engines": {"join_key": "env:JOIN_KEY", "model_folders": [str(folders)]},
        "aliases": {"gpt": "tiny"},
    }
    environment = {"JOIN_KEY": "j", "PARROT_ADMIN_KEY": ADMIN_KEY}
    environment |= hub.environment(tmp_path_factory.mktemp("cache"))
    with Operated(config=config, environment=environment) as gateway:
        yield gateway


def test_from_the_hub_to_an_answer_and_away_again(gateway: Operated) -> None:
    refused = gateway.post("/v1/completions", {"model": "gpt", "prompt": "Once"})
    assert (refused[0], refused[2]["error"]["code"]) == (404, "model_not_found")
    printed = gateway.command(
        "load", "own/tiny", "--name", "tiny", "--set", "num_blocks=64", "--set", "idle_unload_s=0.3"
    )
    assert "tiny" in printed
    assert "builtin on cpu" in printed
    loaded = gateway.model("tiny")
    assert loaded["settings"] == {"num_blocks": 64, "idle_unload_s": 0.3}
    assert loaded["engines"][0]["memory"]["weight_bytes"] > 10**6
    (download,) = gateway.get("/admin/v1/models")["downloads"]
    assert (download["model"], download["state"]) == ("own/tiny", "done")
    assert download["done_bytes"] == download["total_bytes"] > 10**6

    # Nobody calls it: its engine ends, and comes back for the next call, a stream.
    wait_until(lambda: gateway.model("tiny")["state"] == "idle", "the model is idle")
    assert "idle" in gateway.command("list")
    assert set(gateway.names()) == {"tiny", "gpt"}
    assert gateway.get("/health/readiness")["status"] == "ok"
    stream = gateway.client().completions.create(
        model="gpt", prompt="Once upon", max_tokens=4, temperature=0, stream=True
    )
    chunks = list(stream)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert all(chunk.model == "gpt" for chunk in chunks)

    # Its operator takes it out of service and back, and then the whole gateway.
    (engine,) = gateway.get("/admin/v1/engines")["data"]
    assert (engine["model"], engine["kind"]) == ("tiny", "builtin")
    assert "draining" in gateway.command("drain", engine["name"], group="engines")
    assert "draining" in gateway.command("list", group="engines")
    refused = gateway.post("/v1/completions", {"model": "gpt", "prompt": "Once"})
    assert (refused[0], refused[2]["error"]["code"]) == (503, "drained")
    assert "serving" in gateway.command("undrain", engine["id"], group="engines")
    assert "refused in 30 s" in gateway.command("drain", "--all", group="engines")
    assert gateway.get("/health/readiness")["status"] == "draining"
    assert (
        gateway.post("/v1/completions", {"model": "gpt", "prompt": "O", "max_tokens": 1})[0] == 200
    )
    assert "takes calls" in gateway.command("undrain", "--all", group="engines")
    assert gateway.invoke("drain", admin_key=ADMIN_KEY, group="engines").exit_code == 2

    assert "tiny is unloaded" in gateway.command("unload", "tiny")
    assert "tiny" not in gateway.names()
    refused = gateway.post("/v1/completions", {"model": "gpt", "prompt": "Once"})
    assert (refused[0], refused[2]["error"]["code"]) == (404, "model_not_found")


def test_the_engines_refusal_is_the_answer(gateway: Operated, folders: Path) -> None:
    body = {"model": str(folders / "odd"), "kind": "builtin", "stream": True}
    # The stream has begun: the refusal comes in it.
    with pytest.raises(openai.APIError) as caught:
        list(
            gateway.client()
            .with_options(default_headers=gateway.headers())
            .post(
                f"{gateway.root}/admin/v1/models/load",
                body=body,
                cast_to=dict,
                stream=True,
                stream_cls=openai.Stream[dict[str, Any]],
            )
        )
    assert "runes" in caught.value.message
    failed = gateway.model("odd")
    assert (failed["state"], failed["code"]) == ("failed", "model_load_failed")
    assert "odd" not in gateway.names()


def test_downloads_that_fail_have_names(gateway: Operated, hub: FakeHub) -> None:
    status, _, answer = gateway.post("/admin/v1/models/pull", {"model": "no/such"})
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    assert answer["error"]["param"] == "model"


def test_a_command_says_what_is_missing(gateway: Operated) -> None:
    done = gateway.invoke("list", admin_key=None)
    assert (done.exit_code, done.stdout) == (1, "")
    assert "server.admin_key" in done.stderr
    done = gateway.invoke("load", "own/tiny", "--set", "blocks=3", admin_key=ADMIN_KEY)
    assert "blocks" in done.stderr
    done = gateway.invoke("load", "own/tiny", "--set", "blocks", admin_key=ADMIN_KEY)
    assert done.exit_code == 2
