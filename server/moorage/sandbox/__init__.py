"""Runs policies in jailed processes: host, zygote, cell. The daemon uses `host.sandbox`.

This file imports nothing on purpose: the zygote imports the package too, and must not load the
server's half of it (asyncio, sockets, the core).
"""
