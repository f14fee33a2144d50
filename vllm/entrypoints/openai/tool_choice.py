"""What a chat request's tools and tool choice mean for the prompt, the sampling and the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from vllm.entrypoints.openai.chat_request import (
    ChatCompletionRequest,
    ChatCompletionToolsParam,
)
from vllm.entrypoints.openai.errors import ApiError


class ToolMode(Enum):
    """How tool calls come about."""

    NONE = "none"  # never; the answer is text
    AUTO = "auto"  # the model decides, a parser reads its answer
    NAMED = "named"  # the answer is the arguments of one function
    REQUIRED = "required"  # the answer is an array of calls


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolPlan:
    """A resolved tool choice.

    Attributes:
        tools: what the chat template is shown, as plain dicts.
        schema: JSON schema that the answer must have, or None.
        function: the function's name in mode NAMED.
    """

    mode: ToolMode
    tools: list[dict[str, Any]] | None = None
    schema: dict[str, Any] | None = None
    function: str = ""


def plan_tools(request: ChatCompletionRequest, *, is_auto_enabled: bool) -> ToolPlan:
    """Resolve a request's tool choice.

    With "none" the template is not shown the tools, so that the model has nothing to call.

    Raises:
        ApiError: the model is to decide, but the server was started without a parser.
    """
    choice = request.effective_tool_choice
    given = request.tools or []
    if choice == "none" or not given:
        return ToolPlan(mode=ToolMode.NONE)
    tools = [tool.model_dump(exclude_none=True) for tool in given]
    if choice == "auto":
        if not is_auto_enabled:
            raise ApiError(
                'tool_choice "auto" needs a server started with --enable-auto-tool-choice and '
                '--tool-call-parser; "none", "required" or a named function work without',
                param="tool_choice",
            )
        return ToolPlan(mode=ToolMode.AUTO, tools=tools)
    if choice == "required":
        schema = _calls_schema(given, allows_many=request.parallel_tool_calls)
        return ToolPlan(mode=ToolMode.REQUIRED, tools=tools, schema=schema)
    name = choice.function.name
    wanted = next(tool for tool in given if tool.function.name == name)
    return ToolPlan(mode=ToolMode.NAMED, tools=tools, schema=_parameters(wanted), function=name)


def _parameters(tool: ChatCompletionToolsParam) -> dict[str, Any]:
    """Return the schema of a function's arguments; a function without any has no parameters."""
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    return tool.function.parameters or nothing


def _calls_schema(
    tools: Sequence[ChatCompletionToolsParam], *, allows_many: bool
) -> dict[str, Any]:
    """Return the schema of a non-empty array of calls of any of the tools."""
    shared: dict[str, Any] = {}
    variants = []
    for number, tool in enumerate(tools):
        parameters = _lift_definitions(_parameters(tool), f"tool{number}_", shared)
        variants.append(
            {
                "type": "object",
                "properties": {"name": {"enum": [tool.function.name]}, "parameters": parameters},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": variants}}
    if not allows_many:
        schema["maxItems"] = 1
    if shared:
        schema["$defs"] = shared
    return schema


def _lift_definitions(
    schema: dict[str, Any], prefix: str, shared: dict[str, Any]
) -> dict[str, Any]:
    """Move a schema's definitions to the outer schema's, for references count from the root."""
    body = dict(schema)
    for key in ("$defs", "definitions"):
        for name, definition in body.pop(key, {}).items():
            shared[prefix + name] = _rename_references(definition, prefix)
    renamed = _rename_references(body, prefix)
    assert isinstance(renamed, dict), "renaming keeps the shape"
    return renamed


def _rename_references(node: Any, prefix: str) -> Any:
    if isinstance(node, list):
        return [_rename_references(item, prefix) for item in node]
    if not isinstance(node, dict):
        return node
    result = {key: _rename_references(value, prefix) for key, value in node.items()}
    target = node.get("$ref")
    if isinstance(target, str):
        for root in ("#/$defs/", "#/definitions/"):
            if target.startswith(root):
                result["$ref"] = f"#/$defs/{prefix}{target.removeprefix(root)}"
    return result
