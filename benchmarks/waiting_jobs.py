"""The jobs of a trace, and the fleet on which they wait, for `waiting`."""

import csv
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import import_module
from math import ceil
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.packing import Site
from moorage.lab.errors import CommandError
from moorage.model import Demand
from moorage.policy import Rule

GPUS_EACH: Final = 8
"""GPUs of a node; a larger job takes several whole nodes."""
WAIT_SECONDS: Final = 1e9
SIZES: Final = (1, 2, 4, 8)
"""Smallest numbers of GPUs of the groups into which jobs are sorted by size."""


class Job(NamedTuple):
    """One job of the trace.

    Args:
        at: When the job was submitted, in seconds since the first job.
        seconds: How long the job ran.
        gpus: Number of GPUs of the job.
        cluster: The job's virtual cluster.
    """

    at: float
    seconds: float
    gpus: int
    cluster: str


def read_jobs(path: Path) -> list[Job]:
    """Return the jobs of a trace in the order of their submission.

    Raises:
        CommandError: A row cannot be read, or the file has no rows.
    """
    found: list[Job] = []
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for number, row in enumerate(csv.DictReader(file), 2):
                try:
                    at = datetime.fromisoformat(row["timestamp"]).replace(tzinfo=UTC).timestamp()
                    seconds, gpus = float(row["duration"]), int(row["num_gpus"])
                except (KeyError, TypeError, ValueError) as error:
                    expected = "timestamp,duration,num_gpus,cluster"
                    raise CommandError(
                        f"{path}, line {number}: {error}; expected {expected}"
                    ) from error
                found.append(Job(at, max(seconds, 1.0), gpus, row.get("cluster") or ""))
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"{path} cannot be read: {error}") from error
    if not any(job.gpus > 0 for job in found):
        raise CommandError(f"{path} asks for no GPUs")
    found.sort()
    return [job._replace(at=job.at - found[0].at) for job in found if job.gpus > 0]


def nodes_for(jobs: Sequence[Job], load: float) -> int:
    """Return the number of nodes on which jobs cause a load, enough for the largest job."""
    wanted = sum(job.gpus * job.seconds for job in jobs)
    span = max(jobs[-1].at, 1.0)
    largest = max(needs(job.gpus).nodes for job in jobs)
    return max(largest, round(wanted / span / load / GPUS_EACH))


def fleet_of(nodes: int) -> Site:
    """Return a fleet of empty nodes."""
    rows = [{"id": f"n{n:05}", "gpus": {"count": GPUS_EACH}} for n in range(nodes)]
    return Site({"id": "fleet", "nodes": {"count": nodes, "nodeData": rows}})


def policy_of(name: str) -> Rule:
    """Return a shipped policy."""
    module = import_module(f"moorage_policies.{name}")
    policy: Rule = module.AIOSv1PolicyRule(name, {}, {})
    return policy


def needs(gpus: int) -> Demand:
    """Return the demand of a job with a number of GPUs: the nodes, and the GPUs on each."""
    nodes = ceil(gpus / GPUS_EACH)
    return Demand(gpus=ceil(gpus / nodes), nodes=nodes)
