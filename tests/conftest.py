"""Real processes, shared by all tests that need them, and their logs when a test fails.

Standard library and pytest only: the client's tests run in an environment without the server.
"""

from __future__ import annotations

import functools
import gc
import os
import ssl
import tempfile
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from harness import processes
from harness.processes import API_KEY, DEMO_MODEL, GatewayProcess, closed_port, upstream_settings
from harness.scripted_upstream import LISTED_MODEL, ScriptedUpstream

#: Counters come with heartbeats; an engine silent for three of them is lost.
HEARTBEAT_S = 0.5
#: Few rows, so that a handful of calls fills a batch and the next one has to wait.
DEMO_SETTINGS = {"model": DEMO_MODEL, "max_batch_size": 4, "num_blocks": 512}

TESTS = Path(__file__).parent
#: Files that take longest, the longest first; the order of all others does not matter.
LONG = (
    "test_openai_3.py",
    "e2e/test_page.py",
    "examples/test_examples_run.py",
    "docs/test_python_blocks.py",
    "e2e/test_serve.py",
    "faults/test_own_openai.py",
    "faults/test_chaos_engines.py",
    "faults/test_chaos_shutdown.py",
    "faults/test_chaos_liar.py",
    "engine/kernels/test_attention.py",
    "engine/distributed/test_tensor_parallel.py",
    "drop_in/test_linked_programs.py",
    "openai_client/test_client_structured.py",
    "e2e/test_schemathesis.py",
    "engine/kernels/test_long_rows.py",
    "e2e/test_command_line.py",
    "faults/test_upstream_continuation.py",
    "e2e/test_disconnects.py",
    "e2e/test_resumed_streams.py",
    "engine/models/test_models_parity.py",
    "gateway/cli/test_graph.py",
    "llamaindex/test_model.py",
    "langchain/test_program_sessions.py",
    "openai_client/test_client_retries.py",
    "llamaindex/test_query.py",
    "engine/runner/test_sampler.py",
    "engine/kernels/matmul/test_quantized_matmul.py",
    "engine/kernels/test_compile.py",
    "e2e/test_inferred_scheduling.py",
    "e2e/test_engine_process.py",
    "e2e/test_inferred_links.py",
    "gateway/api/upstream/test_passthrough.py",
    "e2e/test_fuzzed_bodies.py",
    "langchain/test_composition.py",
    "e2e/test_engines_by_hand.py",
    "engine/attention/test_fixed_plans.py",
    "gateway/api/batches/test_batches.py",
    "openai_client/test_client_responses.py",
    "engine/kernels/test_model.py",
    "engine/text/test_detokenizer.py",
    "test_layers.py",
    "engine/engine/test_builtin_engine.py",
    "engine/models/test_demo_model.py",
    "gateway/backends/upstreams/test_client.py",
    "engine/runner/test_graphs.py",
    "engine/engine/test_speculation_models.py",
)
#: Files whose programs are forks of one process that has the large client libraries: all of them
#: in one worker, which has that process once.
PROGRAMS = (
    "examples/test_examples_run.py",
    "drop_in/test_linked_programs.py",
    "langchain/test_program_sessions.py",
    "docs/test_python_blocks.py",
)

# Each HTTP client reads the system's certificates, 30 ms of work. No test speaks TLS, and most make
# a client: all clients of a process share what the first one read.
ssl.create_default_context = functools.cache(ssl.create_default_context)

with suppress(ImportError):
    # The client's environment has no Hypothesis.
    from hypothesis import settings

    # Nothing asserts a speed: a machine that does other things as well is slow. Every run tries
    # the same examples, so that a failure is of the change; `--hypothesis-profile=explore` tries
    # others each time.
    settings.register_profile("explore", parent=settings(), deadline=None)
    settings.register_profile("tests", parent=settings(), deadline=None, derandomize=True)
    settings.load_profile("tests")


def pytest_configure(config: pytest.Config) -> None:
    """No benchmarks, and no data of the user.

    LangChain's tests bring a plugin that would print a benchmark of theirs. Commands under test
    start gateways that keep files and batches in the user's folder, one gateway at a time.
    """
    data = tempfile.TemporaryDirectory(prefix="parrot-data-", ignore_cleanup_errors=True)
    os.environ["XDG_DATA_HOME"] = data.name
    config.add_cleanup(data.cleanup)
    if hasattr(config.option, "benchmark_disable"):
        config.option.benchmark_disable = True


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, Any, Any]:
    """No garbage is looked for among what stays: imported modules and collected tests.

    There are some 800,000 objects of them, which a collection walks for half a second; modules of
    tests ask for one, too.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One worker more than cores: for a quarter of its time one waits for processes and timers."""
    return (os.cpu_count() or 1) + 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Files are shared out as ever, but those of `PROGRAMS` as one."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "programs" if file.endswith(PROGRAMS) else file

    return Scheduling(config, log)


def pytest_unconfigure() -> None:
    """At exit libraries look for what they leak."""
    gc.unfreeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files that take long go first where workers share the files: none is left to one at the end.

    Workers take them in the order of collection (`--no-loadscope-reorder`).
    """
    if hasattr(config, "workerinput"):
        ranks = {TESTS / name: rank for rank, name in enumerate(LONG)}
        items.sort(key=lambda item: ranks.get(item.path, len(LONG)))


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """A gateway with the demo model on a real engine process, behind a key."""
    with GatewayProcess(
        config={
            "models": [DEMO_SETTINGS],
            "aliases": {"gpt-4o": DEMO_MODEL},
            "server": {"max_body_bytes": 1024 * 1024},
            "engines": {"heartbeat_s": HEARTBEAT_S},
            "batches": {"folder": str(tmp_path_factory.mktemp("batches"))},
        },
        api_key=API_KEY,
    ) as gateway:
        yield gateway


@pytest.fixture(scope="session")
def upstream() -> Iterator[ScriptedUpstream]:
    """A scripted upstream."""
    with ScriptedUpstream() as server:
        yield server


@pytest.fixture(scope="session")
def relay(upstream: ScriptedUpstream) -> Iterator[GatewayProcess]:
    """An open gateway in front of the scripted upstream.

    Any model goes to an upstream with two retries; under the prefix `once/` there are none, and
    `narrow/` takes one call at a time, `hasty/` waits a moment only, `dead/` is not there, nor is
    `lame/`, which has a model of the scripted one to fall back on; `fragile/` is left alone after
    two failures, and `claude/` speaks Anthropic's API. Its log is JSON, with a line for each call.
    """
    url, nowhere = upstream.base_url, f"http://127.0.0.1:{closed_port()}/v1"
    with GatewayProcess(
        config={
            "upstreams": [
                upstream_settings("scripted", url),
                upstream_settings("once", url, max_retries=0),
                upstream_settings("narrow", url, max_concurrency=1),
                upstream_settings("hasty", url, read_timeout_s=1.0),
                upstream_settings("dead", nowhere),
                upstream_settings("lame", nowhere, fallback=LISTED_MODEL),
                upstream_settings("fragile", url, max_retries=0, breaker_failures=2),
                upstream_settings("claude", url, max_retries=0, api="anthropic"),
            ],
            "server": {"access_log": True},
            "telemetry": {"log_format": "json"},
        }
    ) as gateway:
        yield gateway


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, None]:
    """Show what the processes said when a test failed."""
    outcome = yield
    report = outcome.get_result()
    if report.failed:
        for server in processes.running:
            report.sections.append((" ".join(server.arguments[1:4]), server.tail(4000)))
