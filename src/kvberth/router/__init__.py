"""The OpenAI-compatible router: one address for clients, prefill and decode workers behind it."""

from kvberth.router.app import create_app
from kvberth.router.config import Mode, RouterConfig
from kvberth.router.server import serve

__all__ = ["Mode", "RouterConfig", "create_app", "serve"]
