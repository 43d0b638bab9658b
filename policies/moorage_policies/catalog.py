"""The source of each shipped policy, and its document for `POST /policy`.

Called by the trials (demo, replay, bench), which publish the policies to a daemon over HTTP, and
by a user who starts from a copy of a shipped policy.
"""

from collections.abc import Mapping
from importlib import resources
from typing import Any, Final

VERSION: Final = "1.0"
RELEASE_TAG: Final = "stable"

_PART: Final[dict[str, Any]] = {"type": "number", "min": 0, "max": 1}
_TYPICAL: Final[dict[str, Any]] = {
    "type": "array",
    "description": "Typical requests: {cpu_milli, gpus, gpu_milli, memory_mib, models, weight};"
    " empty: learned from past requests",
    "items": {"type": "object"},
}

_RULES: Final[dict[str, tuple[str, dict[str, Any], dict[str, Any]]]] = {
    # name: (description, schema of its parameters, their defaults)
    "first_fit": ("The first node with room, in the order of node names.", {}, {}),
    "best_fit": (
        "The node with the least free capacity after the placement; keeps empty nodes empty.",
        {},
        {},
    ),
    "spread": (
        "The node with the most free capacity after the placement; evens the load out.",
        {"cpu_weight": {**_PART, "description": "Weight of free CPU, relative to free GPU"}},
        {"cpu_weight": 0.5},
    ),
    "dot_product": ("The node whose free CPU and GPU are least aligned with the request.", {}, {}),
    "gpu_packing": ("GPUs in use before idle ones, nodes in use before idle ones.", {}, {}),
    "gpu_clustering": ("The node that holds requests of the same kind.", {}, {}),
    "random": ("A node with room, drawn from the request's seed.", {}, {}),
    "fgd": (
        "The node whose free GPUs stay most useful to typical requests (FGD, USENIX ATC'23).",
        {"typical": _TYPICAL},
        {"typical": []},
    ),
    "expected_fill": (
        "The node that stays the most fillable by the requests to come.",
        {
            "typical": _TYPICAL,
            "stream_seed": {
                "type": "number",
                "min": 0,
                "description": "Seed of the simulated requests (a whole number)",
            },
            "prices": {
                "type": "boolean",
                "description": "Whether a place counts more if the fleet has few similar places",
            },
        },
        {"typical": [], "stream_seed": 1, "prices": True},
    ),
    "most_memory": ("The node whose GPUs have the most free memory.", {}, {}),
    "cheapest": (
        "The node whose GPU-hours cost the least, by labels and a table of prices.",
        {
            "prices": {
                "type": "object",
                "description": "Price of one GPU-hour by instance type or GPU model",
            },
            "spot_factor": {
                **_PART,
                "description": "Price of spot machines, as a share of the price in the table",
            },
        },
        {"prices": {}, "spot_factor": 1},
    ),
    "spot_first": (
        "Machines that the provider may reclaim before other machines.",
        {
            "order": {
                "type": "array",
                "items": {"type": "string"},
                "description": "Capacity types, in the order of preference",
            },
            "others": {
                "type": "boolean",
                "description": "Whether nodes of other types are used when these have no room",
            },
        },
        {"order": ["spot", "reserved", "on-demand"], "others": True},
    ),
    "least_loaded": (
        "The node with the least load, by its live metrics and its leases.",
        {
            "cpu_weight": {**_PART, "description": "Weight of CPU, relative to GPU"},
            "promised_weight": {**_PART, "description": "Weight of leases, relative to metrics"},
            "unmeasured": {**_PART, "description": "The measured load of a node without metrics"},
            "refresh_seconds": {
                "type": "number",
                "min": 0,
                "description": "Age at which the metrics are read again",
            },
        },
        {"cpu_weight": 0.25, "promised_weight": 0.25, "unmeasured": 1, "refresh_seconds": 1},
    ),
    "topology": ("GPUs of one NVLink group, else NUMA domain; gangs in one rack.", {}, {}),
    "gang": (
        "Nodes for a gang, close together or far apart.",
        {
            "strategy": {
                "type": "string",
                "choices": ["pack", "spread"],
                "description": "Few racks and full nodes, or many racks and empty nodes",
            }
        },
        {"strategy": "pack"},
    ),
    "similarity": (
        "Ranks clusters by similarity to a given cluster, or places in the most similar cluster.",
        {
            "like": {
                "type": "any",
                "description": "Id of a cluster, or (a part of) a cluster document; empty: any",
            },
            "weights": {
                "type": "object",
                "description": "Weight by dotted path; empty: the policy's own weights",
            },
            "refresh_seconds": {
                "type": "number",
                "min": 0,
                "description": "Age at which the documents are read again",
            },
        },
        {"like": "", "weights": {}, "refresh_seconds": 1},
    ),
}


def shipped() -> dict[str, str]:
    """Return the source text of every shipped policy, by its name."""
    folder = resources.files("moorage_policies")
    return {name: (folder / f"{name}.py").read_text(encoding="utf-8") for name in _RULES}


def document(
    name: str,
    parameters: Mapping[str, Any] | None = None,
    *,
    version: str = VERSION,
    release_tag: str = RELEASE_TAG,
) -> dict[str, Any]:
    """Return the PolicyRule document with which `POST /policy` publishes a shipped policy.

    Args:
        name: One of `shipped()`.
        parameters: Defaults that this publication shall have, in place of the policy's own.
        version: Its version; a URI is published once, so other defaults want another one.
        release_tag: Its release tag; the URI is `name:version-release_tag`.

    Raises:
        KeyError: No such policy is shipped.
    """
    if name not in _RULES:
        raise KeyError(f"no shipped policy {name!r}; there are {', '.join(_RULES)}")
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
        "code_file": f"{name}.py",
        "policy_parameters_schema": schema,
        "policy_parameters": {**defaults, **(parameters or {})},
        "policy_settings_schema": {},
        "policy_settings": {},
    }
