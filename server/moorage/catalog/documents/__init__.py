"""Documents of clusters, metrics and policies: read, checked and compared, never stored."""
