"""Tokenizers for every kind of model path.

Called by the engine's text side (input and output processors, HTTP layer) and by `LLM`. Returns
transformers tokenizers whose special-token properties are computed once. Can load without torch,
for the API process. Detokenising step by step lives in detokenizer.py.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.errors import ConfigError
from vllm.logger import init_logger, warn_once
from vllm.transformers_utils.gguf_file import GGUFFile, read_gguf
from vllm.transformers_utils.hub import resolve_path
from vllm.transformers_utils.torch_guard import hide_torch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = init_logger(__name__)

TOKENIZER_MODES = ("auto", "slow")


def get_tokenizer(
    model: str,
    mode: str = "auto",
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    download_dir: str | None = None,
    without_torch: bool = False,
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model.

    Args:
        model: directory, GGUF file or hub id.
        mode: "auto", or "slow" for the Python implementation where one exists.
        revision: branch, tag or commit of a hub id.
        trust_remote_code: whether Python code in the checkpoint may run.
        download_dir: where files of a hub id are kept; None is the library's own place.
        without_torch: hide torch while transformers is imported; no effect once either is loaded.

    Returns:
        A transformers tokenizer. `all_special_ids`, `all_special_tokens` and `len()` are cached, so
        do not add tokens to it.

    Raises:
        ConfigError: no tokenizer found, not readable, or of a kind that is not served.
    """
    if mode not in TOKENIZER_MODES:
        raise ConfigError(f"tokenizer_mode {mode!r}: allowed are {', '.join(TOKENIZER_MODES)}.")
    path = resolve_path(model, revision=revision, download_dir=download_dir)
    with hide_torch(without_torch):
        if path.is_file():
            tokenizer = _from_gguf(read_gguf(path))
        else:
            tokenizer = _from_directory(path, mode, trust_remote_code)
        return cache_properties(tokenizer)


def _from_directory(path: Path, mode: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer  # noqa: PLC0415 - slow to import

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            path,
            use_fast=mode != "slow",
            trust_remote_code=trust_remote_code,
            truncation_side="left",
        )
    except Exception as error:  # transformers and a checkpoint's own code raise many kinds
        raise ConfigError(
            f"No tokenizer could be read from {path}: {type(error).__name__}: {error}. "
            "Give another with --tokenizer, or --skip-tokenizer-init."
        ) from error
    if not tokenizer.is_fast:
        warn_once(logger, "A slow (Python) tokenizer is used; a tokenizer.json would be faster.")
    return tokenizer


class _Handover:
    """Passes a tokenizer to transformers without the deep copy that it makes of its argument.

    Copying goes through JSON, a second for a vocabulary of 262,144; nobody else holds ours.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._backend


def _from_gguf(file: GGUFFile) -> PreTrainedTokenizerBase:
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415 - slow to import

    from vllm.transformers_utils.gguf_tokenizer import read_tokenizer  # noqa: PLC0415

    made = read_tokenizer(file)
    tokenizer: PreTrainedTokenizerBase = PreTrainedTokenizerFast(
        tokenizer_object=_Handover(made.backend),
        chat_template=made.chat_template,
        model_max_length=made.model_max_len,
        clean_up_tokenization_spaces=False,
        truncation_side="left",
        name_or_path=str(file.path),
        **made.special_tokens,
    )
    return tokenizer


def cache_properties(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Give a tokenizer special-token properties that are computed once, on first use.

    transformers builds these lists anew at every access, which detokenising does for each token,
    and names only the tokens with a role. Here they hold every token that `decode` skips with
    `skip_special_tokens`. The tokenizer's class is replaced by a subclass of itself.
    """
    base: Any = type(tokenizer)

    class CachedTokenizer(base):
        @cached_property
        def all_special_ids(self) -> list[int]:
            marked = (i for i, t in self.added_tokens_decoder.items() if t.special)
            return list(dict.fromkeys([*super().all_special_ids, *marked]))

        @cached_property
        def all_special_tokens(self) -> list[str]:
            marked = (t.content for t in self.added_tokens_decoder.values() if t.special)
            return list(dict.fromkeys([*super().all_special_tokens, *marked]))

        @cached_property
        def _num_tokens(self) -> int:
            return int(super().__len__())

        def __len__(self) -> int:
            return self._num_tokens

        def __reduce__(self) -> tuple[Any, ...]:
            plain = base.__new__(base)  # pickle cannot find a class made inside a function
            plain.__dict__.update(self.__dict__)
            return cache_properties, (plain,)

    CachedTokenizer.__name__ = CachedTokenizer.__qualname__ = f"Cached{base.__name__}"
    tokenizer.__class__ = CachedTokenizer
    return tokenizer
