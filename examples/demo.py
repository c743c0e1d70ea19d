"""`make demo`: a real model with prefill and decode apart, and the answers of one undivided engine.

Starts three vLLM engines on this machine (a prefill worker, a decode worker, an undivided one) and the router, sends
the same prompts three ways, and compares. Exits with 1 unless every answer is the same and every split request really
went through a handoff.
"""

import itertools
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import openai
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvberth.launch import ClusterSettings, DemoModelError, LaunchError, LocalCluster, demo_model
from kvberth.launch.metrics import EngineMetrics

MODEL = "SmolLM2-135M-Instruct"
OUTPUT_TOKENS = 24
ALONE = (20, 100, 500, 2000)
AT_ONCE = (20, 60, 100, 200, 300, 500, 700, 1000)

WORDS_PER_TOKEN = 0.885
QUESTION = "In short, these notes are about"
NOTES = (
    "A berth is the place at the quay that a port keeps free for a ship that is still at sea.",
    "The pilot boards two miles out, where the channel narrows and the current turns with the tide.",
    "Grain is weighed twice, once on the ship's own scale and once on the scale of the port.",
    "Nobody remembers who painted the lighthouse red, but everyone agrees that it was before the war.",
    "When fog comes in, the horn sounds every forty seconds until the last boat has been counted.",
    "The apprentice learns the knots in winter, so that his hands know them when the ropes are wet.",
    "A ledger from the year of the great storm lists eleven anchors lost and nine of them found again.",
    "Fish are sold before sunrise by people who have already been awake for half a day.",
)


@dataclass(frozen=True)
class Answer:
    """One streamed answer with its figures; seconds."""

    prompt_tokens: int
    text: str
    ttft: float
    tpot: float


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    mode: str
    answers: list[Answer]
    num_bytes: float
    num_descriptors: float
    identical: bool


def prompt_of(tokens: int, salt: int) -> str:
    """English text of about `tokens` tokens; prompts of different salt begin differently."""
    sentences = [NOTES[(salt + at) % len(NOTES)] for at in range(2 + tokens // 18)]
    words = f"Notes of keeper number {salt}. {' '.join(sentences)}".split()
    return f"{' '.join(words[: round(tokens * WORDS_PER_TOKEN) - len(QUESTION.split())])}\n{QUESTION}"


def ask(url: str, mode: str | None, prompt: str) -> Answer:
    """One greedy answer through the `openai` client, streamed."""
    headers = {"x-kvberth-mode": mode} if mode else {}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", default_headers=headers, max_retries=0) as client:
        began = time.monotonic()
        first = last = began
        pieces: list[str] = []
        prompt_tokens = 0
        for chunk in client.completions.create(
            model=MODEL,
            prompt=prompt,
            max_tokens=OUTPUT_TOKENS,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        ):
            if chunk.usage:
                prompt_tokens = chunk.usage.prompt_tokens
            if chunk.choices:
                last = time.monotonic()
                first = last if not pieces else first
                pieces.append(chunk.choices[0].text)
    return Answer(prompt_tokens, "".join(pieces), first - began, (last - first) / (OUTPUT_TOKENS - 1))


def compare(console: Console, cluster: LocalCluster) -> bool:
    """Send everything three ways and show the table; whether all was as it should be."""
    undivided, decode = cluster.undivided[0].url, EngineMetrics(cluster.decode[0].url)
    salts = itertools.count()
    rows: list[Row] = []
    is_good = True
    for mode in ("push", "pull"):
        for sizes in (*([size] for size in ALONE), AT_ONCE):
            # No prompt begins like another: a prefix that is cached would not be handed over.
            prompts = [prompt_of(size, next(salts)) for size in sizes]
            with console.status(f"{mode}: {len(prompts)} at once, up to {max(sizes)} tokens"):
                wanted = send(undivided, None, prompts)
                before = decode.moved()
                answers = send(cluster.router_url, mode, prompts)
                moved = decode.moved_since(before, transfers=len(prompts))
            same = all(one.text == two.text for one, two in zip(answers, wanted, strict=True))
            # An engine that misses its KV cache computes it anew: the answer alone proves no handoff.
            handed_over = moved.completed == len(prompts) and moved.other == 0
            if not handed_over:
                console.print(f"[red]{mode}: {moved.completed:g} of {len(prompts)} requests were handed over")
            is_good = is_good and same and handed_over
            rows.append(Row("undivided", wanted, 0, 0, identical=True))
            rows.append(Row(mode, answers, moved.num_bytes, moved.num_descriptors, identical=same))
    show(console, rows)
    return is_good


def send(url: str, mode: str | None, prompts: list[str]) -> list[Answer]:
    """All at once."""
    with ThreadPoolExecutor(len(prompts)) as threads:
        return list(threads.map(lambda prompt: ask(url, mode, prompt), prompts))


def show(console: Console, rows: list[Row]) -> None:
    """The beginnings of some answers, and the table."""
    console.print()
    for row in rows[1:8:2]:
        answer = row.answers[0]
        text = escape(" ".join(answer.text.split()))
        line = f"[dim]{answer.prompt_tokens:>5} tokens, {row.mode}:[/] {text}"
        console.print(line, highlight=False, no_wrap=True, overflow="ellipsis")
    caption = "TTFT and TPOT are medians; KV MB and descriptors are sums"
    title = "One model, three ways: CPU, float32, greedy"
    table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))  # 80 columns wide
    for name in ("mode", "prompt tokens", "TTFT ms", "TPOT ms", "KV MB", "descriptors", "identical"):
        table.add_column(name, justify="left" if name == "mode" else "right")
    for row in rows:
        sizes = [answer.prompt_tokens for answer in row.answers]
        split = row.mode != "undivided"
        table.add_row(
            row.mode,
            str(sizes[0]) if len(sizes) == 1 else f"{len(sizes)} x {min(sizes)} to {max(sizes)}",
            f"{1000 * statistics.median(answer.ttft for answer in row.answers):.0f}",
            f"{1000 * statistics.median(answer.tpot for answer in row.answers):.0f}",
            f"{row.num_bytes / 1e6:.1f}" if split else "",
            f"{row.num_descriptors:,.0f}" if split else "",
            ("[green]yes" if row.identical else "[red]no") if split else "",
        )
    console.print(table)


def main() -> int:
    """Run the demo; the exit status."""
    console = Console()
    console.print("[bold]kvberth demo[/]: prefill and decode apart, on a real model")
    try:
        console.print("The model (converted once) ...")
        settings = ClusterSettings(
            model=str(demo_model()),
            served_model_name=MODEL,
            undivided=1,
            dtype="float32",
            max_model_len=4096,
            block_size=32,
            engine_args=("--enforce-eager",),
        )
        console.print("Three engines and the router:")
        with LocalCluster(settings, console) as cluster:
            console.print(f"[dim]logs: {cluster.run_dir}")
            is_good = compare(console, cluster)
    except (DemoModelError, LaunchError) as error:
        console.print(str(error), style="red", markup=False, highlight=False)
        return 1
    except KeyboardInterrupt:
        return 130
    verdict = "[green]All answers are identical." if is_good else "[red]Not as it should be: see above."
    console.print(verdict)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
