"""The big model as the rest of the program sees it: a network, a tokenizer, and where generation ends."""

import json
import operator
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from whiflash.errors import WhiFlashError
from whiflash.nn.cache import KVCache
from whiflash.nn.weights import digest, read_config
from whiflash.target.config import TargetConfig

Message = Mapping[str, Any]
Prompt = str | Sequence[Message] | Sequence[int]


class Network(Protocol):
    """What a target's network must do; `Decoder` is ours, `Adapter` wraps transformers."""

    def __call__(
        self,
        tokens: Tensor,
        cache: KVCache | None = None,
        positions: Tensor | None = None,
        tree: Tensor | None = None,
        taps: Sequence[int] = (),
    ) -> tuple[Tensor, Tensor | None]: ...

    def embed(self, tokens: Tensor) -> Tensor: ...

    def head(self, hidden: Tensor) -> Tensor: ...

    def head_rows(self, ids: Tensor) -> Tensor: ...

    def new_cache(self, capacity: int) -> KVCache: ...


class Target:
    """A causal language model with its tokenizer.

    `path` is the local directory it came from (safetensors, config, tokenizer), so that any other library can load the
    very same weights. `stop_ids` are all end-of-sequence ids of its `generation_config`. `max_positions` is the context
    limit in tokens.
    """

    def __init__(
        self,
        name: str,
        path: Path,
        network: Network,
        tokenizer: Any,
        *,
        layers: int,
        width: int,
        vocab_size: int,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.name, self.path, self.network, self.tokenizer = name, path, network, tokenizer
        self.layers, self.width, self.vocab_size, self.max_positions = layers, width, vocab_size, max_positions
        self.dtype, self.device = dtype, device
        self.stop_ids = stop_ids(path, tokenizer)

    @cached_property
    def byte_ids(self) -> frozenset[int]:
        """The tokens <0x00> … <0xFF> of a tokenizer with byte fallback, and the special ones, which do not part them.

        Empty where bytes are spelt otherwise.
        """
        ids = self.tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in range(256)])
        found = {i for i in ids if i is not None and i != self.tokenizer.unk_token_id}
        return frozenset(found | set(self.tokenizer.all_special_ids) if found else ())

    def encode(self, prompt: Prompt, system: str | None = None, **template: Any) -> list[int]:
        """Token ids of a prompt: a user's text, a list of messages, or token ids as they are.

        Text becomes one user turn of the chat template (plain text where the model has none); `system` is put in front.
        `template` goes to the chat template as it is (`enable_thinking=False`, …); what it does not read is refused.
        """
        given: Any = prompt.tolist() if hasattr(prompt, "tolist") else prompt
        if not given or (isinstance(given, str) and not given.strip()):
            raise WhiFlashError("the prompt is empty; give at least one word, message or token id")
        ids = not isinstance(given, str) and all(hasattr(t, "__index__") for t in given)
        self._refuse_unread(template, "" if ids else str(self.tokenizer.chat_template or ""))
        if ids:
            if system is not None:
                raise WhiFlashError(
                    "a system text cannot go in front of token ids; give messages, or put it in the ids"
                )
            return self._checked([operator.index(t) for t in given])
        messages: list[Any] = [{"role": "user", "content": given}] if isinstance(given, str) else list(given)
        if not all(isinstance(m, Mapping) and isinstance(m.get("role"), str) for m in messages):
            raise WhiFlashError(
                "a prompt is one text, token ids, or messages such as {'role': 'user', 'content': '…'}, not this list"
            )
        if system is not None:
            messages = [{"role": "system", "content": system}, *messages]
        if self.tokenizer.chat_template is None:
            if not isinstance(given, str) or system is not None:
                raise WhiFlashError(
                    f"{self.name} has no chat template; give the prompt as one string, without a system text"
                )
            return self._checked(self._tokenize(given))
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **template)
        except Exception as error:  # templates raise what they like: on roles they do not know, on content they miss
            raise WhiFlashError(f"the chat template of {self.name} refuses these messages: {error}") from error
        return self._checked(self._tokenize(text, add_special_tokens=False))

    def _refuse_unread(self, options: Mapping[str, Any], read_by: str) -> None:
        """What a template does not mention would be ignored; an option that is off (None, False) asks for nothing."""
        for name, value in options.items():
            if value is not None and value is not False and not re.search(rf"\b{re.escape(name)}\b", read_by):
                raise WhiFlashError(
                    f"the option {name} would have no effect: decoding has none of that name, and no chat template of "
                    f"{self.name} that reads it is applied to this prompt; leave it out"
                )

    def _tokenize(self, text: str, **options: Any) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise WhiFlashError("the prompt is not valid Unicode text (it holds a lone surrogate)") from error
        return self.tokenizer(text, **options).input_ids

    def decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _checked(self, tokens: list[int]) -> list[int]:
        if tokens and not 0 <= min(tokens) <= max(tokens) < self.vocab_size:
            raise WhiFlashError(f"prompt token ids must lie in 0..{self.vocab_size - 1}, the vocabulary of {self.name}")
        return tokens

    @property
    def precision(self) -> str:
        """What users call the dtype: float32, bfloat16 or float16."""
        return str(self.dtype).removeprefix("torch.")

    def fingerprint(self) -> str:
        """Sixteen hex digits that tell one target from another, in whatever precision it is loaded."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        try:
            config = TargetConfig.from_config(read_config(self.path, "target"))
        except WhiFlashError:
            return digest(self.path)
        # versions of transformers write the same config in different words
        return digest(self.path, f"{config.rope} {config.shape.norm_eps}")


def stop_ids(path: Path, tokenizer: Any) -> frozenset[int]:
    """Every end-of-sequence id of generation_config.json (one or a list), else of config.json, else the tokenizer's."""
    for name in ("generation_config.json", "config.json"):
        file = path / name
        ids = json.loads(file.read_text("utf-8")).get("eos_token_id") if file.is_file() else None
        if ids is not None:
            return frozenset(ids if isinstance(ids, list) else [ids])
    return frozenset() if tokenizer.eos_token_id is None else frozenset([tokenizer.eos_token_id])
