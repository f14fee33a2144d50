"""Small nouns that belong to no floor; the names that 0.6.3 has here. Imports no torch."""

from vllm.utils.argument_parser import FlexibleArgumentParser, StoreBoolean
from vllm.utils.counter import Counter
from vllm.utils.identifiers import random_uuid

__all__ = ["Counter", "FlexibleArgumentParser", "StoreBoolean", "random_uuid"]
