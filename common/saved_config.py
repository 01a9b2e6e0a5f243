"""The config.json of a saved model, under the names of transformers' LlamaConfig."""

from typing import Any

from common.config import RENAMED, ModelConfig, described
from tracepage.errors import UsageError

from pydantic import ValidationError

# Keys that have one value in this model.
FIXED = {
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
}
# Keys that change no logits; a tokenizer or a training run reads some of them.
WITHOUT_EFFECT = {
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "bos_token_id",
    "chunk_size_feed_forward",
    "dtype",
    "eos_token_id",
    "id2label",
    "is_encoder_decoder",
    "label2id",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "pretraining_tp",
    "problem_type",
    "return_dict",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}


def content(config: ModelConfig) -> dict[str, Any]:
    """What the file says of the model."""
    return FIXED | config.for_transformers() | {"head_dim": config.head_dim}


def read(saved: Any) -> ModelConfig:
    """The shape back again, from the content of a file. UsageError: it is of another model; names
    the key.
    """
    if not isinstance(saved, dict):
        raise UsageError("it holds no keys")
    saved = dict(saved)
    rope = saved.get("rope_parameters")
    # From transformers 5 on.
    if isinstance(rope, dict) and rope.get("rope_type") == "default" and len(rope) == 2:
        saved["rope_theta"] = saved.pop("rope_parameters").get("rope_theta")
    names = {name: RENAMED.get(name, name) for name in ModelConfig.model_fields}
    missing = {*names.values(), "tie_word_embeddings"} - saved.keys()
    if missing:
        raise UsageError(f"it has no {min(missing)}")
    try:
        config = ModelConfig(**{name: saved[key] for name, key in names.items()})
    except ValidationError as error:
        raise UsageError(described(error)) from error
    expected = content(config)
    for key, value in saved.items():
        if key in expected and value != expected[key]:
            raise UsageError(f"{key} = {value!r}: this model has {expected[key]!r}")
        if value and key not in expected.keys() | WITHOUT_EFFECT:
            raise UsageError(f"{key} = {value!r}: this model has no such part")
    return config
