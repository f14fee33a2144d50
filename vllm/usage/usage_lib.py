"""Who makes an engine, which decides defaults; there is no telemetry of any kind."""

from __future__ import annotations

from enum import StrEnum


class UsageContext(StrEnum):
    """The caller of an engine."""

    UNKNOWN_CONTEXT = "UNKNOWN_CONTEXT"
    LLM_CLASS = "LLM_CLASS"
    API_SERVER = "API_SERVER"
    OPENAI_API_SERVER = "OPENAI_API_SERVER"
    OPENAI_BATCH_RUNNER = "OPENAI_BATCH_RUNNER"
    ENGINE_CONTEXT = "ENGINE_CONTEXT"


def is_usage_stats_enabled() -> bool:
    """Return False: there is none."""
    return False
