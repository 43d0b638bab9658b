"""The code for the nodes of a Ray cluster. Ray sends it there, so no node needs this package."""
