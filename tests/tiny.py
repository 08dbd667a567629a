"""A tiny random chat model on disk, for tests: a byte-level tokenizer with a ChatML template and a small decoder.

`build(directory)` writes it in a second; the directory loads in transformers and in `load_target`. The weights are
drawn wide enough that greedy answers wander instead of looping, and the end-of-turn token comes up now and then.
"""

from pathlib import Path

import torch
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
