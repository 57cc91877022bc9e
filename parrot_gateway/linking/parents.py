"""Finds the call that a prompt continues."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from parrot_gateway.linking.call_store import CallStore, StoredCall, Tail, by_age
from parrot_gateway.linking.conversation import Message
from parrot_gateway.linking.fingerprints import RUN, Positions, distinct
from parrot_gateway.linking.links import Link, LinkedSession
from parrot_gateway.linking.prompt import Prompt

#: Answers of at least so many characters that only one call wrote identify it without context.
_LONG_ANSWER = 60
#: A beginning that is another call's whole prompt counts from this many characters on.
_LONG_PROMPT = 200
#: Characters of an answer that are looked for behind the prompt.
_COMPARED = 48
#: Fingerprints of the end of a prompt by which it is found: most, least, and how many of them have
#: to be there. Normalised bytes behind it within which its answer begins.
MAX_TAIL = 16
MIN_TAIL = 3
_MOST_OF_TAIL = 0.6
_BEHIND = 512
_MAX_PLACES = 8
#: Fingerprints of a prompt by which it is compared with others, and the least share of them.
MAX_SKETCH = 32
_ALIKE = 0.25
_MAX_ALIKE = 64
#: Of what stands before the end of a prompt so much has to be from that prompt.
_MOST_BEFORE = 0.8
#: Difference of shares that says nothing.
_ALIKE_NEARLY = 0.1
#: Candidates that are compared.
_MAX_COMPARED = 512


class Parent(NamedTuple):
    """The call that a prompt continues.

    Attributes:
        depth: messages of the prompt that it explains.
        beginning: characters of a completion's prompt that it explains.
        by_tool: the id of one of its tool calls is echoed.
    """

    call: StoredCall
    depth: int
    confidence: float
    by_tool: bool = False
    beginning: int = 0

    def links(self) -> list[Link]:
        links = [Link(self.call.id, "continues", self.confidence)]
        if self.by_tool:
            links.append(Link(self.call.id, "tool", 1.0))
        return links


def find_parent(
    store: CallStore, prompt: Prompt, previous: str, peer: str, now: float
) -> Parent | None:
    """The call that a prompt continues; None for a first one.

    Of several that fit equally the one counts whose session also wrote the newest messages, else
    one that nobody has continued yet, else one of the same connection.

    Args:
        previous: id of a response that the request names.
        peer: address of the client.
    """
    messages, last = prompt.messages, prompt.last_answer
    for call in store.find(store.responses, previous) if previous else ():
        return Parent(call, 0, 1.0, call in _by_tool_ids(store, messages, -1))
    if not messages:
        return None
    chooser = _Chooser(store, prompt, peer, now)
    if prompt.is_completion:
        return _by_text(store, prompt, 0, chooser) if len(messages) == 1 else None
    by_tool = _by_tool_ids(store, messages, last)
    if last >= 0:
        exact = _ended(store.find(store.ends, prompt.states[last + 1]))
        if exact:
            call = chooser.choose(exact)
            return Parent(call, last + 1, 1.0 if len(exact) == 1 else 0.95, call in by_tool)
        # Some servers give the same ids again, so an id does not always settle it.
        candidates = _ended(store.find(store.answers, prompt.keys[last]))
        candidates = [each for each in candidates if each in by_tool] or by_tool or candidates
        found = _by_context(candidates, prompt, chooser, is_sure=bool(by_tool))
        if found is not None:
            return found._replace(by_tool=bool(by_tool))
    elif by_tool:
        return Parent(chooser.choose(by_tool), 0, 1.0 if len(by_tool) == 1 else 0.85, True)
    by_text = _by_text(store, prompt, prompt.text_seed, chooser)
    by_tail = _by_tail(store, prompt, chooser) if last < 0 else None
    # The newest part of a conversation tells more than its beginning.
    if by_tail is not None and (by_text is None or by_text.call.is_ancestor_of(by_tail.call)):
        by_text = by_tail
    return by_text or _by_beginning(store, prompt, chooser)


class _Chooser:
    """Chooses among calls that fit equally."""

    def __init__(self, store: CallStore, prompt: Prompt, peer: str, now: float) -> None:
        self._store = store
        self._prompt = prompt
        self._peer = peer
        self._now = now
        self._written: Counter[LinkedSession] | None = None

    def choose(self, calls: list[StoredCall]) -> StoredCall:
        if len(calls) == 1:
            return calls[0]
        return max(
            calls,
            key=lambda call: (
                self.written_by(call.session.current),
                -call.continuations,
                bool(call.peer) and call.peer == self._peer,
                by_age(call, self._now),
            ),
        )

    def written_by(self, session: LinkedSession) -> int:
        """Messages behind the newest answer that a session has written."""
        return self._writers()[session]

    def is_elsewhere(self, session: LinkedSession) -> bool:
        """Whether other sessions have written what stands behind the newest answer."""
        writers = self._writers()
        return bool(writers) and not writers[session]

    def _writers(self) -> Counter[LinkedSession]:
        if self._written is None:
            prompt, store = self._prompt, self._store
            self._written = Counter(
                session
                for index in range(prompt.last_answer + 1, len(prompt.messages))
                for session in {
                    call.session.current for call in store.find(store.wholes, prompt.whole(index))
                }
            )
        return self._written


def _ended(calls: Iterable[StoredCall]) -> list[StoredCall]:
    found: list[StoredCall] = []
    for call in calls:
        if call.ended is not None and call not in found:
            found.append(call)
            if len(found) >= _MAX_COMPARED:
                break
    return found


def _by_tool_ids(store: CallStore, messages: Sequence[Message], last: int) -> list[StoredCall]:
    """The calls that minted the tool ids of the newest turn."""
    ids = [each.tool_call_id for each in messages[last + 1 :] if each.tool_call_id]
    if last >= 0 and last < len(messages) - 1:
        ids += [call.id for call in messages[last].tool_calls if call.id]
    found: list[StoredCall] = []
    for id_ in dict.fromkeys(ids):
        minted = _ended(store.find(store.tool_ids, id_))
        if minted:
            found = [each for each in found if each in minted] or (found or minted)
    return found


def _by_context(
    candidates: list[StoredCall], prompt: Prompt, chooser: _Chooser, *, is_sure: bool
) -> Parent | None:
    """Which call wrote the last answer of a prompt whose older turns were changed or elided: the
    one whose prompt shares most messages with it.

    Args:
        is_sure: one of the candidates did.
    """
    if not candidates:
        return None
    messages, keys, last = prompt.messages, prompt.keys, prompt.last_answer
    before = frozenset(
        key for key, each in zip(keys[:last], messages[:last], strict=True) if each.role != "system"
    )
    newest = keys[last - 1] if last else 0
    scores = [
        len(before.intersection(each.message_keys)) + 2 * (newest == each.last_key)
        for each in candidates
    ]
    best = max(scores)
    is_long = len(candidates) == 1 and len(messages[last].text) >= _LONG_ANSWER
    if best == 0 and not is_sure and not is_long:
        return None
    equal = [each for each, score in zip(candidates, scores, strict=True) if score == best]
    confidence = 0.85 if len(equal) > 1 else 1.0 if is_sure else 0.95
    return Parent(chooser.choose(equal), last + 1, confidence)


def _by_text(store: CallStore, prompt: Prompt, seed: int, chooser: _Chooser) -> Parent | None:
    """The call with whose text the last message begins: a completion that goes on, or an agent that
    keeps its history in one message."""
    messages = prompt.messages
    text = messages[-1].text
    found = store.find_beginning(text, seed)
    ended = _ended(call for call, _ in found)
    if not ended:
        return None
    size = found[0][1]
    is_chat = messages[-1].role != "prompt"
    rest = text[size:]
    answered = [each for each in ended if any(_is_in(o.text, rest) for o in each.outputs)]
    if answered:
        ended = answered
    elif is_chat:
        return None
    confidence = 1.0 if len(ended) == 1 else 0.9
    depth = len(messages) - 1 if is_chat else 0
    return Parent(chooser.choose(ended), depth, confidence, beginning=size)


def _by_tail(store: CallStore, prompt: Prompt, chooser: _Chooser) -> Parent | None:
    """The call whose prompt's end, and its answer behind it, stand in the last message: an agent
    that keeps the newest part of its history in one message. What stands before has to come from
    that prompt, and to begin like it: one who reads a prompt's subject and its answer begins
    otherwise. Of one conversation the newest call counts."""
    index = len(prompt.messages) - 1
    hashes, positions = prompt.fingerprints(index)
    rows, owners = store.tails.find(hashes)
    if not len(rows):
        return None
    numbers, counts = np.unique(owners, return_counts=True)
    # Most prompts share some fingerprints with many ends, by accident.
    are_most = counts >= _MOST_OF_TAIL * store.tail_sizes(numbers)
    numbers = numbers[are_most]
    if not len(numbers):
        return None
    normalised = prompt.normalised(index)
    content = normalised.content.tobytes()
    known = distinct(hashes)
    found: list[tuple[float, int, StoredCall]] = []
    for number in numbers[::-1].tolist():
        tail = store.tails_by_number.get(number)
        if tail is None:
            continue
        call = tail.call
        if (
            call.ended is not None
            and call.sketch is not None
            and (call.seed, call.head) == (prompt.text_seed, prompt.head)
            and (end := _end_of(tail, content, positions[rows[owners == number]])) is not None
        ):
            places = np.minimum(np.searchsorted(known, call.sketch), len(known) - 1)
            share = float((known[places] == call.sketch).mean())
            before = hashes[: np.searchsorted(positions, end - 2 * RUN)]
            theirs = store.fingerprints.known(call.text)
            if share >= _ALIKE and (
                theirs is None or np.isin(before, theirs).sum() >= _MOST_BEFORE * len(before)
            ):
                found.append((share, end, call))
                if len(found) >= _MAX_ALIKE:
                    break
    newest: dict[int, tuple[float, int, StoredCall]] = {}
    for each in found:
        other = newest.get(each[2].root)
        if other is None or other[2].number < each[2].number:
            newest[each[2].root] = each
    if not newest:
        return None
    most = max(share for share, _, _ in newest.values())
    near = [each for each in newest.values() if each[0] >= most - _ALIKE_NEARLY]
    last = max(end for _, end, _ in near)
    best = [call for _, end, call in near if end >= last - RUN]
    beginning = normalised.character_span(0, last)[1]
    confidence = 0.9 if len(best) == 1 else 0.8
    return Parent(chooser.choose(best), index, confidence, beginning=beginning)


def _end_of(tail: Tail, content: bytes, shared: Positions) -> int | None:
    """Where in a normalised text the prompt of a call ends, with its answer soon behind; None where
    that is not there.

    Args:
        shared: places of the fingerprints that the text shares with the prompt's end, ascending.
    """
    said = tail.call.said
    place = len(content)
    for _ in range(_MAX_PLACES if said else 0):
        place = content.rfind(said, 0, place)
        if place < 0:
            return None
        end = content.rfind(tail.ending, max(0, place - _BEHIND), place)
        if end >= 0:
            end += len(tail.ending)
            first, last = np.searchsorted(shared, (end - RUN * MAX_TAIL, end)).tolist()
            if last - first >= _MOST_OF_TAIL * tail.size:
                return end
        place += len(said) - 1
    return None


def _is_in(answer: str, text: str) -> bool:
    """Whether an answer stands in a text, by its beginning and its end: a revised one does not."""
    answer = answer.strip()
    place = text.find(answer[:_COMPARED])
    return place >= 0 and text.startswith(
        answer[-_COMPARED:], place + max(0, len(answer) - _COMPARED)
    )


def _by_beginning(store: CallStore, prompt: Prompt, chooser: _Chooser) -> Parent | None:
    """The call with whose prompt this one begins, when its answer was edited or left out."""
    messages, states = prompt.messages, prompt.states
    size = sum(len(each.text) for each in messages)
    for depth in range(len(messages) - 1, 0, -1):
        size -= len(messages[depth].text)
        ended = _ended(store.find(store.ends, states[depth]))
        if ended:
            return Parent(chooser.choose(ended), depth, 0.9)
        is_edited = messages[depth].role == "assistant"
        found = _ended(store.find(store.prompts, states[depth]))
        if not found:
            continue
        if is_edited:
            return Parent(chooser.choose(found), depth + 1, 0.9 if len(found) == 1 else 0.8)
        is_enough = size >= _LONG_PROMPT and messages[depth - 1].role != "system"
        if len(found) == 1 and is_enough and not chooser.is_elsewhere(found[0].session.current):
            return Parent(found[0], depth, 0.8)
        return None
    return None
