"""HTTP/1.1 for the gateway: the front door's protocol, and kept-alive connections to engines.

Data requests are read and answered here, on httptools; every other request of the same connection is handed to aiohttp.
It knows nothing of policies, leases or placement, and imports only ``wire`` of Roost. One request's way:

``server`` accepts; ``connection`` takes turns; ``reader`` parses and refuses; ``exchange`` is what the handler sees, or
``control`` the lane to aiohttp; ``upstream`` and ``upstream_connection`` ask the engine; ``relay`` joins both sides.
"""

from gateway.http.answers import error_answer, error_body, told_to_clients
from gateway.http.connection import DataHandler
from gateway.http.exchange import Exchange
from gateway.http.headers import Headers, Pair, forwardable
from gateway.http.limits import HttpLimits, UpstreamLimits, connections_within
from gateway.http.relay import Transform
from gateway.http.server import Server, serve
from gateway.http.upstream import UpstreamPool
from gateway.http.upstream_response import UpstreamFailed, UpstreamResponse

__all__ = [
    "DataHandler",
    "Exchange",
    "Headers",
    "HttpLimits",
    "Pair",
    "Server",
    "Transform",
    "UpstreamFailed",
    "UpstreamLimits",
    "UpstreamPool",
    "UpstreamResponse",
    "connections_within",
    "error_answer",
    "error_body",
    "forwardable",
    "serve",
    "told_to_clients",
]
