"""What an engine says of its transfers."""

import http.server
import threading
from collections.abc import Iterator

import pytest

from kvberth.launch.metrics import EngineMetrics, Moved

PAGE = """# HELP kvberth:transfers_total Transfers by how and why they ended.
# TYPE kvberth:transfers_total counter
kvberth:transfers_total{end="completed",mode="push",reason="none",role="consumer"} %d
kvberth:transfers_total{end="completed",mode="none",reason="not_needed",role="consumer"} 1
kvberth:transfers_total{end="failed",mode="pull",reason="peer_lost",role="consumer"} 2
kvberth:transfers_total{end="completed",mode="push",reason="none",role="producer"} 100
kvberth:transfer_bytes_total{mode="push",role="consumer"} 4096
kvberth:transfer_descriptors_sum{mode="push",role="consumer"} 7
vllm:kv_cache_usage_perc 0.5
"""


@pytest.fixture
def url() -> Iterator[str]:
    """A page whose completed transfers grow by one each time it is read."""
    reads = iter(range(3, 1000))

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write((PAGE % next(reads)).encode())

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_values_are_summed_over_series(url):
    """Only series with the labels, and only the sample's own name."""
    metrics = EngineMetrics(url)
    assert metrics.value("vllm:kv_cache_usage_perc") == 0.5
    assert metrics.value("kvberth:transfers_total", role="producer") == 100
    assert metrics.value("kvberth:transfers_total", reason="peer_lost") == 2
    assert metrics.value("nonesuch") == 0


def test_several_values_come_from_one_reading(url):
    """The page changes between two."""
    page = EngineMetrics(url).page("vllm:kv_cache_usage_perc", "kvberth:transfers_total", "nonesuch")
    assert page.value("vllm:kv_cache_usage_perc") == 0.5
    assert [page.value("kvberth:transfers_total") for _ in range(2)] == [3 + 1 + 2 + 100] * 2
    assert page.value("nonesuch") == 0


def test_what_moved_since_waits_for_the_figures(url):
    """An engine's figures come some steps after its answer."""
    metrics = EngineMetrics(url)
    before = Moved(completed=0, other=3, num_bytes=0, num_descriptors=0)
    moved = metrics.moved_since(before, transfers=8)
    assert moved.completed >= 8
    assert (moved.other, moved.num_bytes, moved.num_descriptors) == (0, 4096, 7)
