"""Model families. Importing the package imports the registry only, no model and no torch."""

from vllm.model_executor.models.registry import ModelRegistry

__all__ = ["ModelRegistry"]
