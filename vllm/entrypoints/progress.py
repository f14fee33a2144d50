"""The progress bar of offline calls, with token speeds."""

from __future__ import annotations

import time
from types import TracebackType

from tqdm import tqdm

from vllm.outputs import RequestOutput


class ProgressBar:
    """Counts finished prompts and shows prompt and answer tokens a second."""

    def __init__(self, num_prompts: int, *, is_shown: bool) -> None:
        """Prepare a bar.

        Args:
            num_prompts: how many there are.
            is_shown: False makes a bar that does nothing.
        """
        self._bar = None
        if is_shown:
            self._bar = tqdm(
                total=num_prompts,
                desc="Processed prompts",
                dynamic_ncols=True,
                postfix=f"est. speed input: {0:.2f} toks/s, output: {0:.2f} toks/s",
            )
        self._started_s = time.perf_counter()
        self._num_prompt_tokens = 0
        self._num_answer_tokens = 0

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def add(self, output: RequestOutput) -> None:
        """Count a finished prompt."""
        if self._bar is None:
            return
        elapsed_s = max(1e-9, time.perf_counter() - self._started_s)
        self._num_prompt_tokens += len(output.prompt_token_ids or ())
        self._num_answer_tokens += sum(len(c.token_ids) for c in output.outputs)
        self._bar.postfix = (
            f"est. speed input: {self._num_prompt_tokens / elapsed_s:.2f} toks/s, "
            f"output: {self._num_answer_tokens / elapsed_s:.2f} toks/s"
        )
        self._bar.update(1)
