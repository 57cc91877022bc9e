"""Links of calls to the calls that they go on from and whose text they use."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import count

import pytest

from parrot_gateway.linking.linker.conversation import (
    Answer,
    Choice,
    Conversation,
    Message,
    ToolCall,
)
from parrot_gateway.linking.linker.linker import LinkedCall, Linker
from parrot_gateway.linking.process.worker_process import limits_of
from parrot_gateway.settings.model import LinkingSettings

SYSTEM = Message("system", "You are a helpful assistant of an airline. Answer briefly.")
STORY = (
    "The heron waited in the reeds until the fox came down to drink, and neither of them spoke "
    "of the duck that both had seen an hour before on the far side of the pond."
)
OTHER = (
    "Seven barges lay at the quay that morning, loaded with slate and barley, and the harbour "
    "master counted each of them twice before he let the ferry through."
)


class Play:
    """Plays calls against a linker, a second apart."""

    def __init__(self, **settings: int) -> None:
        names = count(1)
        limits = limits_of(LinkingSettings(**settings))
        self.linker = Linker(lambda: f"s{next(names)}", limits, max_tenants=10)
        self.now = 0.0
        self.calls = count(1)

    def start(
        self,
        *messages: Message,
        tenant: str = "t",
        session: str | None = None,
        peer: str = "",
        previous: str = "",
    ) -> tuple[str, LinkedCall]:
        self.now += 1.0
        call = f"c{next(self.calls)}"
        conversation = Conversation(messages, previous)
        linker = self.linker.tenant(tenant)
        return call, linker.request(call, conversation, self.now, session, peer)

    def end(self, call: str, text: str, calls: Sequence[ToolCall] = (), tenant: str = "t") -> None:
        self.now += 1.0
        answer = Answer(f"r-{call}", (Choice(text, tuple(calls)),))
        self.linker.tenant(tenant).answer(call, answer, self.now)

    def run(self, *messages: Message, text: str, tenant: str = "t") -> tuple[str, LinkedCall]:
        call, linked = self.start(*messages, tenant=tenant)
        self.end(call, text, tenant=tenant)
        return call, linked

    def session(self, call: str, tenant: str = "t") -> str:
        session = self.linker.tenant(tenant).session_of(call)
        assert session is not None
        return session.id


def user(text: str) -> Message:
    return Message("user", text)


def said(text: str, *calls: ToolCall) -> Message:
    return Message("assistant", text, calls)


def edges(linked: LinkedCall) -> set[tuple[str, str]]:
    return {(link.source, link.kind) for link in linked.links}


def test_a_conversation_continues() -> None:
    play = Play()
    first, _ = play.run(SYSTEM, user("Tell me a story."), text=STORY)
    second, linked = play.start(SYSTEM, user("Tell me a story."), said(STORY), user("More."))
    assert edges(linked) == {(first, "continues")}
    assert play.session(first) == play.session(second)


def test_a_window_whose_old_turns_are_gone_continues() -> None:
    play = Play()
    turns = [SYSTEM]
    for number in range(6):
        turns.append(user(f"Question {number} about the weather in {number * 37}?"))
        _, linked = play.run(*turns[:1], *turns[-4:], text=f"It is {number * 13} degrees there.")
        turns.append(said(f"It is {number * 13} degrees there."))
        if number:
            assert [link.source for link in linked.links] == [f"c{number}"]
    assert len({play.session(f"c{n}") for n in range(1, 7)}) == 1


def test_an_answer_within_another_prompt_is_an_output() -> None:
    play = Play()
    first, _ = play.run(user("Tell me a story."), text=f"Here it is:\n\n  - {STORY}\n")
    quoted = f'Check this for errors:\n```json\n{{"text": "{STORY}"}}\n```'
    _, linked = play.start(user(quoted))
    assert edges(linked) == {(first, "output")}
    evidence = linked.links[0].evidence
    assert evidence is not None
    assert quoted[evidence.start : evidence.end].startswith("The heron waited")
    source = f"Here it is:\n\n  - {STORY}\n"[evidence.source_start : evidence.source_end]
    assert source.startswith("The heron waited")


@pytest.mark.parametrize(
    "answer",
    [
        '{{"title": "An article", "steps": ["{}", "{}", "{}"]}}',
        "The plan:\n1. {}\n2. {}\n3. {}\nThat is all.",
        "<note>{}</note><note>{}</note><note>{}</note>",
        "run(first='{}', then='{}', last='{}')",
    ],
)
def test_one_part_of_an_answer_is_an_output(answer: str) -> None:
    play = Play()
    steps = (
        "Write down which barges came in, and what each of them had carried.",
        "Ask the harbour master how often he counts before the ferry goes.",
        "Compare both lists and name whoever signed for the missing slate.",
    )
    first, _ = play.run(user("Plan it."), text=answer.format(*steps))
    play.run(user("Plan something else."), text=STORY)
    _, linked = play.start(user(f"Do this step, in a few words.\n{steps[1]}"))
    assert edges(linked) == {(first, "output")}


@pytest.mark.parametrize(
    ("answer", "prompt"),
    [
        ('{"title": "Where the old heron waited", "n": 3}', "Write about it.\ntitle: {part}\n"),
        ('<step name="a" input="Where the old heron waited" to="B"/>', "BEGIN\n{part}\nEND"),
        ("1. Where the old heron waited\n2. What the fox drank", "Query: {part}\nAnswer: "),
        (
            "['Where the old heron waited', 'What the fox drank']",
            'Answer this question: "{part}" in short.',
        ),
        ("Where the old heron waited", "Question:{part}\n\nNotes: none"),
    ],
)
def test_a_short_part_is_an_output_where_all_of_it_is_a_part_of_the_prompt(
    answer: str, prompt: str
) -> None:
    play = Play()
    writer, _ = play.run(user(f"Extract the fields.\n{OTHER}"), text=answer)
    part = "Where the old heron waited"
    _, linked = play.run(user(prompt.format(part=part)), text="It is long gone now.")
    assert edges(linked) == {(writer, "output")}
    # Once another session has written it, and where it is a piece of something else.
    play.run(user(f"Think of titles.\n{STORY}"), text=answer)
    _, linked = play.run(user(f"Shorten it.\ntitle: {part}"), text="Herons.")
    assert edges(linked) == set()
    play = Play()
    play.run(user(f"Extract the fields.\n{OTHER}"), text=answer)
    _, linked = play.run(user(f"I know {part} and saw it."), text="Good.")
    assert edges(linked) == set()


def test_answers_to_vote_on_are_read_though_they_share_sentences() -> None:
    play = Play()
    shared = STORY.split(", ")
    own = [
        OTHER,
        "Nobody in the village knows who planted the walnut tree, but every autumn the children "
        "fill their pockets under it and quarrel about whose basket was the fuller one.",
        "A kettle of copper hangs above the stove of the old mill, and whoever comes in from the "
        "rain may pour himself a cup as long as he fills it again before he leaves.",
    ]
    answers = [f"{shared[0]}. {each} {shared[1]}" for each in own]
    writers = [play.run(user("Think step by step."), text=each)[0] for each in answers]
    listed = "\n\n".join(f"Response {at}: {each}" for at, each in enumerate(answers))
    _, linked = play.run(user(f"Which is most consistent?\n\n{listed}"), text="1")
    assert edges(linked) == {(each, "output") for each in writers}


def test_what_stands_behind_an_answer_in_its_own_message_is_looked_at() -> None:
    """An agent whose observations are appended to its answers: another agent's answer is one."""
    play = Play()
    task = user("Current task: " + OTHER)
    manager, _ = play.run(SYSTEM, task, text="Action: delegate. Ask the keeper of herons.")
    worker, _ = play.run(user("You keep herons. Report."), text=STORY)
    told = f"Action: delegate. Ask the keeper of herons.\nObservation: {STORY}"
    _, linked = play.run(SYSTEM, task, said(told), text="The report is done.")
    assert edges(linked) == {(manager, "continues"), (worker, "output")}


def test_a_line_of_prose_that_stands_in_a_prompt_proves_nothing() -> None:
    play = Play()
    line = "Please let me know whether the list above is what you wanted to have."
    play.run(user("Plan it."), text=f"{STORY}\n{OTHER}\n{line}")
    _, linked = play.start(user(f"Is this sentence polite?\n{line}"))
    assert not linked.links


def test_sentences_beside_a_quoted_document_are_an_output() -> None:
    play = Play()
    quote = "Each barge that lies at the quay pays by its length, and twice that on a Sunday."
    document = f"{OTHER} {quote} {STORY}"
    own = "So two of the seven would have paid for nothing, if the count of the master was right."
    answer = f'I looked at the rules. They say: "{quote}" {own} That is no small sum for slate.'
    first, _ = play.run(user(f"Read this.\n{document}\n\nWho paid?"), text=answer)
    _, linked = play.start(user(f'Source:\n{document}\n\nIs it true? "{quote}" {own}'))
    assert edges(linked) == {(first, "output")}


def test_who_repeated_an_answer_is_read() -> None:
    play = Play()
    first, _ = play.run(user("Who counted?"), text=STORY)
    second, linked = play.run(user(f"Refine, or repeat:\n{STORY}\nNew: {OTHER}"), text=STORY)
    assert edges(linked) == {(first, "output")}
    _, linked = play.start(user(f"Refine, or repeat:\n{STORY}\nNew: nothing at all."))
    assert edges(linked) == {(second, "output")}


def test_a_tool_id_is_echoed_before_messages_that_nobody_wrote() -> None:
    play = Play()
    call = ToolCall("call_91", "transfer_to_coder", "{}")
    begin = (SYSTEM, user("Count the barges."))
    first, _ = play.start(*begin)
    play.end(first, "", [call])
    _, linked = play.start(
        *begin,
        said("", call),
        Message("tool", "Transferred.", tool_call_id="call_91"),
        said("Transferring back", ToolCall("call_92", "transfer_back", "{}")),
        Message("tool", "Transferred back.", tool_call_id="call_92"),
    )
    assert edges(linked) == {(first, "continues"), (first, "tool")}


def test_a_transcript_between_two_instructions_continues() -> None:
    play = Play()
    choose = "Choose who of the planner, the expert and the critic is to speak next in this group."
    head, lines = f"Read this conversation. {choose}", [f"user: {STORY}"]
    chooser = ""
    for number in range(6):
        text = "\n\n".join(lines)
        call, linked = play.run(user(f"{head}\n\n{text}\n\n{choose}"), text="the expert")
        # How all of these prompts end is learned from the first ones.
        if number > 3:
            assert (chooser, "continues") in edges(linked)
        assert all(link.source in {chooser} for link in linked.links)
        chooser = call
        lines.append(
            f"the expert: {number * 37} barges, {number * 53} of them with {OTHER[number * 9 :]}"
        )
    other = Play()
    other.run(user(f"{head}\n\nuser: {STORY}\n\n{choose}"), text="the expert")
    _, linked = other.start(user(f"{head}\n\nuser: {OTHER}\n\n{choose}"))
    assert not linked.links


def test_a_conversation_goes_on_from_its_summary() -> None:
    play = Play()
    question, ask = user("Tell me a story."), user("Sum up all that was said.")
    play.run(SYSTEM, question, text=STORY)
    told, linked = play.run(SYSTEM, question, said(STORY), ask, text=f"{OTHER} {STORY}")
    assert len(linked.links) == 1
    begin = f"This goes on from an earlier conversation:\n{OTHER} {STORY}"
    _, linked = play.start(SYSTEM, user(begin), user("Go on."))
    assert edges(linked) == {(told, "continues"), (told, "output")}
    _, linked = play.start(Message("system", "You find titles."), user(begin))
    assert edges(linked) == {(told, "output")}


def test_a_join_reads_all_of_its_parts() -> None:
    play = Play()
    one, _ = play.run(user("Summarise part one."), text=STORY)
    two, _ = play.run(user("Summarise part two."), text=OTHER)
    assert play.session(one) != play.session(two)
    _, linked = play.start(user(f"Join these.\n\n1. {STORY}\n\n2. {OTHER}"))
    assert edges(linked) == {(one, "output"), (two, "output")}
    assert len(linked.merged) == 1
    assert play.session(one) == play.session(two)


def test_a_tool_id_is_echoed_and_an_argument_spawns() -> None:
    play = Play()
    task = "Find out which of the barges carried slate, and who had signed for them."
    call = ToolCall("call_77", "delegate", f'{{"task": "{task}"}}')
    asked = user("Who signed?")
    first, _ = play.start(SYSTEM, asked)
    play.end(first, "", [call])
    child, spawned = play.run(Message("system", "You find things out."), user(task), text=OTHER)
    assert edges(spawned) == {(first, "spawned")}
    result = Message("tool", OTHER, tool_call_id="call_77")
    _, linked = play.start(SYSTEM, asked, said("", call), result)
    assert edges(linked) == {(first, "continues"), (first, "tool"), (child, "output")}


TASK = "Find out which of the barges carried slate, and who had signed for them."


@pytest.mark.parametrize(
    ("messages", "kind"),
    [
        ((user(TASK),), "spawned"),
        ((Message("system", "You find things out."), user(TASK), user("Begin.")), "spawned"),
        ((user("You find things out."), user(TASK)), "output"),
        ((Message("system", TASK), user("Begin.")), "output"),
    ],
)
def test_only_the_first_message_of_a_user_is_spawned(
    messages: tuple[Message, ...], kind: str
) -> None:
    play = Play()
    first, _ = play.start(SYSTEM, user("Who signed?"))
    play.end(first, "", [ToolCall("call_77", "delegate", json.dumps({"task": TASK}))])
    _, linked = play.start(*messages)
    assert edges(linked) == {(first, kind)}


def test_an_argument_in_a_conversation_that_goes_on_is_an_output() -> None:
    play = Play()
    first, _ = play.start(SYSTEM, user("Who signed?"))
    play.end(first, "", [ToolCall("call_77", "delegate", json.dumps({"task": TASK}))])
    other, _ = play.run(SYSTEM, said("Hello."), text=STORY)
    _, linked = play.start(SYSTEM, said("Hello."), said(STORY), user(TASK))
    assert edges(linked) == {(other, "continues"), (first, "output")}


@pytest.mark.parametrize("prompt", [STORY, f"Translate this:\n\n{STORY}"])
def test_what_was_written_beyond_the_horizon_is_read_by_nobody(prompt: str) -> None:
    for age, is_linked in ((90.0, True), (110.0, False)):
        play = Play(horizon_s=100)
        call, _ = play.run(user("Tell me a story."), text=STORY)
        play.now += age
        _, linked = play.start(user(prompt))
        assert edges(linked) == ({(call, "output")} if is_linked else set())


def test_a_conversation_continues_from_beyond_the_horizon() -> None:
    play = Play(horizon_s=100)
    call, _ = play.run(user("Tell me a story."), text=STORY)
    play.now += 1000.0
    _, linked = play.start(user("Tell me a story."), said(STORY), user("More."))
    assert edges(linked) == {(call, "continues")}


def test_several_tool_ids_narrow_down_whose_they_are() -> None:
    play = Play()

    def asks(*ids: str) -> str:
        call, _ = play.start(user(f"Look up {ids}."))
        play.end(call, "", [ToolCall(each, "search", "{}") for each in ids])
        return call

    def results(*ids: str) -> LinkedCall:
        return play.start(*(Message("tool", "Found.", tool_call_id=each) for each in ids))[1]

    # A server that counts anew gives ids again.
    first, second, third = asks("1", "2"), asks("2", "3"), asks("3", "1")
    for ids, call in ((("1", "2"), first), (("3", "2"), second), (("1", "3"), third)):
        linked = results(*ids)
        assert edges(linked) == {(call, "continues"), (call, "tool")}
        assert {link.confidence for link in linked.links} == {1.0}
    # An id that nobody minted says nothing.
    assert edges(results("1", "2", "none")) == {(first, "continues"), (first, "tool")}


def test_what_a_prompt_held_already_links_nothing() -> None:
    play = Play()
    play.run(user(f"Summarise: {STORY}"), text=f"The text says: {STORY}")
    _, linked = play.start(user(f"Translate: {STORY}"))
    assert linked.links == []


def test_short_answers_link_nothing_across_sessions() -> None:
    play = Play()
    play.run(user("Is it raining?"), text="Yes")
    _, linked = play.start(user("Yes"))
    assert linked.links == []


def test_each_of_equal_answers_is_continued_once() -> None:
    play = Play()
    turns = (SYSTEM, user("Begin."))
    calls = [play.start(*turns)[0] for _ in range(5)]
    for call in calls:
        play.end(call, STORY)
    found = [play.start(*turns, said(STORY), user("Go on."))[1] for _ in range(5)]
    assert {link.source for linked in found for link in linked.links} == set(calls)


def test_of_equal_answers_the_one_of_the_same_connection_counts() -> None:
    play = Play()
    turns = (SYSTEM, user("Begin."))
    calls = {peer: play.start(*turns, peer=peer)[0] for peer in "abcd"}
    for call in calls.values():
        play.end(call, STORY)
    for peer in "cadb":
        _, linked = play.start(*turns, said(STORY), user("Go on."), peer=peer)
        assert edges(linked) == {(calls[peer], "continues")}


def test_nothing_crosses_tenants() -> None:
    play = Play()
    play.run(user("Tell me a story."), text=STORY, tenant="a")
    _, linked = play.start(user(f"Check: {STORY}"), tenant="b")
    assert linked.links == []


def test_explicit_sessions_win_and_are_never_merged() -> None:
    play = Play()
    first, _ = play.start(user("Tell me a story."), session="mine")
    play.end(first, STORY)
    other, linked = play.start(user(f"Check: {STORY}"), session="yours")
    assert edges(linked) == {(first, "output")}
    assert (play.session(first), play.session(other)) == ("mine", "yours")
    third, _ = play.start(user("Tell me a story."), said(STORY), user("More."))
    assert play.session(third) == "mine"


def test_a_response_that_is_named_is_continued() -> None:
    play = Play()
    first, _ = play.run(user("Begin."), text="Yes")
    _, linked = play.start(user("Go on."), previous=f"r-{first}")
    assert edges(linked) == {(first, "continues")}


def test_completions_go_on_from_prompt_and_answer() -> None:
    play = Play()
    prompt = "Once upon a time there was a mill. " * 9
    first, _ = play.run(Message("prompt", prompt), text=STORY)
    _, linked = play.start(Message("prompt", f"{prompt}{STORY} Then, one day,"))
    assert edges(linked) == {(first, "continues")}


def test_memory_is_bounded() -> None:
    play = Play(max_calls=50, max_text=4_000, max_fingerprints=1 << 12)
    sizes = []
    for number in range(400):
        text = f"{number} {STORY} {number * 7919}"
        play.run(user(f"Story {number}?"), text=text)
        sizes.append(play.linker.size_bytes)
    assert max(sizes[200:]) <= sizes[200] + 200_000
    _, linked = play.start(user("Story 1?"), said(f"1 {STORY} 7919"), user("More."))
    assert linked.links == []


def test_of_equal_answers_the_one_that_nobody_has_read_counts() -> None:
    play = Play()
    opening = "Hi, I need to cancel my flight."
    play.run(Message("system", "You are Mia, a traveller."), text=opening)
    play.run(SYSTEM, user(opening), text=STORY)
    second, _ = play.run(Message("system", "You are Sofia, a traveller."), text=opening)
    _, linked = play.start(SYSTEM, user(opening))
    assert edges(linked) == {(second, "output")}


def test_an_answer_that_was_copied_is_read_where_the_session_is_known() -> None:
    play = Play()
    step = "Look up the list of all barges that lay at the quay, and who had loaded them."
    plan = f"We are asked about barges.\n{STORY}\nFirst step: {step}\nSecond step: answer."
    planner, _ = play.run(user("Which barge carried slate?"), text=plan)
    leader, _ = play.run(user("Which barge carried slate?"), user(plan), text=step)
    _, linked = play.start(Message("system", "You search."), user(plan), user(step))
    assert edges(linked) == {(planner, "output"), (leader, "output")}


def test_a_group_chat_of_equal_openings_stays_with_those_who_wrote_its_messages() -> None:
    play = Play()
    expert, task = Message("system", "You are an expert in barges."), user(f"Solve this. {OTHER}")
    other, _ = play.run(expert, task, text=f"The first says: {STORY}")
    mine, _ = play.run(Message("system", "You plan."), task, text=f"A plan. {STORY[::-1]}")
    _, linked = play.start(expert, task, user(f"A plan. {STORY[::-1]}"))
    assert edges(linked) == {(mine, "output")}
    assert play.session(mine) != play.session(other)


def test_one_of_many_equal_prompts_is_still_read_and_continued() -> None:
    play = Play()
    for _ in range(600):
        play.run(SYSTEM, user("Tell a story."), text=OTHER)
    last, linked = play.run(SYSTEM, user("Tell a story."), text=STORY)
    assert not linked.links
    _, linked = play.start(user(f"Translate this:\n\n{STORY}"))
    assert edges(linked) == {(last, "output")}
    _, linked = play.start(SYSTEM, user("Tell a story."), said(STORY), user("Go on."))
    assert edges(linked) == {(last, "continues")}


def test_prompts_of_calls_that_run_are_bounded() -> None:
    play = Play()
    text = " ".join(str(number * 7919) for number in range(50_000))
    for number in range(150):
        play.start(user(f"{number} {text}"))
    assert play.linker.size_bytes < 32_000_000


def test_a_call_that_failed_keeps_nothing_of_its_prompt() -> None:
    play = Play()
    linker = play.linker.tenant("t")
    play.run(user("Begin."), text="Begun.")
    before = linker.size_bytes
    for _ in range(3):
        call, _ = play.start(user(STORY))
        linker.failed(call)
    failed = linker.size_bytes - before
    play.start(user(STORY))
    assert linker.size_bytes - before - failed > failed / 3


def test_a_window_of_a_history_in_one_message_continues() -> None:
    play = Play()
    task = "Question: which of the barges at the quay carried slate, and who had signed for them?"
    lines: list[str] = []
    for number in range(6):
        told = "\n".join([task, *lines[-4:]])
        call, linked = play.start(SYSTEM, user(told))
        play.end(call, "", [ToolCall("", "look", f'{{"page": "{number * 37} of the book"}}')])
        if number:
            assert edges(linked) == {(f"c{number}", "continues")}
        lines += [
            f'Action: look {{"page": "{number * 37} of the book"}}',
            f"Observation: barge {number * 91} lay beside barge {number * 77}, loaded with slate "
            f"and barley for the {number * 13}th time, as the harbour master has written.",
        ]
    assert len({play.session(f"c{n}") for n in range(1, 7)}) == 1


def test_who_reads_the_subject_of_a_prompt_and_its_answer_does_not_continue_it() -> None:
    play = Play()
    first, _ = play.run(user(f"You review.\n{OTHER * 3}\nReview it."), text=STORY)
    _, linked = play.start(user(f"You revise.\n{OTHER * 3}\nReview it.\nThe review:\n{STORY}"))
    assert edges(linked) == {(first, "output")}


def test_a_connection_does_not_outweigh_what_has_been_continued_already() -> None:
    play = Play()
    turns = (SYSTEM, user("Begin."))
    calls = [play.start(*turns, peer="proxy")[0] for _ in range(2)]
    for call in calls:
        play.end(call, STORY)
    found = {
        link.source
        for peer in ("proxy", "proxy")
        for link in play.start(*turns, said(STORY), user("Go on."), peer=peer)[1].links
    }
    assert found == set(calls)


def test_all_of_a_long_answer_counts_though_its_pieces_are_common() -> None:
    play = Play()
    signs = {ord("a") + place: 0x1F600 + place for place in range(26)}
    phrases = "the heron sat still. the fox came down. the duck swam on. the reeds stood tall. "
    for number in range(5):
        play.run(user(f"Say {number}: {phrases.translate(signs)}"), text=str(number))
    story = f"{STORY} {phrases} {OTHER}".lower().translate(signs)
    first, _ = play.run(user("A story in signs."), text=story)
    _, linked = play.start(user(f"Translate: {json.dumps(story)}"))
    assert edges(linked) == {(first, "output")}


def test_a_revised_answer_behind_an_equal_beginning_is_its_revisers() -> None:
    play = Play()
    task = f"Task: write about the quay. {OTHER} Be brief, and say who lay where and when."
    draft = f"{STORY} {STORY[::-1]}"
    play.run(user(task), text=draft)
    revised = draft.replace("the fox came down to drink", "a badger walked by, quite unafraid")
    reviser, _ = play.run(user(f"{task}\nDraft:\n{draft}\nRewrite it."), text=revised)
    _, linked = play.start(user(f"{task}\nDraft:\n{revised}\nCriticise it."))
    assert edges(linked) == {(reviser, "output")}


def test_equal_choices_of_one_call_make_no_rivals_of_texts_that_resemble_them() -> None:
    play = Play()
    first, _ = play.start(user("Tell me two stories."))
    play.now += 1.0
    choices = (Choice(STORY, ()), Choice(STORY, ()))
    play.linker.tenant("t").answer(first, Answer("r", choices), play.now)
    play.run(user("Tell me a long story."), text=f"{OTHER} {STORY} {OTHER}")
    _, linked = play.start(user(STORY))
    assert [(link.source, link.confidence) for link in linked.links] == [(first, 0.95)]


@pytest.mark.parametrize(("pause_s", "number"), [(0.5, 0), (10.0, 1)])
def test_the_first_of_answers_at_one_time_is_continued_else_the_last(
    pause_s: float, number: int
) -> None:
    play = Play()
    turns = (SYSTEM, user("Begin."))
    calls = [play.start(*turns)[0] for _ in range(2)]
    for call in calls:
        play.end(call, STORY)
        play.now += 0.1 - 1.0
    play.now += pause_s - 1.0
    _, linked = play.start(*turns, said(STORY), user("Go on."))
    assert edges(linked) == {(calls[number], "continues")}


def test_equal_answers_to_a_flood_of_equal_prompts_take_no_more_memory() -> None:
    grown = []
    for text in (f"{OTHER} {STORY}" * 20, "Yes, there were seven of them."):
        play = Play()
        for _ in range(2):
            before = play.linker.size_bytes
            for _ in range(700):
                play.run(SYSTEM, user("Tell a story."), text=text)
        grown.append(play.linker.size_bytes - before)
    assert grown[0] < grown[1] + 1000


@pytest.mark.parametrize(("answer", "continues"), [("the expert", True), (STORY, False)])
def test_an_answer_that_is_left_out_is_a_decision(answer: str, continues: bool) -> None:
    play = Play()
    task = user(f"Choose who is to speak. {OTHER * 2}")
    chooser, _ = play.run(task, text=answer)
    line = "Nobody at the harbour had heard of any duck, nor of herons, reeds or foxes."
    writer, _ = play.run(Message("system", "You speak."), text=line)
    _, linked = play.start(task, user(line))
    assert ((chooser, "continues") in edges(linked)) == continues
    assert (writer, "output") in edges(linked)


@pytest.mark.parametrize(("answer", "continues"), [(STORY, True), ("Yes, of course.", False)])
def test_a_long_answer_tells_its_call_without_anything_before_it(
    answer: str, continues: bool
) -> None:
    play = Play()
    call, _ = play.run(SYSTEM, user("Tell me a story."), text=answer)
    _, linked = play.start(user("They asked for a tale."), said(answer), user("More."))
    assert edges(linked) == ({(call, "continues")} if continues else set())


@pytest.mark.parametrize(("role", "is_linked"), [("user", True), ("system", False)])
def test_a_short_passage_in_instructions_proves_nothing(role: str, is_linked: bool) -> None:
    play = Play()
    call, _ = play.run(user("Tell me a story."), text=STORY)
    _, linked = play.start(Message(role, f"Keep in mind that {STORY} Say so"), user("Begin."))
    assert edges(linked) == ({(call, "output")} if is_linked else set())


def test_records_with_few_words_link_nothing() -> None:
    play = Play()
    numbers = [str(number * 7919 + 10**6) for number in range(1, 60)]
    call, _ = play.run(user("List the numbers."), text=f"{' '.join(numbers)} and so on")
    _, linked = play.start(user(f"Add these up {' '.join(numbers[5:35])} please"))
    assert linked.links == []
    _, linked = play.start(user(f"Sum all of it {' '.join(numbers)} and so on"))
    assert edges(linked) == {(call, "output")}


@pytest.mark.parametrize(("answer", "is_linked"), [(TASK, False), (f"{STORY} {OTHER}", True)])
def test_conversations_are_merged_by_long_answers_only(answer: str, is_linked: bool) -> None:
    play = Play()
    other, _ = play.run(Message("system", "You plan."), text=answer)
    turns = [SYSTEM, user("Begin.")]
    last = ""
    for text in ("Seven barges are at the quay.", "Two of them carry slate."):
        last, _ = play.run(*turns, text=text)
        turns += [said(text), user("Go on.")]
    _, linked = play.start(*turns[:-1], user(answer))
    expected = {(last, "continues")} | ({(other, "output")} if is_linked else set())
    assert edges(linked) == expected
    assert (play.session(other) == play.session(last)) == is_linked


@pytest.mark.parametrize("is_known", [False, True])
def test_a_short_text_that_prompts_held_before_is_no_answer(is_known: bool) -> None:
    play = Play()
    text = "Count the barges at the quay."
    if is_known:
        play.run(user(text), text="There are seven.")
    call, _ = play.run(Message("system", "You plan."), text=text)
    _, linked = play.start(Message("system", "You act."), user(text))
    assert edges(linked) == (set() if is_known else {(call, "output")})


def test_a_summary_is_gone_on_from_where_a_conversation_begins_with_it() -> None:
    play = Play()
    question = user("Tell me a story.")
    play.run(SYSTEM, question, text=STORY)
    turns = (SYSTEM, question, said(STORY), user("Sum up all that was said."))
    told, _ = play.run(*turns, text=f"{OTHER} {STORY}")
    summary = user(f"This goes on from an earlier conversation:\n{OTHER} {STORY}")
    _, linked = play.start(SYSTEM, user("Good morning to you all."), summary)
    assert edges(linked) == {(told, "output")}


def test_of_sessions_that_turn_out_to_be_one_the_older_name_counts() -> None:
    for join in ((STORY, OTHER), (OTHER, STORY)):
        play = Play()
        older, _ = play.run(user("Summarise part one."), text=STORY)
        name = play.session(older)
        younger, _ = play.run(user("Summarise part two."), text=OTHER)
        play.start(user("Join these.\n\n" + "\n\n".join(join)))
        assert play.session(younger) == play.session(older) == name


def told(linked: LinkedCall) -> list[tuple[str, str, float]]:
    return [(link.source, link.kind, link.confidence) for link in linked.links]


@pytest.mark.parametrize(("count", "confidence"), [(1, 1.0), (2, 0.95)])
def test_how_sure_a_conversation_goes_on(count: int, confidence: float) -> None:
    """Whole, with an answer that stands in other turns, and as one text."""
    play = Play()
    begin = "Once upon a time there was a mill. " * 9
    for _ in range(count):
        play.run(SYSTEM, user("Tell me a story."), text=STORY)
    (link,) = told(play.start(SYSTEM, user("Tell me a story."), said(STORY), user("More."))[1])
    assert link[1:] == ("continues", confidence)
    # The oldest turn has gone, or was changed.
    for turns in ([user("Tell me a story.")], [user("Changed."), user("Tell me a story.")]):
        (link,) = told(play.start(*turns, said(STORY), user("On."))[1])
        assert link[1:] == ("continues", 0.95 if count == 1 else 0.85)
    for _ in range(count):
        play.run(Message("prompt", begin), text=OTHER)
    (link,) = told(play.start(Message("prompt", f"{begin}{OTHER} Then,"))[1])
    assert link[1:] == ("continues", 1.0 if count == 1 else 0.9)


@pytest.mark.parametrize("count", [1, 2])
def test_how_sure_a_conversation_goes_on_whose_answer_was_changed(count: int) -> None:
    play = Play()
    question = user(f"Tell me a story. {OTHER * 3}")
    for _ in range(count):
        play.run(question, text="Yes, I will.")
    edited = 0.9 if count == 1 else 0.8
    for answer in ("No, never at all.", "Yes, I will. A tool said: so be it."):
        (link,) = told(play.start(question, said(answer), user("More."))[1])
        assert link[1:] == ("continues", edited)
    # It was left out: short as it is it may have been a decision, if only one made it.
    links = told(play.start(question, user("More of that."))[1])
    assert links == ([("c1", "continues", 0.8)] if count == 1 else [])
    # Turns behind a whole exchange were left out.
    whole = (question, said("Yes, I will."))
    linked = play.start(*whole, said("And this nobody said."), user("More."))[1]
    assert {link[1:] for link in told(linked)} == {("continues", 0.9)}


@pytest.mark.parametrize("count", [1, 2])
def test_how_sure_the_result_of_a_tool_tells_its_call(count: int) -> None:
    play, tool = Play(), ToolCall("call_7", "look", "{}")
    for number in range(count):
        call, _ = play.start(SYSTEM, user(f"Look at {number}."))
        play.end(call, "", [tool])
    result = Message("tool", "A sail.", tool_call_id="call_7")
    last = f"c{count}"
    # Alone; behind the call in a history that nobody knows; in the history as it was.
    sure = 1.0 if count == 1 else 0.85
    assert told(play.start(result)[1])[0][1:] == ("continues", sure)
    assert told(play.start(result)[1])[1][1:] == ("tool", 1.0)
    (found, echoed) = told(play.start(user("What?"), said("", tool), result)[1])
    assert (found[1:], echoed[1:]) == (("continues", sure), ("tool", 1.0))
    (found, echoed) = told(
        play.start(SYSTEM, user(f"Look at {count - 1}."), said("", tool), result)[1]
    )
    assert (found, echoed) == ((last, "continues", 1.0), (last, "tool", 1.0))


def test_a_named_response_is_certain_and_a_summary_is_not() -> None:
    play = Play()
    first, _ = play.start(user("Begin."))
    play.end(first, "Yes", [ToolCall("call_7", "look", "{}")])
    assert told(play.start(user("Go on."), previous=f"r-{first}")[1]) == [(first, "continues", 1.0)]
    result = Message("tool", "A sail.", tool_call_id="call_7")
    assert told(play.start(result, previous=f"r-{first}")[1]) == [
        (first, "continues", 1.0), (first, "tool", 1.0)
    ]  # fmt: skip
    assert told(play.start(user("Go on."), previous="r-none")[1]) == []
    turns = (SYSTEM, user("Tell me a story."))
    play.run(*turns, text=STORY)
    call, _ = play.run(*turns, said(STORY), user("Sum it up."), text=f"{OTHER} {STORY}")
    begin = user(f"This goes on from an earlier conversation:\n{OTHER} {STORY}")
    assert (call, "continues", 0.7) in told(play.start(SYSTEM, begin, user("Go on."))[1])


@pytest.mark.parametrize(
    ("answer", "prompt", "confidence"),
    [
        # All of it is the text; a part of it; a part of which another session wrote as much.
        (STORY, STORY, 0.95),
        ("Seven barges lay there.", "Seven barges lay there.", None),
        (STORY, f"Translate: {STORY} Thank you.", 0.9),
        (f"{OTHER} {STORY}", f"Translate: {STORY} Thank you.", 0.9),
        (f"{OTHER} {STORY}", f"Translate: {STORY[:30]} Thank you.", None),
    ],
)
def test_how_sure_a_text_was_read(answer: str, prompt: str, confidence: float | None) -> None:
    play = Play()
    call, _ = play.run(user("Write."), text=answer)
    assert told(play.start(user(prompt))[1]) == (
        [] if confidence is None else [(call, "output", confidence)]
    )
    # In a conversation of the same session less is enough, and more is certain.
    _, linked = play.start(user("Write."), said(answer), user(prompt), user("Go on."))
    assert told(linked)[0] == (call, "continues", 1.0)


def test_of_rivals_that_wrote_the_same_the_unread_one_is_less_sure() -> None:
    play = Play()
    for number in range(2):
        play.run(user(f"Write {number}."), text=STORY)
    assert told(play.start(user(STORY))[1]) == [("c2", "output", 0.8)]
    # The other one has not been read yet, and then both have been.
    assert told(play.start(user(STORY))[1]) == [("c1", "output", 0.95)]


def test_what_a_session_wrote_itself_needs_less_evidence() -> None:
    play = Play()
    for text, confidence in ((STORY, 0.98), ("Yes, seven.", 0.9)):
        first, _ = play.start(user("Begin."), session="mine")
        play.end(first, text)
        _, linked = play.start(user(text), user("Is that so?"), session="mine")
        assert told(linked) == [(first, "output", confidence)]
        _, linked = play.start(user(text), user("Is it?"), session="other")
        assert bool(linked.links) == (text == STORY)


def test_evidence_is_where_the_text_stands() -> None:
    play = Play()
    answer = f"Here it is. {STORY} That was it."
    play.run(user("Tell me a story."), text=answer)
    prompt = f"Translate this: {STORY}"
    _, linked = play.start(SYSTEM, user("Hm."), user(prompt))
    (link,) = linked.links
    assert link.evidence is not None
    message, start, end, source_start, source_end = link.evidence
    assert message == 2
    for passage in (prompt[start:end], answer[source_start:source_end]):
        assert STORY[:-1] in passage
        assert len(passage) < len(STORY) + 5


def test_a_text_that_was_put_before_known_turns_is_looked_at() -> None:
    """Agents put what they remember of other conversations there."""
    play = Play()
    writer, _ = play.run(Message("system", "You plan."), text=f"{STORY} {OTHER}")
    question = user("How many barges are there?")
    first, _ = play.run(SYSTEM, question, text="Seven barges are at the quay, as I said before.")
    answer = said("Seven barges are at the quay, as I said before.")
    memory = user(f"Remember this: {STORY} {OTHER}")
    _, linked = play.start(SYSTEM, memory, question, answer, user("And now?"))
    assert edges(linked) == {(first, "continues"), (writer, "output")}


@pytest.mark.parametrize(("count", "confidence"), [(1, 0.9), (2, 0.8)])
def test_how_sure_a_window_in_one_message_goes_on(count: int, confidence: float) -> None:
    """The window of one agent, or of two that came to the same; one that resembles it less."""
    play = Play()
    task = "Question: which of the barges at the quay carried slate, and who had signed for them?"
    lines = [
        f"Observation: barge {number * 91} lay beside barge {number * 77}, loaded with slate and "
        f"barley for the {number * 13}th time, as the harbour master has written down himself."
        for number in range(12)
    ]
    windows = [(lines[:8], 3), (lines[2:10], count)]
    last = ""
    for shown, times in windows:
        for _ in range(times):
            last, _ = play.start(SYSTEM, user("\n".join([task, *shown])))
            play.end(last, f"Action: look at {shown[-1][-60:]}")
    told_now = f"Action: look at {lines[9][-60:]}"
    prompt = user("\n".join([task, *lines[4:10], told_now, lines[10]]))
    links = [each for each in told(play.start(SYSTEM, prompt)[1]) if each[1] == "continues"]
    assert links == [(last if count == 1 else links[0][0], "continues", confidence)]
    assert links[0][0] in {f"c{number}" for number in range(4, 4 + count)}
