"""Templates are learned from a stream of prompts, and found again by their hashes alone."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import count

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parrot_gateway.linking.linker.links import LinkedSession
from parrot_gateway.linking.profiles.templates import (
    MAX_PREFIX,
    Template,
    TemplateLearner,
    TemplateTable,
    prompt_of,
    template_of,
)

WORDS = """heron fox lake boat stone river cloud apple engine paper violet seven under green never
lantern quickly because meadow winter about cellar window""".split()  # noqa: SIM905
RULES = "You are a careful agent. Work step by step, call one tool at a time and invent nothing. "
PREAMBLE = "You work for ACME, maker of fine anvils since 1949. Be polite, brief and exact. " * 3


def prose(draw: random.Random, words: int = 40) -> str:
    return " ".join(draw.choices(WORDS, k=words)).capitalize()


def chat(*messages: tuple[str, str], **parameters: object) -> bytes:
    said = [{"role": role, "content": content} for role, content in messages]
    return msgspec.json.encode({"model": "model", "messages": said, **parameters})


def learned(bodies: Iterable[bytes], sessions: Iterable[int] | None = None) -> TemplateLearner:
    """A learner that has seen these, 2 seconds apart, each in a session of its own or as said."""
    learner = TemplateLearner()
    known: dict[int, LinkedSession] = {}
    for at, (body, number) in enumerate(zip(bodies, sessions or count(), strict=False)):
        session = known.setdefault(number, LinkedSession(str(number), at, False))
        learner.learn(prompt_of(body), session, 2.0 * at)
    return learner


def longest(learner: TemplateLearner, body: bytes) -> bytes:
    """The text of the longest template of a body; empty for none."""
    prompt = prompt_of(body)
    found = learner.table.find(prompt)
    return prompt[: found[-1].length] if found else b""


def test_a_system_prompt_ends_where_the_questions_begin() -> None:
    draw = random.Random(1)
    bodies = [chat(("system", RULES), ("user", prose(draw))) for _ in range(30)]
    found = longest(learned(bodies), bodies[0])
    assert found.endswith(b'invent nothing. "},{"role":"user","content":"')


def test_an_instruction_before_a_text_is_a_template_however_short() -> None:
    draw = random.Random(2)
    bodies = [chat(("user", f"Summarise the following text:\n\n{prose(draw)}")) for _ in range(30)]
    assert longest(learned(bodies), bodies[0]).endswith(b"following text:\\n\\n")


def test_roles_behind_one_preamble_are_told_apart() -> None:
    draw = random.Random(3)
    roles = ("You review what others have written and list its faults, worst first.",
             "You write programs of at most a hundred lines, with tests.")  # fmt: skip
    bodies = [
        chat(("system", PREAMBLE + roles[at % 2]), ("user", prose(draw))) for at in range(100)
    ]
    learner = learned(bodies)
    for at, role in enumerate(roles):
        assert role.encode() in longest(learner, bodies[at])


def test_conversations_belong_to_the_template_of_their_beginning() -> None:
    draw = random.Random(4)
    bodies = [chat(("system", RULES), ("user", prose(draw))) for _ in range(30)]
    learner = learned(bodies)
    going_on = chat(("system", RULES), ("user", prose(draw)), ("assistant", "Yes."), ("user", "So"))
    assert longest(learner, going_on) == longest(learner, bodies[0])


def test_examples_are_part_of_a_template() -> None:
    draw = random.Random(5)
    shots = [("user", "2 and 2?"), ("assistant", "4"), ("user", "3 and 4?"), ("assistant", "7")]
    bodies = [chat(*shots, ("user", prose(draw))) for _ in range(30)]
    assert b'"7"},{"role":"user"' in longest(learned(bodies), bodies[0])


def test_a_document_that_one_session_asks_about_is_no_template() -> None:
    draw = random.Random(6)
    rules = "Answer from the document alone, with the line that says so.\n\n"
    bodies, sessions = [], []
    for session in range(8):
        document = prose(draw, 200)
        for _ in range(10):
            bodies.append(chat(("user", f"{rules}{document}\n\n{prose(draw)}")))
            sessions.append(session)
    assert longest(learned(bodies, sessions), bodies[0]).endswith(b"that says so.\\n\\n")


def test_stock_phrases_in_what_varies_are_no_templates() -> None:
    draw = random.Random(7)
    stock = [f"Thank you for reading, number {word}. Here it comes: " for word in WORDS[:8]]
    bodies = [
        chat(("user", f"Improve the text between the lines.\n---\n{opening}{prose(draw)}"))
        for at in range(160)
        for opening in [draw.choice(stock) if at % 2 else ""]
    ]
    learner = learned(bodies)
    assert {longest(learner, body)[-5:] for body in bodies} == {b"---\\n"}


def test_prompts_that_are_equal_to_the_end_are_a_template() -> None:
    body = chat(("user", "Are you there, and is all well?"))
    assert longest(learned([body] * 30), body) == prompt_of(body)
    # A few may be one program's accident.
    assert longest(learned([body] * 6), body) == b""


def test_a_million_equal_prompts_cost_no_memory() -> None:
    learner, session = TemplateLearner(), LinkedSession("s", 0, False)
    prompt = prompt_of(chat(("system", RULES * 300), ("user", "Go on.")))
    for at in range(20_000):
        learner.learn(prompt, session, float(at))
    assert learner.size_bytes < 100_000


@pytest.mark.parametrize(
    ("said", "instructions"), [("messages", "system"), ("input", "instructions")]
)
def test_instructions_behind_the_messages_count(said: str, instructions: str) -> None:
    draw = random.Random(8)
    role = RULES + "Speak like a pirate."
    bodies = [
        msgspec.json.encode({said: [{"role": "user", "content": prose(draw)}], instructions: role})
        for _ in range(30)
    ]
    assert b"pirate" in longest(learned(bodies), bodies[0])


def test_a_template_that_is_none_any_more_names_the_shorter_one() -> None:
    draw = random.Random(9)
    learner, removed = TemplateLearner(), dict[str, str]()
    for at in range(101):
        # Thirty begin alike to the end of their role; then there are all kinds of roles.
        role = prose(draw, 8) if 30 <= at < 100 else "You write poems. "
        body = chat(("system", PREAMBLE + role), ("user", prose(draw)))
        session = LinkedSession(str(at), at, False)
        removed |= dict(learner.learn(prompt_of(body), session, 2.0 * at))
        if at == 29:
            (first,) = learner.table
    (left,) = learner.table
    assert left.length < first.length
    assert removed[first.key] == left.key


def test_keys_are_the_same_in_every_process() -> None:
    assert template_of(b'"prompt":"Hello').key == "d630d62c0271e896"


ROLES = st.lists(st.integers(0, 4), min_size=150, max_size=250)


def _bodies(roles: Sequence[int], draw: random.Random) -> list[bytes]:
    given = [("user", f"Translate what follows into the language of {word}: ") for word in WORDS]
    return [chat((given[role][0], given[role][1] + prose(draw))) for role in roles]


@settings(max_examples=15, deadline=None)
@given(roles=ROLES, seed=st.integers(0, 1000), shuffled=st.randoms(use_true_random=False))
def test_the_order_of_arrival_does_not_matter(
    roles: list[int], seed: int, shuffled: random.Random
) -> None:
    bodies = _bodies([*roles, *range(5), *range(5), *range(5), *range(5)], random.Random(seed))
    once = learned(bodies)
    again = list(bodies)
    shuffled.shuffle(again)
    other = learned(again)
    same = sum(longest(once, body) == longest(other, body) for body in bodies)
    assert same >= 0.9 * len(bodies)


@settings(max_examples=15, deadline=None)
@given(prompts=st.lists(st.binary(max_size=600), max_size=300), nodes=st.integers(4, 64))
def test_memory_is_bounded_whatever_comes(prompts: list[bytes], nodes: int) -> None:
    learner = TemplateLearner(max_nodes=nodes, max_bytes=4000)
    for at, prompt in enumerate([*prompts, *prompts]):
        learner.learn(prompt, LinkedSession(str(at), at, False), 2.0 * at)
        # The newest prompt's way is added before room is made.
        assert learner.size_bytes <= 4000 + 1024 + 400 * (nodes + 3)


@settings(max_examples=50, deadline=None)
@given(
    prefixes=st.sets(st.integers(1, MAX_PREFIX), min_size=1, max_size=60),
    removed=st.integers(0, 59),
    text=st.binary(min_size=8, max_size=32),
)
def test_a_table_finds_by_hashes_what_it_holds(
    prefixes: set[int], removed: int, text: bytes
) -> None:
    prompt = (text * (MAX_PREFIX // len(text) + 1))[:MAX_PREFIX]
    table = TemplateTable()
    held: list[Template] = []
    for length in sorted(prefixes):
        template = template_of(prompt[:length])
        if table.add(template):
            held.append(template)
    if removed < len(held):
        table.remove(held.pop(removed).key)
    assert table.find(prompt) == held
    assert table.find(bytes([prompt[0] ^ 1]) + prompt[1:]) == []
    short = prompt[: max(prefixes) // 2]
    assert table.find(short) == [each for each in held if each.length <= len(short)]


def test_of_two_templates_with_the_same_hashes_the_first_counts() -> None:
    prompt = b'"prompt":"Hello, hello.'
    true = template_of(prompt)
    crafted = Template("0" * 16, true.length, true.hash, true.head)
    table = TemplateTable()
    assert table.add(true)
    assert not table.add(crafted)
    table.remove(crafted.key)
    assert table.find(prompt) == [true]
    table.remove(true.key)
    assert table.find(prompt) == []
