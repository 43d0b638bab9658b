"""Similarity: ranks clusters by how similar they are to a given one.

As the `policyRuleURI` of a search it gets the cluster documents and returns them all, the most
alike first. As the policy of a request it proposes the first node with room in the most similar
cluster that has any: for work that ran well somewhere and shall run on the like.

The distance is Gower's (Biometrics 27, 1971): per path a distance from 0 to 1, then their
weighted mean. Numbers (several, as in a list of nodes, by their mean) differ as a part of the
range over all documents; texts by Jaccard's distance, the part of the texts that either has and
not both. A document with nothing at a path is at distance 1 there; a path where the reference has
nothing does not count. Equal distances stay in the order of the ids. A search without a policy
ranks by the same measure, over an index; this policy is there to be changed, and for requests.

Parameters:
    like: the id of a cluster (a ranking leaves it out), or (a part of) a cluster document.
        Empty, the default: all are equally similar.
    weights: object, weight by dotted path; empty, the default, takes `WEIGHTS`.
    refresh_seconds: 0 and more, default 1: how old the distances of a placement may get before
        the documents are read again.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import inf
from time import monotonic
from typing import Any

import numpy as np

from moorage.policy import best_rows, decline, propose, read_demand

WEIGHTS = {
    "nodes.count": 1.0,
    "gpus.count": 1.0,
    "gpus.memory": 1.0,
    "vcpus.count": 1.0,
    "memory": 1.0,
    "storage.size": 1.0,
    "network.txBandwidth": 1.0,
    "network.rxBandwidth": 1.0,
    "reputation": 1.0,
    "tags": 1.0,
    "nodes.nodeData.gpus.modelNames": 1.0,
    "regionId": 1.0,
}


class AIOSv1PolicyRule:
    """Ranks clusters by similarity, or places a request in the most similar one."""

    def __init__(self, rule_id: str, settings: dict[str, Any], parameters: dict[str, Any]) -> None:  # noqa: ARG002  # The contract's signature.
        self._settings = settings
        self._known: Any = None
        self._read_at = -inf
        self._places: Any = None

    def eval(self, parameters: dict[str, Any], input_data: Any, context: dict[str, Any]) -> Any:  # noqa: ARG002  # As above.
        """Return the documents, the most similar first; for a request, a placement or a refusal.

        Raises:
            LookupError: There is no cluster with the id that `like` gives.
        """
        like, weights = parameters.get("like") or {}, parameters.get("weights") or WEIGHTS
        if isinstance(input_data, list):
            by_id = {document["id"]: document for document in input_data}
            reference = self._reference(like, by_id)
            others = [by_id[name] for name in sorted(by_id) if name != like]
            order = np.argsort(distances(others, reference, weights), kind="stable")
            return [others[number] for number in order.tolist()]
        fleet, demand = input_data["fleet"], read_demand(input_data)
        if demand is None:
            return decline(None)
        feasible = fleet.feasible(demand)
        scores = np.where(feasible, 0, -1)
        if like and feasible.any():
            refresh_seconds = parameters.get("refresh_seconds", 1)
            places = self._ranked(fleet, input_data["cluster_data"], like, weights, refresh_seconds)
            scores = np.where(feasible, places[fleet.cluster], -1)
        return propose(fleet, demand, best_rows(fleet, demand, scores))

    def _ranked(
        self, fleet: Any, data: Any, like: Any, weights: Any, refresh_seconds: float
    ) -> Any:
        """Return the similarity of each cluster, from documents that are fresh enough."""
        key, now = (fleet.cluster_ids, fleet.layout, list(data), like, weights), monotonic()
        if key != self._known or now - self._read_at >= refresh_seconds:
            by_id = {name: entry["data"] for name, entry in data.items()}
            reference = self._reference(like, by_id)
            # A cluster that is no candidate has no feasible node: any distance will do for it.
            documents = [by_id.get(name, {}) for name in fleet.cluster_ids]
            _, place = np.unique(distances(documents, reference, weights), return_inverse=True)
            self._known, self._read_at, self._places = key, now, place.max() - place
        return self._places

    def _reference(self, like: Any, documents: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the reference document; read it from the registry if it is not a candidate."""
        if isinstance(like, Mapping):
            return like
        if like in documents:
            found: Mapping[str, Any] = documents[like]
            return found
        known, document = self._settings["cluster_client"].read_cluster(like)
        if not known:
            raise LookupError(f"parameters.like: cannot read the cluster {like!r}: {document}")
        read: Mapping[str, Any] = document
        return read


def distances(
    documents: Sequence[Mapping[str, Any]], like: Mapping[str, Any], weights: Mapping[str, float]
) -> Any:
    """Return each document's distance from `like`: float `[documents]`, 0 (alike) to 1."""
    total, weight_total = np.zeros(len(documents)), 0.0
    for path, weight in weights.items():
        parts = path.split(".")
        found = [list(values_at(document, parts)) for document in documents]
        reference = list(values_at(like, parts))
        texts = {value for value in reference if isinstance(value, str)}
        if texts:
            own = [{value for value in values if isinstance(value, str)} for values in found]
            apart = np.array([1 - len(each & texts) / len(each | texts) for each in own])
        elif (mean := mean_of(reference)) is not None:
            means = np.array([mean_of(values) for values in found], float)  # NaN: no numbers.
            every = np.append(means[~np.isnan(means)], mean)
            spread = every.max() - every.min()
            apart = np.where(np.isnan(means), 1.0, abs(means - mean) / (spread or 1))
        else:
            continue
        total += weight * apart
        weight_total += weight
    return total / (weight_total or 1)


def mean_of(values: Sequence[Any]) -> float | None:
    """Return the mean of the numbers among `values`, or None if there are none."""
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    return sum(numbers) / len(numbers) if numbers else None


def values_at(value: Any, parts: Sequence[str]) -> Iterator[Any]:
    """Yield the values at a path; a list on the way contributes the values of each element."""
    if isinstance(value, list):
        for each in value:
            yield from values_at(each, parts)
    elif not parts:
        yield value
    elif isinstance(value, Mapping):
        yield from values_at(value.get(parts[0]), parts[1:])
