"""Traces: what each format says, and that nothing else is taken for it."""

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvberth.bench import Message, TraceError, read_trace
from kvberth.bench.traces import BadRow, GivenTokens, HashedBlocks, RandomTokens, Turn

SAMPLES = Path(__file__).parent / "traces"


def read(name, **settings):
    return read_trace(SAMPLES / name, **{"requests": 100} | settings)


def said(trace):
    return [(row.line, row.seconds, *row.turns) for row in trace.rows]


def user(text):
    return (Message(role="user", content=text),)


@pytest.fixture
def trace_of(tmp_path):
    """Write lines to a file and read it."""

    def write(*lines, end="\n", **settings):
        path = tmp_path / "trace"
        texts = [each if isinstance(each, str) else json.dumps(each) for each in lines]
        path.write_text("\n".join(texts) + end)
        return read_trace(path, **{"requests": 100} | settings)

    return write


def test_mooncake():
    """Milliseconds, lengths, and which blocks of the prompt are which."""
    trace = read("mooncake.jsonl")
    assert (trace.format, trace.time_unit, trace.skipped) == ("mooncake", "milliseconds", ())
    assert said(trace)[:3] == [
        (1, 0.0, Turn(HashedBlocks(1300, (0, 1, 2)), 20)),
        (2, 0.0, Turn(HashedBlocks(700, (0, 3)), 5)),
        (3, 0.25, Turn(HashedBlocks(1536, (0, 1, 4)), 12)),
    ]


@pytest.mark.parametrize("year", [2023, 2024])
def test_azure(year):
    """Dates with seven digits of a second and no zone, or with six or none and a zone."""
    trace = read(f"azure-{year}.csv")
    assert (trace.format, trace.time_unit) == ("azure", "dates")
    begin = trace.rows[0].seconds
    turns = {
        2023: [(2, 0.0, Turn(RandomTokens(480), 12)), (3, 0.25, Turn(RandomTokens(112), 250))],
        2024: [(2, 0.0, Turn(RandomTokens(2000), 6)), (3, 0.75, Turn(RandomTokens(901), 33))],
    }
    assert [(line, round(seconds - begin, 6), turn) for line, seconds, turn in said(trace)[:2]] == turns[year]


def test_burstgpt():
    """Seconds; columns by name, whichever of them there are."""
    assert said(read("burstgpt.csv")) == [
        (2, 7.0, Turn(RandomTokens(300), 20)),
        (3, 19.0, Turn(RandomTokens(95), 410)),
        (4, 20.5, Turn(RandomTokens(1200), 64)),
    ]
    trace = read("burstgpt-sessions.csv", skip_bad_rows=True)
    assert said(trace) == [(2, 19000000.0, Turn(RandomTokens(800), 90)), (4, 19000006.5, Turn(RandomTokens(950), 55))]
    assert [row.line for row in trace.skipped] == [3]


def test_sharegpt():
    """Questions as a chat's messages, an answer as a length, a system's message with the first question."""
    trace = read("sharegpt.json", turns=9, skip_bad_rows=True)
    assert (trace.format, trace.time_unit) == ("sharegpt", None)
    system = Message(role="system", content="Answer in one word.")
    assert said(trace) == [
        (2, None, Turn(user("Which berth is free at noon?"), 11), Turn(user("And after three?"), 6)),
        (11, None, Turn((system, *user("Is the tide high?")), 1)),
    ]
    reason = "question and answer do not take turns - at `$.conversations[0]`"
    assert trace.skipped == (BadRow(19, reason),)


def test_sharegpt_in_lines(trace_of):
    """An entry per line is the same."""
    entry = {"conversations": [{"from": "user", "value": "a"}, {"from": "assistant", "value": "b" * 9}]}
    assert said(trace_of(entry)) == [(1, None, Turn(user("a"), 3))]


def test_custom():
    """A prompt is a length, a text or token ids."""
    assert said(read("custom.jsonl")) == [
        (1, 0.0, Turn(RandomTokens(64), 8)),
        (2, 0.25, Turn(user("Which berth is free at noon?"), 16)),
        (3, 1.5, Turn(GivenTokens((11, 12, 13)), 4)),
    ]


def test_only_what_is_wanted_is_read(trace_of):
    """A file may be longer than a run, and wrong where nobody looks."""
    rows = [{"prompt_tokens": 1, "output_tokens": 1}] * 3
    assert len(trace_of(*rows, "broken", requests=3).rows) == 3
    assert len(trace_of(*rows, requests=9).rows) == 3


def test_the_last_conversation_is_cut_where_the_requests_end():
    """And each where its turns do."""
    assert [len(row.turns) for row in read("sharegpt.json", turns=9, requests=1).rows] == [1]
    assert [len(row.turns) for row in read("sharegpt.json", turns=1, requests=2).rows] == [1, 1]


def test_blank_lines_and_a_mark_at_the_beginning(tmp_path):
    """What editors and other systems add is no row."""
    path = tmp_path / "trace"
    path.write_bytes(b"\xef\xbb\xbfTimestamp,Request tokens,Response tokens\r\n\r\n1,2,3\r\n\r\n")
    assert said(read_trace(path, requests=9)) == [(3, 1.0, Turn(RandomTokens(2), 3))]


GOOD = {
    "azure": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,5,5\n",
    "burstgpt": "Timestamp,Request tokens,Response tokens\n1,5,5\n",
    "mooncake": '{"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": [1]}\n',
    "custom": '{"prompt_tokens": 5, "output_tokens": 5}\n',
}

BAD = [
    ("azure", "yesterday,5,5", "TIMESTAMP: 'yesterday' is no time such as 2023-11-16 18:15:46.680590"),
    ("azure", "2023-11-16 18:15:46,-5,5", "ContextTokens: '-5' is no number of tokens from 1 to 10000000"),
    ("azure", "2023-11-16 18:15:46,5,5.5", "GeneratedTokens: '5.5' is no number of tokens from 1 to 10000000"),
    ("azure", "2023-11-16 18:15:46,5", "2 cells where the header has 3"),
    ("burstgpt", "nan,5,5", "Timestamp: 'nan' is no time in seconds"),
    ("burstgpt", "-1,5,5", "Timestamp: '-1' is no time in seconds"),
    ("burstgpt", "1,1e3,5", "Request tokens: '1e3' is no number of tokens from 1 to 10000000"),
    ("burstgpt", "1,5,0", "Response tokens: 0, a request that had failed; files 'without_fails' have none"),
    ("burstgpt", "1,5,1700000000000", "Response tokens: '1700000000000' is no number of tokens from 1 to 10000000"),
    ("burstgpt", '1,5,"5', "unexpected end of data"),
    ("mooncake", '{"timestamp": 0, "input_length": 5', "Input data was truncated"),
    ("mooncake", '{"timestamp": 0, "input_length": 5}', "Object missing required field `output_length`"),
    (
        "mooncake",
        '{"timestamp": 0, "input_length": 0, "output_length": 5}',
        "Expected `int` >= 1 - at `$.input_length`",
    ),
    (
        "mooncake",
        '{"timestamp": "0", "input_length": 5, "output_length": 5}',
        "Expected `float`, got `str` - at `$.timestamp`",
    ),
    (
        "mooncake",
        '{"timestamp": 61.1, "input_length": 40, "output_length": 5, "hash_ids": [1, 2, 3]}',
        "hash_ids: 3 for 40 tokens; in blocks of 512 there must be 1",
    ),
    ("custom", '{"output_tokens": 5}', "one of prompt, prompt_tokens and prompt_token_ids must be given"),
    (
        "custom",
        '{"prompt": "a", "prompt_tokens": 5}',
        "one of prompt, prompt_tokens and prompt_token_ids must be given",
    ),
    ("custom", '{"prompt_tokens": 5, "output_length": 5}', "Object contains unknown field `output_length`"),
    ("custom", '{"prompt_token_ids": []}', "Expected `array` of length >= 1 - at `$.prompt_token_ids`"),
]


@pytest.mark.parametrize(("name", "row", "reason"), BAD)
def test_a_bad_row_refuses_the_file(tmp_path, name, row, reason):
    """With file, line and reason, and how to go on without it."""
    path = tmp_path / "trace"
    path.write_text(GOOD[name] + row + "\n")
    line = GOOD[name].count("\n") + 1
    with pytest.raises(TraceError) as caught:
        read_trace(path, requests=9)
    assert str(caught.value) == f"{path}:{line}: {reason}; skip_bad_rows leaves such rows out"
    trace = read_trace(path, requests=9, skip_bad_rows=True)
    assert (len(trace.rows), trace.skipped) == (1, (BadRow(line, reason),))


@pytest.mark.parametrize(
    ("conversation", "reason"),
    [
        ([], "an empty conversation"),
        ([("human", "a")], "no answer to the last question"),
        ([("human", "a"), ("human", "b")], "question and answer do not take turns - at `$.conversations[1]`"),
        ([("human", "a"), ("gpt", "")], "an empty text - at `$.conversations[1]`"),
        ([("human", "a"), ("parrot", "b")], "`parrot` is no known speaker - at `$.conversations[1]`"),
        ([("human", "a"), ("system", "b")], "question and answer do not take turns - at `$.conversations[1]`"),
    ],
)
def test_bad_conversations(trace_of, conversation, reason):
    """The reason says which text it is."""
    entry = {"conversations": [{"from": who, "value": text} for who, text in conversation]}
    with pytest.raises(TraceError, match=r":1: ") as caught:
        trace_of(entry)
    assert reason in str(caught.value)


def test_how_many_rows_are_bad(trace_of):
    """The first is shown, the others are counted."""
    good, bad = {"prompt_tokens": 1, "output_tokens": 1}, {"prompt_tokens": 0}
    with pytest.raises(TraceError, match=r":2: .*, and 1 more of the 4 rows read are bad; skip_bad_rows leaves"):
        trace_of(good, bad, good, bad)


def test_times_in_some_rows_only(trace_of):
    """Are no times."""
    with_time = {"prompt_tokens": 1, "output_tokens": 1, "timestamp": 1}
    with pytest.raises(TraceError, match=r":2: no timestamp, though line 1 has one: all must, or none$"):
        trace_of(with_time, {"prompt_tokens": 1, "output_tokens": 1})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", ": the file is empty"),
        ("\n \n", ": the file is empty"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", ": the file has no rows that can be sent"),
        ("[]", ": the file has no rows that can be sent"),
        ("[1, 2", ": no JSON array of conversations: Input data was truncated"),
        ("a,b,c\n1,2,3\n", ":1: the beginning of no known format (azure: CSV with TIMESTAMP, "),
        ('\n{"input": 5}\n', ":2: the beginning of no known format (azure: CSV with TIMESTAMP, "),
        ('{"input_length": 5', ":1: Input data was truncated"),
    ],
)
def test_files_that_are_no_traces(tmp_path, text, message):
    """The reason is said of the file, with the line if there is one."""
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(TraceError) as caught:
        read_trace(path, requests=9)
    assert str(caught.value).startswith(f"{path}{message}")


def test_nothing_left_after_skipping(trace_of):
    """Says what was wrong with the rest."""
    with pytest.raises(
        TraceError, match=r"no rows that can be sent; of 2 bad ones the first is line 1: Expected `int`"
    ):
        trace_of({"prompt_tokens": 0}, {"prompt_tokens": 0}, skip_bad_rows=True)


def test_files_that_cannot_be_read(tmp_path):
    """The system's reason."""
    with pytest.raises(TraceError, match="missing: No such file or directory"):
        read_trace(tmp_path / "missing", requests=1)
    with pytest.raises(TraceError, match="Is a directory"):
        read_trace(tmp_path, requests=1)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from([b"", *(each.encode() for each in GOOD.values()), b"[", b"{", b'[{"conversations": [']),
    st.binary(max_size=200) | st.text(max_size=60).map(str.encode),
    st.booleans(),
)
def test_any_bytes_are_read_or_refused(tmp_path, begin, rest, skip):
    """Nothing but the loaders' own error comes out of a file, whatever is in it."""
    path = tmp_path / "trace"
    path.write_bytes(begin + rest)
    try:
        trace = read_trace(path, requests=9, turns=3, skip_bad_rows=skip)
    except TraceError as error:
        assert str(error).startswith(str(path))  # noqa: PT017 - either outcome is right
        return
    assert trace.rows
    assert all(row.turns for row in trace.rows)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(sorted(SAMPLES.glob("*.[jc]s*"))), st.data())
def test_a_damaged_sample_is_read_or_refused(tmp_path, sample, data):
    """A byte that is another one, and an end that is missing."""
    whole = bytearray(sample.read_bytes())
    whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "trace"
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole)))])
    try:
        assert read_trace(path, requests=9, turns=3).rows
    except TraceError as error:
        assert str(error).startswith(str(path))  # noqa: PT017 - either outcome is right
