"""Fields of specs in JSON and Python; errors name each wrong field."""

import dataclasses
import json
import math
from typing import Any

import pytest

from moorage.backends.spec_documents import SPECS, document_from_spec, pool_key, spec_from_document
from moorage.backends.specs import (
    BaseResourceSpec,
    ContainerResourceSpec,
    MemoryResourceSpec,
    ProcessResourceSpec,
    Readiness,
    ServiceResourceSpec,
    SpecError,
    VLLMModelResourceSpec,
)

PROCESS = {"command": ["true"]}


@pytest.mark.parametrize(
    ("document", "path", "expected"),
    [
        ({}, "command", "a list of texts, the program first"),
        ({"command": "sleep 5"}, "command", 'a list, such as ["sleep", "5"]'),
        ({"command": [""]}, "command", "a list of texts, the program first"),
        ({"command": ["a", 3]}, "command.1", "a valid string"),
        ({"command": ["a\0"]}, "command.0", "a text without NUL characters"),
        ({**PROCESS, "environment": {"A=B": "1"}}, "environment.A=B", "names of variables"),
        ({**PROCESS, "environment": {"A": "\0"}}, "environment.A", "without NUL"),
        ({**PROCESS, "environment": {"A": 1}}, "environment.A", "a valid string"),
        ({**PROCESS, "workdir": "here"}, "workdir", "an absolute path"),
        ({**PROCESS, "cpu_count": 0}, "cpu_count", "a number greater than 0"),
        ({**PROCESS, "cpu_count": math.nan}, "cpu_count", "a finite number"),
        ({**PROCESS, "cpu_count": 1e300}, "cpu_count", "less than or equal to 65536"),
        ({**PROCESS, "mem_limit": True}, "mem_limit", "bytes, or text"),
        ({**PROCESS, "mem_limit": "9" * 5000}, "mem_limit", "bytes, or text"),
        ({**PROCESS, "mem_limit": 10**40}, "mem_limit", "bytes, or text"),
        ({**PROCESS, "gpus": -1}, "gpus", "greater than or equal to 0"),
        ({**PROCESS, "stop_seconds": 1e9}, "stop_seconds", "less than or equal to 3600"),
        ({**PROCESS, "stop_seconds": -1}, "stop_seconds", "greater than or equal to 0"),
        ({**PROCESS, "start_timeout": 0}, "start_timeout", "a number greater than 0"),
        ({**PROCESS, "max_global_num": 0}, "max_global_num", "greater than or equal to 1"),
        ({**PROCESS, "extra": None}, "extra", "a valid dictionary"),
        ({**PROCESS, "shoes": 2}, "shoes", "one of the fields of process: category, command"),
    ],
)
def test_invalid_fields_of_a_process_spec_are_refused(document, path, expected):
    with pytest.raises(SpecError) as raised:
        spec_from_document(document, "process")
    assert raised.value.path == f"spec.{path}"
    assert expected in raised.value.expected
    if "shoes" not in document:
        with pytest.raises(SpecError) as raised:
            ProcessResourceSpec(**document)
        assert raised.value.path == path


@pytest.mark.parametrize(
    ("category", "document", "path"),
    [
        ("service", {**PROCESS, "port": 70_000}, "port"),
        ("service", {**PROCESS, "host": ""}, "host"),
        ("service", {**PROCESS, "readiness": {"port": 0}}, "readiness.port"),
        ("service", {**PROCESS, "readiness": {"every_seconds": 0}}, "readiness.every_seconds"),
        ("service", {**PROCESS, "readiness": {"command": []}}, "readiness.command"),
        ("service", {**PROCESS, "readiness": {"wait": 1}}, "readiness.wait"),
        ("vllm", {}, "model_name_or_path"),
        ("vllm", {"model_name_or_path": "m", "tensor_parallel_size": 0}, "tensor_parallel_size"),
        ("vllm", {"model_name_or_path": "m", "gpu_memory_utilization": 2}, "gpu_memory_"),
        ("container", {"ports": {"http": 80}}, "ports.http"),
        ("container", {"ports": {"80": 70_000}}, "ports.80"),
        ("container", {"gpus": "two"}, "gpus"),
        ("container", {"image": ""}, "image"),
        ("instance", {"volume_gib": 0}, "volume_gib"),
        ("instance", {"max_price_per_hour": 0}, "max_price_per_hour"),
        ("memory", {"start_seconds": 61}, "start_seconds"),
        ("pizza", {}, "category"),
    ],
)
def test_invalid_fields_of_other_specs_are_refused(category, document, path):
    with pytest.raises(SpecError) as raised:
        spec_from_document(document, category)
    assert raised.value.path.startswith(f"spec.{path}")


def test_a_probe_that_was_made_in_python_is_checked_with_its_spec():
    with pytest.raises(SpecError, match=r"readiness\.port: expected a number"):
        ServiceResourceSpec(command=["x"], readiness=Readiness(port=-1))


@pytest.mark.parametrize("given", [2, "all", ["GPU-1", "GPU-2"], None])
def test_a_container_requests_gpus_by_number_or_by_name(given):
    assert ContainerResourceSpec(gpus=given).gpus == given


def test_a_memory_limit_keeps_its_spelling():
    assert ProcessResourceSpec(command=["x"], mem_limit="1.5GiB").mem_limit == "1.5GiB"


@pytest.mark.parametrize("category", sorted(SPECS))
def test_equal_specs_from_json_and_python_share_a_pool(category):
    document: dict[str, Any] = {
        "process": PROCESS,
        "service": {**PROCESS, "readiness": {"path": "/"}},
        "vllm": {"model_name_or_path": "m"},
        "container": {"ports": {"80": 0}, "mount": {"/a": "/b"}},
    }.get(category, {})
    read = spec_from_document(document, category)
    made = type(read)(**{each.name: getattr(read, each.name) for each in dataclasses.fields(read)})
    assert pool_key(read, "local") == pool_key(made, "local")


def test_the_fields_of_a_custom_spec_are_checked_by_their_types():
    @dataclasses.dataclass(kw_only=True)
    class Own(BaseResourceSpec):
        category = "own"
        handle: object = None
        size: int = 1

    assert Own(handle=print, size=2).handle is print
    with pytest.raises(SpecError, match="size: expected a valid integer"):
        Own(size="many")


def test_defaults_are_as_documented():
    model = VLLMModelResourceSpec(model_name_or_path="m")
    assert (model.port, model.gpu_memory_utilization, model.tool_call_parser) == (
        8000,
        0.8,
        "hermes",
    )
    assert ContainerResourceSpec().title == "ubuntu:22.04"
    assert MemoryResourceSpec().max_global_num is None


@pytest.mark.parametrize(
    ("document", "least"),
    [
        (
            {"command": ["a"], "workdir": None, "stop_seconds": 1, "mem_limit": "2k"},
            {"category": "process", "command": ["a"], "stop_seconds": 1.0, "mem_limit": 2048},
        ),
        (
            {"category": "service", "command": ["a"], "readiness": {"path": "/", "port": None}},
            {"category": "service", "command": ["a"], "readiness": {"path": "/"}},
        ),
        (
            {"category": "container", "ports": {"80": 0}, "cpu_count": 2, "environment": {}},
            {"category": "container", "ports": {"80": 0}, "cpu_count": 2.0},
        ),
    ],
)
def test_equal_specs_have_one_document_and_reading_the_document_gives_the_spec_again(
    document, least
):
    spec = spec_from_document(document, "process")
    said = document_from_spec(spec)
    assert said == least
    again = spec_from_document(json.loads(json.dumps(said)), "memory")
    assert document_from_spec(again) == said


@pytest.mark.parametrize(
    "fields", [{"port": True}, {"stop_seconds": True}, {"cpu_count": True}, {"gpus": True}]
)
def test_a_boolean_is_not_accepted_as_a_number(fields):
    with pytest.raises(SpecError, match=f"{next(iter(fields))}: expected a number"):
        ServiceResourceSpec(command=["a"], **fields)
