"""News for watchers: of requests, leases, the fleet and the shapes that fit on it."""
