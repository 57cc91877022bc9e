"""Plain HTTP, driven as the openai package's clients are (see `openai_client`)."""

from __future__ import annotations

import json
from typing import Any

import httpx

from harness.openai_client import Driver, Fields


class RawDriver:
    """JSON over plain HTTP, held to every byte of a stream's framing."""

    def __init__(self, base_url: str, api_key: str | None) -> None:
        headers = {"authorization": f"Bearer {api_key}"}
        self.http = httpx.AsyncClient(base_url=base_url, headers=headers, timeout=60)

    async def close(self) -> None:
        """Close its connections."""
        await self.http.aclose()

    async def complete(self, **body: Any) -> Any:
        """`POST /v1/completions`."""
        return await self._whole("completions", body)

    async def chat(self, **body: Any) -> Any:
        """`POST /v1/chat/completions`."""
        return await self._whole("chat/completions", body)

    async def stream_completion(self, **body: Any) -> list[Any]:
        """Return the chunks of a streamed completion."""
        return await self._chunks("completions", body)

    async def stream_chat(self, **body: Any) -> list[Any]:
        """Return the chunks of a streamed chat."""
        return await self._chunks("chat/completions", body)

    async def _post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        body = {**body, **body.pop("extra_body", {})}
        response = await self.http.post(f"/{path}", json=body)
        assert response.status_code == 200, response.text
        return response

    async def _whole(self, path: str, body: dict[str, Any]) -> Any:
        response = await self._post(path, body)
        answer = response.json(object_hook=Fields)
        return Fields(answer, _request_id=response.headers["x-request-id"])

    async def _chunks(self, path: str, body: dict[str, Any]) -> list[Any]:
        response = await self._post(path, {**body, "stream": True})
        assert "\r" not in response.text
        *blocks, done, rest = response.text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        # The others are comments.
        events = [block for block in blocks if not block.startswith(": ")]
        assert all(event.startswith("data: ") and "\n" not in event for event in events)
        return [json.loads(event.removeprefix("data: "), object_hook=Fields) for event in events]


#: One of the two.
Either = Driver | RawDriver
