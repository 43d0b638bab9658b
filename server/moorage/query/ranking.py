"""Ranks documents by similarity to a reference, for searches without a ranking policy.

The distance is Gower's (Biometrics 27, 1971, "A general coefficient of similarity and some of its
properties"): the weighted mean of a distance from 0 to 1 for each path. The distances compare
numbers and texts, and do not depend on the units of numbers.
"""

from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from moorage.query.conditions import Fold, Path
from moorage.query.errors import QueryError
from moorage.query.evaluate import spread
from moorage.query.index import DocumentIndex
from moorage.query.paths import reader
from moorage.records.json_values import JsonMapping

_Floats = npt.NDArray[np.float64]

DEFAULT_WEIGHTS: Final[Mapping[str, float]] = {
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
"""Default weights for the similarity of cluster documents."""


def nearest(
    documents: DocumentIndex | Mapping[str, JsonMapping],
    reference: str | JsonMapping,
    weights: Mapping[str, float] | None = None,
    k: int | None = None,
) -> list[tuple[str, float]]:
    """Return the documents most similar to a reference, the most similar first.

    A document is compared with the reference at each path where the reference has a value:

    - numbers by the difference of their means, as a part of the range over all documents and the
      reference;
    - texts (where the reference has a text at the path) by Jaccard's distance: of all texts of the
      two documents, the part that only one of them has.

    A document without anything to compare at a path is at distance 1 there. Where the reference
    has nothing at any path, every document is at distance 0.

    Args:
        documents: The documents to rank, by id.
        reference: The id of one of `documents`, which is then left out of the answer; or a
            document, or the part of a document that matters.
        weights: Weight by path, 0 and more; None takes `DEFAULT_WEIGHTS`.
        k: The largest number of returned documents; None returns all.

    Returns:
        Ids with distances from 0 (alike) to 1, by ascending distance; equal distances by id.

    Raises:
        QueryError: There is no document with the reference's id.
    """
    index = documents if isinstance(documents, DocumentIndex) else _index(documents)
    like = index.get(reference) if isinstance(reference, str) else reference
    if like is None:
        raise QueryError("like", "the id of an existing document", f"{reference!r} is not")
    ids = [each for each in sorted(index) if each != reference]
    rows = np.array([index.rows()[each] for each in ids], np.intp)
    total, weight_total = np.zeros(len(ids)), 0.0
    weights = DEFAULT_WEIGHTS if weights is None else weights
    # Weights as parts of the largest, so that no sum of them is beyond a float.
    largest = max(weights.values(), default=0.0)
    for path, weight in weights.items():
        distances = _distances(index, rows, like, path) if weight > 0 else None
        if distances is not None:
            total += weight / largest * distances
            weight_total += weight / largest
    if weight_total:
        total /= weight_total
    order = np.argsort(total, kind="stable")[:k]  # The ids are in order, so ties are too.
    return [(ids[each], float(total[each])) for each in order]


def _index(documents: Mapping[str, JsonMapping]) -> DocumentIndex:
    index = DocumentIndex()
    for document_id, document in documents.items():
        index.put(document_id, document)
    return index


def _distances(
    index: DocumentIndex, rows: npt.NDArray[np.intp], like: JsonMapping, path: str
) -> _Floats | None:
    """Return each row's distance at one path; None if the reference has no value there."""
    found = spread(reader(Path(path))(like))
    texts = {value for value in found if isinstance(value, str)}
    if texts:
        shared, own = (counts[rows] for counts in index.column(Path(path)).common(texts))
        return 1.0 - shared / (own + len(texts) - shared)
    mean = Fold("avg", Path(path))
    (reference,) = reader(mean)(like) or (None,)
    if reference is None or not np.isfinite(reference):
        return None
    # Halves: the difference of two floats may exceed the largest float.
    values = index.column(mean).low[rows] / 2
    reference = reference / 2
    finite = np.isfinite(values)
    if not finite.any():
        return np.ones(len(rows))
    low = min(reference, values[finite].min())
    high = max(reference, values[finite].max())
    distances = np.ones(len(rows))
    distances[finite] = np.abs(values[finite] - reference) / (high - low) if high > low else 0.0
    return distances
