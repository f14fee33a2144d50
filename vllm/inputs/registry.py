"""The registry of input processors for multimodal models, which are not served.

Kept so that code written for 0.6.3 imports and fails with a reason where it registers something.
"""

from __future__ import annotations

from typing import Any, NoReturn


class InputRegistry:
    """Refuses registrations: text models need none."""

    def register_input_processor(self, processor: Any) -> NoReturn:
        """Raise NotImplementedError."""
        raise NotImplementedError("multimodal models are not served; no input processor is called")

    def register_dummy_data(self, factory: Any) -> NoReturn:
        """Raise NotImplementedError."""
        raise NotImplementedError("multimodal models are not served; no dummy data is needed")


INPUT_REGISTRY = InputRegistry()
