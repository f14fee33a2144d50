"""The log line of a request."""

from __future__ import annotations

from vllm.logger import init_logger
from vllm.sampling_params import BeamSearchParams, SamplingParams

logger = init_logger(__name__)


class RequestLogger:
    """Logs what came in, cut to a length that the operator chose."""

    def __init__(self, *, max_log_len: int | None) -> None:
        """Make a logger.

        Args:
            max_log_len: most characters of the prompt, and most token ids; None for all.
        """
        self._max_log_len = max_log_len

    def log_inputs(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int] | None,
        params: SamplingParams | BeamSearchParams,
    ) -> None:
        """Log one line at INFO."""
        limit = self._max_log_len
        logger.info(
            "Received request %s: prompt: %r, params: %s, prompt_token_ids: %s.",
            request_id,
            prompt if prompt is None else prompt[:limit],
            params,
            prompt_token_ids if prompt_token_ids is None else prompt_token_ids[:limit],
        )
