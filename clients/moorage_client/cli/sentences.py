"""Sentences for the details of a refusal; `output` prints them."""

from collections.abc import Callable, Mapping
from typing import Final

from moorage.records.fields import field_title
from moorage.records.json_values import JsonValue

_MISFITS: Final = {
    "labels": "other labels than the request's",
    "gpu_model": "too few GPUs of the accepted models",
    "gpu_memory": "too few GPUs with that much memory",
    "gpu_count": "too few GPUs",
    "topology": "too few GPUs in one link group or NUMA domain",
    "cpu": "too little CPU",
    "memory": "too little memory",
    "unavailable": "no service at present",
    "gpus_busy": "too few free GPUs",
    "topology_busy": "too few free GPUs in one link group or NUMA domain",
    "cpu_busy": "too little free CPU",
    "memory_busy": "too little free memory",
    "nodes": "too few nodes",
}
"""Phrases for the constraints that a node fails, after "has" or "have"."""
_VERDICTS: Final = {
    "never": "Waiting does not help: it would not fit an empty fleet either.",
    "not_now": "It may succeed later; `--wait SECONDS` waits for that, if the command has it.",
    "not_you": "Your role or your tenant's quota does not allow this at present.",
}


def sentence(name: str, value: JsonValue, words: Callable[[JsonValue], str]) -> str:
    """Return a detail of a refusal as a sentence.

    Args:
        name: The detail's key in the reply.
        value: The detail's value, of any type.
        words: Returns a value in words.
    """
    if name == "verdict":
        return _VERDICTS.get(str(value), f"Verdict: {words(value)}.")
    text = detail(name, value, words)
    if name == "misfits" or not text:
        return text
    if name in _BEFORE:
        return f"{_BEFORE[name]}{text}."
    plain = field_title(name)
    return f"{plain[:1].upper()}{plain[1:]}: {text}"


def detail(name: str, value: JsonValue, words: Callable[[JsonValue], str]) -> str:
    """Return the value of a detail in words; the arguments are those of `sentence`."""
    if name == "misfits" and isinstance(value, Mapping):
        return " ".join(filter(None, (_misfit(*each) for each in value.items())))
    if name == "largest" and isinstance(value, Mapping) and value.get("nodes") == 0:
        return ""
    text = words(value)
    return _MISFITS.get(text, field_title(text)) if name == "binding" and text else text


def says(name: str, value: JsonValue, reason: str) -> bool:
    """Return whether the sentence of a refusal already contains a detail."""
    if name in {"nearest", "registered"}:
        return "did you mean" in reason.lower()
    return name == "fits_if" and len(value) == 1 and "It would fit" in reason


def _misfit(name: str, nodes: JsonValue) -> str:
    lacks = _MISFITS.get(name, field_title(name))
    return f"{nodes} node{' has' if nodes == 1 else 's have'} {lacks}." if nodes else ""


_BEFORE: Final = {
    "binding": "What rules out most nodes: ",
    "fits_if": "It would fit ",
    "known": "There are: ",
    "largest": "The largest amounts: ",
    "missing": "Missing: ",
    "models": "Existing GPU models: ",
    "nearest": "Similar names: ",
    "nodes": "Examined nodes: ",
    "registered": "Registered here: ",
    "unknown": "Not there: ",
}
"""Words before the value of a detail."""
