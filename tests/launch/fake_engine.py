"""A process that behaves like an engine as far as launching goes: `/health`, a child and a grandchild.

`python fake_engine.py PORT [--die | --deaf]`: die at once, or never become healthy.
"""

import http.server
import subprocess
import sys
import time

CHILD = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "


class Health(http.server.BaseHTTPRequestHandler):
    """Says that all is well."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def main(port: int, how: str) -> None:
    print(f"fake engine on {port}", flush=True)
    if how == "--die":
        print("no such model", file=sys.stderr, flush=True)
        sys.exit(3)
    # A child in a session of its own, as vLLM's workers may be, that ignores SIGTERM's absence and has a child itself.
    subprocess.Popen([sys.executable, "-c", CHILD + "time.sleep(600)"], start_new_session=True)
    if how == "--deaf":
        time.sleep(600)
    http.server.HTTPServer(("127.0.0.1", port), Health).serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "")
