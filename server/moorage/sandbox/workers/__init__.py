"""Cells on other machines: `bridge` speaks to Ray, `agent` runs on Ray's nodes.

The daemon imports neither: it starts the bridge as a process (`sandbox.host.workers`), so that
nothing of Ray can stop or end it.
"""
