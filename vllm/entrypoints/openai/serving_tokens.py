"""POST /tokenize, POST /detokenize and GET /v1/models: what never needs the engine."""

from __future__ import annotations

from vllm.entrypoints.openai.chat_template import parse_chat_messages
from vllm.entrypoints.openai.errors import ApiError, model_not_found
from vllm.entrypoints.openai.response import (
    DetokenizeResponse,
    ModelCard,
    ModelList,
    TokenizeResponse,
)
from vllm.entrypoints.openai.serving_engine import ServingEngine
from vllm.entrypoints.openai.tokenize_request import DetokenizeRequest, TokenizeRequest


class OpenAIServingTokenization:
    """The endpoints that never reach the engine; they work while it is busy."""

    def __init__(self, serving: ServingEngine, chat_template: str | None) -> None:
        """Take the shared parts, and the template that replaces the tokenizer's, or None."""
        self._serving = serving
        self._chat_template = chat_template

    async def create_tokenize(self, request: TokenizeRequest) -> TokenizeResponse:
        """Return the ids of a text or of a conversation."""
        self._check_model(request.model)
        text, has_specials = request.prompt, True
        if text is None:
            has_specials = False
            text = await self._serving.render_chat(
                parse_chat_messages(request.messages or ()),
                own_template=request.chat_template,
                server_template=self._chat_template,
                tools=request.tools,
                add_generation_prompt=request.add_generation_prompt,
                continue_final_message=request.continue_final_message,
                template_kwargs=request.chat_template_kwargs,
            )
        if request.add_special_tokens is not None:
            has_specials = request.add_special_tokens
        prompt = await self._serving.encode_text(text, add_special_tokens=has_specials)
        return TokenizeResponse(
            count=len(prompt.token_ids),
            max_model_len=self._serving.max_model_len,
            tokens=prompt.token_ids,
        )

    async def create_detokenize(self, request: DetokenizeRequest) -> DetokenizeResponse:
        """Return the text of ids, special tokens included."""
        self._check_model(request.model)
        tokenizer = self._serving.require_tokenizer()
        bad = [i for i in request.tokens if not 0 <= i < len(tokenizer)]
        if bad:
            raise ApiError(
                f"tokens: {bad[0]} is not a token id of this model (0 to {len(tokenizer) - 1})",
                param="tokens",
            )
        return DetokenizeResponse(prompt=str(tokenizer.decode(request.tokens)))

    def list_models(self) -> ModelList:
        """Return a card for every name."""
        config = self._serving.model_config
        cards = [
            ModelCard(id=name, root=config.model, max_model_len=config.max_model_len)
            for name in config.served_model_names
        ]
        return ModelList(data=cards)

    def find_model(self, name: str) -> ModelCard:
        """Return the card of one name."""
        self._check_model(name)
        return next(card for card in self.list_models().data if card.id == name)

    def _check_model(self, name: str) -> None:
        served = self._serving.model_config.served_model_names
        if name not in served:
            raise model_not_found(name, served)
