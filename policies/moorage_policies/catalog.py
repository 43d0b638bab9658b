"""The shipped rules as a server takes them: their source, and a document for `POST /policy`.

Called by the trials (demo, replay, bench), which publish the rules to a daemon over HTTP, and
by whoever wants a copy of a shipped rule to start from.
"""

from collections.abc import Mapping
from importlib import resources
from typing import Any, Final

VERSION: Final = "1.0"
RELEASE_TAG: Final = "stable"

_TYPICAL: Final[dict[str, Any]] = {
    "type": "array",
    "description": "Typical requests: {cpu_milli, gpus, gpu_milli, models, weight}; "
    "empty learns them from the requests seen",
    "items": {"type": "object"},
}

_RULES: Final[dict[str, tuple[str, dict[str, Any], dict[str, Any]]]] = {
    # name: (description, schema of its parameters, their defaults)
    "first_fit": ("The first node with room, in the order of their names.", {}, {}),
    "best_fit": ("The node that is left with the least; keeps empty nodes empty.", {}, {}),
    "spread": (
        "The node that is left with the most; evens the load out.",
        {
            "cpu_weight": {
                "type": "number",
                "min": 0,
                "max": 1,
                "description": "How much free CPU counts against free GPU",
            }
        },
        {"cpu_weight": 0.5},
    ),
    "dot_product": (
        "The node whose free CPU and GPU are least aligned with the request.",
        {},
        {},
    ),
    "gpu_packing": ("GPUs in use before idle ones, nodes in use before idle ones.", {}, {}),
    "gpu_clustering": ("The node that holds requests of the same kind.", {}, {}),
    "random": ("A node with room, drawn from the request's seed.", {}, {}),
    "fgd": (
        "The node whose free GPUs stay most useful to typical requests (FGD, USENIX ATC'23).",
        {"typical": _TYPICAL},
        {"typical": []},
    ),
}


def shipped() -> dict[str, str]:
    """Return the source text of every shipped rule, by its name."""
    folder = resources.files("moorage_policies")
    return {name: (folder / f"{name}.py").read_text(encoding="utf-8") for name in _RULES}


def document(
    name: str,
    parameters: Mapping[str, Any] | None = None,
    *,
    version: str = VERSION,
    release_tag: str = RELEASE_TAG,
) -> dict[str, Any]:
    """Return the PolicyRule document that publishes a shipped rule by `POST /policy`.

    Args:
        name: One of `shipped()`.
        parameters: Defaults that this publication shall have, in place of the rule's own.
        version: Its version; a URI is published once, so other defaults want another one.
        release_tag: Its release tag; the URI is `name:version-release_tag`.

    Raises:
        KeyError: No such rule is shipped.

    """
    if name not in _RULES:
        raise KeyError(f"no shipped rule {name!r}; there are {', '.join(_RULES)}")
    description, schema, defaults = _RULES[name]
    return {
        "policy_rule_uri": f"{name}:{version}-{release_tag}",
        "name": name,
        "version": version,
        "release_tag": release_tag,
        "type": "python_class_v1",
        "description": description,
        "tags": "shipped,placement",
        "metadata": {"author": "Moorage"},
        "code": shipped()[name],
        "policy_parameters_schema": schema,
        "policy_parameters": {**defaults, **(parameters or {})},
        "policy_settings_schema": {},
        "policy_settings": {},
    }
