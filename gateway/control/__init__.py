"""The control plane on aiohttp: health, metrics, the list of models, and the admin API under ``/roost/v1``."""

from .app import make_control
from .services import Services

__all__ = ["Services", "make_control"]
