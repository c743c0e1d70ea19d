"""What all tests have in common."""

from hypothesis import settings

# Speed is measured in benchmarks: a machine that is busy with something else proves nothing of an example.
settings.register_profile("kvberth", deadline=None)
settings.load_profile("kvberth")
