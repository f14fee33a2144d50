"""Loading models: from directories, GGUF files, the hub, or made up."""

from vllm.model_executor.model_loader.loader import get_model_architecture, load_model

__all__ = ["get_model_architecture", "load_model"]
