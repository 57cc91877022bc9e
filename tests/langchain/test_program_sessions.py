"""Runs that a program calls one after the other: which of them are one session, and their names.

The programs are real scripts with plain ChatOpenAI and `install()`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import langchain_parrot
import pytest
from harness.interpreter import run_python
from harness.scripted_upstream import ScriptedUpstream, chat_document, document

OPENING = """
import asyncio, threading
import langchain_parrot
langchain_parrot.install()
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI
llm = ChatOpenAI(model={model!r}, max_retries=0)
chain = ChatPromptTemplate.from_template("Summarise {{x}}") | llm
"""


def fork(path: Path, environment: dict[str, str]) -> None:
    """Run a script in an interpreter that has loaded its libraries."""
    run_python(path, [], environment, path.parent)


def start(path: Path, environment: dict[str, str]) -> None:
    """Run a script as a user does."""
    command = [sys.executable, str(path)]
    ran = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr


def told_by(
    upstream: ScriptedUpstream,
    folder: Path,
    script: str,
    run: Callable[[Path, dict[str, str]], None] = fork,
    **files: str,
) -> list[tuple[str | None, str | None]]:
    """Session and name of each call of a script, in the order of the calls' names."""
    model = upstream.script(*[document(chat_document("x")) for _ in range(8)])
    for name, text in files.items():
        folder.joinpath(f"{name}.py").write_text(textwrap.dedent(text))
    path = folder / "report.py"
    path.write_text(OPENING.format(model=model) + textwrap.dedent(script))
    environment = {**os.environ, "OPENAI_BASE_URL": upstream.base_url, "OPENAI_API_KEY": "none"}
    run(path, environment)
    calls = upstream.calls(model)
    told = [(c.headers.get("x-parrot-session"), c.headers.get("x-parrot-name")) for c in calls]
    return sorted(told, key=str)


MAIN = """
def main():
    texts = chain.batch([{"x": "a"}, {"x": "b"}])
    llm.invoke("Combine: " + " ".join(text.content for text in texts))

if __name__ == "__main__":
    main()
"""
TOP_LEVEL = """
texts = chain.batch([{"x": "a"}, {"x": "b"}])
llm.invoke("Combine")
"""
COROUTINE = """
async def main():
    await chain.abatch([{"x": "a"}, {"x": "b"}])
    await llm.ainvoke("Combine")

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("script", "place"), [(MAIN, "main:"), (TOP_LEVEL, "report:"), (COROUTINE, "main:")]
)
def test_a_batch_and_the_call_after_it_are_one_session(
    upstream: ScriptedUpstream, tmp_path: Path, script: str, place: str
) -> None:
    told = told_by(upstream, tmp_path, script)
    assert len(told) == 3
    (session,) = {each for each, _ in told}
    assert session is not None
    assert session.startswith("report-")
    names = [name or "" for _, name in told]
    assert all(name.startswith(place) for name in names)
    assert len(set(names)) == 2


def test_functions_of_other_files_of_the_program_count(
    upstream: ScriptedUpstream, tmp_path: Path
) -> None:
    told = told_by(
        upstream,
        tmp_path,
        "import steps\nsteps.combine(llm)\nllm.invoke('again')\n",
        steps="def combine(llm):\n    llm.invoke('x')\n",
    )
    assert len({session for session, _ in told}) == 1
    assert [str(name).partition(":")[0] for _, name in told] == ["combine", "report"]


def test_a_program_may_lie_above_its_libraries(upstream: ScriptedUpstream, tmp_path: Path) -> None:
    """A program's folder may hold a checkout of this repository."""
    library = Path(langchain_parrot.__file__).parent
    tmp_path.joinpath("langchain_parrot").symlink_to(library)
    told = told_by(upstream, tmp_path, MAIN, start)
    assert len({session for session, _ in told}) == 1
    assert all(str(name).startswith("main:") for _, name in told)


@pytest.mark.parametrize(
    ("folder", "module"),
    [
        ("langchain_parrot", "steps"),
        ("my-site-packages", "langchain_steps"),
        ("site-packages", "steps"),
        ("langgraph", "langsmith_notes"),
    ],
)
def test_a_program_may_lie_in_a_folder_named_like_a_library(
    upstream: ScriptedUpstream, tmp_path: Path, folder: str, module: str
) -> None:
    own = tmp_path / folder
    own.mkdir()
    told = told_by(
        upstream,
        own,
        f"import {module}\n{module}.combine(llm)\nllm.invoke('again')\n",
        **{module: "def combine(llm):\n    llm.invoke('x')\n"},
    )
    assert len({session for session, _ in told}) == 1
    assert [str(name).partition(":")[0] for _, name in told] == ["combine", "report"]


def test_packages_installed_in_the_folder_of_the_program_are_not_its_own(
    upstream: ScriptedUpstream, tmp_path: Path
) -> None:
    packages = tmp_path / ".venv" / "site-packages"
    packages.mkdir(parents=True)
    body = "def answer(llm):\n    llm.invoke('x')\n"
    packages.joinpath("langchain_helpers.py").write_text(body)
    told = told_by(
        upstream,
        tmp_path,
        f"""
        import sys
        sys.path.insert(0, {str(packages)!r})
        import langchain_helpers

        def ask():
            langchain_helpers.answer(llm)

        ask()
        """,
    )
    assert [str(name).partition(":")[0] for _, name in told] == ["ask"]


@pytest.mark.parametrize(
    "script",
    [
        """
        for _ in range(2):
            thread = threading.Thread(target=lambda: llm.invoke("x"))
            thread.start()
            thread.join()
        """,
        """
        async def handler(text):
            await llm.ainvoke(text)

        async def main():
            await asyncio.gather(handler("a"), handler("b"))

        asyncio.run(main())
        """,
        """
        import socketserver

        class Handler(socketserver.BaseRequestHandler):
            def handle(self):
                llm.invoke("x")

        for _ in range(2):
            with socketserver.TCPServer(("127.0.0.1", 0), Handler) as server:
                import socket
                with socket.create_connection(server.server_address):
                    server.handle_request()
        """,
    ],
    ids=["threads", "tasks", "server"],
)
def test_what_others_call_stays_apart(
    upstream: ScriptedUpstream, tmp_path: Path, script: str
) -> None:
    told = told_by(upstream, tmp_path, textwrap.dedent(script))
    assert len({session for session, _ in told}) == 2


def test_a_program_may_name_a_session(upstream: ScriptedUpstream, tmp_path: Path) -> None:
    told = told_by(
        upstream,
        tmp_path,
        """
        async def handler(text):
            with langchain_parrot.session(f"request-{text}"):
                await chain.abatch([{"x": text}, {"x": text}])
                await llm.ainvoke(text)
                await llm.ainvoke(text, {"metadata": {"thread_id": "t"}})

        async def main():
            await asyncio.gather(handler("a"), handler("b"))

        asyncio.run(main())
        """,
    )
    sessions = [session for session, _ in told]
    assert sessions == ["request-a"] * 3 + ["request-b"] * 3 + ["t"] * 2


def test_sessions_have_names() -> None:
    with pytest.raises(ValueError, match="name"), langchain_parrot.session(" "):
        pass
    with langchain_parrot.session() as one, langchain_parrot.session() as other:
        assert one != other
