"""`/v1/embeddings` with the real client, of the demo model and of an upstream."""

from __future__ import annotations

import openai
import pytest
from harness.openai_client import Driver, result
from harness.processes import DEMO_MODEL


@pytest.mark.parametrize("is_base64", [False, True])
async def test_texts(api: Driver, loose: Driver, is_base64: bool) -> None:
    texts = ["A fisherman caught a fish.", "The king slept."]
    # What the client asks for by itself, base64, breaks its own types until it is decoded.
    client = loose.client if is_base64 else api.client
    options = {} if is_base64 else {"encoding_format": "float"}
    answer = await result(client.embeddings.create(model="gpt-4o", input=texts, **options))
    assert [item.index for item in answer.data] == [0, 1]
    assert {len(item.embedding) for item in answer.data} == {256}
    for item in answer.data:
        assert sum(value * value for value in item.embedding) == pytest.approx(1, abs=1e-4)
    assert answer.model == "gpt-4o"
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 8


async def test_token_ids(loose: Driver) -> None:
    answer = await result(loose.client.embeddings.create(model=DEMO_MODEL, input=[[40, 41], [42]]))
    assert (len(answer.data), answer.usage.prompt_tokens) == (2, 3)


async def test_refusals(api: Driver) -> None:
    for body, param in (({"input": ""}, "input"), ({"input": "a", "dimensions": 8}, "dimensions")):
        with pytest.raises(openai.BadRequestError) as caught:
            await result(api.client.embeddings.create(model=DEMO_MODEL, **body))
        assert caught.value.param == param
