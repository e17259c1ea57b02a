"""The names that one engine answers to: its model's, and LoRA adapters loaded at run time."""

from __future__ import annotations

from typing import Any

from router.sim import calls
from router.sim.calls import ApiError

MAX_ADAPTERS = 64


class Adapters:
    def __init__(self, served_model_names: tuple[str, ...]) -> None:
        self.served = served_model_names
        self.loaded: dict[str, str] = {}  # name -> path

    def model_of(self, body: dict[str, Any]) -> tuple[str, str | None]:
        """(the model's name for the answer, the adapter). ApiError 404 for one that is not served."""
        names = self.served
        model = body.get("model")
        if model is None or model in ("", names[0]):
            return names[0], None
        if not isinstance(model, str):
            raise calls.invalid("string_type", "body.model", "Input should be a valid string", model)
        if model in names:
            return names[0], None
        if model in self.loaded:
            return model, model
        text = f"The model `{model[:200]}` does not exist. Valid aliases: {', '.join(names)}."
        raise ApiError(404, "NotFoundError", text, "model")

    def load(self, body: dict[str, Any]) -> str:
        """The answer's text. ApiError as vLLM refuses."""
        name, path = body.get("lora_name"), body.get("lora_path")
        if not isinstance(name, str) or not isinstance(path, str) or not name or not path:
            raise ApiError(400, "InvalidUserInput", "Both 'lora_name' and 'lora_path' must be provided.")
        if name in self.loaded and not body.get("load_inplace"):
            raise ApiError(400, "InvalidUserInput", f"The lora adapter '{name}' has already been loaded.")
        if len(self.loaded) >= MAX_ADAPTERS:
            raise ApiError(400, "BadRequestError", f"No more than {MAX_ADAPTERS} adapters can be loaded.")
        self.loaded[name] = path
        return f"Success: LoRA adapter '{name}' added successfully."

    def unload(self, body: dict[str, Any]) -> str:
        name = body.get("lora_name")
        if not isinstance(name, str) or not name:
            raise ApiError(400, "InvalidUserInput", "'lora_name' needs to be provided to unload a LoRA adapter.")
        if name not in self.loaded:
            raise ApiError(404, "NotFoundError", f"The lora adapter '{name}' cannot be found.")
        del self.loaded[name]
        return f"Success: LoRA adapter '{name}' removed successfully."
