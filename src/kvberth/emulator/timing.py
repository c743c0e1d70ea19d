"""How long a step takes on the modelled accelerator. Pure arithmetic; no clock.

    t(step) = step
            + sequence * (decoding sequences)
            + context_token * (sum of their contexts)
            + prompt_token * (prompt tokens computed)
            + prompt_pair * (sum over chunks of T tokens after C:  T * C + T * T / 2)

The sum is linear in its five coefficients, so that least squares fit them to measured steps (`calibrate`). It is a
model of a step that is bound by memory while it decodes and by arithmetic while it reads a prompt; a step that mixes
both pays for both, which is what chunked prefill shows in the field.
"""

from collections.abc import Iterable

import msgspec

from kvberth.emulator.profile import Timing

__all__ = ["Step", "step_seconds"]


class Step(msgspec.Struct, frozen=True):
    """What a step computes.

    Attributes:
        sequences: that decode one token.
        context_tokens: which those read, summed.
        prompt_tokens: computed for prompts.
        prompt_pairs: of those with all tokens before them, summed.
    """

    sequences: int = 0
    context_tokens: int = 0
    prompt_tokens: int = 0
    prompt_pairs: float = 0.0

    @classmethod
    def of(cls, chunks: Iterable[tuple[int, int]]) -> "Step":
        """The step that computes these chunks: (tokens before, tokens computed) of each sequence.

        One token after others is decoding, whichever side it belongs to: it costs the same.
        """
        sequences = context = prompt = 0
        pairs = 0.0
        for before, count in chunks:
            if count == 1 and before > 0:
                sequences += 1
                context += before
            else:
                prompt += count
                pairs += count * before + count * count / 2
        return cls(sequences, context, prompt, pairs)

    def features(self) -> tuple[float, float, float, float, float]:
        """What the coefficients of `Timing` are multiplied with, in the order of its fields and in seconds per unit."""
        return (
            1e-6,
            self.sequences * 1e-6,
            self.context_tokens * 1e-9,
            self.prompt_tokens * 1e-6,
            self.prompt_pairs * 1e-12,
        )


def step_seconds(timing: Timing, step: Step) -> float:
    """The time of one step in seconds."""
    coefficients = (
        timing.step_us,
        timing.sequence_us,
        timing.context_token_ns,
        timing.prompt_token_us,
        timing.prompt_pair_ps,
    )
    return sum(value * feature for value, feature in zip(coefficients, step.features(), strict=True))
