"""The page, the tables and the rest of what is made of a comparison."""

import csv
import io
import re
from html.parser import HTMLParser

import pytest
from rich.console import Console
from tests.compare.conftest import fill, manifest, settings

from kvberth.compare import Folder, load, to_csv, to_markdown, to_tables
from kvberth.compare.settings import TraceChoice

pytest.importorskip("matplotlib", reason="the report's plots need it")

from kvberth.compare.report import to_html


class Page(HTMLParser):
    """Tags that are open, and what the page would load from elsewhere."""

    def __init__(self, text):
        super().__init__()
        self.open, self.loads, self.texts = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        if tag not in {"meta", "br", "link", "img"}:
            self.open.append(tag)
        for name, value in attributes:
            if name in {"src", "href", "xlink:href"} and value and not value.startswith("#"):
                self.loads.append(value)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """That of the comparison which `folder` is."""
    folder = Folder(tmp_path_factory.mktemp("results"))
    folder.create(manifest(settings()))
    fill(folder, settings())
    return to_html(load(folder), folder.measured())


def test_the_page_needs_nothing_else(page):
    """Offline: no address is loaded, every tag is closed."""
    parsed = Page(page)
    assert parsed.loads == []
    assert parsed.open == []
    assert not re.search(r"@import|url\(http", page)


def test_the_verdict_comes_first(page):
    """Before any figure or plot."""
    assert page.index("This traffic wants kvberth push") < page.index("<svg")
    assert "emulated engines" in page


def test_plots_follow_the_theme(page):
    """No colour of matplotlib's own is left: placeholders have become variables."""
    for svg in re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL):
        assert set(re.findall(r"#[0-9a-f]{6}\b", svg)) == set()
        assert "var(--" in svg
        assert "width=" not in svg.partition(">")[0]


def test_a_report_that_is_made_again_is_the_same(folder, page):
    """Byte for byte, so that differences mean something."""
    assert to_html(load(folder), folder.measured()) == page


def test_a_trace_has_a_page_too(tmp_path):
    """Its prompts have no one length, and its cells no place in a grid of lengths."""
    trace = TraceChoice(file="/x/calls.jsonl", sha256="", requests=4, rate=2.0, speeds=(1.0, 4.0))
    chosen = settings(trace=trace, arrivals="trace", output_tokens=None)
    folder = Folder(tmp_path)
    folder.create(manifest(chosen))
    fill(folder, chosen)
    page = to_html(load(folder), folder.measured())
    assert "at the trace&#39;s prompts at 8 requests/s" in page
    assert "The first 4 requests of a trace, its own answers&#39; lengths, its own times" in page
    (push, *_) = load(folder).cells
    assert (push.prompt_tokens, push.mean_prompt_tokens, push.output_tokens) == (0, 16384, 3)


def test_a_mode_that_is_measured_in_some_cells_only(tmp_path):
    """It stands beside the others where it was measured, and is missing nowhere else."""
    chosen = settings(rates=(1.0, 4.0, 8.0), extra=True)
    folder = Folder(tmp_path)
    folder.create(manifest(chosen))
    fill(folder, chosen)
    comparison = load(folder)
    assert comparison.is_complete
    page = to_html(comparison, folder.measured())
    inline = page[page.index("over vLLM pull (inline posting)") :]
    rates = re.findall(r"<th>([0-9]+)/s</th>", inline[: inline.index("</table>")])
    assert rates == ["4", "8"]


def test_what_is_missing_stands_in_the_page(tmp_path):
    """A comparison that was cut short has a report that says so."""
    folder = Folder(tmp_path)
    folder.create(manifest(settings()))
    fill(folder, settings(), skip=lambda key: "vllm" in key and key.startswith("r1"))
    folder.note("vllm-pull, grid, repetition 2: prefill-0 <ended>")
    page = to_html(load(folder), folder.measured())
    assert "2 of the planned measurements are missing" in page
    assert "prefill-0 &lt;ended&gt;" in page


def test_a_comparison_of_nothing_has_a_page_too(tmp_path):
    """Interrupted before the first cell."""
    folder = Folder(tmp_path)
    folder.create(manifest(settings()))
    assert "Nothing was measured to its end." in to_html(load(folder))


def test_costs_only_with_a_price(folder, page):
    """Two engines of one GPU at 3.6 per hour are 0.002 per second."""
    assert "per M tokens" not in page
    comparison = load(folder, price_per_gpu_hour=3.6)
    (push,) = [cell for cell in comparison.cells if (cell.mode, cell.cell) == ("push", "16384@8")]
    assert push.cost_per_request == pytest.approx(0.002 / push.requests_per_second)
    assert "per M tokens" in to_html(comparison, folder.measured())


def test_csv_has_a_row_per_mode_and_cell(folder):
    """Figures within figures under names with dots."""
    rows = list(csv.DictReader(io.StringIO(to_csv(load(folder)))))
    assert len(rows) == 4
    assert float(rows[0]["ttft_ms.p50"]) == pytest.approx(100.4, abs=0.2)


def test_markdown_has_verdict_figures_and_targets(folder):
    """Tables as GitHub shows them."""
    text = to_markdown(load(folder))
    assert text.startswith("# This traffic wants kvberth push")
    assert "| kvberth push | 100 / - / - |" in text
    assert "| T1 |" in text
    assert '\n* machine: `{"' in text
    assert '"seed":' in text


def test_tables_fit_a_terminal(folder):
    """80 columns, no figure cut off."""
    console = Console(width=80, record=True, file=io.StringIO())
    for table in to_tables(load(folder)):
        console.print(table)
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
