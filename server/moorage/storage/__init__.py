"""Transactions on one database: facts of the ledger, records of the catalog, tokens, a secret.

`ledger`, `catalog` and `daemon.access` define what these rows mean; only this package deals with
files, SQL and syncs. `storage.base` is the interface; each store has a folder.
"""
