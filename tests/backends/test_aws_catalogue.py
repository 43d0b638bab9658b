"""The list of instance types that ships with Moorage, and the list that AWS returns."""

import json
import re

import pytest

from moorage.backends.aws.calls import AwsCalls
from moorage.backends.aws.catalogue import load, refresh
from moorage.backends.base import BackendError

pytestmark = pytest.mark.heavy  # The extra `aws`.


@pytest.fixture
def catalogue(tmp_path):
    return load(tmp_path, "us-east-1")


def test_the_catalogue_has_the_region_and_date_of_its_prices(catalogue):
    assert catalogue.region == "us-east-1"
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", catalogue.as_of)
    assert "Price List" in catalogue.source
    families = {each.name.partition(".")[0] for each in catalogue.types if each.gpus}
    assert families >= {"p3", "p4d", "p5", "g4dn", "g5", "g6", "g6e"}
    assert all(each.usd_per_hour and each.vcpus and each.memory_mib for each in catalogue.types)


@pytest.mark.parametrize(
    ("wanted", "cheapest"),
    [
        ({"gpus": 1}, "g4dn.xlarge"),
        ({"gpus": 8, "gpu_model": "A100"}, "p4d.24xlarge"),
        ({"gpus": 8, "gpu_model": "a100-80gb"}, "p4de.24xlarge"),
        ({"gpu_model": "L40S", "memory_mib": 100_000}, "g6e.4xlarge"),
        ({"vcpus": 2, "memory_mib": 4096}, "t3.medium"),
    ],
)
def test_the_cheapest_type_that_fits_comes_first(catalogue, wanted, cheapest):
    assert catalogue.fitting(**wanted)[0].name == cheapest


def test_cpu_demands_get_types_without_gpus_and_huge_demands_get_no_type(catalogue):
    assert not any(each.gpus for each in catalogue.fitting(vcpus=4))
    assert catalogue.fitting(gpus=9) == []
    assert catalogue.fitting(gpu_model="A1") == []


def test_prices_of_another_region_are_not_used(catalogue):
    assert catalogue.of("us-east-1") is catalogue
    assert {each.usd_per_hour for each in catalogue.of("eu-west-1").types} == {None}


def product(kind: str, price: str, unit: str = "Hrs") -> str:
    dimension = {"unit": unit, "pricePerUnit": {"USD": price}}
    terms = {"OnDemand": {"t": {"priceDimensions": {"d": dimension}}}}
    return json.dumps({"product": {"attributes": {"instanceType": kind}}, "terms": terms})


def test_a_refreshed_list_of_prices_replaces_the_shipped_list(aws, tmp_path):
    aws.memory.prices = [product("g5.xlarge", "1.42"), product("t3.micro", "0.0000000000")]
    made = refresh(AwsCalls(), tmp_path, "eu-west-1")
    read = load(tmp_path, "eu-west-1")
    assert read == made
    assert (read.region, read.find("g5.xlarge").usd_per_hour) == ("eu-west-1", 1.42)
    assert read.find("g5.xlarge").gpu_model == "A10G"
    assert read.find("t3.micro").usd_per_hour is None
    assert read.find("g5g.xlarge") is None, "an ARM machine cannot boot the default image"
    (request,) = aws.requests("GetProducts")
    assert "eu-west-1" in request["body"]
    assert load(tmp_path, "us-east-1").region == "us-east-1"


def test_a_refresh_that_fails_leaves_the_list_of_prices_unchanged(aws, tmp_path):
    with pytest.raises(BackendError, match="no prices of eu-west-1"):
        refresh(AwsCalls(), tmp_path, "eu-west-1")
    aws.refuse("DescribeInstanceTypes", "UnauthorizedOperation")
    with pytest.raises(BackendError, match="does not allow DescribeInstanceTypes in eu-west-1"):
        refresh(AwsCalls(), tmp_path, "eu-west-1")
    assert list(tmp_path.iterdir()) == []


def test_the_error_about_a_broken_list_of_prices_names_the_file(tmp_path):
    (tmp_path / "catalogue-eu-west-1.json").write_text("[]")
    with pytest.raises(BackendError, match=r"catalogue-eu-west-1\.json is not a catalogue"):
        load(tmp_path, "eu-west-1")
    with pytest.raises(BackendError, match="not a region of AWS"):
        load(tmp_path, "../eu")
