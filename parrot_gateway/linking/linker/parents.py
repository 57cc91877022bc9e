"""Finds the call that a prompt continues."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from parrot_gateway.linking.linker.call_store import CallStore, StoredCall, by_age
from parrot_gateway.linking.linker.conversation import Message
from parrot_gateway.linking.linker.fingerprints import RUN
from parrot_gateway.linking.linker.links import Link, LinkedSession
from parrot_gateway.linking.linker.prompt import Prompt
from parrot_gateway.linking.linker.prompt_ends import FoundEnd, PromptEnds

#: An answer of at least this length, written by only one call, identifies it without context.
_LONG_ANSWER = 60
#: Minimum length of a beginning that is another call's whole prompt.
_LONG_PROMPT = 200
#: Characters of an answer that are searched for behind the prompt.
_COMPARED = 48
#: Minimum share of a prompt's fingerprint sample that the other prompt must contain.
_ALIKE = 0.25
_MAX_ALIKE = 64
#: Minimum share of the text before a prompt's end that must come from that prompt.
_MOST_BEFORE = 0.8
#: Smaller differences between shares mean nothing.
_ALIKE_NEARLY = 0.1
#: Maximum candidates compared.
_MAX_COMPARED = 512


class Parent(NamedTuple):
    """The call that a prompt continues.

    Attributes:
        depth: number of the prompt's messages that it explains.
        beginning: characters of a completion's prompt that it explains.
        by_tool: true if the prompt repeats the id of one of its tool calls.
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
    store: CallStore, ends: PromptEnds, prompt: Prompt, previous: str, peer: str, now: float
) -> Parent | None:
    """Return the call that a prompt continues; None for a first one.

    Ties go to the call whose session also wrote the newest messages, then to one that nobody has
    continued, then to one of the same connection.

    Args:
        previous: id of the response that the request names.
        peer: address of the client.
    """
    parent = _find_parent(store, ends, prompt, previous, peer, now)
    if parent is None or parent.by_tool:
        return parent
    new = prompt.messages[parent.depth :]
    ids = {each.tool_call_id for each in new if each.tool_call_id}
    is_echoed = any(parent.call in store.find(store.tool_ids, id_) for id_ in ids)
    return parent._replace(by_tool=is_echoed)


def _find_parent(
    store: CallStore, ends: PromptEnds, prompt: Prompt, previous: str, peer: str, now: float
) -> Parent | None:
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
        # Some servers reuse ids, so an id is not always conclusive.
        candidates = _ended(store.find(store.answers, prompt.keys[last]))
        candidates = [each for each in candidates if each in by_tool] or by_tool or candidates
        found = _by_context(candidates, prompt, chooser, is_sure=bool(by_tool))
        if found is not None:
            return found._replace(by_tool=bool(by_tool))
    elif by_tool:
        return Parent(chooser.choose(by_tool), 0, 1.0 if len(by_tool) == 1 else 0.85, True)
    by_text = _by_text(store, prompt, prompt.text_seed, chooser)
    by_tail = _by_tail(store, ends, prompt, chooser) if last < 0 else None
    # The newest part of a conversation is better evidence than its beginning.
    if by_tail is not None and (by_text is None or by_text.call.is_ancestor_of(by_tail.call)):
        by_text = by_tail
    return by_text or _by_beginning(store, prompt, chooser)


class _Chooser:
    """Chooses among equally good calls."""

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
        """Return the number of messages behind the newest answer that a session wrote."""
        return self._writers()[session]

    def is_elsewhere(self, session: LinkedSession) -> bool:
        """Return true if only other sessions wrote the messages behind the newest answer."""
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
    """Return the calls that created the tool ids of the newest turn."""
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
    """Return the call that wrote the last answer of a prompt with changed or omitted older turns:
    the one whose prompt shares most messages with it.

    Args:
        is_sure: true if one of the candidates certainly did.
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
    """Return the call whose text begins the last message: a continued completion, or an agent that
    keeps its history in one message.
    """
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


def _by_tail(
    store: CallStore, ends: PromptEnds, prompt: Prompt, chooser: _Chooser
) -> Parent | None:
    """Return the call whose prompt's end and answer are in the last message: an agent that keeps
    the newest part of its history in one message.

    The text before must come from that prompt and begin like it; a call that only reads a prompt's
    subject and answer begins differently. The newest call of each conversation counts.
    """
    index = len(prompt.messages) - 1
    found: list[FoundEnd] = []
    for each in ends.find(prompt):
        hashes, positions = prompt.fingerprints(index)
        before = hashes[: np.searchsorted(positions, each.end - 2 * RUN)]
        theirs = store.fingerprints.known(each.call.text)
        if each.share >= _ALIKE and (
            theirs is None or np.isin(before, theirs).sum() >= _MOST_BEFORE * len(before)
        ):
            found.append(each)
            if len(found) >= _MAX_ALIKE:
                break
    newest: dict[int, FoundEnd] = {}
    for each in found:
        other = newest.get(each.call.root)
        if other is None or other.call.number < each.call.number:
            newest[each.call.root] = each
    if not newest:
        return None
    most = max(each.share for each in newest.values())
    near = [each for each in newest.values() if each.share >= most - _ALIKE_NEARLY]
    last = max(each.end for each in near)
    best = [each.call for each in near if each.end >= last - RUN]
    beginning = prompt.normalised(index).character_span(0, last)[1]
    confidence = 0.9 if len(best) == 1 else 0.8
    return Parent(chooser.choose(best), index, confidence, beginning=beginning)


def _is_in(answer: str, text: str) -> bool:
    """Return true if a text contains an answer's beginning and end in place; a revised answer
    fails.
    """
    answer = answer.strip()
    place = text.find(answer[:_COMPARED])
    return place >= 0 and text.startswith(
        answer[-_COMPARED:], place + max(0, len(answer) - _COMPARED)
    )


def _begins_with(text: str, call: StoredCall) -> int:
    """Return the length of the call's longest answer that begins a text; 0 if none does."""
    answers = (each.text.rstrip() for each in call.outputs if not each.is_argument)
    return max((len(each) for each in answers if text.startswith(each)), default=0)


def _by_beginning(store: CallStore, prompt: Prompt, chooser: _Chooser) -> Parent | None:
    """Return the call whose prompt begins this one, when its answer was edited or left out."""
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
            text = messages[depth].text
            # Text of a tool or another agent may follow the answer.
            longer = [each for each in found if _begins_with(text, each)]
            call = chooser.choose(longer or found)
            confidence = 0.9 if len(found) == 1 else 0.8
            if longer:
                return Parent(call, depth, confidence, beginning=_begins_with(text, call))
            return Parent(call, depth + 1, confidence)
        is_enough = size >= _LONG_PROMPT and messages[depth - 1].role != "system"
        if len(found) == 1 and is_enough:
            # A short answer, such as a decision, may be missing from the history; a longer one
            # would be there.
            said = sum(len(each.text) for each in found[0].outputs)
            is_only = len(store.prompts[states[depth]]) == 1 and said < _LONG_ANSWER
            if is_only or not chooser.is_elsewhere(found[0].session.current):
                return Parent(found[0], depth, 0.8)
        return None
    return None
