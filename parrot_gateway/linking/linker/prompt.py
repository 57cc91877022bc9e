"""A prompt and lazily derived properties of its messages."""

from __future__ import annotations

from collections.abc import Sequence

from parrot_gateway.linking.linker.call_store import message_key, states_of
from parrot_gateway.linking.linker.conversation import Message
from parrot_gateway.linking.linker.fingerprints import (
    Hashes,
    NormalisedText,
    fingerprint,
    normalise,
    with_parts,
)
from parrot_gateway.linking.linker.parts import Positions

#: Characters that represent a message's beginning.
_HEAD = 32


class Prompt:
    """The messages of a request.

    Attributes:
        keys: key of each message, see `call_store.message_key`.
        states: hash of each beginning, see `call_store.states_of`.
        texts: hash of each message's text.
        last_answer: index of the newest answer; -1 for none.
    """

    def __init__(self, messages: Sequence[Message]) -> None:
        self.messages = messages
        self.keys = [message_key(each) for each in messages]
        self.states = states_of(self.keys)
        self.texts = [hash(each.text) for each in messages]
        self.last_answer = max(
            (i for i, each in enumerate(messages) if each.role == "assistant"), default=-1
        )
        self._normalised: dict[int, NormalisedText] = {}
        self._fingerprints: dict[int, tuple[Hashes, Positions]] = {}
        self._passages: dict[int, tuple[Hashes, Positions]] = {}

    @property
    def is_completion(self) -> bool:
        return bool(self.messages) and self.messages[0].role == "prompt"

    @property
    def opening(self) -> int:
        """Return the hash of the system prompt, if other messages follow it; 0 otherwise."""
        has_system = len(self.messages) > 1 and self.messages[0].role == "system"
        return self.keys[0] if has_system else 0

    @property
    def text_seed(self) -> int:
        """Return the seed for hashing a chat's last message: everything before its text."""
        return hash((self.states[-2], self.messages[-1].role))

    @property
    def head(self) -> int:
        """Return the hash of the last message's beginning."""
        return hash(self.messages[-1].text[:_HEAD])

    def normalised(self, index: int) -> NormalisedText:
        """Return a message's text reduced to letters and digits."""
        found = self._normalised.get(index)
        if found is None:
            found = self._normalised[index] = normalise(self.messages[index].text)
        return found

    def fingerprints(self, index: int) -> tuple[Hashes, Positions]:
        """Return the fingerprints of a message's text, see `fingerprints.fingerprint`."""
        found = self._fingerprints.get(index)
        if found is None:
            found = self._fingerprints[index] = fingerprint(self.normalised(index).content)
        return found

    def passages(self, index: int) -> tuple[Hashes, Positions]:
        """Return them with those of its parts, see `fingerprints.passages`."""
        found = self._passages.get(index)
        if found is None:
            hashes, positions = self.fingerprints(index)
            found = with_parts(self.normalised(index), hashes, positions)
            self._passages[index] = found
        return found

    def whole(self, index: int) -> int:
        """Return the hash of a message's reduced text, which finds equal answers."""
        return hash(self.normalised(index).content.tobytes())
