"""The `kvberth` command.

Importing this package costs typer and rich only. vLLM, torch, NIXL and the web server are imported within the commands
that need them, so that `--help` is quick and works where they are broken.
"""

from kvberth.cli.app import app, main

__all__ = ["app", "main"]
