"""Machines as cluster documents, read from files and programs that a site already has.

`moorage fleet import` calls `collect`; `moorage.lab` also reads node tables with `openb`. The
documents are those of docs/reference/allocation-server.md, "Cluster documents".

A source is one of:

- a file, or `-` for stdin: a table of nodes (CSV), cluster documents (JSON), or the output of
  `kubectl get nodes -o json`, of `ray list nodes --detail --format json` or of `ray.nodes()`; the
  reader recognises the kind by the content;
- `local`: this machine;
- `kubernetes`, or `kubernetes:CONTEXT`: a Kubernetes cluster that the kubeconfig names;
- `ray`, or `ray:URL`: the dashboard of a Ray cluster.

All errors are one tree, below `MoorageError`:

    InventoryError    a source cannot be read, or the sources contradict each other
    └── TableError    a line of a CSV file does not match its header
"""

from moorage_client.inventory.collecting import collect, read
from moorage_client.inventory.documents import Document, Inventory, InventoryError, merge_documents
from moorage_client.inventory.openb import TableError

__all__ = [
    "Document",
    "Inventory",
    "InventoryError",
    "TableError",
    "collect",
    "merge_documents",
    "read",
]
