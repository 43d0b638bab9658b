"""What watchers hear: news of requests, leases, the fleet and the shapes that fit on it."""
