"""Any causal language model of transformers as a `Network`, for architectures the runtime does not read itself.

Slower than the own decoder and just as exact. What cannot be rolled back or masked as a tree is refused at load time.
"""

from collections.abc import Callable, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicLayer

from whiflash.errors import WhiFlashError
from whiflash.nn.cache import additive

# what models multiply their logits by (Cohere), divide them by (Granite), or cap them at (Gemma)
LOGIT_KEYS = ("logit_scale", "logits_scaling", "final_logit_softcapping")
# how far a probe may be off, relative to the largest logit, before the architecture is refused
TOLERANCE = {torch.float32: 1e-3}


class AdapterCache:
    """`KVCache`'s interface over transformers' `DynamicCache`: rows beyond `length` are speculative and vanish."""

    def __init__(self, config: Any):
        self.inner = DynamicCache(config=config)
        self.length = 0

    @property
    def capacity(self) -> int:
        return self.inner.get_seq_length()

    def reserve(self, capacity: int) -> None:
        """Nothing to do: these rows grow by concatenation."""

    def advance(self, rows: int) -> None:
        self.length += rows

    def truncate(self, length: int) -> None:
        if not 0 <= length <= self.length:
            raise IndexError(f"cannot truncate a cache of {self.length} rows to {length}")
        self.length = length

    def keep_path(self, start: int, path: Tensor) -> None:
        """Of the rows written from `start` on, keep those at offsets `path` [m] (ascending), moved up behind it."""
        self._edit(lambda rows: torch.cat([rows[..., :start, :], rows.index_select(-2, path + start)], -2))
        self.length = start + path.shape[0]

    def drop_speculative(self) -> None:
        if self.capacity > self.length:
            self._edit(lambda rows: rows[..., : self.length, :])

    def _edit(self, change: Callable[[Tensor], Tensor]) -> None:
        for layer in self.inner.layers:
            if layer.is_initialized:
                layer.keys, layer.values = change(layer.keys), change(layer.values)


class Adapter:
    """A transformers model as a `Network`. Taps are read by hooks on its layers, so only those asked for are kept."""

    def __init__(self, model: Any):
        self.model = model
        self.config = model.config.get_text_config(decoder=True)
        self.body, self.blocks = _body(model)
        self.layers, self.width = len(self.blocks), int(self.config.hidden_size)
        self.vocab_size = int(model.get_output_embeddings().weight.shape[0])
        self.max_positions = _max_positions(self.config)
        # transformers renamed the argument between 5.17 and 5.24
        self._cache_name = "cache" if "cache" in signature(self.body.forward).parameters else "past_key_values"
        self._states: dict[int, Any] | None = None
        for index, block in enumerate(self.blocks):
            block.register_forward_hook(self._after(index + 1))
        self.blocks[0].register_forward_pre_hook(self._before, with_kwargs=True)

    @classmethod
    def load(cls, path: Path, dtype: torch.dtype, device: torch.device | str) -> "Adapter":
        """Read a model directory, or say in a sentence why this architecture does not serve."""
        try:
            config = AutoConfig.from_pretrained(path)
        except Exception as error:  # OSError, ValueError, KeyError, … by what is wrong with the file
            raise _unreadable(path, error) from error
        _check_cache(config, path)
        try:
            model, report = AutoModelForCausalLM.from_pretrained(
                path, config=config, dtype=dtype, output_loading_info=True
            )
        except Exception as error:  # as many kinds as there are ways to be damaged
            raise _unreadable(path, error) from error
        for problem, names in report.items():
            if names:
                raise WhiFlashError(
                    f"{path} does not hold the tensors its config calls for ({problem.replace('_', ' ')}: "
                    f"{', '.join(map(str, sorted(names)[:4]))}); fetch it again"
                )
        if getattr(model, "_is_stateful", False):
            raise _no_rollback(config.model_type, "recurrent state")
        adapter = cls(model.to(device).eval().requires_grad_(False))
        adapter.probe()
        return adapter

    def __call__(
        self,
        tokens: Tensor,
        cache: Any = None,
        positions: Tensor | None = None,
        tree: Tensor | None = None,
        taps: Sequence[int] = (),
    ) -> tuple[Tensor, Tensor | None]:
        """As `Decoder.forward`: final-normed hidden states [B, T, width], the taps' states [B, T, len(taps)·width]."""
        past = 0
        if cache is not None:
            cache.drop_speculative()
            past = cache.length
        if positions is None:
            positions = torch.arange(past, past + tokens.shape[1], device=tokens.device)
        mask = None
        if tree is not None:
            seen = torch.cat([tree.new_ones(tree.shape[0], past), tree], 1)
            mask = additive(seen, self.model.dtype)[None, None]
        states: dict[int, Any] = dict.fromkeys(taps)
        self._states = states
        try:
            hidden = self.body(
                input_ids=tokens,
                attention_mask=mask,
                position_ids=positions.expand(tokens.shape),
                use_cache=cache is not None,
                return_dict=True,
                **{self._cache_name: None if cache is None else cache.inner},
            ).last_hidden_state
        finally:
            self._states = None
        states[self.layers + 1] = hidden
        return hidden, torch.cat([states[t] for t in taps], -1) if taps else None

    def embed(self, tokens: Tensor) -> Tensor:
        """What the model's input embedding gives, its own scale included (Gemma)."""
        return self.model.get_input_embeddings()(tokens)

    def head(self, hidden: Tensor) -> Tensor:
        """Final-normed hidden states [..., width] → logits [..., vocab], scaled and soft-capped as the model does."""
        logits = self.model.get_output_embeddings()(hidden)
        scale, divisor, cap = (getattr(self.config, key, None) for key in LOGIT_KEYS)
        if scale is not None:
            logits = logits * scale
        if divisor is not None:
            logits = logits / divisor
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits

    @torch.no_grad()
    def head_rows(self, ids: Tensor) -> Tensor:
        """What is the head's weight for the tokens `ids` [n] → [n, width], float32: its answers to unit vectors."""
        units = torch.eye(self.width, dtype=self.model.dtype, device=self.model.device).split(256)
        columns = [self.head(unit)[:, ids.to(unit.device)].float() for unit in units]
        return torch.cat(columns).T.contiguous()

    def new_cache(self, capacity: int) -> Any:
        return AdapterCache(self.config)

    @torch.inference_mode()
    def probe(self) -> None:
        """Refuse an architecture whose logits after a cached prefix and a small tree are not those of its own forward.

        That catches what no config says: a mask that is ignored, a logit scale this file does not know.
        """
        a, b, root, left, right, below = (i * (self.vocab_size // 8) for i in range(1, 7))
        child_of = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]], device=self.model.device)
        try:
            cache = self.new_cache(8)
            self(self._row(a, b), cache)
            cache.advance(2)
            depths = child_of.sum(1) - 1
            hidden, _ = self(self._row(root, left, right, below), cache, 2 + depths, child_of.bool())
            found = self.head(hidden)[0]
            paths = self._row(a, b, root, left, below), self._row(a, b, root, right)
            one, other = (self.model(input_ids=path, use_cache=False).logits[0] for path in paths)
        except Exception as error:  # whatever an unforeseen forward signature raises
            raise WhiFlashError(
                f"{self.config.model_type} models cannot run a tree of tokens behind a cache: {_first_line(error)}"
            ) from error
        expected = torch.stack([one[2], one[3], other[3], one[4]]).float()
        off = (found.float() - expected).abs().max() / expected.abs().max()
        if not off <= TOLERANCE.get(self.model.dtype, 0.1):
            raise WhiFlashError(
                f"{self.config.model_type} models give other logits ({off:.1%} off) when a tree of tokens follows a "
                "cached prefix than in one plain pass, so drafts cannot be verified with them; use another target"
            )

    def _row(self, *tokens: int) -> Tensor:
        return torch.tensor([tokens], device=self.model.device)

    def _before(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if self._states is not None and 0 in self._states:
            self._states[0] = args[0] if args else kwargs["hidden_states"]

    def _after(self, tap: int):
        def hook(module: nn.Module, args: tuple, output: Any) -> None:
            if self._states is not None and tap in self._states:
                self._states[tap] = output if isinstance(output, Tensor) else output[0]

        return hook


def _body(model: Any) -> tuple[Any, nn.ModuleList]:
    """The decoder below the head, and its stack of layers."""
    body = model.get_decoder()
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    stacks = [m for m in body.children() if isinstance(m, nn.ModuleList) and len(m) == count]
    if len(stacks) != 1 or model.get_output_embeddings() is None:
        raise WhiFlashError(
            f"{model.config.model_type} models are not built as a stack of {count} layers below one head, so their "
            "hidden states cannot be tapped; use another target"
        )
    if "position_ids" not in signature(body.forward).parameters or getattr(model.config, "alibi", False):
        raise WhiFlashError(
            f"{model.config.model_type} models take positions from the order of tokens alone, so a tree of drafts "
            "cannot be verified with them; use another target"
        )
    return body, stacks[0]


def _max_positions(config: Any) -> int:
    """The context limit; with longrope the original one, beyond which all cached keys would have to change."""
    limit = int(getattr(config, "max_position_embeddings", None) or 2048)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        limit = min(limit, int(rope.get("original_max_position_embeddings") or limit))
    return limit


def _check_cache(config: Any, path: Path) -> None:
    if config.is_encoder_decoder:
        raise WhiFlashError(f"{path} is an encoder-decoder model ({config.model_type}); expected a decoder-only one")
    try:
        layers = DynamicCache(config=config).layers
    except Exception as error:  # a config without layers, or of a kind of layer this release does not know
        raise _unreadable(path, error) from error
    odd = {type(layer).__name__ for layer in layers if type(layer) is not DynamicLayer}
    if odd:
        raise _no_rollback(config.model_type, ", ".join(sorted(odd)))


def _no_rollback(model_type: str, why: str) -> WhiFlashError:
    return WhiFlashError(
        f"{model_type} models keep a cache that cannot be rolled back to an earlier token ({why}), which speculative "
        "decoding needs; use a target with full attention in every layer"
    )


def _unreadable(path: Path, error: Exception) -> WhiFlashError:
    return WhiFlashError(f"transformers cannot load a causal language model from {path}: {_first_line(error)}")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
