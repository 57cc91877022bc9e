"""The calls of a tenant that can be linked to, by everything that later prompts repeat of them."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from parrot_gateway.linking.linker.conversation import Choice, Message, ToolCall, argument_texts
from parrot_gateway.linking.linker.fingerprints import (
    FingerprintCache,
    FingerprintIndex,
    Hashes,
    NormalisedText,
    distinct,
    normalise,
    passages,
)
from parrot_gateway.linking.linker.links import LinkedSession
from parrot_gateway.linking.linker.parts import Positions

#: Calls kept under one key; more say nothing that these do not.
_MAX_EQUAL = 512
#: Fingerprints kept of the prompts of calls that run; 4 bytes each.
_MAX_RUNNING = 1 << 21
#: Last messages of a prompt by which windows of one conversation are told apart.
_KEPT_MESSAGES = 12
#: Arguments of tool calls that are remembered, of one answer.
_MAX_ARGUMENTS = 16
#: Characters of the shortest text that others can begin with; a power of two.
MIN_BEGINNING = 32
#: Places in a text at which its beginnings are hashed, the powers of two and one between each two.
_BOUNDARIES = [(2 + i) << power for power in range(4, 60) for i in range(2)]
#: Fingerprints up to which they are looked up as they come.
_MAX_UNSORTED = 512
#: Normalised bytes that are kept of how an answer begins.
_SAID = 48
#: Shorter normalised texts are in everybody's prompts.
MIN_WHOLE = 3


@dataclass(slots=True, eq=False)
class Output:
    """A text that a call has written.

    Attributes:
        number: its owner's number in the fingerprint index.
        is_argument: it stood in the arguments of a tool call.
        key: hash of its normalised text.
        size: number of its fingerprints.
        copied: its fingerprints that its own prompt held.
        readers: calls that have read it.
    """

    number: int
    call: StoredCall
    text: str
    is_argument: bool
    key: int
    size: int
    copied: frozenset[int]
    readers: int = 0

    def normalised(self) -> NormalisedText:
        return normalise(self.text)


@dataclass(slots=True, eq=False)
class StoredCall:
    """One call, as much of it as links need.

    Attributes:
        number: counts up.
        state: hash of its prompt's messages.
        parent: the call that it continues.
        root: number of the first call of its conversation.
        ended: None while it runs.
        peer: its client's address, as far as it is known.
        message_keys: hashes of its last messages.
        opening: see `Prompt.opening`.
        seed: hash of what stands before its last message.
        head: hash of how that begins.
        text: hash of its text.
        sketch: some of its fingerprints, the smallest ones.
        said: how its answer begins, normalised; its longest argument or its tool's name where it
            is a tool call.
        passages: fingerprints of its prompt, while it runs.
        is_alone: it has no links.
        continuations: calls that go on where it ended.
    """

    number: int
    id: str
    session: LinkedSession
    started: float
    state: int
    message_keys: array[int]
    last_key: int
    peer: str = ""
    parent: StoredCall | None = None
    root: int = 0
    opening: int = 0
    seed: int = 0
    head: int = 0
    text: int = 0
    sketch: Hashes | None = None
    said: bytes = b""
    ended: float | None = None
    is_alone: bool = False
    passages: Hashes | None = None
    continuations: int = 0
    #: Of a completion its prompt, while it runs.
    prompt: str | None = None
    #: Of the texts that others may begin with the states at their first and at their last boundary,
    #: and the length.
    beginnings: list[tuple[int, int, int]] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    keys: list[tuple[dict[object, list[int]], object]] = field(default_factory=list)

    def is_ancestor_of(self, call: StoredCall | None) -> bool:
        """True if `call` is this one, or goes on from it."""
        if call is None or call.root != self.root:
            return False
        while call is not None and call.number > self.number:
            call = call.parent
        return call is self


def by_age(call: StoredCall, now: float) -> float:
    """Rank calls by age: the first of answers that came at about the same time, else the last."""
    age = now - (call.ended or now)
    return age if age < 2.0 else -age


def message_key(message: Message) -> int:
    """Hash of a message as conversations repeat it."""
    calls = tuple(_call_key(call) for call in message.tool_calls)
    return hash((message.role, message.text.strip(), calls, message.tool_call_id))


def _call_key(call: ToolCall) -> tuple[str, str, str]:
    return call.id, call.name, "".join(call.arguments.split())


def states_of(keys: Iterable[int], seed: int = 0) -> list[int]:
    """Hash of each beginning of a conversation; the first is the empty one."""
    states = [seed]
    for key in keys:
        states.append(hash((states[-1], key)))
    return states


class CallStore:
    """Calls, the oldest of which make room.

    Args:
        max_calls: kept.
        max_text: characters of their answers kept.
        max_fingerprints: kept of them, a power of two.
    """

    def __init__(self, max_calls: int, max_text: int, max_fingerprints: int) -> None:
        self.max_calls = max_calls
        self.max_text = max_text
        self.index = FingerprintIndex(max_fingerprints)
        self.calls: OrderedDict[int, StoredCall] = OrderedDict()
        self.by_id: dict[str, StoredCall] = {}
        self.outputs: dict[int, Output] = {}
        #: Calls by the state after their answer, and by that of their prompt.
        self.ends: dict[object, list[int]] = {}
        self.prompts: dict[object, list[int]] = {}
        #: By the key of their answer as a message, and by its normalised text.
        self.answers: dict[object, list[int]] = {}
        self.wholes: dict[object, list[int]] = {}
        #: By the text of a completion, or of the last message; and how many there are of each
        #: length behind the same last boundary.
        self.texts: dict[object, list[int]] = {}
        self._lengths: dict[int, Counter[int]] = {}
        #: How many there are by the state at their first boundary: most begin like no other.
        self._firsts: Counter[int] = Counter()
        #: The last text that a call wrote, and the hash of it normalised: equal ones come in a row.
        self._last_written = "", normalise(""), 0
        self.tool_ids: dict[object, list[int]] = {}
        self.responses: dict[object, list[int]] = {}
        self.text_size = 0
        #: Calls that run, with the fingerprints of their prompts, and how many those are.
        self._running: OrderedDict[int, StoredCall] = OrderedDict()
        self._running_size = 0
        self.fingerprints = FingerprintCache()
        #: When the outputs were written, by their numbers, from the number of the first one on.
        self._times: list[float] = []
        #: The numbers of the sessions that they belong to now, likewise; 0 where one is forgotten.
        self._sessions = array("q")
        #: How many fingerprints they have, likewise.
        self._sizes = array("i")
        self._first_time = 1
        self._numbers = 0
        self._output_numbers = 0

    def add(self, call: StoredCall) -> None:
        """Take a call whose request is known."""
        self.calls[call.number] = call
        self.by_id[call.id] = call
        self.file(call, self.prompts, call.state)
        while len(self.calls) > self.max_calls:
            self._drop_oldest()

    @property
    def running_bytes(self) -> int:
        """Bytes kept of the prompts of calls that run."""
        return 4 * self._running_size

    def is_flooded(self, state: int) -> bool:
        """True if there are many equal prompts, of which the last has no links."""
        numbers = self.prompts.get(state)
        if numbers is None or len(numbers) < _MAX_EQUAL:
            return False
        call = self.calls.get(numbers[-1])
        return call is not None and call.is_alone

    def run(self, call: StoredCall, passages: Hashes | None) -> None:
        """Keep what is needed of a call's prompt while it runs; the oldest ones make room."""
        call.passages = passages
        self._running[call.number] = call
        self._running_size += _running_size(call)
        while self._running_size > _MAX_RUNNING:
            self.stop(next(iter(self._running.values())))

    def stop(self, call: StoredCall) -> None:
        """Forget what is needed of a prompt while its call runs."""
        if self._running.pop(call.number, None) is not None:
            self._running_size -= _running_size(call)
        call.passages = call.prompt = None

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def file(self, call: StoredCall, table: dict[object, list[int]], key: object) -> None:
        """Let `call` be found in `table`."""
        found = table.get(key)
        if found is None:
            table[key] = [call.number]
        else:
            found.append(call.number)
            if len(found) > _MAX_EQUAL:
                del found[0]
        call.keys.append((table, key))

    def find(self, table: dict[object, list[int]], key: object) -> Iterator[StoredCall]:
        """The calls of a key, newest first."""
        for number in reversed(table.get(key, ())):
            call = self.calls.get(number)
            if call is not None:
                yield call

    def find_whole(self, key: int) -> Iterator[Output]:
        """The outputs whose normalised text has this hash, newest first."""
        for call in self.find(self.wholes, key):
            yield from (output for output in call.outputs if output.key == key)

    def finish(self, call: StoredCall, choices: Sequence[Choice], now: float) -> None:
        """Take what a call has written."""
        call.ended = now
        known = call.passages
        for choice in choices:
            self._take(call, choice, known)
        if call.sketch is not None:
            texts = [each.text for each in call.outputs] or [
                tool_call.name for choice in choices for tool_call in choice.tool_calls
            ]
            said = max(texts, key=len, default="")[: 2 * _SAID]
            call.said = normalise(said).content[:_SAID].tobytes()
        self.stop(call)
        while self.text_size > self.max_text and len(self.calls) > 1:
            self._drop_oldest()

    def _take(self, call: StoredCall, choice: Choice, known: Hashes | None) -> None:
        variants = {(choice.text, choice.tool_calls)}
        if choice.tool_calls:
            variants |= {(choice.text, ()), ("", choice.tool_calls)}
        if call.prompt is not None:
            self.file_text(call, call.prompt + choice.text)
        for text, calls in variants:
            if text or calls:
                key = message_key(Message("assistant", text, calls))
                self.file(call, self.answers, key)
                self.file(call, self.ends, hash((call.state, key)))
        for tool_call in choice.tool_calls:
            if tool_call.id:
                self.file(call, self.tool_ids, tool_call.id)
        self._remember(call, choice.text, False, known)
        arguments = [text for each in choice.tool_calls for text in argument_texts(each.arguments)]
        for text in arguments[:_MAX_ARGUMENTS]:
            self._remember(call, text, True, known)

    def file_text(self, call: StoredCall, text: str, seed: int = 0) -> None:
        """Let a call be found by texts that begin with this one.

        Args:
            seed: of what stands before it.
        """
        if len(text) >= MIN_BEGINNING:
            states = _states_at_boundaries(text, seed)
            first, state = states[0], states[-1]
            call.beginnings.append((first, state, len(text)))
            self._firsts[first] += 1
            lengths = self._lengths.get(state)
            if lengths is None:
                lengths = self._lengths[state] = Counter()
            lengths[len(text)] += 1
            rest = text[_BOUNDARIES[len(states) - 1] :]
            self.file(call, self.texts, (state, len(text), hash(rest)))

    def find_beginning(self, text: str, seed: int = 0) -> list[tuple[StoredCall, int]]:
        """The calls whose text is the longest beginning of `text`, and its length."""
        if hash((seed, text[:MIN_BEGINNING])) not in self._firsts:
            return []
        states = _states_at_boundaries(text, seed)
        for start, state in zip(_BOUNDARIES[len(states) - 1 :: -1], reversed(states), strict=True):
            lengths = self._lengths.get(state)
            for length in sorted(lengths, reverse=True) if lengths else ():
                if length < len(text):
                    found = list(self.find(self.texts, (state, length, hash(text[start:length]))))
                    if found:
                        return [(call, length) for call in found]
        return []

    def sessions_and_sizes(self, numbers: Positions) -> tuple[Positions, NDArray[np.int32]]:
        """The session numbers of outputs, 0 for forgotten ones, and their counts of fingerprints;
        [n] each.

        Args:
            numbers: ascending, [n].
        """
        if not self._sessions:
            return np.zeros(len(numbers), np.int64), np.zeros(len(numbers), np.int32)
        places = numbers - self._first_time
        sessions = np.frombuffer(self._sessions, np.int64).take(places, mode="clip")
        if len(places) and places[0] < 0:
            sessions[places < 0] = 0
        return sessions, np.frombuffer(self._sizes, np.int32).take(places, mode="clip")

    def merge(self, ended: LinkedSession, session: LinkedSession) -> None:
        """Count the outputs of a session that has become part of another as that one's."""
        if self._sessions:
            numbers = np.frombuffer(self._sessions, np.int64)
            numbers[numbers == ended.number] = session.number

    def numbers(self, since: float, until: float | None) -> tuple[int, int]:
        """The first number of an output that was written in a time, and the one after the last.

        Args:
            since, until: seconds; None for no end.
        """
        end = len(self._times) if until is None else bisect_right(self._times, until)
        return self._first_time + bisect_left(self._times, since), self._first_time + end

    def _remember(
        self, call: StoredCall, text: str, is_argument: bool, known: Hashes | None
    ) -> None:
        if text != self._last_written[0]:
            normalised = normalise(text)
            self._last_written = text, normalised, hash(normalised.content.tobytes())
        _, normalised, key = self._last_written
        if len(normalised.content) < MIN_WHOLE:
            return
        if call.is_alone and len(self.wholes.get(key, ())) >= _MAX_EQUAL:
            return
        self._output_numbers += 1
        hashes = distinct(passages(normalised, is_answer=True)[0])
        # The next prompt will hold it.
        self.fingerprints.keep(hash(text), hashes)
        copied: frozenset[int] = frozenset()
        if known is not None and len(hashes):
            copied = frozenset(hashes[contains(known, hashes)].tolist())
        output = Output(self._output_numbers, call, text, is_argument, key, len(hashes), copied)
        call.outputs.append(output)
        self.outputs[output.number] = output
        self._times.append(call.ended or 0.0)
        self._sessions.append(call.session.current.number)
        self._sizes.append(len(hashes))
        self.text_size += len(text)
        self.file(call, self.wholes, key)
        self.index.add(hashes, output.number)

    def _drop_oldest(self) -> None:
        number, call = self.calls.popitem(last=False)
        self.stop(call)
        if self.by_id.get(call.id) is call:
            del self.by_id[call.id]
        for table, key in call.keys:
            found = table.get(key)
            if found is not None and found[0] <= number:
                # Those of calls that ended out of order go with the next one.
                gone = 1
                while gone < len(found) and found[gone] <= number:
                    gone += 1
                del found[:gone]
                if not found:
                    del table[key]
        call.keys.clear()
        for output in call.outputs:
            self.outputs.pop(output.number, None)
            self._sessions[output.number - self._first_time] = 0
            self.text_size -= len(output.text)
        for first, state, length in call.beginnings:
            self._firsts[first] -= 1
            if not self._firsts[first]:
                del self._firsts[first]
            lengths = self._lengths[state]
            lengths[length] -= 1
            if not lengths[length]:
                del lengths[length]
            if not lengths:
                del self._lengths[state]
        gone = next(iter(self.outputs), self._output_numbers + 1) - self._first_time
        if gone > len(self._times) // 2:
            del self._times[:gone]
            del self._sessions[:gone]
            del self._sizes[:gone]
            self._first_time += gone
        # The next call's chain would keep all its ancestors alive.
        call.parent = None


def _running_size(call: StoredCall) -> int:
    """Size of what is kept of a running call's prompt, in units of 4 bytes."""
    passages = 0 if call.passages is None else len(call.passages)
    return 16 + passages + len(call.prompt or "") // 4


def _states_at_boundaries(text: str, seed: int) -> list[int]:
    """The hash of what stands before each of the `_BOUNDARIES` in a text."""
    state, start, states = seed, 0, []
    for end in _BOUNDARIES[: bisect_right(_BOUNDARIES, len(text))]:
        state = hash((state, text[start:end]))
        states.append(state)
        start = end
    return states


def contains(known: Hashes, hashes: Hashes) -> np.ndarray:
    """Flags: each of `hashes` that is among `known`; [n] bool."""
    if not len(known):
        return np.zeros(len(hashes), np.bool_)
    known = np.sort(known)
    if len(hashes) <= _MAX_UNSORTED:
        places = np.searchsorted(known, hashes)
        return known.take(places, mode="clip") == hashes  # type: ignore[no-any-return]
    # In order they are found several times as fast.
    order = np.argsort(hashes)
    ordered = hashes.take(order)
    found = np.empty(len(hashes), np.bool_)
    found[order] = known.take(np.searchsorted(known, ordered), mode="clip") == ordered
    return found


def kept_keys(keys: list[int]) -> array[int]:
    """The keys of a prompt's last messages, which are remembered."""
    return array("q", keys[-_KEPT_MESSAGES:])
