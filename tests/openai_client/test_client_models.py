"""`/v1/models` with the real client."""

from __future__ import annotations

import openai
import pytest
from harness.openai_client import Driver, collect, result
from harness.processes import DEMO_MODEL


async def test_list(api: Driver) -> None:
    models = {model.id: model for model in await collect(await result(api.client.models.list()))}
    assert {DEMO_MODEL, "gpt-4o"} <= set(models)
    assert models[DEMO_MODEL].object == "model"
    assert models[DEMO_MODEL].owned_by
    assert models[DEMO_MODEL].created > 1_700_000_000


@pytest.mark.parametrize("name", [DEMO_MODEL, "gpt-4o"])
async def test_retrieve(api: Driver, name: str) -> None:
    assert (await result(api.client.models.retrieve(name))).id == name


async def test_retrieve_unknown(api: Driver) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await result(api.client.models.retrieve("no/such-model"))
    assert caught.value.code == "model_not_found"
    assert caught.value.request_id


async def test_models_cannot_be_deleted(api: Driver) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        await result(api.client.models.delete(DEMO_MODEL))
    assert caught.value.status_code == 405
    assert caught.value.code == "method_not_allowed"
