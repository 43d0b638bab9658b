"""Tests of the check that distinguishes breaking changes of specifications from harmless ones."""

import importlib.util
import json
from copy import deepcopy
from pathlib import Path

import pytest

from moorage.protocol.specification import asyncapi


@pytest.fixture(scope="module")
def breaking(root: Path):
    spec = importlib.util.spec_from_file_location("breaking", root / "tools" / "breaking.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def new():
    return deepcopy(asyncapi("1.0"))


def schemas(document):
    return document["components"]["schemas"]


def test_an_unchanged_specification_breaks_no_client(breaking, root: Path, new) -> None:
    assert list(breaking.asyncapi_breaks(asyncapi("1.0"), new)) == []
    path = root / "tools" / "released" / "openapi.json"
    released = json.loads(path.read_text())
    assert list(breaking.openapi_breaks(released, deepcopy(released))) == []


def drop_operation(d):
    del d["operations"]["flush"]


def require_more(d):
    schemas(d)["Release"]["required"].append("id")


def drop_field(d):
    del schemas(d)["LeaseAnswer"]["properties"]["fencing"]


def promise_less(d):
    schemas(d)["LeaseAnswer"]["required"].remove("fencing")


def lower_a_bound(d):
    schemas(d)["Resources"]["properties"]["gpus"]["maximum"] = 8


def refuse_a_value(d):
    schemas(d)["Resources"]["properties"]["topology"]["enum"].remove("rack")


def change_a_type(d):
    schemas(d)["LeaseAnswer"]["properties"]["fencing"] = {"type": "string"}


def refuse_null(d):
    field = schemas(d)["AllocationRequest"]["properties"]["lease"]
    field["anyOf"] = [each for each in field["anyOf"] if each.get("type") != "null"]


BREAKS = [
    (drop_operation, "operation flush: is gone"),
    (require_more, "Release.id: is required now"),
    (drop_field, "fencing: is gone"),
    (promise_less, "fencing: may be missing now"),
    (lower_a_bound, "resources.gpus: maximum is 8 now, and was 1024"),
    (refuse_a_value, "resources.topology: may no longer be 'rack'"),
    (change_a_type, "fencing: may now be string"),
    (refuse_null, "AllocationRequest.lease: may no longer be null"),
]


@pytest.mark.parametrize(("change", "named"), BREAKS)
def test_the_check_reports_each_breaking_change(breaking, new, change, named: str) -> None:
    change(new)
    found = list(breaking.asyncapi_breaks(asyncapi("1.0"), new))
    assert any(named in each for each in found), found


def say_more(d):
    schemas(d)["Release"]["properties"]["why"] = {"type": "string"}


def tell_more(d):
    schemas(d)["LeaseAnswer"]["properties"]["colour"] = {"type": "string"}
    schemas(d)["LeaseAnswer"]["required"].append("colour")


def raise_a_bound(d):
    schemas(d)["Resources"]["properties"]["gpus"]["maximum"] = 4096


def add_a_code(d):
    schemas(d)["FailureReason"]["properties"]["code"] = {"enum": ["new", "busy"]}


@pytest.mark.parametrize("change", [say_more, tell_more, raise_a_bound, add_a_code])
def test_additions_to_a_specification_break_no_client(breaking, new, change) -> None:
    change(new)
    assert list(breaking.asyncapi_breaks(asyncapi("1.0"), new)) == []


def test_the_check_reports_a_removed_path(breaking, root: Path) -> None:
    path = root / "tools" / "released" / "openapi.json"
    old = json.loads(path.read_text())
    new = deepcopy(old)
    del new["paths"]["/allocate"]
    new["paths"]["/policy"]["post"]["responses"].pop("200")
    found = list(breaking.openapi_breaks(old, new))
    assert found == ["POST /allocate: is gone", "POST /policy: no longer answers 200"]
