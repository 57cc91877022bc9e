"""A tenant's calls that can be linked to, indexed by what later prompts repeat of them."""

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

#: Maximum calls under one key; more would add nothing.
_MAX_EQUAL = 512
#: Maximum fingerprints of running calls' prompts; 4 bytes each.
_MAX_RUNNING = 1 << 21
#: Number of a prompt's last messages that tell windows of one conversation apart.
_KEPT_MESSAGES = 12
#: Maximum remembered tool-call arguments of one answer.
_MAX_ARGUMENTS = 16
#: Characters of the shortest text that can be another's beginning; a power of two.
MIN_BEGINNING = 32
#: Positions at which the beginnings of a text are hashed: the powers of two and one between each
#: pair.
_BOUNDARIES = [(2 + i) << power for power in range(4, 60) for i in range(2)]
#: Up to this many fingerprints are looked up in their original order.
_MAX_UNSORTED = 512
#: Normalised bytes kept of an answer's beginning.
_SAID = 48
#: Shorter normalised texts occur in every prompt.
MIN_WHOLE = 3


@dataclass(slots=True, eq=False)
class Output:
    """A text that a call wrote.

    Attributes:
        number: its number in the fingerprint index.
        is_argument: true if it was in the arguments of a tool call.
        key: hash of its normalised text.
        size: number of its fingerprints.
        copied: its fingerprints that were in its own prompt.
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
    """One call, reduced to what links need.

    Attributes:
        number: ascending sequence number.
        state: hash of its prompt's messages.
        parent: the call that it continues.
        root: number of the first call of its conversation.
        ended: None while it runs.
        peer: its client's address, if known.
        message_keys: hashes of its last messages.
        opening: see `Prompt.opening`.
        seed: hash of the messages before its last one.
        head: hash of the last message's beginning.
        text: hash of its text.
        sketch: its smallest fingerprints.
        said: the normalised beginning of its answer; for a tool call its longest argument or
            the tool's name.
        passages: fingerprints of its prompt, while it runs.
        is_alone: true if it has no links.
        continuations: number of calls that continue it.
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
    #: Prompt of a completion while it runs.
    prompt: str | None = None
    #: For texts that others may begin with: the states at the first and last boundary, and the
    #: length.
    beginnings: list[tuple[int, int, int]] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    keys: list[tuple[dict[object, list[int]], object]] = field(default_factory=list)

    def is_ancestor_of(self, call: StoredCall | None) -> bool:
        """Return true if `call` is this call or continues it."""
        if call is None or call.root != self.root:
            return False
        while call is not None and call.number > self.number:
            call = call.parent
        return call is self


def by_age(call: StoredCall, now: float) -> float:
    """Rank calls by age: the earliest of nearly simultaneous answers, otherwise the latest."""
    age = now - (call.ended or now)
    return age if age < 2.0 else -age


def message_key(message: Message) -> int:
    """Hash a message in the form that conversations repeat."""
    calls = tuple(_call_key(call) for call in message.tool_calls)
    return hash((message.role, message.text.strip(), calls, message.tool_call_id))


def _call_key(call: ToolCall) -> tuple[str, str, str]:
    return call.id, call.name, "".join(call.arguments.split())


def states_of(keys: Iterable[int], seed: int = 0) -> list[int]:
    """Hash each beginning of a conversation; the first is the empty one."""
    states = [seed]
    for key in keys:
        states.append(hash((states[-1], key)))
    return states


class CallStore:
    """A bounded store of calls; the oldest make room.

    Args:
        max_calls: maximum number of calls.
        max_text: maximum characters of their answers.
        max_fingerprints: maximum fingerprints of the answers, a power of two.
    """

    def __init__(self, max_calls: int, max_text: int, max_fingerprints: int) -> None:
        self.max_calls = max_calls
        self.max_text = max_text
        self.index = FingerprintIndex(max_fingerprints)
        self.calls: OrderedDict[int, StoredCall] = OrderedDict()
        self.by_id: dict[str, StoredCall] = {}
        self.outputs: dict[int, Output] = {}
        #: Calls by the state after their answer, and by the state of their prompt.
        self.ends: dict[object, list[int]] = {}
        self.prompts: dict[object, list[int]] = {}
        #: Calls by the key of their answer as a message, and by its normalised text.
        self.answers: dict[object, list[int]] = {}
        self.wholes: dict[object, list[int]] = {}
        #: Calls by the text of a completion or last message, and the number of calls per length
        #: with the same last boundary.
        self.texts: dict[object, list[int]] = {}
        self._lengths: dict[int, Counter[int]] = {}
        #: Number of texts per state at the first boundary; most texts share it with no other.
        self._firsts: Counter[int] = Counter()
        #: The last written text and its normalised hash, because equal texts come in a row.
        self._last_written = "", normalise(""), 0
        self.tool_ids: dict[object, list[int]] = {}
        self.responses: dict[object, list[int]] = {}
        self.text_size = 0
        #: Running calls with their prompts' fingerprints, and the number of these fingerprints.
        self._running: OrderedDict[int, StoredCall] = OrderedDict()
        self._running_size = 0
        self.fingerprints = FingerprintCache()
        #: Times at which outputs were written, indexed by number from the first kept one.
        self._times: list[float] = []
        #: Numbers of the outputs' current sessions, indexed likewise; 0 for a forgotten output.
        self._sessions = array("q")
        #: The outputs' fingerprint counts, indexed likewise.
        self._sizes = array("i")
        self._first_time = 1
        self._numbers = 0
        self._output_numbers = 0

    def add(self, call: StoredCall) -> None:
        """Add a call whose request is known."""
        self.calls[call.number] = call
        self.by_id[call.id] = call
        self.file(call, self.prompts, call.state)
        while len(self.calls) > self.max_calls:
            self._drop_oldest()

    @property
    def running_bytes(self) -> int:
        """Return the bytes kept of running calls' prompts."""
        return 4 * self._running_size

    def is_flooded(self, state: int) -> bool:
        """Return true if there are many equal prompts and the last one has no links."""
        numbers = self.prompts.get(state)
        if numbers is None or len(numbers) < _MAX_EQUAL:
            return False
        call = self.calls.get(numbers[-1])
        return call is not None and call.is_alone

    def run(self, call: StoredCall, passages: Hashes | None) -> None:
        """Keep a prompt's data while its call runs; the oldest make room."""
        call.passages = passages
        self._running[call.number] = call
        self._running_size += _running_size(call)
        while self._running_size > _MAX_RUNNING:
            self.stop(next(iter(self._running.values())))

    def stop(self, call: StoredCall) -> None:
        """Drop the prompt data of a call that no longer runs."""
        if self._running.pop(call.number, None) is not None:
            self._running_size -= _running_size(call)
        call.passages = call.prompt = None

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def file(self, call: StoredCall, table: dict[object, list[int]], key: object) -> None:
        """Index a call under a key of `table`."""
        found = table.get(key)
        if found is None:
            table[key] = [call.number]
        else:
            found.append(call.number)
            if len(found) > _MAX_EQUAL:
                del found[0]
        call.keys.append((table, key))

    def find(self, table: dict[object, list[int]], key: object) -> Iterator[StoredCall]:
        """Iterate over the calls of a key, newest first."""
        for number in reversed(table.get(key, ())):
            call = self.calls.get(number)
            if call is not None:
                yield call

    def find_whole(self, key: int) -> Iterator[Output]:
        """Iterate over the outputs whose normalised text has this hash, newest first."""
        for call in self.find(self.wholes, key):
            yield from (output for output in call.outputs if output.key == key)

    def finish(self, call: StoredCall, choices: Sequence[Choice], now: float) -> None:
        """Add a call's answer."""
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
        """Index a call by its text, for texts that begin with it.

        Args:
            seed: hash of what precedes the text.
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
        """Return the calls whose text is the longest beginning of `text`, with its length."""
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
        """Return the outputs' session numbers, 0 for forgotten ones, and fingerprint counts; [n]
        each.

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
        """Reassign the outputs of a session that was merged into another."""
        if self._sessions:
            numbers = np.frombuffer(self._sessions, np.int64)
            numbers[numbers == ended.number] = session.number

    def numbers(self, since: float, until: float | None) -> tuple[int, int]:
        """Return the half-open range of numbers of the outputs written in a period.

        Args:
            since, until: seconds; None means open.
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
        # The next prompt will contain it.
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
                # Entries of calls that ended out of order go with the next one.
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
        # Otherwise the next call's chain would keep all its ancestors alive.
        call.parent = None


def _running_size(call: StoredCall) -> int:
    """Return the size of a running call's prompt data, in units of 4 bytes."""
    passages = 0 if call.passages is None else len(call.passages)
    return 16 + passages + len(call.prompt or "") // 4


def _states_at_boundaries(text: str, seed: int) -> list[int]:
    """Return the hash of the text before each of the `_BOUNDARIES`."""
    state, start, states = seed, 0, []
    for end in _BOUNDARIES[: bisect_right(_BOUNDARIES, len(text))]:
        state = hash((state, text[start:end]))
        states.append(state)
        start = end
    return states


def contains(known: Hashes, hashes: Hashes) -> np.ndarray:
    """Flag each of `hashes` that is among `known`; [n] bool."""
    if not len(known):
        return np.zeros(len(hashes), np.bool_)
    known = np.sort(known)
    if len(hashes) <= _MAX_UNSORTED:
        places = np.searchsorted(known, hashes)
        return known.take(places, mode="clip") == hashes  # type: ignore[no-any-return]
    # Sorted hashes are found several times as fast.
    order = np.argsort(hashes)
    ordered = hashes.take(order)
    found = np.empty(len(hashes), np.bool_)
    found[order] = known.take(np.searchsorted(known, ordered), mode="clip") == ordered
    return found


def kept_keys(keys: list[int]) -> array[int]:
    """Return the keys of a prompt's last messages to remember."""
    return array("q", keys[-_KEPT_MESSAGES:])
