"""A model behind a URL that speaks OpenAI's protocol."""

import os
from typing import Any

from convert.teachers.teacher import first_line

from .forms import Row, Turns, turns_of

RETRIES = 5
"""Attempts of the client beside the first, with growing pauses, before a server counts as gone."""

OWNERS = ("vllm", "sglang")
"""Servers, as their lists of models name them, that sample by the teacher's generation_config.json."""
PLAIN = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""Settings that switch off what these servers read there. Other servers refuse some of them."""


class Server:
    """The model that such a server serves.

    Args:
        url: up to where the protocol begins, such as http://localhost:8000/v1.
        model: the name under which the server has it; by default the only one that it has.

    Raises:
        ValueError: the client is not installed, the server does not answer, or has not this model.
    """

    def __init__(self, url: str, model: str | None):
        try:
            import openai
        except ImportError as error:
            raise ValueError("--server needs OpenAI's client: pip install 'convert-to-hybrid[server]'.") from error
        self.url = url
        # a server of one's own wants no key, the client one of any kind
        key = os.environ.get("OPENAI_API_KEY", "none")
        self.client = openai.OpenAI(base_url=url, api_key=key, max_retries=RETRIES)
        self.lost = openai.APIConnectionError
        self.refused = openai.APIStatusError
        owners = {each.id: getattr(each, "owned_by", None) for each in self._asked(self.client.models.list)}
        if model is None and len(owners) == 1:
            (model,) = owners
        if model not in owners:
            raise ValueError(f"{url} serves {', '.join(owners) or 'nothing'}: give one of these to server_model.")
        self.model = model
        self.plain = PLAIN if owners[model] in OWNERS else {}

    def answer(
        self, turns: Turns | str, beside: Row, max_tokens: int, temperature: float, seed: int
    ) -> dict[str, Any]:
        """{"text", "finished"}: what the model says to turns of a chat or as a text goes on, and whether it ended it.

        Calls of functions are in the text, or under "tool_calls" where the server takes them out of it.

        Args:
            beside: `tools` and `chat_template_kwargs`, where the question has any.

        Raises:
            ValueError: the server is gone, or refuses the question.
        """
        sampling = {"model": self.model, "max_tokens": max_tokens, "temperature": temperature, "seed": seed,
                    "extra_body": self.plain}  # fmt: skip
        if isinstance(turns, str):
            choice = self._asked(self.client.completions.create, prompt=turns, **sampling).choices[0]
            return {"text": choice.text, "finished": choice.finish_reason == "stop"}
        if "tools" in beside:
            sampling["tools"] = beside["tools"]
        if "chat_template_kwargs" in beside:
            sampling["extra_body"] = self.plain | {"chat_template_kwargs": beside["chat_template_kwargs"]}
        choice = self._asked(self.client.chat.completions.create, messages=turns, **sampling).choices[0]
        found = {
            "text": (choice.message.content or "").strip(),
            "finished": choice.finish_reason in ("stop", "tool_calls"),
        }
        if choice.message.tool_calls:
            given = choice.message.model_dump(include={"tool_calls"})
            (message,) = turns_of({"role": "assistant", **given}, "answer")
            found["tool_calls"] = message["tool_calls"]
        return found

    def _asked(self, method: Any, **arguments: Any) -> Any:
        try:
            return method(**arguments)
        except self.lost as error:
            raise ValueError(
                f"{self.url} does not answer ({first_line(error)}). Once it does, the same command goes on."
            ) from error
        except self.refused as error:
            raise ValueError(f"{self.url} refuses a request: {first_line(error)}") from error
