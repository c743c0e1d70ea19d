"""Some thousand inputs to each fuzzed target, the same ones each time; `make fuzz` takes a million."""

import logging
import random
from collections.abc import Iterator

import pytest
from tests.fuzz.playing import TARGETS, inputs_of, play

RUNS = {"protocol": 500, "traces": 3000, "requests": 6000}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """What goes wrong here does so on purpose, and often."""
    logger = logging.getLogger("kvberth")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    yield
    logger.setLevel(level)


@pytest.mark.parametrize("name", TARGETS)
def test_what_is_kept_breaks_nothing(name):
    """Seeds, and what a fuzzer has once found."""
    for data in inputs_of(name):
        TARGETS[name].run(data)


@pytest.mark.parametrize("name", TARGETS)
def test_what_is_made_of_it_breaks_nothing(name):
    """Neither does it with a few changes."""
    play(name, RUNS[name], random.Random(1))
