"""The ledger: facts, in order, on disk; `append` returns when they are durable."""
