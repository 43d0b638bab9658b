"""The code on the nodes of a Ray cluster. It is sent there, so no node needs this package."""
