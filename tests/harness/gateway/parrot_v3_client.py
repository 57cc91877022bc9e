"""The original V3 client on the wire, and the answers it needs, in plain httpx.

Every request carries a JSON body, GET and DELETE too, on a connection of its own and without any
credentials; only a 200 with a JSON object counts; an error must have `error` and `traceback`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import httpx

SAMPLING: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "max_gen_length": 512,
    "ignore_tokenizer_eos": False,
    "stop_token_ids": [],
    "stop_str": None,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "n": 1,
    "best_of": 1,
    "logit_bias": None,
    "repetition_penalty": 0.0,
    "length_penalty": 0.0,
}


class V3Error(RuntimeError):
    """An error as the client tells its user: its text is made of `error` and `traceback`."""

    def __init__(self, status: int, error: dict[str, Any], traceback: str) -> None:
        super().__init__(f"{error} {traceback}")
        self.status = status
        self.error = error

    @property
    def code(self) -> str | None:
        """OpenAI's `code`."""
        code: str | None = self.error["code"]
        return code


@dataclass
class Var:
    """A variable on the client's side; its id comes with a call's answer when it has none."""

    name: str
    id: str | None = None
    value: str | None = None


def bound(name: str, variable: Var) -> dict[str, Any]:
    """An input, as a parameter of a call: by id when there is one, else by value."""
    if variable.id is not None:
        return {"name": name, "is_output": False, "var_id": variable.id}
    assert variable.value is not None
    return {"name": name, "is_output": False, "value": variable.value}


@dataclass
class V3Client:
    """One session's client."""

    root: str
    http: httpx.AsyncClient
    session_id: int = 0
    session_auth: str = ""
    headers: dict[str, str] = field(default_factory=dict)

    async def send(self, method: str, path: str, body: Any) -> dict[str, Any]:
        """One request of the client."""
        response = await self.http.request(
            method,
            f"{self.root}/v1{path}",
            json=body,
            headers={"connection": "close", **self.headers},
            timeout=60.0,
        )
        answer = response.json()
        assert isinstance(answer, dict)
        assert response.headers["content-type"].startswith("application/json")
        if response.status_code != 200:
            raise V3Error(response.status_code, answer["error"], answer["traceback"])
        return answer

    async def register(self) -> None:
        """POST /session."""
        answer = await self.send("POST", "/session", {"api_key": "1"})
        assert isinstance(answer["session_id"], int)
        assert isinstance(answer["session_auth"], str)
        self.session_id, self.session_auth = answer["session_id"], answer["session_auth"]

    @property
    def owned(self) -> dict[str, Any]:
        """Return the fields that all requests but calls carry."""
        return {"session_id": self.session_id, "session_auth": self.session_auth}

    async def remove(self) -> None:
        """DELETE /session/{id}."""
        path = f"/session/{self.session_id}"
        await self.send("DELETE", path, {"session_auth": self.session_auth})

    async def variable(self, name: str, content: str | None = None) -> Var:
        """POST /semantic_var, and set it if there is content."""
        answer = await self.send("POST", "/semantic_var", {**self.owned, "var_name": name})
        assert isinstance(answer["var_id"], str)
        variable = Var(name, answer["var_id"])
        if content is not None:
            await self.set(variable, content)
        return variable

    async def set(self, variable: Var, content: str) -> None:
        """POST /semantic_var/{id}."""
        body = {**self.owned, "content": content}
        await self.send("POST", f"/semantic_var/{variable.id}", body)

    async def get(self, variable: Var, criteria: str = "throughput") -> str:
        """GET /semantic_var/{id}, with a body."""
        body = {**self.owned, "criteria": criteria}
        content = (await self.send("GET", f"/semantic_var/{variable.id}", body))["content"]
        assert isinstance(content, str)
        return content

    async def call(
        self,
        template: str,
        inputs: dict[str, Var] | None = None,
        outputs: dict[str, Any] | None = None,
        **changes: Any,
    ) -> dict[str, Var]:
        """POST /semantic_call: no `session_auth`, and a stray `retry_times`.

        Args:
            template: with a place for each parameter.
            inputs: by parameter; those that have no id get theirs from the answer.
            outputs: by parameter: changes of the sampling config, or a variable of the user's.
            changes: of other fields.
        """
        variables = dict(inputs or {})
        parameters = [bound(name, variable) for name, variable in variables.items()]
        for name, what in (outputs or {"out": {}}).items():
            parameter = {"name": name, "is_output": True, "sampling_config": SAMPLING}
            variables[name] = Var(name)
            if isinstance(what, Var):
                parameter["var_id"], variables[name] = what.id, what
            else:
                parameter["sampling_config"] = SAMPLING | what
            parameters.append(parameter)
        body = {
            "session_id": self.session_id,
            "func_name": "f",
            "template": template,
            "models": [],
            "model_type": "token_id",
            "remove_pure_fill": True,
            "cache_prefix": True,
            "output_criteria": None,
            "fuse_fill": False,
            "parameters": parameters,
            "retry_times": 1,
            **changes,
        }
        answer = await self.send("POST", "/semantic_call", body)
        assert isinstance(answer["request_id"], int)
        listed = set()
        for info in answer["param_info"]:
            variable = variables[info["parameter_name"]]
            assert variable.id in (None, info["var_id"])
            assert isinstance(info["var_id"], str)
            assert info["var_id"].replace("-", "").replace("_", "").isalnum()
            variable.id = info["var_id"]
            listed.add(info["parameter_name"])
        assert listed == set(variables)
        return variables
