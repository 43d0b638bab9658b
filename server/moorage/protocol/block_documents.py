"""Takes the block documents of clients out of the envelope of their specification."""

from moorage.records.json_values import JsonValue


def bare_block(document: JsonValue) -> JsonValue:
    """Return the value at `body.spec.values`, or the document itself."""
    inner = document
    for key in ("body", "spec", "values"):
        inner = inner.get(key) if isinstance(inner, dict) else None
    return inner if isinstance(inner, dict) else document
