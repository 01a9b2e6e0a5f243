"""Saving a trained model so that `transformers.AutoModelForCausalLM` and `AutoTokenizer` open it."""

import shutil
from pathlib import Path

from common.config import ModelConfig
from common.data import Dataset
from common.errors import RunError
from common.files import write_json

from torch import Tensor


def save(folder: Path, state: dict[str, Tensor], config: ModelConfig, dataset: Dataset) -> None:
    """Writes model.safetensors, config.json and, for data that has one, the tokenizer.

    Args:
        folder: exists.
        state: under Version 1's names; the tied `lm_head.weight` is left out, as transformers does.

    Raises:
        RunError: the file cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors = {f"model.{name}": value.detach().cpu().contiguous() for name, value in state.items() if name != "lm_head.weight"}
    try:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:
        raise RunError(f"cannot write {folder / 'model.safetensors'}: {error}") from error
    llama = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "tie_word_embeddings": True,
        "vocab_size": config.vocab_size, "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size, "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads, "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim, "max_position_embeddings": config.max_sequence_length,
        "rope_theta": config.rope_theta, "rms_norm_eps": config.rms_norm_eps,
        "initializer_range": config.initializer_std, "attention_bias": False, "mlp_bias": False,
        "bos_token_id": None, "eos_token_id": None, "torch_dtype": "float32",
    }  # fmt: skip
    write_json(folder / "config.json", llama)
    if dataset.tokenizer:
        shutil.copy(dataset.tokenizer, folder / "tokenizer.json")
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        write_json(folder / "tokenizer_config.json", settings)
