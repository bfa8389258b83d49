"""The control plane on aiohttp: health, metrics, the list of models, and the admin API under ``/roost/v1``."""

from .app import make_control
from .services import Services
from .training import TrainingService

__all__ = ["Services", "TrainingService", "make_control"]
