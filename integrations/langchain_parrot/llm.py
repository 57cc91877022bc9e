"""ParrotLLM: LangChain's text model on Parrot Gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseLLM, LangSmithParams
from langchain_core.outputs import Generation, GenerationChunk, LLMResult

from langchain_parrot._base import Call, ParrotModel, told_by
from langchain_parrot._errors import translated
from langchain_parrot._messages import plain
from langchain_parrot.deferred import deferred_generation


class ParrotLLM(ParrotModel, BaseLLM):
    """A text model behind Parrot Gateway, or behind any server with `/v1/completions`.

    All prompts of a `batch` are one call. Parrot's extras, see `ParrotFields`, are arguments of the
    constructor or of a call::

        llm = ParrotLLM(model="parrot-demo", session="tale")
        llm.invoke("Once upon a time", output="beginning")

    Attributes:
        max_tokens: 256; the server's own default is 16. None leaves it to the server.
    """

    max_tokens: int | None = 256
    logprobs: int | None = None
    best_of: int | None = None
    echo: bool | None = None

    @property
    def _llm_type(self) -> str:
        return "parrot"

    @classmethod
    def _sampling_names(cls) -> tuple[str, ...]:
        return (*super()._sampling_names(), "logprobs", "best_of", "echo")

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        return super()._get_ls_params(stop=stop or self._own_stop(), **kwargs)

    # -- whole answers ------------------------------------------------------------------------

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        call = self._call(stop, run_manager, kwargs)
        if call.is_deferred:
            calls = zip(call.for_each(len(prompts)), prompts, strict=True)
            return _side_by_side([self._answer(each, [prompt]) for each, prompt in calls])
        if self._shall_stream(len(prompts), call, kwargs):
            return _of_chunks(list(self._stream(prompts[0], stop, run_manager, **kwargs)))
        return self._answer(call, prompts)

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        call = self._call(stop, run_manager, kwargs)
        if call.is_deferred:
            calls = zip(call.for_each(len(prompts)), prompts, strict=True)
            submitted = [self._aanswer(each, [prompt]) for each, prompt in calls]
            return _side_by_side(await asyncio.gather(*submitted))
        if self._shall_stream(len(prompts), call, kwargs):
            chunks = [
                chunk async for chunk in self._astream(prompts[0], stop, run_manager, **kwargs)
            ]
            return _of_chunks(chunks)
        return await self._aanswer(call, prompts)

    def _answer(self, call: Call, prompts: list[str]) -> LLMResult:
        with translated(self.base_url):
            raw = self._clients.sync().completions.with_raw_response.create(
                **self._arguments(call, prompts)
            )
        return self._result(call, len(prompts), raw.content, raw.headers)

    async def _aanswer(self, call: Call, prompts: list[str]) -> LLMResult:
        with translated(self.base_url):
            client = self._clients.of_running_loop()
            raw = await client.completions.with_raw_response.create(
                **self._arguments(call, prompts)
            )
        return self._result(call, len(prompts), raw.content, raw.headers)

    def _shall_stream(self, prompts: int, call: Call, given: Mapping[str, Any]) -> bool:
        """Whether `invoke` shall stream inside: only ever one prompt and one answer."""
        return (
            prompts == 1
            and call.body.get("n", 1) == 1
            and bool(given.get("stream", self.streaming))
        )

    def _arguments(self, call: Call, prompts: list[str]) -> dict[str, Any]:
        # NOTE: all in `extra_body`, since the client refuses fields that its version does not know.
        texts = [plain(prompt) for prompt in prompts]
        return {
            "model": call.model,
            "prompt": texts[0] if len(texts) == 1 else texts,
            "extra_body": call.body,
            **call.options,
        }

    def _result(
        self, call: Call, prompts: int, content: bytes, headers: Mapping[str, str]
    ) -> LLMResult:
        document = self._document(content)
        self._check_understood(call, headers)
        about = _of_answer(document, headers)
        if call.is_deferred:
            text = self._deferred(document["choices"][0]["text"])
            return LLMResult(generations=[[deferred_generation(text)]], llm_output=about)
        # Those of the first prompt, then those of the second, …
        choices = sorted(document["choices"], key=lambda choice: int(choice["index"]))
        each = len(choices) // prompts
        generations = [
            Generation(text=choice.get("text") or "", generation_info=_of_choice(choice))
            for choice in choices
        ]
        return LLMResult(
            generations=[
                generations[number * each : (number + 1) * each] for number in range(prompts)
            ],
            llm_output={
                "token_usage": document.get("usage") or {},
                **about,
            },
        )

    # -- streams ------------------------------------------------------------------------------

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        call = self._call(stop, run_manager, kwargs)
        if call.is_deferred:
            yield _as_chunk(self._answer(call, [prompt]))
            return
        with translated(self.base_url):
            raw = self._clients.sync().completions.with_raw_response.create(
                stream=True, **self._arguments(call.streamed(), [prompt])
            )
            self._check_understood(call, raw.headers)
            assembly = _Assembly(raw.headers)
            with raw.parse() as events:
                for event in events:
                    for chunk in assembly.pieces(event.model_dump(warnings=False)):
                        if run_manager is not None:
                            run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                        yield chunk
            yield assembly.last()

    async def _astream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[GenerationChunk]:
        call = self._call(stop, run_manager, kwargs)
        if call.is_deferred:
            yield _as_chunk(await self._aanswer(call, [prompt]))
            return
        with translated(self.base_url):
            client = self._clients.of_running_loop()
            raw = await client.completions.with_raw_response.create(
                stream=True, **self._arguments(call.streamed(), [prompt])
            )
            self._check_understood(call, raw.headers)
            assembly = _Assembly(raw.headers)
            async with raw.parse() as events:
                async for event in events:
                    for chunk in assembly.pieces(event.model_dump(warnings=False)):
                        if run_manager is not None:
                            await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                        yield chunk
            yield assembly.last()


class _Assembly:
    """What a stream's events become: pieces, and a last chunk with all that is told once."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        self._headers = headers
        self._about: dict[str, Any] = {}
        self._finish: dict[str, Any] = {}
        self._usage: Mapping[str, Any] | None = None

    def pieces(self, event: Mapping[str, Any]) -> Iterator[GenerationChunk]:
        """The chunks of one event."""
        self._usage = event.get("usage") or self._usage
        for name in ("model", "system_fingerprint"):
            if event.get(name):
                self._about[name] = event[name]
        for choice in event.get("choices") or ():
            if choice.get("finish_reason"):
                self._finish["finish_reason"] = choice["finish_reason"]
            logprobs = choice.get("logprobs")
            yield GenerationChunk(
                text=choice.get("text") or "",
                generation_info={"logprobs": logprobs} if logprobs else None,
            )

    def last(self) -> GenerationChunk:
        """The end, without text: usage, finish reason, model, and what the headers say."""
        usage = {"token_usage": dict(self._usage)} if self._usage else {}
        about = _of_answer(self._about, self._headers)
        return GenerationChunk(text="", generation_info={**self._finish, **usage, **about})


def _side_by_side(results: Sequence[LLMResult]) -> LLMResult:
    """The result of deferred calls, each of which had one prompt."""
    return LLMResult(
        generations=[result.generations[0] for result in results],
        llm_output=results[0].llm_output,
    )


def _as_chunk(deferred: LLMResult) -> GenerationChunk:
    """A deferred answer as the only chunk of a stream."""
    chunk = GenerationChunk(text="", generation_info=deferred.llm_output)
    # Validation would make a plain string of the text.
    chunk.text = deferred.generations[0][0].text
    return chunk


def _of_chunks(chunks: list[GenerationChunk]) -> LLMResult:
    """The result of a call that was streamed inside."""
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


def _of_choice(choice: Mapping[str, Any]) -> dict[str, Any]:
    return {name: choice.get(name) for name in ("finish_reason", "logprobs")}


def _of_answer(document: Mapping[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
    told = {
        "model_name": document.get("model"),
        "system_fingerprint": document.get("system_fingerprint"),
    }
    return {**{name: text for name, text in told.items() if text}, **told_by(headers)}
