"""The backend that starts nothing, for tests of programs that use `ResourceEngine`.

A server has the backend, too: requests choose it with `provision={"backend": "memory"}`.
"""

from moorage.backends.memory.backend import MemoryBackend
from moorage.backends.specs import MemoryResourceSpec

__all__ = ["MemoryBackend", "MemoryResourceSpec"]
