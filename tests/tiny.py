"""A tiny random chat model on disk, for tests: a byte-level tokenizer with a ChatML template and a small decoder.

`build(directory)` writes it in a second; the directory loads in transformers and in `load_target`. The weights are
drawn wide enough that greedy answers wander instead of looping, and the end-of-turn token comes up now and then.
`eagle3_head` and `dflash_model` give random drafters for it, to be put on disk with `write`.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

SYSTEM = "You are a tiny assistant."
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")
# rows of the embedding table that no token uses, as padded vocabularies have
PADDING = 4
TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\n" + SYSTEM + "<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, then the special ones."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({s: i for i, s in enumerate(symbols)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(s, special=True) for s in SPECIAL])
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = TEMPLATE
    return fast


def build(
    directory: str | Path, family: str = "llama", *, layers: int = 6, width: int = 32, seed: int = 0, **options
) -> Path:
    """Write config, generation config, tokenizer and float32 safetensors of a random model; returns the path.

    `options` replace or join the config keys below.
    """
    directory = Path(directory)
    words = tokenizer()
    end = words.convert_tokens_to_ids("<|im_end|>")
    keys = {
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": width // 4,
        "vocab_size": len(words) + PADDING,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "initializer_range": 0.25,
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": words.pad_token_id,
    }
    config = AutoConfig.for_model(family, **keys | options)
    generator = torch.get_rng_state()
    try:
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    finally:
        torch.set_rng_state(generator)
    # peaked, and on readable tokens: padding rows, odd bytes and other special tokens practically never win
    head = model.get_output_embeddings().weight.data.mul_(3)
    texts = [words.decode([i]) for i in range(len(words))]
    readable = {
        i for i, text in enumerate(texts) if len(text) == 1 and (text.isalnum() or text in " .,?") and text.isascii()
    }
    head[[i for i in range(len(head)) if i not in readable | {end}]] = 0
    head[end] *= 1.5
    model.generation_config = GenerationConfig(eos_token_id=[end], pad_token_id=words.pad_token_id)
    model.save_pretrained(directory)
    words.save_pretrained(directory)
    return directory


def _layer(prefix: str, width: int, inputs: int, heads: int = 4, kv_heads: int = 2, head_dim: int = 8) -> dict:
    """Shapes of one draft layer whose q, k and v read `inputs` values."""
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    return {
        f"{prefix}.input_layernorm.weight": (width,),
        f"{prefix}.post_attention_layernorm.weight": (width,),
        f"{attention}.q_proj.weight": (heads * head_dim, inputs),
        f"{attention}.k_proj.weight": (kv_heads * head_dim, inputs),
        f"{attention}.v_proj.weight": (kv_heads * head_dim, inputs),
        f"{attention}.o_proj.weight": (width, heads * head_dim),
        f"{mlp}.gate_proj.weight": (2 * width, width),
        f"{mlp}.up_proj.weight": (2 * width, width),
        f"{mlp}.down_proj.weight": (width, 2 * width),
    }


def eagle3_head(vocab: int, draft_vocab: int = 40, width: int = 32, seed: int = 1) -> tuple[dict, dict]:
    """(config, tensors) of a random EAGLE-3 head as SpecForge writes it, without an embedding."""
    shapes = {
        "fc.weight": (width, 3 * width),
        "midlayer.hidden_norm.weight": (width,),
        "norm.weight": (width,),
        "lm_head.weight": (draft_vocab, width),
        **_layer("midlayer", width, 2 * width),
    }
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": width,
        "num_attention_heads": 4,
        "vocab_size": vocab,
        "draft_vocab_size": draft_vocab,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]},
    }
    tensors, generator = _random(shapes, seed)
    kept = torch.randperm(vocab, generator=generator)[:draft_vocab].sort().values
    tensors["d2t"] = kept - torch.arange(draft_vocab)
    tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, kept, True)
    return config, tensors


def dflash_model(vocab: int, target_layers: int, layers: int = 2, width: int = 32, seed: int = 2) -> tuple[dict, dict]:
    """(config, tensors) of a random DFlash model as z-lab writes it; the mask token is tiny's <|mask|>."""
    shapes = {"fc.weight": (width, 3 * width), "hidden_norm.weight": (width,), "norm.weight": (width,)}
    for i in range(layers):
        shapes |= _layer(f"layers.{i}", width, width)
        shapes |= {f"layers.{i}.self_attn.{n}_norm.weight": (8,) for n in "qk"}
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": width,
        "num_attention_heads": 4,
        "num_hidden_layers": layers,
        "num_target_layers": target_layers,
        "vocab_size": vocab,
        "block_size": 4,
        "dflash_config": {"target_layer_ids": [0, 2, 4], "mask_token_id": 259},
    }
    return config, _random(shapes, seed)[0]


def _random(shapes: dict, seed: int) -> tuple[dict[str, torch.Tensor], torch.Generator]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * 0.2 + (len(shape) == 1) for name, shape in shapes.items()
    }, generator


def write(directory: str | Path, config: dict, tensors: dict[str, torch.Tensor]) -> Path:
    directory = Path(directory)
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    return directory
