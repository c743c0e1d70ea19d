"""The load generator: planned traffic out, one record per request back, figures from the records.

Traffic, sending, records and statistics know nothing of each other beyond their types; `run` ties them together.
"""

from kvberth.bench.arrivals import Arrivals
from kvberth.bench.errors import BenchError, RecordError, TargetError, TraceError
from kvberth.bench.interrupts import Interrupts
from kvberth.bench.machine import machine, versions
from kvberth.bench.plan import Cancellation, Message, Plan, PlannedRequest
from kvberth.bench.records import RecordFile, RequestRecord, read_records, write_records
from kvberth.bench.run import Progress, RunResult, run, run_blocking
from kvberth.bench.statistics import Percentiles, Summary, summarise
from kvberth.bench.target import Target
from kvberth.bench.trace_traffic import TraceTraffic
from kvberth.bench.traces import Trace, read_trace
from kvberth.bench.traffic import RandomTraffic, Traffic

__all__ = [
    "Arrivals",
    "BenchError",
    "Cancellation",
    "Interrupts",
    "Message",
    "Percentiles",
    "Plan",
    "PlannedRequest",
    "Progress",
    "RandomTraffic",
    "RecordError",
    "RecordFile",
    "RequestRecord",
    "RunResult",
    "Summary",
    "Target",
    "TargetError",
    "Trace",
    "TraceError",
    "TraceTraffic",
    "Traffic",
    "machine",
    "read_records",
    "read_trace",
    "run",
    "run_blocking",
    "summarise",
    "versions",
    "write_records",
]
