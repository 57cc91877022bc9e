"""Pictures show every call once, whatever its name, and stay within their bounds."""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parrot_gateway.semantic.drawing import to_json, to_mermaid, to_text
from parrot_gateway.semantic.drawing.labels import clean, clip, duration, select, width_of
from parrot_gateway.semantic.drawing.mermaid import escape
from parrot_gateway.semantic.graph.snapshot import GraphSnapshot, LinkView, NodeView, VariableView

GOLDEN = Path(__file__).parent / "golden"
STATES = ("waiting", "running", "done", "failed", "cancelled")

#: What names of calls and variables may look like when somebody means ill, or French.
EVIL = '</text><script>alert("1")</script>&]]>|`"#quot;end{{x}}\x1b[31m\u202e\ud800\x00\n--> n0\n'
NAMES = st.one_of(
    st.text(max_size=30), st.sampled_from([EVIL, "", "end", "style a:#b;", "变量" * 40, "é€😀"])
)


def snapshot_of(
    reads: dict[str, str],
    *,
    states: dict[str, str] | None = None,
    names: dict[str, str] | None = None,
    groups: dict[str, str] | None = None,
    pruned: int = 0,
) -> GraphSnapshot:
    """Call `x` writes variable `x`; what nobody writes is a source."""
    states, names, groups = states or {}, names or {}, groups or {}
    everything = dict.fromkeys([*reads, *(v for read in reads.values() for v in read.split())])
    stages: dict[str, int] = {}
    for call, read in reads.items():
        stages[call] = max((stages[v] + 1 for v in read.split() if v in stages), default=0)
    return GraphSnapshot(
        session_id="s1",
        session_name=names.get("session", "demo"),
        taken_at=100.0,
        nodes=tuple(
            NodeView(
                id=call,
                name=names.get(call, call),
                kind="transform" if call.startswith("t-") else "call",
                state=states.get(call, "done"),
                stage=stages[call],
                inputs=tuple(read.split()),
                output=call,
                detail="json(/answer) | strip" if call.startswith("t-") else "",
                model="parrot-demo",
                objective="latency",
                tokens=17,
                engine="engine-1",
                submitted=90.0 + number / 4,
                started=None if states.get(call) == "waiting" else 91.0 + number,
                first_token=None if states.get(call) == "waiting" else 91.2 + number,
                finished=92.5 + number
                if states.get(call, "done") not in ("waiting", "running")
                else None,
                group=groups.get(call),
                failure="the engine went away" if states.get(call) == "failed" else None,
            )
            for number, (call, read) in enumerate(reads.items())
        ),
        variables=tuple(
            VariableView(v, names.get(v, v), "ready", v if v in reads else None) for v in everything
        ),
        pruned=pruned,
    )


SMALL = snapshot_of(
    {
        "map-1": "doc",
        "map-2": "doc",
        "t-json": "map-2",
        "reduce": "map-1 t-json",
        "report": "reduce",
    },
    states={"t-json": "failed", "reduce": "running", "report": "waiting"},
    groups={"map-1": "maps", "map-2": "maps", "report": "alone"},
    pruned=3,
)


def test_inferred_edges_are_dashed_and_named() -> None:
    snapshot = replace(
        snapshot_of({"ask": "", "tell": ""}),
        links=(LinkView("ask", "tell", "continues", 0.95), LinkView("gone", "tell", "output", 1.0)),
        inferred=True,
    )
    assert 'n0 -.->|"continues 0.95"| n1' in to_mermaid(snapshot)
    assert "⇠ ask (continues 0.95)" in to_text(snapshot)


def test_many_sources_are_gathered() -> None:
    reads = {f"chat {number}": "" for number in (1, 2, 3, 5)} | {"chat 6": ""}
    edges = [("chat 3", "output", 0.9), ("chat 1", "output", 0.9), ("chat 2", "output", 0.95)]
    edges += [("chat 5", "continues", 1.0), ("chat 5", "tool", 1.0)]
    snapshot = replace(
        snapshot_of(reads),
        links=tuple(LinkView(source, "chat 6", kind, sure) for source, kind, sure in edges),
        inferred=True,
    )
    snapshot = replace(
        snapshot, nodes=(*snapshot.nodes[:-1], replace(snapshot.nodes[-1], tools=("search",)))
    )
    text = to_text(snapshot, 160)
    flow = "⇠ chat 1-3 (output 0.90-0.95), chat 5 (continues, tool 1.00) calls search"
    assert text.splitlines()[-1].endswith(flow)
    assert text.startswith("inferred session ")
    drawn = to_mermaid(snapshot)
    assert drawn.count("-.->") == 4
    assert "continues, tool 1.00" in drawn
    assert "calls search" in drawn


@pytest.mark.parametrize("lines", [4, 6, 11])
def test_a_text_of_so_many_lines_shows_the_newest_calls(lines: int) -> None:
    snapshot = snapshot_of({f"c{number}": f"c{number - 1}" for number in range(40)})
    text = to_text(snapshot, 80, lines).splitlines()
    assert len(text) <= lines
    assert " c39 " in "\n".join(text)
    assert text[-1].startswith("… not shown: ")


@pytest.mark.parametrize(
    ("file", "drawn"),
    [
        ("graph.mermaid", to_mermaid(SMALL)),
        ("graph.txt", to_text(SMALL, 100)),
        ("graph.json", json.dumps(to_json(SMALL), indent=1) + "\n"),
    ],
)
def test_drawn_as_before(file: str, drawn: str) -> None:
    """Look at a changed picture before you accept it: write `drawn` into the file."""
    assert drawn == (GOLDEN / file).read_text(encoding="utf-8")


@st.composite
def snapshots(draw: st.DrawFn, max_size: int = 12) -> GraphSnapshot:
    size = draw(st.integers(0, max_size))
    reads: dict[str, str] = {}
    for i in range(size):
        before = draw(st.sets(st.integers(-3, i - 1), max_size=4))
        prefix = draw(st.sampled_from(["c-", "t-"]))
        calls = list(reads)
        reads[f"{prefix}{i}"] = " ".join(f"in{-b}" if b < 0 else calls[b] for b in sorted(before))
    return snapshot_of(
        reads,
        states={call: draw(st.sampled_from(STATES)) for call in reads},
        names={name: draw(NAMES) for name in [*reads, "in1", "in2", "in3", "session"]},
        groups={call: draw(NAMES) for call in reads if draw(st.booleans())},
        pruned=draw(st.integers(0, 2)),
    )


def sources(snapshot: GraphSnapshot) -> set[str]:
    written = {node.output for node in snapshot.nodes}
    return {v for node in snapshot.nodes for v in node.inputs} - written


def num_arrows(snapshot: GraphSnapshot) -> int:
    return sum(len(node.inputs) for node in snapshot.nodes)


LABEL = r"(?:[^\"#<>`&|\[\]{}()\n]|#\d+;|<br>)*"
BOX = re.compile(
    rf'  n\d+(?:\["{LABEL}"\]|\{{\{{"{LABEL}"\}}\}}|\(\["{LABEL}"\]\)):::(?:{"|".join(STATES)})'
)
ARROW = re.compile(rf'  n(\d+) -->(?:\|"{LABEL}"\|)? n(\d+)')
FRAME = re.compile(rf'  subgraph g\d+\["{LABEL}"\]')
MEMBER = re.compile(r"    n\d+")
REST = re.compile(
    rf'flowchart LR|  about\["{LABEL}"\]|  style about [\w:,]+|  classDef [\w:,#. -]+'
)


@given(snapshots())
@settings(max_examples=80, deadline=None)
def test_mermaid_lines_are_boxes_and_arrows_and_nothing_else(snapshot: GraphSnapshot) -> None:
    """A grammar of what we mean to write, strict enough that no name can leave its label."""
    lines = to_mermaid(snapshot).removesuffix("\n").split("\n")
    boxes = [line for line in lines if BOX.fullmatch(line)]
    arrows = [found for line in lines if (found := ARROW.fullmatch(line))]
    rest = [line for line in lines if REST.fullmatch(line)]
    framed = [line for line in lines if MEMBER.fullmatch(line)]
    frames = [line for line in lines if FRAME.fullmatch(line)]
    assert len(boxes) + len(arrows) + len(rest) + len(framed) + 2 * len(frames) == len(lines)
    assert lines.count("  end") == len(frames)
    sizes = Counter(node.group for node in snapshot.nodes if node.group is not None)
    assert len(frames) == sum(size > 1 for size in sizes.values())
    assert len(framed) == sum(size for size in sizes.values() if size > 1)
    assert len(boxes) == len(snapshot.nodes) + len(sources(snapshot))
    assert len({box.split("[")[0].split("{")[0].split("(")[0] for box in boxes}) == len(boxes)
    assert len(arrows) == num_arrows(snapshot)
    assert all(int(a[1]) < len(boxes) and int(a[2]) < len(boxes) for a in arrows)


def test_the_grammar_of_mermaid_lines_refuses_an_escape() -> None:
    assert BOX.fullmatch('  n0["a#34;b"]:::done')
    assert not BOX.fullmatch('  n0["a"b"]:::done')
    assert not BOX.fullmatch('  n0["<script>"]:::done')
    assert "#34;" in escape('"')


@given(snapshots(), st.integers(40, 160))
@settings(max_examples=80, deadline=None)
def test_text_keeps_its_width_and_shows_every_call_once(
    snapshot: GraphSnapshot, width: int
) -> None:
    text = to_text(snapshot, width)
    lines = text.removesuffix("\n").split("\n")
    for line in lines:
        assert line.isprintable()
        cells = sum(
            0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in "WF")
            for c in line
        )
        assert cells <= width
    calls = [line for line in lines if re.match(r"  [○▶✓✗⊘] ", line)]
    assert len(calls) == len(snapshot.nodes)
    for state in STATES:
        expected = sum(node.state == state for node in snapshot.nodes)
        assert sum(f" {state} " in f"{line} " for line in calls) >= expected
    told = [int(line.removeprefix("stage ")) for line in lines if line.startswith("stage ")]
    assert told == sorted({node.stage for node in snapshot.nodes})


@given(snapshots())
@settings(max_examples=40, deadline=None)
def test_json_holds_all_of_it(snapshot: GraphSnapshot) -> None:
    plain = json.loads(json.dumps(to_json(snapshot)))
    assert [call["id"] for call in plain["calls"]] == [node.id for node in snapshot.nodes]
    assert {v["id"] for v in plain["variables"]} == {v.id for v in snapshot.variables}
    for call, node in zip(plain["calls"], snapshot.nodes, strict=True):
        assert call["submitted_s"] == node.submitted - 90.0
        assert call["finished_s"] == (None if node.finished is None else node.finished - 90.0)
        assert (call["ran_s"] is None) == (node.started is None)


def big(size: int, *, wide: bool, state: str = "done") -> GraphSnapshot:
    reads = {f"c{i}": "doc" if wide or i == 0 else f"c{i - 1}" for i in range(size)}
    if wide:
        reads["end"] = " ".join(reads)
    return snapshot_of(reads, states=dict.fromkeys(reads, state))


@pytest.mark.parametrize("size", [1, 2, 50, 200])
@pytest.mark.parametrize("wide", [True, False])
def test_one_to_two_hundred_nodes_are_drawn_whole(size: int, wide: bool) -> None:
    text = to_mermaid(big(size, wide=wide))
    assert len([line for line in text.split("\n") if BOX.fullmatch(line)]) == size + 1 + wide
    assert len(text) < 50_000
    assert "not drawn" not in text.replace("#32;", " ")


@pytest.mark.parametrize("wide", [True, False])
def test_larger_graphs_are_cut_and_say_so(wide: bool) -> None:
    snapshot = big(5_000, wide=wide, state="waiting")
    mermaid = to_mermaid(snapshot)
    assert len(mermaid) < 50_000
    assert mermaid.count("-->") <= 500
    assert "not drawn" in mermaid
    lines = to_text(snapshot, 80).splitlines()
    assert len(lines) < 1_100
    assert lines[-1].startswith("… not shown: 4")


def test_long_names_do_not_make_mermaid_too_long() -> None:
    names = {f"c{i}": '"' * 256 for i in range(200)}
    reads = {f"c{i}": f"c{i - 1}" if i else "" for i in range(200)}
    text = to_mermaid(snapshot_of(reads, names=names))
    assert len(text) < 50_000
    assert "not drawn" in text


def test_what_is_unfinished_is_shown_first() -> None:
    reads = dict.fromkeys((f"c{i}" for i in range(10)), "")
    chosen = select(snapshot_of(reads, states={"c2": "running", "c4": "waiting"}), 4)
    assert [node.id for node in chosen.nodes] == ["c2", "c4", "c8", "c9"]
    assert chosen.left_out == 6


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(-1, "0 ms"), (0.0304, "30 ms"), (0.9996, "1.0 s"), (1.25, "1.2 s"), (59.96, "1 min 00 s"),
     (125, "2 min 05 s"), (3600, "1 h 00 min"), (12_000, "3 h 20 min")],
)  # fmt: skip
def test_durations_are_short(seconds: float, told: str) -> None:
    assert duration(seconds) == told


@given(NAMES, st.integers(1, 30))
def test_clipped_names_fit_and_are_printable(name: str, width: int) -> None:
    short = clip(name, width)
    assert width_of(short) <= width
    assert short.isprintable()
    assert short == clean(name) or short.endswith("…")
