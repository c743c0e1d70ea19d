"""The OpenAI-compatible router: one address for clients, prefill and decode workers behind it."""

from kvberth.router.app import create_app, serve
from kvberth.router.config import Mode, RouterConfig

__all__ = ["Mode", "RouterConfig", "create_app", "serve"]
