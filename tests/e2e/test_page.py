"""The live page in a real browser, against a real gateway behind a key.

Skipped where there is no playwright or no Chromium (`PARROT_CHROMIUM`, or one in the path). The
check by axe needs `axe.min.js` of axe-core (`PARROT_AXE`, or in `node_modules`). Pictures of all
views are written to the folder `PARROT_SCREENSHOTS`, if it is set.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from harness.processes import API_KEY, DEMO_MODEL, GatewayProcess, clean_environment

playwright = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed (the extra `browser`)"
)

CHROMIUM = os.environ.get("PARROT_CHROMIUM") or shutil.which("chromium") or shutil.which("chrome")
AXE = Path(os.environ.get("PARROT_AXE", "node_modules/axe-core/axe.min.js"))
SESSION = "page-tale"
VIEWS = ("sessions", "engines", "scheduler", "tenants", "playground", "compare")

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium (PARROT_CHROMIUM)")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as running:
        # Where tests run as root, as in containers, its sandbox cannot be set up.
        chromium = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def client(demo: GatewayProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{demo.root}/v1", api_key=API_KEY, max_retries=0)


def write(client: openai.OpenAI, prompt: str, **parrot: Any) -> str:
    answer = client.completions.create(
        model=DEMO_MODEL, prompt=prompt, max_tokens=8, extra_body={"parrot": parrot}
    )
    return answer.choices[0].text


def tell(client: openai.OpenAI, session: str) -> None:
    """Three calls: two that are read by a third."""
    write(client, "A little", session=session, output="hero", defer=True)
    write(client, "In a big", session=session, output="place", defer=True)
    inputs = {"hero": "hero", "place": "place"}
    write(client, "{{hero}} and {{place}}", session=session, inputs=inputs, name="tale")


@pytest.fixture(scope="module")
def told(client: openai.OpenAI) -> str:
    tell(client, SESSION)
    return SESSION


class Page:
    """A browser's page, and what it complained of."""

    def __init__(self, browser: Any, root: str, **options: Any) -> None:
        self.context = browser.new_context(**options)
        self.context.set_default_timeout(15_000)
        self.page = self.context.new_page()
        self.root = root
        self.faults: list[str] = []
        self.page.on("pageerror", lambda error: self.faults.append(f"{error}\n{error.stack}"))
        self.page.on("console", self._said)

    def _said(self, message: Any) -> None:
        # The answer that asks for a key is an error to the console.
        if message.type in ("error", "warning") and "401" not in message.text:
            self.faults.append(message.text)

    def open(self, view: str) -> Any:
        """A view, after the key has been typed where it is asked for."""
        self.page.goto(f"{self.root}/ui/#/{view}")
        self.page.locator("dialog[open], .connection.is-live").first.wait_for()
        if self.page.locator("dialog[open]").count():
            self.page.get_by_role("textbox", name="Key").fill(API_KEY)
            self.page.get_by_role("button", name="Use this key").click()
        self.page.locator(".connection.is-live").wait_for()
        return self.page

    def session(self, name: str) -> Any:
        """A session's graph, by a click on its row."""
        page = self.open("sessions")
        page.get_by_role("link", name=name).first.click()
        page.locator(".node").first.wait_for()
        return page


@pytest.fixture
def view(browser: Any, demo: GatewayProcess) -> Iterator[Page]:
    page = Page(browser, demo.root, viewport={"width": 1440, "height": 900})
    yield page
    page.context.close()
    assert page.faults == []


def node(page: Any, name: str) -> Any:
    return page.locator(".node", has=page.get_by_text(name, exact=True))


def test_a_session_is_drawn_and_its_calls_explained(view: Page, told: str) -> None:
    page = view.session(told)
    for name in ("hero", "place", "tale"):
        node(page, name).wait_for()
    node(page, "tale").click()
    details = page.get_by_role("complementary", name="Details")
    details.get_by_text("Ran on").wait_for()
    for text in ("Tokens", "Time", "Placement", "reads", "/v1/completions"):
        details.get_by_text(text).first.wait_for()
    assert "X-Parrot-Input: hero=hero, place=place" in details.inner_text()
    details.get_by_role("button", name="hero").click()
    details.get_by_role("heading", name="hero").wait_for()
    # The address leads to the same call; the key stands nowhere.
    assert "?call=" in page.url
    assert API_KEY not in page.url + page.content()


def test_the_text_of_a_call_is_that_of_its_variables(view: Page, told: str) -> None:
    page = view.session(told)
    node(page, "tale").click()
    details = page.get_by_role("complementary", name="Details")
    details.get_by_text("Prompts and answers are not kept.").wait_for()
    details.get_by_text("telemetry.keep_content").wait_for()
    details.get_by_text("This request is not kept.").wait_for()
    shown = details.get_by_role("region", name="reads hero")
    assert shown.count() == 0, "folded up"
    details.locator("summary", has_text="Reads hero").click()
    shown.wait_for()
    details.get_by_role("button", name="hero").first.click()
    details.locator("summary", has_text="Writes hero").wait_for()


def test_prompt_answer_and_curl_of_a_call_that_is_kept(browser: Any, tmp_path: Path) -> None:
    config = {"models": [DEMO_MODEL], "telemetry": {"keep_content": True}}
    with GatewayProcess(config=config) as gateway:
        client = openai.OpenAI(base_url=gateway.base_url, api_key="none", max_retries=0)
        write(client, "<b>It's</b> a", session="kept", name="told")
        answer = write(client, "A key: sk-test-0123456789", session="kept", name="secret")
        client.close()
        opened = Page(browser, gateway.root, viewport={"width": 1440, "height": 900})
        page = opened.session("kept")
        node(page, "told").click()
        details = page.get_by_role("complementary", name="Details")
        details.locator("summary", has_text="Prompt").click()
        prompt = details.get_by_role("region", name="prompt")
        prompt.wait_for()
        assert prompt.inner_text() == "<b>It's</b> a"
        path = tmp_path / "told"
        path.write_text(details.get_by_role("region", name="curl of this request").inner_text())
        program = _start("sh", path)
        output, faults = program.communicate(timeout=60)
        assert '"text_completion"' in output, faults
        node(page, "secret").click()
        details.locator("summary", has_text="Answer").click()
        details.get_by_role("region", name="answer").wait_for()
        assert details.get_by_role("region", name="answer").inner_text().strip() == answer.strip()
        assert (
            "A key: sk-…" in details.get_by_role("region", name="curl of this request").inner_text()
        )
        _check(opened, page, "text-light-1440")
        opened.context.close()
        assert opened.faults == []


def test_a_session_grows_while_it_is_watched(view: Page, client: openai.OpenAI, told: str) -> None:
    page = view.open("sessions")
    page.get_by_role("link", name=told).first.wait_for()
    write(client, "Once", session="page-live", output="first")
    page.get_by_role("link", name="page-live").click()
    node(page, "first").wait_for()
    inputs = {"first": "first"}
    write(client, "So {{first}}", session="page-live", inputs=inputs, name="second")
    node(page, "second").wait_for()
    page.locator(".node.is-done", has=page.get_by_text("second", exact=True)).wait_for()


def test_the_keyboard_goes_from_call_to_call(view: Page, told: str) -> None:
    page = view.session(told)
    node(page, "tale").wait_for()
    page.locator(".node[tabindex='0']").focus()
    page.keyboard.press("Home")
    focused = page.locator(".node:focus")
    focused.wait_for()
    page.keyboard.press("ArrowRight")
    focused.filter(has=page.get_by_text("tale", exact=True)).wait_for()
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="tale", exact=True).wait_for()
    page.keyboard.press("ArrowLeft")
    focused.filter(has_not=page.get_by_text("tale", exact=True)).wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("complementary", name="Details").wait_for(state="detached")


def test_tab_begins_at_the_top_and_escape_closes_from_anywhere(view: Page, told: str) -> None:
    page = view.session(told)
    page.reload()
    node(page, "tale").wait_for()
    page.keyboard.press("Tab")
    page.get_by_role("link", name="Skip to the content").and_(page.locator(":focus")).wait_for()
    node(page, "tale").click()
    page.get_by_role("slider").focus()
    page.keyboard.press("Escape")
    page.get_by_role("complementary", name="Details").wait_for(state="detached")


def test_a_wrong_key_is_told_but_not_a_missing_one(view: Page) -> None:
    page = view.page
    page.goto(f"{view.root}/ui/")
    key = page.get_by_role("textbox", name="Key")
    key.wait_for()
    assert page.get_by_role("alert").count() == 0
    key.fill("wrong")
    page.keyboard.press("Enter")
    page.get_by_role("alert").get_by_text("This key was not taken.").wait_for()


def test_a_call_that_never_ran_has_a_lane_that_says_so(view: Page) -> None:
    script = """async (nodes) => {
        const { lanesOf } = await import(new URL("app/session/lanes.js", document.baseURI));
        const byId = new Map(nodes.map((node) => [node.id, node]));
        const graph = { nodes: byId, variables: new Map() };
        return lanesOf(graph, 3).lanes.map((lane) => lane.name);
    }"""
    times = {"submitted_s": 0, "started_s": 1, "first_token_s": None, "finished_s": 2, "inputs": []}
    refused = {**times, "id": "a", "state": "failed", "engine": None, "model": "m"}
    passed_on = {**times, "id": "b", "state": "done", "engine": None, "model": "m"}
    waiting = {**refused, "id": "c", "state": "waiting", "started_s": None, "finished_s": None}
    page = view.open("sessions")
    assert page.evaluate(script, [refused, passed_on, waiting]) == ["m", "1 waiting", "1 not run"]


LAYOUT = """async ([edges, groups, pane]) => {
    const url = new URL("app/graph/layout.js", document.baseURI);
    const { placeGraph } = await import(url);
    const { CALL_SIZE } = await import(new URL("app/graph/sizes.js", document.baseURI));
    const boxes = groups.map((group, id) => ({ id, kind: "call", group }));
    const lines = edges.map(([from, to], key) => ({ key, from, to, label: "v", isImplied: false }));
    const { at, bends, ...picture } = placeGraph(boxes, lines, pane);
    const places = boxes.map(({ id }) => ({ ...at.get(id), ...CALL_SIZE }));
    return { ...picture, places, bends: lines.map(({ key }) => bends.get(key)) };
}"""
WIDE, HIGH = {"width": 1000, "height": 600}, {"width": 390, "height": 600}


def lay_out(page: Any, edges: list[tuple[int, int]], pane: dict[str, int], **more: Any) -> Any:
    size = more.get("size", 1 + max((max(edge) for edge in edges), default=0))
    groups = [more.get("groups", {}).get(box) for box in range(size)]
    return page.evaluate(LAYOUT, [edges, groups, pane])


def overlapping(one: dict[str, float], other: dict[str, float]) -> bool:
    return (
        one["x"] < other["x"] + other["width"]
        and other["x"] < one["x"] + one["width"]
        and one["y"] < other["y"] + other["height"]
        and other["y"] < one["y"] + one["height"]
    )


CHAIN = [(i, i + 1) for i in range(11)]
AGENTS = [(0, 1), (0, 2), (0, 3), (1, 4), (2, 4), (3, 4), (0, 4), (4, 5), (4, 6), (5, 7), (6, 7)]
GRAPHS = {
    "one call": ([], {"size": 1}),
    "a chain": (CHAIN, {}),
    "a chain that looks back": ([*CHAIN, *((i, i + 3) for i in range(0, 9, 3))], {}),
    "agents": ([*AGENTS, (4, 7), (0, 7)], {}),
    "a map-reduce": ([(i, 30) for i in range(30)], {}),
    "a thousand calls": ([(i // 9, i + 1) for i in range(999)], {}),
    "a circle": ([(0, 1), (1, 2), (2, 0)], {}),
}


@pytest.mark.parametrize("pane", [WIDE, HIGH], ids=["wide", "high"])
@pytest.mark.parametrize("name", GRAPHS)
def test_boxes_of_a_graph_are_apart(view: Page, name: str, pane: dict[str, int]) -> None:
    edges, more = GRAPHS[name]
    placed = lay_out(view.open("sessions"), edges, pane, **more)
    boxes = sorted(placed["places"], key=lambda box: box["x"])
    for number, box in enumerate(boxes):
        assert 0 <= box["x"] <= box["x"] + box["width"] <= placed["width"] + 0.01
        assert 0 <= box["y"] <= box["y"] + box["height"] <= placed["height"] + 0.01
        for other in boxes[number + 1 :]:
            if other["x"] >= box["x"] + box["width"]:
                break
            assert not overlapping(box, other)


@pytest.mark.parametrize("name", ["a chain that looks back", "agents"])
def test_edges_that_pass_layers_run_between_boxes(view: Page, name: str) -> None:
    edges, _ = GRAPHS[name]
    placed = lay_out(view.open("sessions"), edges, WIDE)
    passing = 0
    for (tail, head), bends in zip(edges, placed["bends"], strict=True):
        # Bends come in pairs: an edge crosses a layer straight from one to the other.
        for begin, end in zip(bends[::2], bends[1::2], strict=True):
            passing += 1
            lane = {"x": begin["x"], "y": begin["y"], "width": end["x"] - begin["x"], "height": 0.0}
            assert begin["y"] == end["y"]
            others = [box for n, box in enumerate(placed["places"]) if n not in (tail, head)]
            assert not any(overlapping(lane, box) for box in others)
    assert passing == {"a chain that looks back": 6, "agents": 5}[name]


def test_graphs_fill_the_pane(view: Page) -> None:
    page = view.open("sessions")
    # To the right, and down where a chain would be too small to be read.
    chain = lay_out(page, CHAIN, WIDE)
    assert not chain["runsDown"]
    assert chain["height"] < 60
    assert lay_out(page, CHAIN, HIGH)["runsDown"]
    assert lay_out(page, CHAIN, HIGH)["width"] < 210
    # A thousand parallel calls are a block of the pane's shape.
    wide = lay_out(page, [(i, 999) for i in range(999)], WIDE)
    assert 1.0 < wide["width"] / wide["height"] < 2.5
    # Nine of them stand side by side.
    columns = {box["x"] for box in lay_out(page, [(i, 9) for i in range(9)], WIDE)["places"]}
    assert len(columns) == 2


def test_the_same_calls_stand_as_they_were_submitted(view: Page) -> None:
    placed = lay_out(view.open("sessions"), [(i, 6) for i in range(6)], WIDE)
    heights = [box["y"] for box in placed["places"][:6]]
    assert heights == sorted(heights)


def test_frames_of_groups_hold_their_members_alone(view: Page) -> None:
    page = view.open("sessions")
    # Two groups that are submitted in turns.
    edges = [(0, i) for i in range(1, 7)] + [(i, 7 + i % 2) for i in range(1, 7)]
    groups = {i: "ab"[i % 2] for i in range(1, 7)}
    placed = lay_out(page, edges, WIDE, groups=groups)
    assert sorted(frame["group"] for frame in placed["frames"]) == ["a", "b"]
    for frame in placed["frames"]:
        for number, box in enumerate(placed["places"]):
            is_in = frame["left"] <= box["x"] <= frame["right"] and (
                frame["top"] <= box["y"] <= frame["bottom"]
            )
            assert is_in == (groups.get(number) == frame["group"])
    # The second call stands between two of a group: each of these has a frame of its own.
    split = lay_out(page, [(0, 1), (1, 2)], WIDE, groups={0: "a", 2: "a"})
    assert [frame["group"] for frame in split["frames"]] == ["a", "a"]
    assert lay_out(page, [(0, 1)], WIDE, groups={0: "a"})["frames"] == []


def test_the_scrubber_goes_back_in_time(view: Page, told: str) -> None:
    page = view.session(told)
    page.locator(".node.is-done").nth(2).wait_for()
    slider = page.get_by_role("slider")
    slider.focus()
    page.keyboard.press("Home")
    page.locator(".node.is-done").first.wait_for(state="detached")
    page.get_by_role("button", name="Replay").click()
    page.locator(".node.is-done").nth(2).wait_for()
    page.get_by_role("button", name="Live").click()
    page.get_by_role("button", name="Live", pressed=True).wait_for()


def test_names_are_text(view: Page, client: openai.OpenAI) -> None:
    name = "<img src=x onerror=alert(1)>"
    write(client, "Once", session=name, name="<b>bold</b>")
    page = view.session(name)
    node(page, "<b>bold</b>").wait_for()
    assert page.locator("img[src=x], b", has_text="bold").count() == 0


def test_the_list_is_filtered(view: Page, client: openai.OpenAI, told: str) -> None:
    answer = client.completions.with_raw_response.create(
        model=DEMO_MODEL, prompt="Nobody names this", max_tokens=2
    )
    page = view.open("sessions")
    page.get_by_role("link", name=told).first.wait_for()
    page.get_by_label("Filter sessions").fill("no session is called so")
    page.get_by_text("No session matches.").wait_for()
    page.get_by_label("Filter sessions").fill(told)
    page.get_by_role("link", name=told).first.wait_for()
    # What nobody has named is called by its shape, and still found by its id.
    call = client.get("/calls/" + answer.headers["x-request-id"], cast_to=httpx.Response)
    session = call.json()["session"]
    page.get_by_label("Filter sessions").fill(session)
    page.get_by_role("link", name=f"Completion · {session[5:11]}").click()
    page.get_by_role("heading", name=f"Completion · {session[5:11]}").wait_for()
    assert page.locator(".session-id").inner_text().startswith(session)


def test_engines_scheduler_and_tenants_are_shown(view: Page, told: str) -> None:
    page = view.open("engines")
    page.get_by_text("blocks of KV in use").wait_for()
    page.locator(".chart canvas").first.wait_for()
    page.get_by_role("link", name="Scheduler").click()
    page.get_by_role("row", name=DEMO_MODEL).wait_for()
    page.get_by_role("link", name="Tenants").click()
    page.get_by_role("row", name="default").wait_for()


def test_without_the_admin_key_nothing_is_drained(view: Page) -> None:
    page = view.open("engines")
    drain = page.get_by_role("button", name="Drain")
    drain.wait_for()
    assert drain.is_disabled()
    assert "server.admin_key" in (drain.get_attribute("title") or "")


def test_the_playground_runs_a_graph_both_ways(view: Page) -> None:
    page = view.open("playground")
    for way in ("Run call by call", "Run with its graph"):
        page.locator(".editor-run button:enabled").first.wait_for()
        page.get_by_role("button", name=way).click()
    for name in ("hero", "place", "tale"):
        page.locator(".node.is-done", has=page.get_by_text(name, exact=True)).wait_for()
    page.locator(".texts dd:not(:has(.muted))").nth(2).wait_for()
    page.get_by_role("link", name="Compare both runs").click()
    page.get_by_role("link", name=re.compile("^no graph, playground [0-9a-f]{4}$")).wait_for()
    page.get_by_text("Its graph was declared").wait_for()
    figures = page.get_by_role("region", name="Figures of both runs")
    figures.get_by_role("row", name="Calls 3 3 1.00").wait_for()


def test_a_graph_that_cannot_run_says_why(view: Page) -> None:
    page = view.open("playground")
    page.get_by_label("Prompt of tale").fill("{{hero}} and {{nobody}}")
    page.get_by_text("Nothing here is called nobody.").wait_for()
    page.get_by_label("Prompt of hero").fill("{{tale}}")
    page.get_by_label("Prompt of tale").fill("{{hero}}")
    page.get_by_text("It would wait for its own text.").first.wait_for()
    assert page.get_by_role("button", name="Run with its graph").is_disabled()


def test_the_playgrounds_programs_run(view: Page, tmp_path: Path) -> None:
    page = view.open("playground")
    page.get_by_label("Begin with").select_option("A chain")
    node(page, "outline").wait_for()
    running = []
    for language, command in (
        ("Python", sys.executable),
        ("LangChain", sys.executable),
        ("curl", "sh"),
    ):
        page.get_by_role("tab", name=language).click()
        path = tmp_path / language
        path.write_text(page.locator("#tab-panel code").inner_text(), "utf-8")
        assert API_KEY not in path.read_text("utf-8")
        running.append(_start(command, path))
    for program in running:
        output, faults = program.communicate(timeout=60)
        assert program.returncode == 0, faults
        assert output.strip()


def _start(command: str, path: Path) -> subprocess.Popen[str]:
    """The program with the key in its environment, where clients look for it."""
    text = path.read_text("utf-8").replace(', api_key="none"', "")
    path.write_text(text, "utf-8")
    environment = clean_environment({"OPENAI_API_KEY": API_KEY})
    pipe = subprocess.PIPE
    return subprocess.Popen([command, path], env=environment, stdout=pipe, stderr=pipe, text=True)


def test_the_theme_is_kept(view: Page) -> None:
    page = view.open("sessions")
    colour = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(colour)
    page.get_by_role("button", name="Theme").click()
    page.get_by_role("button", name="Theme").click()
    assert page.evaluate(colour) != light
    dark = page.evaluate(colour)
    # What is drawn on a canvas has colours of its own theme.
    script = """async () => {
        const { palette } = await import(new URL("app/parts/palette.js", document.baseURI));
        return palette().text;
    }"""
    assert page.evaluate(script) == page.evaluate("getComputedStyle(document.body).color")
    page.reload()
    assert page.evaluate(colour) == dark


def test_events_are_read_in_any_pieces(view: Page) -> None:
    page = view.open("sessions")
    script = """async (pieces) => {
        const { EventParser } = await import(new URL("app/data/event_stream.js", document.baseURI));
        const parser = new EventParser();
        return pieces.flatMap((piece) => parser.push(piece));
    }"""
    text = ": keep-alive\n\nevent: a\ndata: 1\n\ndata: 2\r\ndata: 3\r\n\r\nevent: b\ndata: {}\n\n"
    expected = [
        {"name": "a", "data": "1"},
        {"name": "message", "data": "2\n3"},
        {"name": "b", "data": "{}"},
    ]
    assert page.evaluate(script, [text]) == expected
    plain = text.replace("\r", "")
    assert page.evaluate(script, list(plain)) == expected


@pytest.mark.parametrize(("theme", "width"), [("light", 1440), ("dark", 390)])
def test_every_view_fits_and_is_accessible(
    browser: Any, demo: GatewayProcess, told: str, theme: str, width: int
) -> None:
    size = {"width": width, "height": 900 if width > 500 else 844}
    opened = Page(browser, demo.root, viewport=size, color_scheme=theme)
    for name in VIEWS:
        page = opened.open(name)
        page.locator("main :is(.row, .card, .panel, .step, .compare-head)").first.wait_for()
        _check(opened, page, f"{name}-{theme}-{width}")
    page = opened.session(told)
    _check(opened, page, f"session-{theme}-{width}")
    node(page, "tale").click()
    page.get_by_text("Ran on").first.wait_for()
    _check(opened, page, f"call-{theme}-{width}")
    opened.context.close()
    assert opened.faults == []


def test_the_page_of_the_routes(view: Page) -> None:
    page = view.page
    page.goto(f"{view.root}/docs#get-v1-sessions-id-graph")
    page.locator("#get-v1-sessions-id-graph[open] table").first.wait_for()
    page.keyboard.press("/")
    page.keyboard.type("chat completion")
    assert page.locator("details.route:visible").count() < 5
    page.locator("#post-v1-chat-completions > summary").click()
    command = page.locator("#post-v1-chat-completions pre").inner_text()
    assert f"{view.root}/v1/chat/completions" in command
    page.get_by_role("searchbox").fill("")
    _check(view, page, "docs")


def _check(opened: Page, page: Any, name: str) -> None:
    """Nothing stands out to the right; axe finds nothing; the picture is kept if that is asked."""
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
    if folder := os.environ.get("PARROT_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"{name}.png")
    if not AXE.is_file():
        return
    page.evaluate(AXE.read_text("utf-8"))
    found = page.evaluate("axe.run().then((result) => result.violations)")
    told = [(rule["id"], node["html"][:160]) for rule in found for node in rule["nodes"]]
    assert told == [], name


def test_axe_is_there() -> None:
    if not AXE.is_file():
        pytest.skip("no axe-core (PARROT_AXE): views were not checked for accessibility")
