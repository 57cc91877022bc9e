"""The context window of a model, from `GET /v1/models`, in LlamaIndex's own tokens.

LlamaIndex packs prompts by counting tokens with a tokenizer of its own (`Settings.tokenizer`,
GPT-3.5's by default) for any model. A text of 2,000 such tokens may have 2,300 of the model's. So
the window is given in LlamaIndex's tokens: one text is counted both ways, and the model's window is
divided by the ratio.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from llama_index.core.constants import DEFAULT_CONTEXT_WINDOW
from llama_index.core.utils import get_tokenizer
from parrot_client.connection import OpenAIClients
from parrot_client.fields import REFERENCE

#: English prose to count with both tokenizers; Lewis Carroll, "Alice's Adventures in Wonderland".
SAMPLE = (
    "Alice was beginning to get very tired of sitting by her sister on the bank, and of having "
    "nothing to do: once or twice she had peeped into the book her sister was reading, but it had "
    'no pictures or conversations in it, "and what is the use of a book," thought Alice "without '
    'pictures or conversations?" So she was considering in her own mind (as well as she could, for '
    "the hot day made her feel very sleepy and stupid), whether the pleasure of making a "
    "daisy-chain would be worth the trouble of getting up and picking the daisies, when suddenly a "
    "White Rabbit with pink eyes ran close by her."
)
#: Margin for texts that differ from the sample, and for tokens of the chat template.
MARGIN = 1.08
#: Value of `owned_by` for the gateway's own models.
OWN = "parrot-gateway"


class Window(NamedTuple):
    """The context window of a model.

    Attributes:
        tokens: the window, in LlamaIndex's tokens.
        ratio: the model's tokens per LlamaIndex token, margin included.
        is_final: true if the window is known; False while an engine loads.
        is_own: true if one of the gateway's own engines serves the model, and so has its tokenizer.
    """

    tokens: int
    ratio: float
    is_final: bool
    is_own: bool


def ask_window(clients: OpenAIClients, model: str) -> Window:
    """Find the window of a model: two requests, or one for an upstream's model.

    Models without a known window get LlamaIndex's `DEFAULT_CONTEXT_WINDOW`.

    Raises:
        openai.APIError: no gateway answers, or the key is wrong.
    """
    client: Any = clients.sync()
    listed = client.get("/models", cast_to=object)["data"]
    found: dict[str, Any] = next((item for item in listed if item["id"] == model), {})
    longest = found.get("max_model_len")
    if not isinstance(longest, int):
        # A window of our own model is known once its engine has loaded.
        is_own = found.get("owned_by") == OWN
        return Window(DEFAULT_CONTEXT_WINDOW, 1.0, is_final=not is_own, is_own=is_own)
    body = {"model": model, "prompt": SAMPLE}
    counted = client.post(f"{clients.connection.root}/tokenize", body=body, cast_to=object)["count"]
    ratio = max(1.0, counted / len(get_tokenizer()(SAMPLE))) * MARGIN
    return Window(math.floor(longest / ratio), ratio, is_final=True, is_own=True)


def reference_counter(
    base: Callable[[str], list[Any]], reference_tokens: int
) -> Callable[[str], list[Any]]:
    """Return a tokenizer that counts a reference as much as its text may have.

    Args:
        base: tokenizer of all other text.
        reference_tokens: largest output of a deferred call, in tokens of `base`.

    Returns:
        a tokenizer for counting only: each reference becomes `reference_tokens` zeros.
    """

    def tokenize(text: str) -> list[Any]:
        parts = REFERENCE.split(text)
        tokens = [token for part in parts if part for token in base(part)]
        return tokens + [0] * (reference_tokens * (len(parts) - 1))

    return tokenize
