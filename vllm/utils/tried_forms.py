"""Forms of GPU kernels that are not measured yet, and off unless VLLM_TRIED_FORMS names them.

Asked by those who choose between forms. What is measured becomes the rule or goes away; nothing
stays here.
"""

from __future__ import annotations

from vllm import envs
from vllm.errors import ConfigError

TRIED_FORMS = {
    "copies": "the device copies whole tiles of prompts",
    "cudnn": "long prompts are padded for cuDNN",
    "expand": "latents of prompts that go on are expanded",
    "join": "what long prompts see is laid behind each other",
}
"""What each does."""


def list_tried_forms() -> frozenset[str]:
    """Return the forms that are asked for.

    Raises:
        ConfigError: one is not known.
    """
    value: str = envs.VLLM_TRIED_FORMS
    names = frozenset(filter(None, (name.strip() for name in value.split(","))))
    if unknown := sorted(names - TRIED_FORMS.keys()):
        raise ConfigError(
            f"VLLM_TRIED_FORMS names {', '.join(unknown)}; allowed, by commas: "
            f"{', '.join(TRIED_FORMS)}; unset it for what is measured"
        )
    return names


def is_tried(form: str) -> bool:
    """Return whether a form, one of TRIED_FORMS, is asked for."""
    assert form in TRIED_FORMS
    return form in list_tried_forms()
