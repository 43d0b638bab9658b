"""The storage in PostgreSQL. Only `storage.opening` imports this package, which needs an extra.

An advisory lock elects the server that writes, and an epoch fences it: each commit share-locks the
row of the epoch, which changes only when another server takes over. So a server that lost its lock
cannot commit, even if its clock is wrong.
"""
