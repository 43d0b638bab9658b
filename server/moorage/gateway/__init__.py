"""The WebSocket server: sessions, bounded send buffers, authentication.

The daemon makes a `Gateway`, passes it a `Deliver`, and answers through `Gateway.tell`.
"""

from moorage.gateway.deliver import Deliver, Request
from moorage.gateway.server import Gateway, GatewayStats
from moorage.gateway.settings import GatewaySettings

__all__ = ["Deliver", "Gateway", "GatewaySettings", "GatewayStats", "Request"]
