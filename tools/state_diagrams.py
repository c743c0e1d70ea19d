"""Write `docs/design/states.md` from the tables of the two machines."""

from pathlib import Path

from kvberth.protocol.consumer_states import CONSUMER_TABLE
from kvberth.protocol.producer_states import PRODUCER_TABLE
from kvberth.protocol.table import Table, mermaid

TARGET = Path(__file__).parents[1] / "docs" / "design" / "states.md"


def rows(table: Table) -> str:
    """The table as text: one line per state and event."""
    lines = ["| state | event | leads to |", "| --- | --- | --- |"]
    for (state, event), targets in table.items():
        lines.append(f"| {state} | {event.__name__} | {', '.join(sorted(targets))} |")
    return "\n".join(lines)


def page() -> str:
    """The whole page."""
    parts = [
        "# States of a transfer",
        "Made by `python tools/state_diagrams.py` from the tables in `kvberth.protocol`; a test holds it in step. What"
        " is not in a table cannot happen: it raises, and names the transfer, the state and the event.",
    ]
    for name, table in (("Producer (prefill worker)", PRODUCER_TABLE), ("Consumer (decode worker)", CONSUMER_TABLE)):
        parts += [f"## {name}", f"```mermaid\n{mermaid(table)}\n```", rows(table)]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    TARGET.write_text(page())
