"""Tests of Mongo filters in requests to the catalog: their matches and their errors."""

import pytest

from moorage.catalog.filters import compile_filter
from moorage.model import Code
from moorage.protocol.faults import ServiceError

CLUSTER = {"id": "c1", "regionId": "eu-west", "tags": ["gpu", "eu"], "gpus": {"count": 4}}


@pytest.mark.parametrize(
    ("query", "matches"),
    [
        ({}, True),
        (None, True),
        ({"id": {"$in": ["c1", "c2"]}, "gpus.count": {"$gte": "4"}}, True),
        ({"$or": [{"tags": "us"}, {"gpus.count": {"$lt": 4}}]}, False),
        ({"regionId": {"$regex": "^EU", "$options": "i"}}, True),
        # Fields may have the same names as keys of conditions.
        ({"operator": {"$exists": True}}, False),
    ],
    ids=str,
)
def test_a_compiled_filter_says_which_documents_match(query, matches):
    assert compile_filter(query)(CLUSTER) is matches


@pytest.mark.parametrize(
    ("query", "code", "field"),
    [
        ({"$where": "sleep(1000)"}, Code.UNSUPPORTED, "$where"),
        ({"$and": [{"id": 1}, {"$function": {}}]}, Code.UNSUPPORTED, "$and[1].$function"),
        ({"id": {"$not": {"$where": "1"}}}, Code.UNSUPPORTED, "id.$not.$where"),
        ([], Code.BAD_MESSAGE, "query"),
        ({"$or": [1]}, Code.BAD_MESSAGE, "$or[0]"),
        ({"id": {"$in": "c1"}}, Code.BAD_MESSAGE, "id.$in"),
        ({"$or": [{"id": 1}] * 257}, Code.TOO_LARGE, "$or"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_the_refusal_of_a_wrong_filter_names_the_place_of_the_error(query, code, field):
    with pytest.raises(ServiceError) as caught:
        compile_filter(query)
    assert caught.value.code is code
    assert caught.value.field.startswith(field)
    assert caught.value.expected
    assert caught.value.reason.startswith(caught.value.field)
