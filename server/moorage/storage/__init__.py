"""Transactions on one database: facts of the ledger, records of the catalog, tokens, a secret.

`ledger`, `catalog` and `daemon.access` say what these mean; a file, a dialect of SQL and a sync are
here alone. `storage.base` is the interface; each store is a folder beside it.
"""
