"""How plans and outputs travel between the engine and the processes of its ranks.

Used by both ends of the multi-process executor. A frame is one byte that says what it is, then its
body: msgpack for what moves every step, pickle for what moves once.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import msgspec

from vllm.step import StepOutput, StepPlan

CONFIG = b"C"  # down: pickled (EngineConfig, rank, init_method)
LAYOUT = b"L"  # down: pickled CacheLayout
PLAN = b"P"  # down: a StepPlan
QUIT = b"Q"  # down: nothing
REPORT = b"R"  # up: pickled RankReport
READY = b"D"  # up: nothing; the cache is laid out
OUTPUT = b"O"  # up, rank 0 only: a StepOutput
ERROR = b"E"  # up: pickled RankFault; the rank ends after it


class RankFault(msgspec.Struct, frozen=True, kw_only=True):
    """Why a rank ends.

    Attributes:
        error: the exception if it is one of this project's own, else None.
        summary: type and message in one line.
        traceback: the traceback as text.
        time_s: when it happened; the monotonic clock is one for all processes of a machine.
    """

    error: Exception | None
    summary: str
    traceback: str
    time_s: float


class UnsendableProcessor:
    """Stands in for a user's logits processor that cannot travel: fails its row with the reason."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __call__(self, output_ids: list[int], logits: Any) -> Any:
        """Raise what `reason` says."""
        raise TypeError(self.reason)


def ignore_processor(output_ids: list[int], logits: Any) -> Any:
    """Stand in for every processor on ranks that do not sample."""
    return logits


def _encode_callable(value: Any) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as exc:  # pickle raises whatever the object's own methods raise
        return pickle.dumps(
            UnsendableProcessor(
                "logits processors must be importable functions or picklable objects when the "
                f"engine has several ranks; this one cannot be sent to them: {exc}"
            )
        )


def _decode_callable(kind: type, value: Any) -> Callable[..., Any]:
    function: Callable[..., Any] = pickle.loads(value)
    return function


def _skip_callable(kind: type, value: Any) -> Callable[..., Any]:
    return ignore_processor


_plan_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_callable)
_output_codec = msgspec.msgpack.Encoder()
_output_decoder = msgspec.msgpack.Decoder(StepOutput)


def encode_plan(plan: StepPlan) -> bytes:
    """Return the frame of a plan."""
    return PLAN + _plan_encoder.encode(plan)


def make_plan_decoder(rank: int) -> Callable[[bytes], StepPlan]:
    """Return what turns the body of a PLAN frame into a plan; only rank 0 loads processors."""
    hook = _decode_callable if rank == 0 else _skip_callable
    return msgspec.msgpack.Decoder(StepPlan, dec_hook=hook).decode


def encode_output(output: StepOutput) -> bytes:
    """Return the frame of an output."""
    return OUTPUT + _output_codec.encode(output)


def decode_output(body: bytes) -> StepOutput:
    """Return the output of an OUTPUT frame's body."""
    return _output_decoder.decode(body)


def pack(kind: bytes, value: Any) -> bytes:
    """Return a frame with a pickled body."""
    return kind + pickle.dumps(value)


def split(frame: bytes) -> tuple[bytes, bytes]:
    """Return (kind, body) of a frame."""
    return frame[:1], frame[1:]
