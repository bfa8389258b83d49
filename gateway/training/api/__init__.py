"""The training API over HTTP: a request becomes work, an error an answer. ``app`` joins the parts."""

from .app import make_app
from .services import Services

__all__ = ["Services", "make_app"]
