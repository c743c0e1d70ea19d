"""How a transfer ends, and why, in words for people."""

from enum import StrEnum

__all__ = ["End", "Reason"]


class End(StrEnum):
    """The five ends. Every transfer reaches exactly one of them, and both sides reach the same."""

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    SUPERSEDED = "superseded"


class Reason(StrEnum):
    """Why a transfer ended otherwise than completed. The value is the label in metrics; `text` is for people."""

    NONE = "none"
    CONSUMER_GONE = "consumer_gone"
    DEADLINE = "deadline"
    HANDED_OVER = "handed_over"
    INCOMPATIBLE = "incompatible"
    ID_REUSED = "id_reused"
    INVALID_BLOCKS = "invalid_blocks"
    LEASE_EXPIRED = "lease_expired"
    NEWER_ATTEMPT = "newer_attempt"
    NOT_AUTHENTICATED = "not_authenticated"
    NOT_NEEDED = "not_needed"
    PEER_LOST = "peer_lost"
    PEER_UNREACHABLE = "peer_unreachable"
    PREFILL_ABORTED = "prefill_aborted"
    PREFILL_NEVER_CAME = "prefill_never_came"
    PROMPT_DIFFERS = "prompt_differs"
    SHUTDOWN = "shutdown"
    TRANSPORT = "transport"
    UNKNOWN_TRANSFER = "unknown_transfer"

    @property
    def text(self) -> str:
        """One sentence for logs and error messages."""
        return _TEXTS[self]


_TEXTS = {
    Reason.NONE: "nothing went wrong",
    Reason.CONSUMER_GONE: "the request ended on the decode worker before its KV cache arrived",
    Reason.DEADLINE: "the KV cache did not arrive before the decode worker's deadline",
    Reason.HANDED_OVER: "the KV cache went to another decode worker, or to an earlier attempt",
    Reason.INCOMPATIBLE: "the two engines do not fit each other",
    Reason.ID_REUSED: "another request came under the same transfer id, which is remembered for a while",
    Reason.INVALID_BLOCKS: "the registration names blocks that do not fit the request or the region",
    Reason.LEASE_EXPIRED: "no decode worker asked for the blocks before their lease ended",
    Reason.NEWER_ATTEMPT: "a newer attempt of the same transfer took over",
    Reason.NOT_AUTHENTICATED: "one of the two engines does not accept the other's key",
    Reason.NOT_NEEDED: "the decode worker already held everything it needed",
    Reason.PEER_LOST: "the other engine stopped answering",
    Reason.PEER_UNREACHABLE: "the prefill worker's control channel could not be reached",
    Reason.PREFILL_ABORTED: "the request was aborted on the prefill worker",
    Reason.PREFILL_NEVER_CAME: "the prefill worker never received the request that this registration is for",
    Reason.PROMPT_DIFFERS: "the two workers were given different prompts under one transfer id",
    Reason.SHUTDOWN: "the engine is shutting down",
    Reason.TRANSPORT: "the transfer library reported an error",
    Reason.UNKNOWN_TRANSFER: "the prefill worker knows nothing of this transfer",
}
