"""Checks HTTP exchanges against `/openapi.json`, for tests of the server."""

import json
from functools import cached_property

import httpx
from jsonschema import Draft202012Validator
from starlette.routing import compile_path

CHECKED_BYTES_MAX = 65_536
"""Bytes of the largest body that is checked; larger bodies belong to tests of limits."""


class Interface:
    """A server's description of its own interface."""

    def __init__(self, described):
        self.described = described

    @cached_property
    def operations(self):
        """Return the operations by method and path, each with the pattern of its path."""
        return {
            (method.upper(), path): (compile_path(path)[0], operation)
            for path, methods in self.described["paths"].items()
            for method, operation in methods.items()
        }

    def problems(self, schema, value):
        whole = {**schema, "components": self.described["components"]}
        return [
            f"{error.json_path}: {error.message[:300]}"
            for error in Draft202012Validator(whole).iter_errors(value)
        ]

    def found(self, request):
        """Return the operation of a request; as in the server, the most literal path wins."""
        matching = [
            (path.count("{"), method, path)
            for (method, path), (pattern, _) in self.operations.items()
            if method == request.method and pattern.match(request.url.path)
        ]
        return min(matching)[1:] if matching else None

    def check(self, request: httpx.Request, response: httpx.Response, *, body: bool = True) -> None:
        """Fail if an answer, or the body of an accepted request, differs from the description.

        Without `body`, only the answer.
        """
        if len(response.content) > CHECKED_BYTES_MAX:
            return
        key = self.found(request)
        if key is None:
            return
        _, operation = self.operations[key]
        status = str(response.status_code)
        answers = operation["responses"]
        content = answers.get(status, answers["default"])["content"]
        kind = response.headers["content-type"].partition(";")[0]
        assert kind in content, (key, status, kind)
        if kind == "application/json":
            problems = self.problems(content[kind]["schema"], response.json())
            assert problems == [], (key, status, problems)
        if response.status_code >= 300:
            return
        assert status in answers, (key, status)
        if body and "requestBody" in operation and len(request.content) <= CHECKED_BYTES_MAX:
            schema = operation["requestBody"]["content"]["application/json"]["schema"]
            problems = self.problems(schema, json.loads(request.content))
            assert problems == [], (key, "body", problems)
