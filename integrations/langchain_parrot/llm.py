"""ParrotLLM: LangChain's text model on Parrot Gateway, over `/v1/completions`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseLLM, LangSmithParams
from langchain_core.outputs import Generation, GenerationChunk, LLMResult

from langchain_parrot._base import (
    CallOptions,
    ParrotModel,
    StreamAssembly,
    header_metadata,
    present,
)


class _TextAssembly(StreamAssembly):
    def chunk(
        self, choice: Mapping[str, Any], information: dict[str, Any] | None
    ) -> GenerationChunk:
        return GenerationChunk(text=choice.get("text") or "", generation_info=information)

    def last(self) -> GenerationChunk:
        information = present(
            {"finish_reason": self.finish_reason, "token_usage": self.usage and dict(self.usage)}
        )
        metadata = _answer_metadata(self.document, self.headers)
        return GenerationChunk(text="", generation_info={**information, **metadata})


class ParrotLLM(ParrotModel, BaseLLM):
    """A text model behind Parrot Gateway, or behind any server with `/v1/completions`.

    All prompts of a `batch` form one call. Parrot's fields are arguments of the constructor or of a
    call::

        llm = ParrotLLM(model="parrot-demo", session="tale")
        llm.invoke("Once upon a time", output="beginning")

    Attributes:
        max_tokens: 256 by default; the server's own default is 16. None leaves it to the server.
    """

    _resource: ClassVar[str] = "completions"
    _assembly: ClassVar[type[StreamAssembly]] = _TextAssembly
    _sampling: ClassVar[tuple[str, ...]] = (*ParrotModel._sampling, "logprobs", "best_of", "echo")

    max_tokens: int | None = 256
    logprobs: int | None = None
    best_of: int | None = None
    echo: bool | None = None

    @property
    def _llm_type(self) -> str:
        return "parrot"

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        return super()._get_ls_params(stop=stop or self._own_stop(), **kwargs)

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        call = self._options(stop, run_manager, kwargs)
        if call.is_deferred:
            calls = zip(call.for_each(len(prompts)), prompts, strict=True)
            return _side_by_side([self._answer(each, prompt) for each, prompt in calls])
        if self._shall_stream(len(prompts), call, kwargs):
            return _join_chunks(list(self._stream(prompts[0], stop, run_manager, **kwargs)))
        result: LLMResult = self._answer(call, prompts)
        return result

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        call = self._options(stop, run_manager, kwargs)
        if call.is_deferred:
            calls = zip(call.for_each(len(prompts)), prompts, strict=True)
            submitted = [self._aanswer(each, prompt) for each, prompt in calls]
            return _side_by_side(await asyncio.gather(*submitted))
        if self._shall_stream(len(prompts), call, kwargs):
            chunks = [
                chunk async for chunk in self._astream(prompts[0], stop, run_manager, **kwargs)
            ]
            return _join_chunks(chunks)
        result: LLMResult = await self._aanswer(call, prompts)
        return result

    def _shall_stream(self, prompts: int, call: CallOptions, arguments: Mapping[str, Any]) -> bool:
        """Return true if `invoke` streams internally: only with one prompt and one answer."""
        return (
            prompts == 1
            and call.body.get("n", 1) == 1
            and bool(arguments.get("stream", self.streaming))
        )

    def _prompt_fields(self, prompt: str | list[str]) -> dict[str, Any]:
        return {"prompt": prompt if isinstance(prompt, str) or len(prompt) > 1 else prompt[0]}

    def _result(
        self, call: CallOptions, prompt: Any, document: dict[str, Any], headers: Mapping[str, str]
    ) -> LLMResult:
        metadata = _answer_metadata(document, headers)
        if call.is_deferred:
            reference = document["choices"][0]["text"]
            self._note_reference(reference)
            return LLMResult(generations=[[Generation(text=reference)]], llm_output=metadata)
        # Choices of the first prompt, then of the second, ….
        choices = sorted(document["choices"], key=lambda choice: int(choice["index"]))
        prompts = 1 if isinstance(prompt, str) else len(prompt)
        each = len(choices) // prompts
        generations = [
            Generation(
                text=choice.get("text") or "",
                generation_info={name: choice.get(name) for name in ("finish_reason", "logprobs")},
            )
            for choice in choices
        ]
        return LLMResult(
            generations=[
                generations[number * each : (number + 1) * each] for number in range(prompts)
            ],
            llm_output={"token_usage": document.get("usage") or {}, **metadata},
        )

    def _as_chunk(self, result: LLMResult) -> GenerationChunk:
        text = result.generations[0][0].text
        return GenerationChunk(text=text, generation_info=result.llm_output)


def _side_by_side(results: Sequence[LLMResult]) -> LLMResult:
    """Combine the results of deferred calls with one prompt each."""
    return LLMResult(
        generations=[result.generations[0] for result in results], llm_output=results[0].llm_output
    )


def _join_chunks(chunks: list[GenerationChunk]) -> LLMResult:
    """Combine the chunks of a call that is streamed internally."""
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    information = dict(whole.generation_info or {})
    usage = information.pop("token_usage", {})
    kept: dict[str, Any] = {
        name: information.pop(name, None) for name in ("finish_reason", "logprobs")
    }
    return LLMResult(
        generations=[[Generation(text=whole.text, generation_info=kept)]],
        llm_output={"token_usage": usage, **information},
    )


def _answer_metadata(document: Mapping[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
    metadata = {
        "model_name": document.get("model") or None,
        "system_fingerprint": document.get("system_fingerprint") or None,
    }
    return {**present(metadata), **header_metadata(headers)}
