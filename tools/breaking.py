"""Names the breaking changes of a JSON Schema, an OpenAPI or an AsyncAPI document.

An existing client must be able to send the same messages, and to read the answers as before. New
operations, new optional fields, new fields of answers and new codes break no client.
"""

from collections.abc import Iterator
from typing import Any, Final, Literal

Direction = Literal["said", "told"]
"""`said`: messages of clients; `told`: answers of the server."""

_UPPER: Final = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
_LOWER: Final = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")


class Comparison:
    """Compares the schemas of two documents.

    Args:
        old: The released document.
        new: The current document.
    """

    def __init__(self, old: dict[str, Any], new: dict[str, Any]) -> None:
        self._old, self._new = old, new
        self._seen: set[tuple[str, str, Direction]] = set()

    def breaks(self, old: Any, new: Any, where: str, direction: Direction) -> Iterator[str]:
        """Yield changes after which a schema allows or promises less than before."""
        pair = (str(old.get("$ref")), str(new.get("$ref")), direction)
        if "$ref" in old and "$ref" in new:
            if pair in self._seen:
                return
            self._seen.add(pair)
        old, new = _resolve(self._old, old), _resolve(self._new, new)
        olds, news = self._kinds(self._old, old), self._kinds(self._new, new)
        if not olds:  # It allowed every value, and promised nothing.
            if news and direction == "said":
                yield f"{where}: only {', '.join(sorted(news))} may be said now, not anything"
            return
        if not news:
            if direction == "told":
                yield f"{where}: may be anything now"
            return
        fewer, more = (olds, news) if direction == "said" else (news, olds)
        for kind in sorted(fewer.keys() - more.keys()):
            if kind == "integer" and "number" in more:
                continue
            change = "may no longer be" if direction == "said" else "may now be"
            yield f"{where}: {change} {kind}"
        for kind in olds.keys() & news.keys():
            yield from self._alike(olds[kind], news[kind], where, direction)

    def _kinds(self, document: dict[str, Any], schema: Any) -> dict[str, Any]:
        """Return the alternatives of a schema, by type and title."""
        found: dict[str, Any] = {}
        for each in schema.get("anyOf", [schema]):
            whole = _resolve(document, each)
            if "anyOf" in whole:
                found |= self._kinds(document, whole)
            elif "enum" in whole or "const" in whole:
                found["one of a list"] = whole
            elif "type" in whole:
                several = len(schema.get("anyOf", ())) > 1 and "title" in whole
                found[f"{whole['type']} {whole['title']}" if several else whole["type"]] = whole
        return found

    def _alike(
        self, old: dict[str, Any], new: dict[str, Any], where: str, direction: Direction
    ) -> Iterator[str]:
        """Yield the breaking changes between two schemas of one kind."""
        if direction == "said":
            yield from _lost_values(old, new, where)
        added = set(new.get("required", ())) - set(old.get("required", ()))
        gone = set(old.get("required", ())) - set(new.get("required", ()))
        for name in sorted(added if direction == "said" else gone):
            verb = "is required now" if direction == "said" else "may be missing now"
            yield f"{where}.{name}: {verb}"
        properties = new.get("properties", {})
        for name, was in old.get("properties", {}).items():
            if name in properties:
                yield from self.breaks(was, properties[name], f"{where}.{name}", direction)
            else:
                yield f"{where}.{name}: is gone"
        for part in ("items", "additionalProperties"):
            if isinstance(old.get(part), dict) and isinstance(new.get(part), dict):
                yield from self.breaks(old[part], new[part], f"{where}[]", direction)


def _lost_values(old: dict[str, Any], new: dict[str, Any], where: str) -> Iterator[str]:
    """Yield values that clients could send before, and no longer can."""
    values, before = _values(new), _values(old)
    for value in before:
        if values and value not in values:
            yield f"{where}: may no longer be {value!r}"
    for names, sign in ((_UPPER, 1), (_LOWER, -1)):
        for name in names:
            bound = new.get(name)
            if bound is not None and (name not in old or sign * bound < sign * old[name]):
                yield f"{where}: {name} is {bound} now, and was {old.get(name, 'not there')}"
    if new.get("additionalProperties") is False and old.get("additionalProperties") is not False:
        yield f"{where}: may have no other fields now"


def _values(schema: dict[str, Any]) -> list[Any]:
    return [schema["const"]] if "const" in schema else schema.get("enum", [])


def _resolve(document: dict[str, Any], part: Any) -> Any:
    while "$ref" in part:
        found: Any = document
        for name in part["$ref"].removeprefix("#/").split("/"):
            found = found[name]
        part = found
    return part


def openapi_breaks(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    """Yield the breaking changes of an OpenAPI document since the last release."""
    comparison = Comparison(old, new)
    for path, methods in old["paths"].items():
        for method, was in methods.items():
            where, now = f"{method.upper()} {path}", new["paths"].get(path, {}).get(method)
            if now is None:
                yield f"{where}: is gone"
                continue
            yield from _body(comparison, was, now, where)
            for status, answer in was["responses"].items():
                yield from _answer(comparison, answer, now["responses"].get(status), where, status)


def _body(comparison: Comparison, was: Any, now: Any, where: str) -> Iterator[str]:
    asked, asks = _contents(was.get("requestBody", {})), _contents(now.get("requestBody", {}))
    if asks and not asked:
        yield f"{where}: needs a body now"
    for kind in asked.keys() & asks.keys():
        yield from comparison.breaks(asked[kind], asks[kind], f"{where} body", "said")


def _answer(comparison: Comparison, was: Any, now: Any, where: str, status: str) -> Iterator[str]:
    if now is None:
        yield f"{where}: no longer answers {status}"
        return
    told, tells = _contents(was), _contents(now)
    for kind in told:
        if kind not in tells:
            yield f"{where} {status}: no longer answers {kind}"
        else:
            yield from comparison.breaks(told[kind], tells[kind], f"{where} {status}", "told")


def _contents(part: dict[str, Any]) -> dict[str, Any]:
    return {kind: each["schema"] for kind, each in part.get("content", {}).items()}


def asyncapi_breaks(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    """Yield the breaking changes of an AsyncAPI document since the last release."""
    comparison = Comparison(old, new)
    for name, was in old["operations"].items():
        now = new["operations"].get(name)
        if now is None:
            yield f"operation {name}: is gone"
            continue
        direction: Direction = "said" if was["action"] == "receive" else "told"
        yield from _messages(comparison, (old, was), (new, now), name, direction)
        if "reply" in was:
            pair = (old, was["reply"]), (new, now.get("reply", {"messages": []}))
            yield from _messages(comparison, *pair, name, "told")


def _messages(
    comparison: Comparison,
    old: tuple[dict[str, Any], Any],
    new: tuple[dict[str, Any], Any],
    operation: str,
    direction: Direction,
) -> Iterator[str]:
    before, after = (
        {each["name"]: each["payload"] for each in (_resolve(whole, m) for m in part["messages"])}
        for whole, part in (old, new)
    )
    for name, payload in before.items():
        if name not in after:
            yield f"operation {operation}: message {name} is gone"
        else:
            yield from comparison.breaks(payload, after[name], name, direction)
