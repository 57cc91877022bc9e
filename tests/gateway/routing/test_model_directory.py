"""Model names and who serves them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from parrot_gateway.exceptions import InvalidRequestError, ModelLoadingError, ModelNotFoundError
from parrot_gateway.routing.model_directory import Catalog, Target


class Listed:
    """An upstream that lists fixed models."""

    def __init__(
        self, name: str, models: Sequence[str], *, any_name: bool = False, ready: bool = True
    ) -> None:
        self.name = name
        self.ready = ready
        self.refusal = None
        self._models = list(models)
        self._any = any_name

    def serves(self, model: str) -> bool:
        return model in self._models

    def serves_any(self) -> bool:
        return self._any

    def models(self) -> Sequence[str]:
        return self._models


def catalog(
    *upstreams: Listed, engines: Sequence[str] = (), aliases: dict[str, str] | None = None
) -> Catalog:
    return Catalog(lambda: engines, {item.name: item for item in upstreams}, aliases or {})


def test_engines_come_before_upstreams() -> None:
    both = catalog(Listed("up", ["m"]), engines=["m"])
    assert both.resolve("m") == Target("m")


def test_first_upstream_that_lists_a_model() -> None:
    found = catalog(Listed("a", ["x"]), Listed("b", ["x", "y"]))
    assert found.resolve("x") == Target("x", "a")
    assert found.resolve("y") == Target("y", "b")


def test_an_upstream_can_be_named() -> None:
    found = catalog(Listed("a", ["x"]), Listed("b", ["x", "y"]), Listed("c", ["org/z"]))
    assert found.resolve("b/x") == Target("x", "b")
    assert found.resolve("a") == Target("x", "a")
    assert found.resolve("org/z") == Target("org/z", "c")
    with pytest.raises(InvalidRequestError, match="serves 2 models"):
        found.resolve("b")


def test_an_upstream_that_takes_any_name_comes_last() -> None:
    found = catalog(Listed("any", [], any_name=True), Listed("b", ["y"]))
    assert found.resolve("y") == Target("y", "b")
    assert found.resolve("gpt-9") == Target("gpt-9", "any")


def test_exact_alias_replaces_even_a_served_name() -> None:
    found = catalog(Listed("up", ["gpt-4o"]), engines=["demo"], aliases={"gpt-4o": "demo"})
    assert found.resolve("gpt-4o") == Target("demo")


def test_patterns_fill_gaps_only_and_the_longest_wins() -> None:
    aliases = {"*": "demo", "gpt-*": "up/big"}
    found = catalog(Listed("up", ["gpt-4o", "big"]), engines=["demo"], aliases=aliases)
    assert found.resolve("gpt-4o") == Target("gpt-4o", "up")
    assert found.resolve("gpt-5") == Target("big", "up")
    assert found.resolve("claude") == Target("demo")


def test_aliases_do_not_chain() -> None:
    with pytest.raises(ModelNotFoundError):
        catalog(engines=["demo"], aliases={"a": "b", "b": "demo"}).resolve("a")


def test_unknown_model_says_what_there_is() -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        catalog(Listed("up", ["x"]), engines=["demo"]).resolve("nope")
    assert caught.value.param == "model"
    assert caught.value.code == "model_not_found"
    assert "'nope'" in caught.value.message
    assert caught.value.message == "The model 'nope' does not exist. Served here: demo, x."


def test_a_misspelt_model_is_told_the_name_most_alike() -> None:
    found = catalog(
        Listed("up", ["gpt-4o-mini", "gpt-4.1"]), engines=["qwen3"], aliases={"big": "qwen3"}
    )
    for name, meant in (("gpt-4o-mimi", "gpt-4o-mini"), ("Qwen3", "qwen3"), ("bigg", "big")):
        with pytest.raises(ModelNotFoundError, match=f"Did you mean '{meant}'"):
            found.resolve(name)
    with pytest.raises(ModelNotFoundError) as caught:
        found.resolve("x" * 1_000_000)
    assert "Did you mean" not in caught.value.message


def test_while_an_upstream_is_silent_a_name_may_still_turn_up() -> None:
    found = catalog(Listed("up", [], ready=False), engines=["demo"])
    assert found.resolve("demo") == Target("demo")
    with pytest.raises(ModelLoadingError) as caught:
        found.resolve("nope")
    assert caught.value.retry_after_s is not None


def test_an_upstream_alone_that_is_silent_is_waited_for() -> None:
    """Its name stands for its only model, which is not known before it has told its models."""
    silent = catalog(Listed("vllm", [], ready=False), aliases={"*": "vllm", "gpt-4o": "vllm"})
    for name in ("vllm", "gpt-4o", "anything"):
        with pytest.raises(ModelLoadingError, match="'vllm/MODEL'"):
            silent.resolve(name)
    assert silent.resolve("vllm/m") == Target("m", "vllm")


def test_an_alias_of_what_nothing_serves_is_told_as_that() -> None:
    found = catalog(
        Listed("up", ["x", "demo"]),
        engines=["demo"],
        aliases={"gpt-4o": "dem", "good": "demo", "*": "nope", "up-*": "up"},
    )
    with pytest.raises(ModelNotFoundError) as caught:
        found.resolve("gpt-4o")
    assert "'gpt-4o' is an alias of 'dem', which nothing serves" in caught.value.message
    assert caught.value.message.endswith("Did you mean 'demo'? Served here: demo, good, x.")
    assert found.dangling() == ["gpt-4o", "up-*", "*"]


def test_no_alias_is_called_lost_while_an_upstream_may_still_serve_it() -> None:
    assert catalog(Listed("up", [], ready=False), aliases={"a": "b"}).dangling() == []
