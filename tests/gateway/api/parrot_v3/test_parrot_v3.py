"""Parrot's own API over the wire, as the original client speaks it, on a scripted engine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from harness.gateway.parrot_v3_client import V3Client, V3Error, Var
from harness.gateway.serving import Service
from harness.gateway.v3_service import Model, blocked, left_over
from harness.waiting import until

# --- sessions -------------------------------------------------------------------------------------


async def test_session_ids_are_secrets(client: V3Client, service: Service) -> None:
    first = client.session_id
    assert first >= 2**64
    other = V3Client(service.root, client.http)
    await other.register()
    assert other.session_id != first
    assert other.session_auth != client.session_auth
    (session, _) = service.gateway.semantic.sessions.of_tenant("default")
    assert str(first) not in session.name
    assert str(other.session_id) not in session.name + session.id
    await other.remove()


async def test_proof_is_checked_wherever_it_is_carried(client: V3Client, service: Service) -> None:
    variable = await client.variable("v", "text")
    other = V3Client(service.root, client.http)
    await other.register()
    for proof in ("", "1", other.session_auth, client.session_auth[:-1], "é"):
        wrong = {"session_id": client.session_id, "session_auth": proof}
        requests: list[tuple[str, str, dict[str, Any]]] = [
            ("DELETE", f"/session/{client.session_id}", {"session_auth": proof}),
            ("GET", f"/session/{client.session_id}", {"session_auth": proof}),
            ("POST", "/semantic_var", {**wrong, "var_name": "w"}),
            ("POST", f"/semantic_var/{variable.id}", {**wrong, "content": "x"}),
            ("GET", f"/semantic_var/{variable.id}", {**wrong, "criteria": "latency"}),
            ("GET", "/semantic_var", wrong),
            ("POST", "/transform", {**wrong, "input": variable.id, "transform": "strip"}),
            ("POST", "/semantic_call", {**wrong, "template": "x", "parameters": []}),
        ]
        for method, path, body in requests:
            with pytest.raises(V3Error) as caught:
                await client.send(method, path, body)
            assert (caught.value.status, caught.value.code) == (401, "invalid_session_auth"), path
            assert caught.value.error["param"] == "session_auth"
    assert await client.get(variable) == "text"
    # A session's owner is nobody in another session.
    for method, body in (("GET", {"criteria": "latency"}), ("POST", {"content": "x"})):
        with pytest.raises(V3Error) as caught:
            await client.send(method, f"/semantic_var/{variable.id}", {**other.owned, **body})
        assert (caught.value.status, caught.value.code) == (404, "variable_not_found")
    await other.remove()


@pytest.mark.parametrize("number", [1, 2**127 + 5, "12", -3])
async def test_unknown_sessions_take_no_calls(client: V3Client, number: int | str) -> None:
    client.session_id, real = number, client.session_id
    with pytest.raises(V3Error) as caught:
        await client.call("say: {{out}}")
    assert (caught.value.status, caught.value.code) == (404, "session_not_found")
    assert caught.value.error["param"] == "session_id"
    client.session_id = real


async def test_digits_in_a_string_are_the_same_session(client: V3Client) -> None:
    client.session_id, real = str(client.session_id), client.session_id
    assert await client.get((await client.call("say:x{{out}}"))["out"]) == "[x]"
    client.session_id = real


async def test_session_and_its_variables_can_be_listed(client: V3Client) -> None:
    one = await client.variable("one", "text")
    two = await client.variable("two")
    again = await client.variable("one")
    listed = (await client.send("GET", "/semantic_var", client.owned))["vars"]
    assert [(item["var_id"], item["state"]) for item in listed] == [
        (one.id, "ready"),
        (two.id, "empty"),
        (again.id, "empty"),
    ]
    # Names are not unique to the client, who makes a new variable each time.
    assert listed[0]["var_name"] == "one" != listed[2]["var_name"]
    body = {"session_auth": client.session_auth}
    described = await client.send("GET", f"/session/{client.session_id}", body)
    assert (described["vars"], described["value_bytes"]) == (3, 4)


async def test_deletion_frees_everything_and_tells_those_who_wait(
    client: V3Client, service: Service, model: Model
) -> None:
    model.engine.automatic = False
    never = await client.variable("never")
    running = (await client.call("say:x{{out}}"))["out"]
    waiting = (await client.call("say:{{in}}{{out}}", {"in": never}))["out"]
    await model.engine.wait_for(lambda: bool(model.engine.contexts))
    readers = [asyncio.create_task(client.get(item)) for item in (never, running, waiting)]
    await blocked(service, 3)
    await client.remove()
    for reader in readers:
        with pytest.raises(V3Error) as caught:
            await reader
        assert (caught.value.status, caught.value.code) == (424, "dependency_failed")
    await until(lambda: not left_over(service))
    await model.engine.settle()
    for variable in (never, running, waiting):
        with pytest.raises(V3Error) as caught:
            await client.get(variable)
        assert caught.value.code == "session_not_found"
    client.session_id = 0


# --- calls ----------------------------------------------------------------------------------------


async def test_variables_are_set_after_the_calls_that_read_them(
    client: V3Client, service: Service, model: Model
) -> None:
    early = await client.variable("early", "E")
    late = await client.variable("late")
    inputs = {"a": early, "b": late, "c": Var("c", value="{{a}}")}
    out = (await client.call("{{a}} {{b}} say:{{c}}{{out}} end", inputs))["out"]
    waiting = asyncio.create_task(client.get(out, "latency"))
    await blocked(service)
    assert model.prompts == []
    await client.set(late, "L")
    assert await waiting == "[{{a}}]"
    assert model.prompts == ["E L say:{{a}}"]
    assert await client.get(inputs["c"]) == "{{a}}"
    with pytest.raises(V3Error) as caught:
        await client.set(late, "again")
    assert (caught.value.status, caught.value.code) == (409, "variable_already_written")


async def test_a_chain_is_submitted_before_anything_runs(
    client: V3Client, service: Service, model: Model
) -> None:
    start = await client.variable("start")
    link = start
    for step in range(5):
        link = (await client.call(f"{step} say:{{{{x}}}}{{{{y}}}}", {"x": link}, {"y": {}}))["y"]
    got = asyncio.create_task(client.get(link, "TTFT"))
    await blocked(service)
    await client.set(start, "s")
    assert await got == "[[[[[s]]]]]"
    assert model.prompts == [f"{step} say:{'[' * step}s{']' * step}" for step in range(5)]


async def test_several_outputs_are_each_generated_from_all_before(
    client: V3Client, model: Model
) -> None:
    late = await client.variable("late")
    variables = await client.call(
        "say:{{x}}{{p}} say:1{{q}} then {{p}} say:2{{r}} end {{x}}",
        {"x": late},
        {
            "r": {"max_gen_length": 2, "temperature": 0.0},
            "p": {},
            "q": {"stop_str": "]", "top_p": 0.5},
        },
        func_name="three",
    )
    await client.set(late, "X")
    texts = [await client.get(variables[name], "TPOT") for name in ("p", "q", "r")]
    assert texts == ["[X]", "[1", "[2"]
    assert model.prompts == ["say:X", "say:X[X] say:1", "say:X[X] say:1[1 then [X] say:2"]
    assert [s.max_tokens for s in model.samplings] == [512, 512, 2]
    assert [s.temperature for s in model.samplings] == [1.0, 1.0, 0.0]
    assert [s.top_p for s in model.samplings] == [1.0, 0.5, 1.0]
    assert [s.repetition_penalty for s in model.samplings] == [1.0, 1.0, 1.0]


async def test_a_variable_of_the_users_may_be_an_output(client: V3Client, model: Model) -> None:
    mine = await client.variable("mine")
    reader = await client.call("say:{{in}}{{out}}", {"in": mine})
    writer = await client.call("say:w{{out}}", None, {"out": mine})
    assert writer["out"] is mine
    assert await client.get(reader["out"]) == "[[w]]"
    with pytest.raises(V3Error) as caught:
        await client.call("say:w{{out}}", None, {"out": mine})
    assert (caught.value.status, caught.value.code) == (409, "output_taken")
    with pytest.raises(V3Error) as caught:
        await client.set(mine, "x")
    assert caught.value.status == 409
    assert len(model.prompts) == 2


async def test_what_cannot_be_submitted_leaves_nothing_behind(
    client: V3Client, service: Service, model: Model
) -> None:
    x, y, taken = [await client.variable(name) for name in ("x", "y", "taken")]
    await client.set(taken, "t")
    await client.call("say:{{x}}{{y}}", {"x": x}, {"y": y})
    before = service.gateway.semantic.describe()
    failures = [
        ({"y": y}, {"p": {}, "x": x}, "dependency_cycle"),
        ({"y": y}, {"p": {}, "x": taken}, "output_taken"),
        ({"y": y}, {"p": x, "x": x}, "output_taken"),
        ({"y": y, "z": Var("z", "v" * 27)}, {"p": {}, "x": {}}, "variable_not_found"),
    ]
    for inputs, outputs, code in failures:
        if code == "output_taken" and outputs["p"] is x:
            outputs = {"p": taken, "x": taken}
        with pytest.raises(V3Error) as caught:
            await client.call("say:{{y}}{{p}} {{x}}", dict(inputs), outputs)
        assert caught.value.code == code
    after = service.gateway.semantic.describe()
    for name in ("variables", "value_bytes", "unfinished_calls"):
        assert after["sessions"][name] == before["sessions"][name]
    assert after["calls"]["waiting"] == before["calls"]["waiting"] == 1
    assert model.prompts == []


async def test_failure_reaches_get_through_calls_and_outputs(
    client: V3Client, model: Model
) -> None:
    broken = await client.call("BREAK {{p}} {{q}}", None, {"p": {}, "q": {}})
    after = await client.call("say:{{in}}{{out}}", {"in": broken["q"]})
    for variable in (broken["p"], broken["q"], after["out"]):
        with pytest.raises(V3Error, match="could not finish") as caught:
            await client.get(variable)
        assert (caught.value.status, caught.value.code) == (424, "dependency_failed")
        assert "call_" in caught.value.error["message"]
    assert len(model.prompts) == 1


async def test_prompt_that_does_not_fit_is_told_to_get(client: V3Client) -> None:
    long = Var("x", value="word " * 5000)
    out = (await client.call("{{x}} say: {{out}}", {"x": long}))["out"]
    with pytest.raises(V3Error, match="context"):
        await client.get(out)


async def test_a_reader_who_leaves_leaves_nothing(client: V3Client, service: Service) -> None:
    variable = await client.variable("never")
    reader = asyncio.create_task(client.get(variable))
    await blocked(service)
    reader.cancel()
    await until(lambda: service.gateway.semantic.describe()["readers"] == 0)
    await until(lambda: service.gate.running == 0)


async def test_criteria_become_objectives(client: V3Client, service: Service) -> None:
    never = await client.variable("never")
    given = await client.call("say:{{x}}{{y}}", {"x": never}, {"y": {}}, output_criteria="TTFT")
    waited = await client.call("say:{{x}}{{y}}", {"x": never}, {"y": {}})
    reader = asyncio.create_task(client.get(waited["y"], "TPOT"))
    await blocked(service)
    (session,) = service.gateway.semantic.sessions.of_tenant("default")
    by_output = {node.output: node for node in session.graph}
    await until(lambda: str(by_output[waited["y"].id].objective) == "tpot=50ms")
    assert str(by_output[given["y"].id].objective) == "ttft=500ms"
    for path, body in (
        (f"/semantic_var/{never.id}", {**client.owned, "criteria": "soon"}),
        ("/semantic_var/x", {**client.owned, "criteria": "soon"}),
    ):
        with pytest.raises(V3Error) as caught:
            await client.send("GET", path, body)
        assert (caught.value.status, caught.value.error["param"]) == (400, "criteria")
    await client.set(never, "1")
    assert await reader == "[1]"


async def test_values_with_quotes_continue_the_very_text(client: V3Client, model: Model) -> None:
    said = 'a "quoted" \\ word\n'
    call = await client.call(
        '{"in": "{{x}}", "say:{{p}}", "q": "{{q}}"}',
        {"x": Var("x", value=said)},
        {"p": {}, "q": {}},
    )
    await client.get(call["q"])
    assert model.prompts[0] == '{"in": "' + said + '", "say:'
    assert model.prompts[1] == model.prompts[0] + '[]", "q": "'


async def test_references_of_ordinary_calls_may_stand_in_a_template(
    client: V3Client, service: Service, model: Model
) -> None:
    described = await client.send(
        "GET", f"/session/{client.session_id}", {"session_auth": client.session_auth}
    )
    deferred = await client.http.post(
        f"{client.root}/v1/completions",
        json={"model": "m", "prompt": "say:deferred", "max_tokens": 50},
        headers={"x-parrot-session": described["name"], "x-parrot-defer": "true"},
    )
    reference = deferred.json()["choices"][0]["text"]
    assert reference.startswith("[[parrot:")
    values = {"x": Var("x", value=reference)}
    out = (await client.call(f"{reference} say:{{{{x}}}}{{{{y}}}}", values, {"y": {}}))["y"]
    assert await client.get(out) == f"[{reference}]"
    assert model.prompts == ["say:deferred", f"[deferred] say:{reference}"]
