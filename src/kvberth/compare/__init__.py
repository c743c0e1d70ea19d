"""Ways to hand a KV cache over, side by side on the same traffic."""

__all__: list[str] = []
