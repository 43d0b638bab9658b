"""Instance types with their sizes and prices: a list in this package, and newer lists by region.

Prices are on demand, for Linux, as of the day in the list. The shipped list has the prices of
us-east-1; for other regions, only its sizes are valid. `refresh` asks AWS for the list of a region
and writes it into the data folder; that list is used from then on.
"""

import functools
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from moorage.backends.aws.calls import PRICING_REGION, AwsCalls
from moorage.backends.base import BackendError
from moorage.records.json_values import JsonMapping

_SHIPPED: Final = Path(__file__).with_name("catalogue.json")
_REGION: Final = re.compile(r"[a-z0-9-]{1,40}")
_PRICE_FILTERS: Final = {
    "operatingSystem": "Linux",
    "tenancy": "Shared",
    "preInstalledSw": "NA",
    "capacitystatus": "Used",
    "marketoption": "OnDemand",
}


@dataclass(frozen=True, slots=True)
class InstanceType:
    """One instance type of EC2, with its size and price.

    Args:
        name: E.g. `g5.xlarge`.
        gpus: Number of GPUs.
        gpu_model: E.g. `A100`; empty if the type has no GPU.
        gpu_memory_mib: Memory of each GPU, in MiB.
        usd_per_hour: Price on demand; None: unknown.
    """

    name: str
    vcpus: int
    memory_mib: int
    gpus: int = 0
    gpu_model: str = ""
    gpu_memory_mib: int = 0
    usd_per_hour: float | None = None

    def is_model(self, wanted: str) -> bool:
        """Return whether the type's GPUs are of a model: `A100`, or with its memory `A100-80GB`."""
        names = {self.gpu_model, f"{self.gpu_model}-{round(self.gpu_memory_mib / 1024)}GB"}
        return wanted.casefold() in {name.casefold() for name in names}


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The instance types of a region with their prices, all of them x86.

    Args:
        region: The region of the prices.
        as_of: The day of the prices, as `2026-01-19`.
    """

    region: str
    as_of: str
    source: str
    types: tuple[InstanceType, ...]

    def find(self, name: str) -> InstanceType | None:
        """Return a type by its name, or None if the list has none."""
        return next((each for each in self.types if each.name == name), None)

    def fitting(
        self, *, vcpus: float = 0, memory_mib: float = 0, gpus: int = 0, gpu_model: str = ""
    ) -> list[InstanceType]:
        """Return the types that have at least these resources, the cheapest first.

        A request without GPUs gets a type without GPUs. Types without a price come last, the
        smallest first.

        Args:
            vcpus: Least number of processors.
            memory_mib: Least memory, in MiB.
            gpus: Least number of GPUs.
            gpu_model: Model of the GPUs; empty: any.
        """
        wanted = max(gpus, 1 if gpu_model else 0)
        fit = [
            each
            for each in self.types
            if each.vcpus >= vcpus
            and each.memory_mib >= memory_mib
            and (each.gpus >= wanted if wanted else not each.gpus)
            and (not gpu_model or each.is_model(gpu_model))
        ]
        return sorted(fit, key=_cost)

    def of(self, region: str) -> "Catalogue":
        """Return the catalogue for a region, without prices if its prices are of another region."""
        if region == self.region:
            return self
        return replace(self, types=tuple(replace(each, usd_per_hour=None) for each in self.types))


def _cost(each: InstanceType) -> tuple[bool, float, int, int, str]:
    price = each.usd_per_hour
    return (price is None, price or 0.0, each.gpus, each.vcpus, each.name)


def load(folder: Path, region: str) -> Catalogue:
    """Return the catalogue of a region: the list that `refresh` wrote, else the shipped list.

    The shipped catalogue keeps its prices, so types are ordered by price in any region;
    `Catalogue.of` removes them where an actual price is needed.

    Raises:
        BackendError: A refreshed list cannot be read; the message names the file.
    """
    path = _path(folder, region)
    path = path if path.exists() else _SHIPPED
    try:
        return _read(path, path.stat().st_mtime_ns)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise BackendError(
            f"{path} is not a catalogue ({error}): delete it or refresh it"
        ) from error


@functools.lru_cache(maxsize=64)
def _read(path: Path, changed_ns: int) -> Catalogue:
    del changed_ns  # Only part of the cache key: a rewritten file is read again.
    document = json.loads(path.read_text())
    types = tuple(InstanceType(**each) for each in document["types"])
    return Catalogue(document["region"], document["as_of"], document["source"], types)


def _path(folder: Path, region: str) -> Path:
    if not _REGION.fullmatch(region):
        raise BackendError(f"{region!r} is not a region of AWS")
    return folder / f"catalogue-{region}.json"


def refresh(calls: AwsCalls, folder: Path, region: str) -> Catalogue:
    """Ask AWS for the types and prices of a region, and store them.

    Needs the permissions ec2:DescribeInstanceTypes and pricing:GetProducts.

    Raises:
        BackendError: AWS did not answer, or refused; the stored list is unchanged.
    """
    path = _path(folder, region)
    prices = dict(_prices(calls, region))
    types = [replace(each, usd_per_hour=prices.get(each.name)) for each in _types(calls, region)]
    if not types or not prices:
        what = "instance types" if not types else "prices"
        raise BackendError(f"AWS listed no {what} of {region}; the catalogue is unchanged")
    types.sort(key=lambda each: each.name)
    today = datetime.now(UTC).date().isoformat()
    source = "EC2 DescribeInstanceTypes and AWS Price List"
    made = Catalogue(region, today, source, tuple(types))
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(asdict(made), indent=1))
    draft.replace(path)
    return made


def _types(calls: AwsCalls, region: str) -> Iterable[InstanceType]:
    pages = calls.pages(
        "describe_instance_types",
        region,
        Filters=[{"Name": "processor-info.supported-architecture", "Values": ["x86_64"]}],
    )
    for page in pages:
        for each in page["InstanceTypes"]:
            devices = each.get("GpuInfo", {}).get("Gpus", [])
            first = devices[0] if devices else {}
            yield InstanceType(
                each["InstanceType"],
                each["VCpuInfo"]["DefaultVCpus"],
                each["MemoryInfo"]["SizeInMiB"],
                sum(int(device.get("Count", 0)) for device in devices),
                first.get("Name", ""),
                first.get("MemoryInfo", {}).get("SizeInMiB", 0),
            )


def _prices(calls: AwsCalls, region: str) -> Iterable[tuple[str, float]]:
    wanted = {**_PRICE_FILTERS, "regionCode": region}
    filters = [
        {"Type": "TERM_MATCH", "Field": name, "Value": value} for name, value in wanted.items()
    ]
    pages = calls.pages(
        "get_products", PRICING_REGION, "pricing", ServiceCode="AmazonEC2", Filters=filters
    )
    for page in pages:
        for text in page["PriceList"]:
            product = json.loads(text)
            name = product["product"]["attributes"].get("instanceType", "")
            price = _hourly(product.get("terms", {}).get("OnDemand", {}))
            if name and price:
                yield name, price


def _hourly(terms: JsonMapping) -> float | None:
    for term in terms.values():
        for dimension in term["priceDimensions"].values():
            if dimension["unit"] == "Hrs" and "USD" in dimension["pricePerUnit"]:
                return float(dimension["pricePerUnit"]["USD"])
    return None
