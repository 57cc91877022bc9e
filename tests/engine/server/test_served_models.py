"""Every family of models and every format of weights, from a checkpoint to the answers of `serve`.

One gateway as a process; engines join it from this one, one model after the other. Each says what
transformers says, forks, finds its prompt again, and follows a grammar.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.engine.checkpoints import CONFIGS, load_reference, make_checkpoint
from harness.engine.quantized_checkpoints import FORMS, Written, write_checkpoint
from harness.processes import GatewayProcess, wait_until
from parrot_engine.engine.driver import EngineDriver
from parrot_engine.link.client import EngineLink
from parrot_engine.loading.factory import EngineOptions, load_engine
from parrot_engine.models.families.registry import FAMILIES
from parrot_engine.quantization.registry import METHODS
from transformers import Starcoder2Config

_KEY = "the key of the engines"
_PROMPT = list(range(60, 100))
#: Configurations of each architecture, the first of it.
_OF_FAMILY = (
    "llama", "mistral-window", "qwen2", "qwen3", "qwen3-moe", "mixtral", "olmoe", "olmo2",
    "smollm3", "granite", "phi3", "gemma2", "gemma3", "gemma3-vision", "gpt-oss", "glm4",
)  # fmt: skip
#: Of an architecture that goes to the huggingface engine.
_OTHER = Starcoder2Config(
    vocab_size=257, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, sliding_window=13, max_position_embeddings=256,
    bos_token_id=None, eos_token_id=256,
)  # fmt: skip


def _plain(config: Any) -> Callable[[Path], Written]:
    def write(folder: Path) -> Written:
        path = make_checkpoint(folder, config)
        return Written(path, path)

    return write


def _quantised(form: str) -> Callable[[Path], Written]:
    return lambda folder: write_checkpoint(folder, form)


#: By name, what writes a checkpoint and the one that transformers is to read.
MODELS: dict[str, Callable[[Path], Written]] = {
    **{name: _plain(CONFIGS[name]) for name in _OF_FAMILY},
    "starcoder2": _plain(_OTHER),
    **{form: _quantised(form) for form in FORMS},
}


class House:
    """A gateway that runs nothing itself, and the event loop of the engines that join it."""

    def __init__(self, gateway: GatewayProcess) -> None:
        self.gateway = gateway
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    @contextmanager
    def joined(self, folder: Path, name: str) -> Iterator[str]:
        """An engine for a checkpoint, as long as it is wanted; the architecture it has."""
        loaded = load_engine(
            EngineOptions(str(folder), name=name, device="cpu", dtype="float32", num_blocks=32)
        )
        driver = EngineDriver(loaded.engine)
        driver.start()
        url = self.gateway.root.replace("http://", "ws://") + "/v1/engines/join"
        link = EngineLink(driver, loaded.text, url=url, join_key=_KEY, name=name)
        running = asyncio.run_coroutine_threadsafe(link.run(), self._loop)
        try:
            wait_until(lambda: name in self.served(), f"{name} to be served")
            yield loaded.engine.info.architecture
        finally:
            self._loop.call_soon_threadsafe(link.stop)
            running.result(20)
            driver.close()

    def served(self) -> list[str]:
        return [model["id"] for model in self.gateway.get("/v1/models")["data"]]

    def complete(self, **body: Any) -> Any:
        """The answer to a completion call."""
        status, _, answer = self.gateway.post("/v1/completions", body)
        assert status == 200, answer
        return answer

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    config = {"engines": {"join_key": "env:PARROT_JOIN_KEY", "heartbeat_s": 0.5}}
    with GatewayProcess(config=config, environment={"PARROT_JOIN_KEY": _KEY}) as gateway:
        house = House(gateway)
        yield house
        house.close()


@pytest.mark.parametrize("name", MODELS)
def test_a_checkpoint_is_served(name: str, house: House, tmp_path: Path) -> None:
    written = MODELS[name](tmp_path)
    greedy = {
        "model": name, "prompt": _PROMPT, "max_tokens": 6, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True,
    }  # fmt: skip
    with house.joined(written.path, name) as architecture:
        assert (
            architecture in json.loads((written.path / "config.json").read_text())["architectures"]
        )
        [choice] = house.complete(**greedy)["choices"]
        forked = house.complete(**greedy, n=2)
        grammar = {"choice": ["yes", "no"]}
        chosen = house.complete(
            model=name, prompt="Is it?", max_tokens=10, structured_outputs=grammar
        )
    said = choice["token_ids"]
    with torch.inference_mode():
        logits = load_reference(written.dense, torch.float32)(
            torch.tensor([_PROMPT + said]), use_cache=False
        ).logits[0]
    assert said == logits[len(_PROMPT) - 1 : -1].argmax(1).tolist()
    assert [each["token_ids"] for each in forked["choices"]] == [said, said]
    assert forked["usage"]["prompt_tokens_details"]["cached_tokens"] == 32
    assert chosen["choices"][0]["text"] in grammar["choice"]


def test_all_families_and_formats_are_there() -> None:
    served = {CONFIGS[name].to_dict()["model_type"] for name in _OF_FAMILY}
    assert len(served) == len(_OF_FAMILY) == len(FAMILIES)
    assert {form.config["quant_method"] for form in FORMS.values()} == set(METHODS)
