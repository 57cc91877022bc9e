"""Every Python block of every document runs by itself and does what it is printed for.

All of them run against one gateway with the demo model, each as a program of its own: nothing of an
earlier block is there.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.interpreter import environment_of, run_python
from harness.processes import API_KEY, GatewayProcess
from harness.python_blocks import PAGES, ROOT, Block, blocks_of

#: Pages whose blocks need something else around them, and the test that runs them.
ELSEWHERE = {
    "docs/parrot-api.md": "test_parrot_v3_process.py",
    "docs/scheduling.md": "test_own_order.py",
}
#: Some composition was run that deferred a call.
DEFERS = (
    "from langchain_parrot.composition import _plans\n"
    "assert any(built is not None and built.defers for _, built in _plans.values())"
)
SYNTHESIZES = (
    "from llama_index.llms.parrot._synthesis import _may_defer\n"
    "assert _may_defer(engine._response_synthesizer)"
)
#: Blocks that print nothing.
SILENT = {("docs/langchain.md", "install()")}
#: Blocks whose only output is an answer, which has to be the same each time: (old, new).
GREEDY = {
    ("docs/llama-index.md", "LlamaIndex"): ("max_tokens=40,", "max_tokens=40, temperature=0.0,")
}
#: What is true at the end of a block besides its output.
CHECKS = {
    ("README.md", "Calls that feed one another"): (
        "import re; assert re.fullmatch(r'\\[\\[parrot:[a-z0-9]+\\]\\]', hero), hero"
    ),
    ("docs/api.md", "Resumed streams"): (
        "import json\n"
        "chunks = [json.loads(event) for event in events[:-1]]\n"
        "assert len({chunk['id'] for chunk in chunks}) == 1 and len(chunks) > 12\n"
        "assert chunks[-1]['choices'][0]['finish_reason'] == 'length'"
    ),
    ("docs/batches.md", "Files and batches"): (
        "assert (batch.status, batch.request_counts.completed) == ('completed', 20)"
    ),
    ("docs/tutorials/langchain-program.md", "2. The whole graph at once"): DEFERS,
    ("docs/tutorials/ten-minutes.md", "4. Without the round trips"): (
        "assert one.startswith('[[parrot:') and two.startswith('[[parrot:')"
    ),
    ("docs/langchain.md", "LangChain"): DEFERS,
    ("docs/langchain.md", "install()"): (
        "from openai import OpenAI\n"
        "assert OpenAI._prepare_options.__module__ == 'langchain_parrot.install'"
    ),
    ("docs/langchain.md", "Deferred chains"): DEFERS,
    ("docs/llama-index.md", "LlamaIndex"): SYNTHESIZES,
    ("docs/semantic-variables.md", "In short"): (
        "import re; assert re.fullmatch(r'\\[\\[parrot:[a-z0-9]+\\]\\]', hero), hero"
    ),
}
BLOCKS = [block for page in PAGES for block in blocks_of(page, "python")]


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.page not in ELSEWHERE], ids=str)
def test_a_block_runs_by_itself(demo: GatewayProcess, block: Block, tmp_path: Path) -> None:
    place = block.page, block.heading
    code = block.code.replace("http://127.0.0.1:8000", demo.root)
    code = code.replace('"none"', repr(API_KEY))
    if place in GREEDY:
        assert GREEDY[place][0] in code
        code = code.replace(*GREEDY[place])
    script = tmp_path / "block.py"
    script.write_text(f"{code}\n{CHECKS.get(place, '')}\n", encoding="utf-8")
    printed = run_python(script, [], environment_of(demo), tmp_path)
    assert "[[parrot:" not in printed
    assert (len(printed) > 20) is (place not in SILENT), printed


def test_all_of_them_were_found() -> None:
    assert len(BLOCKS) == 21
    known = {(block.page, block.heading) for block in BLOCKS}
    assert CHECKS.keys() | SILENT <= known
    assert ELSEWHERE.keys() <= {block.page for block in BLOCKS}


@pytest.mark.parametrize(("page", "test"), ELSEWHERE.items())
def test_other_blocks_are_run_elsewhere(page: str, test: str) -> None:
    [file] = (ROOT / "tests").rglob(test)
    assert Path(page).name in file.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", ["docs/langchain.md", "docs/llama-index.md"])
def test_first_examples_are_short(page: str) -> None:
    for heading in ("LangChain", "LlamaIndex"):
        for block in blocks_of(page, "python"):
            if block.heading == heading:
                assert len([line for line in block.code.splitlines() if line.strip()]) <= 10
