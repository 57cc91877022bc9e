"""Workloads made to mislead a linker, each of one difficulty.

Where truth is subtle it is said at the workload. "No edge" means: whatever is said is wrong.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterable

from parrot_bench.applications.conversations import AGENT_RULES
from parrot_bench.linking.script import (
    COMPLETIONS,
    PERSON_S,
    RESPONSES,
    TOOL_S,
    Chain,
    Kinds,
    Message,
    Script,
    answer_id,
    assistant,
    chat_answer,
    system,
    text_answer,
    tool_call,
    tool_result,
    user,
)
from parrot_bench.linking.text import CLOSINGS, HEADINGS, OPENINGS, Text

_ASSISTANT = system("You are a helpful assistant.")
_TRIALS = 5


def equal_trials(script: Script, number: int) -> None:
    """Five equal tasks in the same moment, equal answers in the first two turns; ids are minted."""
    _trial(script, number, with_ids=True)


def equal_trials_without_ids(script: Script, number: int) -> None:
    """Run `equal_trials` in plain text.

    Nothing tells which of five equal first calls a trial continues. The column "or
    equal" counts those as right.
    """
    _trial(script, number, with_ids=False)


def _trial(script: Script, number: int, *, with_ids: bool) -> None:
    common, own = Text(f"trial {number // _TRIALS}"), Text(f"trial {number // _TRIALS} {number}")
    script.task = str(number // _TRIALS)
    chain = Chain(script, [system(AGENT_RULES), user(common.prose(200))])
    for turn in range(6):
        text = common if turn < 2 else own
        said, result = text.answer(), text.prose(400)
        if with_ids:
            call = own.identifier()
            chain.call(tool_call(call, "search", '{"query": "next"}', said), pause_s=TOOL_S)
            chain.hear(tool_result(call, result))
        else:
            chain.call(said, pause_s=TOOL_S)
            chain.hear(user(f"Observation: {result}"))
    chain.call(own.answer(), pause_s=TOOL_S)


def shared_documents(script: Script, number: int) -> None:
    """Retrieved documents of a small pool in all prompts; answers quote them.

    A quotation links nothing: the document brought it. The second turn quotes the same document.
    """
    text = Text(f"rag {number}")
    document = Text(f"document {number % 7}").prose(3000)
    lines = document.replace("\n\n", " ").split(". ")
    chain = Chain(
        script, [_ASSISTANT, user(f"Use this:\n{document}\n\nQuestion: {text.sentence()}")]
    )
    for _ in range(2):
        quote = ". ".join(lines[(start := text.draw.randrange(len(lines) - 3)) : start + 3])
        chain.call(f'{text.answer(150)}\n> "{quote}."\n\n{text.sentence()}', pause_s=PERSON_S)
        other = Text(f"document {text.draw.randrange(7)}").prose(3000)
        chain.hear(user(f"Also consider:\n{other}\n\n{text.sentence()}"))
    chain.call(text.answer(), pause_s=PERSON_S)


def boilerplate(script: Script, number: int) -> None:
    """Every answer and many prompts are full of phrases that all share."""
    text = Text(f"boilerplate {number}", common=2.0)
    chain = Chain(script, [_ASSISTANT])
    for _ in range(4):
        phrases = [text.draw.choice(pool) for pool in (OPENINGS, CLOSINGS, HEADINGS)]
        chain.hear(user(f"{phrases[0]}\n{text.sentence()}\n{phrases[1]}\n{phrases[2]}"))
        chain.call(text.answer(text.draw.choice((20, 300))), pause_s=PERSON_S)


def short_answers(script: Script, number: int) -> None:
    """Classifiers whose few answers stand in the next prompts too; no edge but in conversations."""
    text = Text(f"short {number}")
    answer = text.draw.choice(("Yes", "No", "42", "Alice", "positive", "I don't know."))
    if number % 2:
        script.ask(f"Is this positive? Answer Yes or No.\n{text.prose(200)}", answer)
        return
    chain = Chain(script, [_ASSISTANT])
    for _ in range(4):
        chain.hear(user(f"{text.sentence()} Yes or no?"))
        chain.call(text.draw.choice(("Yes", "No", "42", "Alice")), pause_s=PERSON_S)


def paraphrase(script: Script, number: int) -> None:
    """One session's answer is another's question in other words: no edge."""
    said = Text(f"paraphrase {number // 2}").prose(500)
    text = Text(f"paraphrase of {number}")
    if number % 2:
        script.ask(f"Improve the style:\n{text.reworded(said)}", text.answer())
    else:
        script.ask(f"Write about {text.name()}.", said)


def two_tenants(script: Script, number: int) -> None:
    """Two tenants with the same texts, word for word, at the same time."""
    text = Text(f"tenants {number // 2}")
    script.tenant, script.task = f"tenant-{number % 2}", str(number // 2)
    chain = _chat(script, text)
    answer = chain.messages[-1]["content"]
    script.ask(f"Translate into French:\n{answer}", text.answer(), reads=[str(chain.last)])


def _chat(script: Script, text: Text, turns: int = 4) -> Chain:
    chain = Chain(script, [_ASSISTANT])
    for _ in range(turns):
        chain.hear(user(text.prose(text.draw.choice((40, 200)))))
        chain.call(text.answer(), pause_s=PERSON_S)
    return chain


def windows(script: Script, number: int) -> None:
    """Only the system prompt and the last few messages of the history are sent.

    The call before is the source; those before that are carried.
    """
    text, size = Text(f"windows {number}"), (3, 5, 8)[number % 3]
    chain = Chain(script, [system(AGENT_RULES), user(text.prose(100))])
    for _ in range(10):
        kept = chain.messages[:2] + chain.messages[2:][-size:]
        chain.call(text.answer(), messages=kept, pause_s=TOOL_S)
        chain.hear(user(f"Observation: {text.prose(200)}"))


def elided_outputs(script: Script, number: int) -> None:
    """Old outputs of tools are replaced by a line; tool ids are `call_1`, … in all sessions."""
    text = Text(f"elided {number}")
    chain = Chain(script, [system(AGENT_RULES), user(text.prose(100))])
    for turn in range(8):
        sent = [
            {**message, "content": "Old environment output: (12 lines omitted)"}
            if message["role"] == "tool" and at < len(chain.messages) - 4
            else message
            for at, message in enumerate(chain.messages)
        ]
        said = text.answer(150) if turn % 2 else None
        call = tool_call(f"call_{turn}", "bash", json.dumps({"command": text.prose(60)}), said)
        chain.call(call, messages=sent, pause_s=TOOL_S)
        chain.hear(tool_result(f"call_{turn}", text.prose(500)))


def edited_turns(script: Script, number: int) -> None:
    """The last turn is asked again with other words, then an old answer is edited.

    An edit continues the call before the edited turn; the call whose turn is dropped is carried.
    """
    text = Text(f"edited {number}")
    chain = _chat(script, text, 2)
    before, history = chain.last, chain.messages
    chain.hear(user(text.prose(150)))
    dropped = chain.call(text.answer(), pause_s=PERSON_S)
    chain.messages, chain.last = [*history, user(text.prose(150))], before
    chain.call(text.answer(), pause_s=PERSON_S, after=[dropped], neutral=[dropped])
    shortened = {**history[2], "content": history[2]["content"][:40].strip() + " [edited]"}
    chain.messages = [shortened if m is history[2] else m for m in chain.messages]
    for _ in range(2):
        chain.hear(user(text.prose(80)))
        chain.call(text.answer(), pause_s=PERSON_S)


def summaries(script: Script, number: int) -> None:
    """A known call summarises the conversation; the summary is the next first message.

    The summarising call gets the history as messages (it continues, and is continued) or as one
    text (it reads the last answer; older ones are neutral). The next call reads the summary; the
    old chain is neutral.
    """
    text = Text(f"summaries {number}")
    chain = _chat(script, text, 4)
    old, last, summary = list(script.calls), str(chain.last), text.answer(700)
    instruction = user("Summarise the conversation so far, with all facts, for a new context.")
    if number % 2:
        chain.hear(instruction)
        made = chain.call(summary)
    else:
        lines = "\n".join(f"{m['role'].upper()}: {m['content']}" for m in chain.messages)
        prompt = user(f"{instruction['content']}\n<conversation>\n{lines}\n</conversation>")
        made = script.chat([prompt], summary, edges={last: ("output",)}, neutral=old)
    compacted = [_ASSISTANT, user(f"This session continues an earlier one. Summary:\n{summary}")]
    kinds: Kinds = ("continues", "output") if number % 2 else ("output",)
    chain = Chain(script, [*compacted, user(text.prose(80))])
    chain.call(text.answer(), edges={made: kinds}, neutral=old, pause_s=PERSON_S)
    chain.hear(user(text.prose(80)))
    chain.call(text.answer(), pause_s=PERSON_S)


_FORMATS: tuple[Callable[[str], str], ...] = (
    lambda text: json.dumps({"result": text, "ok": True}),
    lambda text: json.dumps(json.dumps([{"text": text}])),
    lambda text: textwrap.indent(text, "        "),
    lambda text: "\n".join(f"> {line}" for line in text.splitlines()),
    lambda text: "\n".join(f"* {line.strip()}" for line in text.replace(". ", ".\n").split("\n")),
    lambda text: f"```text\n{text}\n```",
    lambda text: f"{text[: len(text) * 6 // 10]}… [truncated]",
    lambda text: textwrap.fill(" ".join(text.split()), 60),
    lambda text: text.replace("'", "’").replace('"', "”").replace("-", "–"),
    lambda text: f'"{text.strip()}"'.upper() if len(text) < 300 else f"<doc>{text[100:]}</doc>",
)


def reformatted(script: Script, number: int) -> None:
    """An answer of 200 characters or more in another format, in another agent's prompt or tool."""
    text, change = Text(f"formats {number}"), _FORMATS[number % len(_FORMATS)]
    answer = text.answer(text.draw.randint(200, 1500))
    source = script.ask(f"Explain: {text.sentence()}", answer)
    if number // len(_FORMATS) % 2:
        script.ask(
            f"Check this text:\n{change(answer)}\nIs it right?", text.answer(), reads=[source]
        )
        return
    call = text.identifier()
    chain = Chain(script, [system(AGENT_RULES), user(text.prose(80))])
    chain.call(tool_call(call, "read", "{}"), after=[source])
    chain.hear(tool_result(call, change(answer)), source)
    chain.call(text.answer())


def code_cut(script: Script, number: int) -> None:
    """Code is cut out of an answer's prose, stored, shown with line numbers, partly.

    The reader of a file that a second call has revised reads the second; the first is an ancestor.
    """
    text = Text(f"code {number}")
    code = text.code(5)
    source = script.ask(
        f"Write a program: {text.prose(100)}",
        f"{text.answer(100)}\n```python\n{code}\n```\n{text.answer(100)}",
    )
    shown = code.splitlines()
    if number % 3 == 0:
        shown = [f"{line:4d} | {content}" for line, content in enumerate(shown, 1)]
    elif number % 3 == 1:
        shown = shown[len(shown) // 4 : -len(shown) // 4]
    else:
        shown = [content.replace("    ", "\t") for content in shown]
    listing = "\n".join(shown)
    script.ask(f"File main.py:\n{listing}\n\nWhat is wrong?", text.answer(), reads=[source])


def sub_agents(script: Script, number: int) -> None:
    """An orchestrator's tool calls start agents; their last answers come back as tool results."""
    text = Text(f"sub {number}")
    chain = Chain(script, [system("You are an orchestrator of agents."), user(text.prose(200))])
    for _ in range(2):
        tasks = [(text.identifier(), text.prose(text.draw.choice((60, 400)))) for _ in range(3)]
        calls = [
            tool_call(name, "task", json.dumps({"description": "part", "prompt": task}))
            for name, task in tasks
        ]
        made = {**calls[0], "tool_calls": [call["tool_calls"][0] for call in calls]}
        spawner = chain.call(made)
        for name, task in tasks:
            agent = Chain(script, [system(AGENT_RULES), user(task)])
            spawned: dict[str, Kinds] = {spawner: ("spawned",)}
            for step in range(text.draw.randint(0, 3)):
                inner = text.identifier()
                call = tool_call(inner, "search", json.dumps({"q": text.sentence()}))
                agent.call(call, edges=spawned if not step else {}, pause_s=TOOL_S)
                agent.hear(tool_result(inner, text.prose(300)))
            answer = text.answer()
            end = agent.call(answer, edges={} if agent.last else spawned, pause_s=TOOL_S)
            chain.hear(tool_result(name, answer), end)
    chain.call(text.answer())


def long_pauses(script: Script, number: int) -> None:
    """A person comes back after hours; every other time the client sends a window."""
    text = Text(f"pauses {number}")
    chain = Chain(script, [_ASSISTANT])
    for _ in range(5):
        chain.hear(user(text.prose(100)))
        sent = chain.messages[:1] + chain.messages[1:][-5 if number % 2 else 0 :]
        chain.call(text.answer(), messages=sent, pause_s=(7200.0, 18_000.0))


def languages(script: Script, number: int) -> None:
    """Chinese without blanks, Cyrillic, or emoji: a chat, and an answer that another call reads."""
    text, said = Text(f"languages {number}"), _LANGUAGES[number % len(_LANGUAGES)]
    chain, last = Chain(script, [_ASSISTANT]), ""
    for _ in range(3):
        chain.hear(user(said(text.prose(100))))
        last = said(text.prose(300))
        chain.call(last, pause_s=PERSON_S)
    quoted = json.dumps({"text": last}) if number % 2 else last
    script.ask(f"Translate:\n{quoted}", text.answer(), reads=[str(chain.last)])


_LANGUAGES: tuple[Callable[[str], str], ...] = (
    lambda text: "".join(_chinese(word) for word in text.split()),
    lambda text: text.translate({ord("a") + i: 0x430 + i for i in range(26)}),
    lambda text: text.translate({ord("a") + i: 0x1F600 + i for i in range(26)}),
)


def _chinese(word: str) -> str:
    first, second = divmod(sum(ord(c) * 31**i for i, c in enumerate(word)) % 4_000_000, 2000)
    return f"{chr(0x4E00 + first)}{chr(0x4E00 + second)}" + "，" * word.endswith((".", ","))


def retries(script: Script, number: int) -> None:
    """A call is sent again after a time-out, or after an answer was lost on its way.

    Both attempts continue the call before; from the first to the second attempt there is nothing.
    """
    text = Text(f"retries {number}")
    chain = _chat(script, text, 2)
    chain.hear(user(text.prose(60)))
    edges = {str(chain.last): chain.kinds}
    lost = None if number % 2 else text.answer()
    first = script.chat(chain.messages, lost, edges=edges, pause_s=PERSON_S)
    chain.call(text.answer(), neutral=[first], pause_s=(90.0, 120.0))
    for _ in range(2):
        chain.hear(user(text.prose(60)))
        chain.call(text.answer(), pause_s=PERSON_S)


def best_of(script: Script, number: int) -> None:
    """One prompt sent four times at once; a judge reads all answers; the best is carried on."""
    text = Text(f"best {number}")
    messages = [_ASSISTANT, user(text.prose(150))]
    answers = {}
    for _ in range(4):
        answer = text.answer(500)
        answers[script.chat(messages, answer)] = answer
    listing = "\n\n".join(f"[{i}]\n{answer}" for i, answer in enumerate(answers.values()))
    judge = script.ask(f"Which is best?\n{listing}", "[2]", reads=answers)
    best = list(answers)[2]
    chain = Chain(script, [*messages, {"role": "assistant", "content": answers[best]}], best)
    chain.hear(user(text.prose(60)))
    chain.call(text.answer(), after=[judge])


def choices(script: Script, number: int) -> None:
    """One call with four choices; a judge reads them all; one of them is carried on."""
    text = Text(f"choices {number}")
    messages, answers = [_ASSISTANT, user(text.prose(150))], [text.answer(500) for _ in range(4)]
    listed = [chat_answer(answer)["choices"][0] for answer in answers]
    numbered = [{**choice, "index": index} for index, choice in enumerate(listed)]
    answer = {**chat_answer(answers[0]), "choices": numbered}
    source = script.add({"model": "model", "n": 4, "messages": messages}, answer)
    judge = script.ask("Which is best?\n" + "\n\n".join(answers), "The third.", reads=[source])
    chain = Chain(script, [*messages, assistant(answers[2])], source)
    chain.hear(user(text.prose(60)))
    chain.call(text.answer(), after=[judge])


def branching(script: Script, number: int) -> None:
    """A tree search: two continuations of every answer, three levels deep."""
    text = Text(f"branching {number}")
    level = [Chain(script, [system(AGENT_RULES), user(text.prose(150))])]
    level[0].call(text.answer(300))
    for _ in range(3):
        below = []
        for chain in level:
            for thought in ("Continue with the most likely step.", "Try something else."):
                child = Chain(script, [*chain.messages, user(thought)], chain.last)
                child.call(text.answer(300))
                below.append(child)
        level = below


def text_completions(script: Script, number: int) -> None:
    """Completions whose prompt is the prompt before, its answer and more."""
    text = Text(f"completions {number}")
    prompt, last = f"{AGENT_RULES}\nQuestion: {text.sentence()}\nThought:", None
    for _ in range(6):
        answer = text.answer(200)
        last = _complete(script, prompt, answer, last)
        prompt += f"{answer}\nObservation: {text.prose(200)}\nThought:"


def token_completions(script: Script, number: int) -> None:
    """The same in token ids; only the prompt before is known to stand in the prompt."""
    text = Text(f"tokens {number}")
    tokens, last = _tokens(f"{AGENT_RULES} Question: {text.sentence()}"), None
    for _ in range(6):
        answer = text.answer(200)
        last = _complete(script, tokens, answer, last)
        tokens = [*tokens, *_tokens(answer), *_tokens(text.prose(200))]


def _complete(script: Script, prompt: str | list[int], answer: str, last: str | None) -> str:
    request = {"model": "model", "prompt": prompt, "max_tokens": 500}
    edges: dict[str, Kinds] = {last: ("continues",)} if last else {}
    return script.add(request, text_answer(answer), path=COMPLETIONS, edges=edges, pause_s=TOOL_S)


def _tokens(text: str) -> list[int]:
    return [sum(map(ord, word)) * 31 % 50_000 for word in text.split()]


def responses(script: Script, number: int) -> None:
    """Agents over the responses API; every third sends new items and `previous_response_id`."""
    text = Text(f"responses {number}")
    question = {"type": "input_text", "text": text.prose(100)}
    items: list[Message] = [{"role": "user", "content": [question]}]
    last: str | None = None
    for turn in range(5):
        name, said = text.identifier(), text.answer()
        call = {"type": "function_call", "call_id": name, "name": "look", "arguments": "{}"}
        parts = [{"type": "output_text", "text": said, "annotations": []}]
        message = {"type": "message", "role": "assistant", "content": parts}
        output = [message] if turn == 4 else [call]
        edges: dict[str, Kinds] = {last: ("continues", "tool")} if last else {}
        request = {"model": "model", "instructions": AGENT_RULES, "input": items}
        if last and number % 3 == 0:
            request |= {"input": items[-1:], "previous_response_id": answer_id(last)}
        answer = {"object": "response", "model": "model", "status": "completed", "output": output}
        last = script.add(request, answer, path=RESPONSES, edges=edges, pause_s=TOOL_S)
        result = {"type": "function_call_output", "call_id": name, "output": text.prose(300)}
        items = [*items, call, result]


def echoed_otherwise(script: Script, number: int) -> None:
    """Clients that send history back changed: as parts, stripped, without reasoning, other JSON."""
    text = Text(f"echoed {number}")
    chain = Chain(script, [_ASSISTANT, user(text.prose(100))])
    for _ in range(4):
        name, said = text.identifier(), f" {text.answer()}\n"
        arguments = '{"query":"next","limit":5}'
        sent = [_echo(message, number) for message in chain.messages]
        thought = f"<think>{text.prose(300)}</think>\n{said}" if number % 4 == 2 else said
        chain.call(tool_call(name, "search", arguments, thought), messages=sent, pause_s=TOOL_S)
        chain.hear(tool_result(name, text.prose(200)))


def _echo(message: Message, number: int) -> Message:
    content = str(message["content"])
    if message["role"] != "assistant":
        return message
    if number % 4 == 0:
        return {**message, "content": [{"type": "text", "text": content}]}
    if number % 4 == 1:
        return {**message, "content": content.strip()}
    if number % 4 == 2:
        return {**message, "content": content.rpartition("</think>")[2].strip()}
    changed: Message = json.loads(json.dumps(message))
    changed["tool_calls"][0]["function"]["arguments"] = '{"query": "next", "limit": 5}'
    return {**changed, "content": content or None}


def scratchpads(script: Script, number: int) -> None:
    """The history is one message: the question and the last steps; answers are thoughts or JSON."""
    text, kept = Text(f"scratchpads {number}"), (4, 6, 100)[number % 3]
    question, steps = f"Question: {text.sentence()} {text.sentence()}", list[str]()
    last: str | None = None
    for turn in range(8):
        said = text.answer(120) if turn % 2 else json.dumps({"tool": "look", "for": text.prose(40)})
        prompt = user("\n".join([question, *steps[-kept:], "Thought:"]))
        edges: dict[str, Kinds] = {last: ("continues",)} if last else {}
        last = script.chat([system(AGENT_RULES), prompt], said, edges=edges, pause_s=TOOL_S)
        steps += [f"Thought: {said}", f"Observation: {text.prose(200)}"]


def group_chats(script: Script, number: int) -> None:
    """Three authors, each a client that hears the others; five groups discuss one question, which
    their answers repeat."""
    text = Text(f"group {number}")
    task = f"Solve this task: {Text(f'group task {number // 5}').prose(400)}"
    members = [
        Chain(script, [system(f"You are {name}, one of a team."), user(task)])
        for name in ("the planner", "the expert", "the critic")
    ]
    for turn in range(9):
        said = text.answer(text.draw.choice((60, 400)))
        said = f"We work on: {task}\n\n{said}" if turn % 4 == 0 else said
        speaker = members[turn % 3]
        call = speaker.call(said)
        for member in members:
            if member is not speaker:
                member.hear(user(said), call)


def chosen_speakers(script: Script, number: int) -> None:
    """A group chat whose next speaker a model chooses: it reads the transcript between two copies
    of one instruction, and answers with a name that stands in them."""
    text = Text(f"speakers {number}")
    names = ["PlanningAgent", "WebSearchAgent", "DataAnalystAgent"]
    task = text.prose(150)
    members = {
        name: Chain(script, [system(f"You are {name}, one of a team."), user(task)])
        for name in names
    }
    choose = f"Then name the next one of {names} to speak. Only return the name."
    transcript, heard, chooser = [f"user: {task}"], list[str](), ""
    for turn in range(6):
        name = names[turn % 3]
        lines = "\n\n".join(transcript)
        prompt = f"Read the following conversation. {choose}\n\n{lines}\n\nRead the above. {choose}"
        edges: dict[str, Kinds] = {chooser: ("continues",)} if chooser else {}
        edges |= dict.fromkeys(heard[-1:], ("output",))
        chooser = script.chat([user(prompt)], name, edges=edges, neutral=heard)
        said = text.answer(text.draw.choice((80, 400)))
        call = members[name].call(said, after=[chooser])
        for other in names:
            if other != name:
                members[other].hear(user(said), call)
        transcript.append(f"{name}: {said}")
        heard.append(call)


def parts(script: Script, number: int) -> None:
    """One part of an answer is what the next call is about: a string of JSON, an item of a list,
    what stands between tags; or some sentences, beside a document that both have and both quote."""
    text = Text(f"parts {number}")
    part, others = text.prose(80), [text.prose(80) for _ in range(4)]
    if number % 4 == 3:
        document = Text(f"parts document {number % 9}").prose(2500)
        quote = document[200:450]
        answer = f'{others[0]} {others[1]} It says "{quote}". {others[2]} {others[3]}'
        prompt = f"Use the context.\n{document}\n\nQuestion: {text.sentence()}"
        source = script.ask(prompt, answer)
        claim = f'"{quote}". {others[2]} {others[3]}'
        script.ask(f"Source:\n{document}\n\nClaim: {claim}\n\nYes or no?", "yes", reads=[source])
        return
    listed = [*others[:2], part, *others[2:]]
    answer = (
        json.dumps({"steps": listed, "tone": "formal"}, indent=2),
        "\n".join(f"{place}. {each}" for place, each in enumerate(listed, 1)),
        "\n".join(f"<note>{each}</note>" for each in listed),
    )[number % 4]
    source = script.ask(f"Plan an article about {text.name()}.", answer)
    script.ask(f"Do this in a formal tone, in a few words.\n{part}", text.answer(), reads=[source])


def supervisors(script: Script, number: int) -> None:
    """A supervisor hands over by a tool call; the agent gets the history under instructions of its
    own, and its answer comes back before messages that no model has written."""
    text = Text(f"supervisor {number}")
    chain = Chain(script, [system("You are the supervisor of a team."), user(text.prose(100))])
    for name in ("researcher", "coder", "researcher"):
        handover, back = text.identifier(), text.identifier()
        call = chain.call(tool_call(handover, f"transfer_to_{name}", "{}"))
        chain.hear(tool_result(handover, f"Successfully transferred to {name}"))
        agent = Chain(script, [system(f"You are a {name}."), *chain.messages[1:]], call)
        agent.kinds = ("continues", "tool")
        earlier = [each for each in script.calls if each != call]
        for _ in range(text.draw.randint(0, 2)):
            found = text.identifier()
            agent.call(tool_call(found, "search", "{}"), neutral=earlier, pause_s=TOOL_S)
            agent.hear(tool_result(found, text.prose(300)))
        answer = text.answer()
        end = agent.call(answer, neutral=earlier)
        chain.hear(assistant(answer), end)
        chain.hear(tool_call(back, "transfer_back", "{}", "Transferring back to supervisor"))
        chain.hear(tool_result(back, "Successfully transferred back"))
        chain.kinds = ("continues", "tool")
    chain.call(text.answer())


ADVERSARIAL: dict[str, Callable[[Script, int], None]] = {
    recipe.__name__: recipe
    for recipe in (
        equal_trials,
        equal_trials_without_ids,
        shared_documents,
        boilerplate,
        short_answers,
        paraphrase,
        two_tenants,
        windows,
        elided_outputs,
        edited_turns,
        summaries,
        reformatted,
        code_cut,
        sub_agents,
        long_pauses,
        languages,
        retries,
        best_of,
        choices,
        branching,
        text_completions,
        token_completions,
        responses,
        echoed_otherwise,
        scratchpads,
        group_chats,
        chosen_speakers,
        parts,
        supervisors,
    )
}
#: Those in which nothing tells which of several sources is the true one.
UNDECIDABLE = ("equal_trials_without_ids",)
#: Those whose sessions of one task start in the same moment.
TOGETHER = ("equal_trials", "equal_trials_without_ids", "two_tenants")


def adversarial(name: str, instances: Iterable[int]) -> list[Script]:
    """Sessions of one workload."""
    scripts = []
    for number in instances:
        script = Script(f"{name}-{number}", task=str(number))
        ADVERSARIAL[name](script, number)
        scripts.append(script)
    return scripts
