"""Settings: four sources, one order, errors that name the culprit."""

from __future__ import annotations

from pathlib import Path

import pytest

from parrot_gateway.settings.config_file import ConfigError
from parrot_gateway.settings.model import Settings, api_key_of
from parrot_gateway.settings.secret_reference import read_secret
from parrot_gateway.settings.sources import is_loopback, load_settings


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in list(os.environ):
        if name.startswith("PARROT_"):
            monkeypatch.delenv(name)


def write(folder: Path, text: str) -> Path:
    path = folder / "parrot.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_defaults_serve_loopback_without_a_key() -> None:
    settings = load_settings()
    assert (settings.server.host, settings.server.port) == ("127.0.0.1", 8000)
    assert api_key_of(settings) is None


def test_order_of_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path, "server: {port: 1001, log_level: error, drain_timeout_s: 7}\n")
    monkeypatch.setenv("PARROT_SERVER_PORT", "1002")
    monkeypatch.setenv("PARROT_SERVER_LOG_LEVEL", "warning")
    settings = load_settings({"server": {"port": 1003}}, file)
    assert settings.server.port == 1003  # flag
    assert settings.server.log_level == "warning"  # environment
    assert settings.server.drain_timeout_s == 7  # file
    assert settings.server.host == "127.0.0.1"  # default


@pytest.mark.parametrize(
    ("text", "line", "field"),
    [
        ("server:\n  port: 99999\n", 2, "server.port"),
        ("server:\n  host: localhost\n  prot: 1\n", 3, "server.prot: unknown setting"),
        ("sever: {}\n", 1, "sever: unknown setting"),
        # A setting of earlier versions.
        (
            "models:\n  - model: parrot-demo\n    paged_attention: true\n",
            3,
            "models.0.paged_attention: unknown setting",
        ),
        ("upstreams:\n  - name: a\n    url: ftp://x\n", 3, "upstreams.0.url"),
        ("models:\n  - model: m\n    block_size: many\n", 3, "models.0.block_size"),
        ("server:\n  api_key: sk-secret\n", 2, "server.api_key"),
    ],
)
def test_errors_name_file_line_and_field(tmp_path: Path, text: str, line: int, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(config=write(tmp_path, text))
    assert f"parrot.yaml, line {line}: {field}" in str(caught.value)


def test_every_fault_is_listed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(config=write(tmp_path, "server:\n  port: -1\n  host: 5\n"))
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize("text", ["a: [", "- 1\n", "\x00"])
def test_files_that_are_no_mapping(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"parrot\.yaml"):
        load_settings(config=write(tmp_path, text))


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_settings(config=tmp_path / "absent.yaml")


def test_environment_errors_name_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARROT_SERVER_PORT", "abc")
    with pytest.raises(ConfigError, match="PARROT_SERVER_PORT"):
        load_settings()


def test_a_public_address_needs_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {"server": {"host": "0.0.0.0"}}
    with pytest.raises(ConfigError, match="PARROT_API_KEY"):
        load_settings(flags)
    monkeypatch.setenv("PARROT_API_KEY", "k")
    assert api_key_of(load_settings(flags)) == "k"


def test_secrets_are_references_only(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="env:NAME") as caught:
        load_settings({"server": {"api_key": "sk-very-secret"}})
    assert "sk-very-secret" not in str(caught.value)
    monkeypatch.setenv("MY_KEY", "k2")
    assert api_key_of(load_settings({"server": {"api_key": "env:MY_KEY"}})) == "k2"
    monkeypatch.delenv("MY_KEY")
    with pytest.raises(ConfigError, match="MY_KEY is not set"):
        read_secret("env:MY_KEY")


def test_secrets_in_files(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("from a file\n")
    assert read_secret(f"file:{key}") == "from a file"
    for content in (b"", b" \n", b"two\nlines", b"\xff\xfe", b"x" * 70_000):
        key.write_bytes(content)
        with pytest.raises(ConfigError) as caught:
            read_secret(f"file:{key}")
        assert str(key) in str(caught.value)
    with pytest.raises(ConfigError, match="No such file"):
        read_secret(f"file:{tmp_path}/nothing")
    with pytest.raises(ConfigError, match="file:/PATH"):
        load_settings({"server": {"api_key": "file:not/absolute"}})


def test_upstream_keys_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load_settings({"upstreams": [{"name": "my-llm", "url": "http://h/v1/"}]})
    (upstream,) = settings.upstreams
    assert upstream.url == "http://h/v1"
    assert upstream.key_reference() is None
    monkeypatch.setenv("MY_LLM_API_KEY", "x")
    assert upstream.key_reference() == "env:MY_LLM_API_KEY"


def test_an_upstream_has_one_server_or_several() -> None:
    one, several = load_settings(
        {
            "upstreams": [
                {"name": "one", "urls": ["http://a/v1/"]},
                {"name": "vllm", "urls": ["http://a/v1", "http://b/v1/"]},
            ]
        }
    ).upstreams
    assert one.servers == {"one": "http://a/v1"}
    assert several.servers == {"vllm-1": "http://a/v1", "vllm-2": "http://b/v1"}


@pytest.mark.parametrize(
    ("upstreams", "reason"),
    [
        ([{"name": "x"}], "an upstream has a url, or several urls"),
        ([{"name": "x", "url": "http://a", "urls": ["http://b"]}], "a url, or several urls"),
        ([{"name": "x", "urls": ["http://a", "http://a/"]}], "named twice"),
        ([{"name": "x", "urls": ["http://a", "b:80"]}], "begins with http"),
        ([{"name": "x", "url": "http://a/v1?key=1"}], "has no query"),
        (
            [{"name": "x", "urls": ["http://a", "http://b"]}, {"name": "x-2", "url": "http://c"}],
            "given twice: x-2",
        ),
    ],
)
def test_servers_that_make_no_sense_are_refused(
    upstreams: list[dict[str, object]], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_settings({"upstreams": upstreams})


def test_models_may_be_plain_names() -> None:
    settings = load_settings({"models": ["org/name", {"model": "other", "name": "short"}]})
    assert [model.served_name for model in settings.models] == ["org/name", "short"]


def test_names_are_unique() -> None:
    with pytest.raises(ConfigError, match="given twice: a"):
        load_settings({"models": ["a", "a"]})


def test_a_folder_is_named_after_itself(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    assert load_settings({"models": [str(folder)]}).models[0].served_name == "my-model"


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.5.5.5", True), ("::1", True), ("localhost", True),
     ("0.0.0.0", False), ("10.0.0.1", False), ("example.org", False)],
)  # fmt: skip
def test_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_settings_cannot_be_changed() -> None:
    settings = Settings()
    with pytest.raises(ValueError, match="frozen"):
        settings.aliases = {}  # type: ignore[misc]


@pytest.mark.parametrize(
    ("models", "conflict"),
    [
        ([("a", 0.5, "cuda:0"), ("b", 0.5, "cuda")], None),
        ([("a", 0.7, "cuda:0"), ("b", 0.2, "cuda:0"), ("c", 0.1, "cuda:0")], None),
        ([("a", 0.6, "cuda:0"), ("b", 0.5, "cuda")], "cuda:0 come to 1.1"),
        ([("a", 0.6, "cuda:0"), ("b", 0.5, "cuda:1")], None),
        ([("a", 0.6, "cuda:0"), ("b", None, "cuda:0")], None),
    ],
)
def test_shares_of_a_device_come_to_one_at_most(
    models: list[tuple[str, float | None, str]], conflict: str | None
) -> None:
    given = [
        {"model": name, "memory_share": share, "device": device} for name, share, device in models
    ]
    if conflict is None:
        assert len(Settings.model_validate({"models": given}).models) == len(models)
    else:
        with pytest.raises(ValueError, match=conflict):
            Settings.model_validate({"models": given})


def test_every_process_of_a_model_has_its_share() -> None:
    shared = {"model": "a", "memory_share": 0.4, "device": "cuda:0,cuda:1"}
    assert Settings.model_validate({"models": [{**shared, "engines": 4}]})
    for more in ({"engines": 5}, {"engines": 2, "tensor_parallel": 2, "memory_share": 0.6}):
        with pytest.raises(ValueError, match="more than 1"):
            Settings.model_validate({"models": [{**shared, **more}]})
