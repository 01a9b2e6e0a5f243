"""Configuration of the model and of the training run: defaults < preset < YAML file < command-line
flags.

Shape letters, the same in every file of this repository:

    B  batch size            H   attention heads (query)      F  feed-forward (intermediate) size
    S  sequence length       K   key/value heads (K <= H)     V  vocabulary size
    D  hidden size           Dh  head dimension, D / H        L  layers
"""

import copy
import math
from pathlib import Path
from typing import Annotated, Any

from tracepage.errors import UsageError
from tracepage.files import read_text

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

Count = Annotated[int, Field(gt=0, le=10**9)]  # below that, memory sets the limit
# YAML 1.1, which PyYAML follows, takes 1e-3 for text.
Amount = Annotated[float, Field(gt=0, strict=False)]

# Names of transformers.
RENAMED = {"num_layers": "num_hidden_layers", "max_sequence_length": "max_position_embeddings"}


class StrictModel(BaseModel):
    """Unknown keys are errors, values do not change, and true is not 1."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)


class ModelConfig(StrictModel):
    """Shape of a LLaMA (Touvron et al. 2023, arXiv:2302.13971) with tied embeddings."""

    vocab_size: Count = 1000  # V
    hidden_size: Count = 256  # D
    num_layers: Count = 4  # L
    num_attention_heads: Count = 8  # H
    num_key_value_heads: Count = 8  # K; as many as there are attention heads unless given
    intermediate_size: Count = 512  # F
    max_sequence_length: Count = 128  # longest S that the rotary tables cover
    rope_theta: Amount = 10000.0
    rms_norm_eps: Amount = 1e-5
    # The standard deviation of all matrices; sqrt(2 / (5 D)) unless given.
    initializer_range: Amount | None = None

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def initializer_std(self) -> float:
        """The "small" initialization of Nguyen and Salazar 2019 (arXiv:1910.05895): sqrt(2 / (5
        D)).
        """
        return self.initializer_range or math.sqrt(2 / (5 * self.hidden_size))

    def for_transformers(self) -> dict[str, Any]:
        """The same shape under the names of transformers' LlamaConfig."""
        shape = {RENAMED.get(name, name): value for name, value in self}
        return shape | {"initializer_range": self.initializer_std, "tie_word_embeddings": True}

    @model_validator(mode="before")
    @classmethod
    def _as_many_kv_heads_as_heads(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("num_key_value_heads") is None:
            heads = values.get(
                "num_attention_heads", cls.model_fields["num_attention_heads"].default
            )
            values = values | {"num_key_value_heads": heads}
        return values

    @model_validator(mode="after")
    def _heads_divide(self) -> "ModelConfig":
        hidden = self.hidden_size
        heads = self.num_attention_heads
        kv_heads = self.num_key_value_heads
        if hidden % heads:
            raise ValueError(
                f"hidden_size {hidden} is not divisible by num_attention_heads {heads}"
            )
        if heads % kv_heads:
            raise ValueError(
                f"num_attention_heads {heads} is not divisible by num_key_value_heads {kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"head dimension {hidden} / {heads} = {self.head_dim} is odd; "
                "rotary embedding rotates pairs, so make it even"
            )
        return self


class TrainingConfig(StrictModel):
    """The settings of one training run."""

    batch_size: Count = 8  # B
    # S; with a single token, q and k would learn nothing.
    sequence_length: int = Field(default=128, ge=2, le=10**9)
    num_steps: Count = 300
    learning_rate: Amount = 1.5e-3
    seed: int = Field(default=0, ge=0, lt=2**63)


class Config(StrictModel):
    model: ModelConfig = ModelConfig()
    training: TrainingConfig = TrainingConfig()


# A value that a preset leaves out keeps the default above. `large` is the shape of TinyLlama-1.1B
# (arXiv:2401.02385).
PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "tiny": {"model": {}, "training": {}},
    "small": {
        "model": dict(hidden_size=512, num_layers=8, num_key_value_heads=4, intermediate_size=2048),
        "training": dict(learning_rate=1e-3),
    },
    "medium": {
        "model": dict(
            hidden_size=1024, num_layers=12, num_key_value_heads=4, intermediate_size=4096
        ),
        "training": dict(batch_size=16, sequence_length=512, learning_rate=3e-4),
    },
    "large": {
        "model": dict(
            hidden_size=2048,
            num_layers=22,
            num_attention_heads=32,
            num_key_value_heads=4,
            intermediate_size=5632,
            vocab_size=32000,
        ),
        "training": dict(batch_size=4, sequence_length=2048, learning_rate=3e-4),
    },
}


class UniqueKeys(yaml.SafeLoader):
    """PyYAML's loader, which of a key that is given twice takes the last without a word."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        names: set[str] = set()
        for key, _ in node.value:
            if str(key.value) in names:
                raise ValueError(f"line {key.start_mark.line + 1} gives {key.value} a second time")
            names.add(str(key.value))
        return node


def read_yaml(path: Path) -> dict[str, dict[str, Any]]:
    """The sections of a configuration file. UsageError: it is missing, not YAML, or not a mapping
    of mappings.
    """
    text = read_text(path)
    try:
        content = yaml.load(text, UniqueKeys)
    # A date that does not exist, and a number of thousands of digits, are a ValueError.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"config {path} is not valid YAML: {error}") from error
    if not isinstance(content, dict) or not all(
        isinstance(section, dict) for section in content.values()
    ):
        raise UsageError(
            f"config {path} must hold the sections `model:` and `training:`, "
            "each with `key: value` lines"
        )
    return content


def resolve(preset: str = "tiny", file: Path | None = None, **overrides: dict[str, Any]) -> Config:
    """Merges preset, YAML file and flags (None: not given), by section. UsageError: a value is
    wrong, or contradicts another.
    """
    sections: dict[str, dict[str, Any]] = copy.deepcopy(PRESETS[preset])
    if file:
        for name, values in read_yaml(file).items():
            sections.setdefault(name, {}).update(values)
    for name, values in overrides.items():
        set_values = {key: value for key, value in values.items() if value is not None}
        sections.setdefault(name, {}).update(set_values)
    try:
        config = Config.model_validate(sections)
    except ValidationError as error:
        source = f"config {file}: " if file else ""
        raise UsageError(source + described(error)) from error
    length = config.training.sequence_length
    longest = config.model.max_sequence_length
    if length <= longest:
        return config
    if "max_sequence_length" in sections["model"]:
        raise UsageError(
            f"sequence length {length} is above the config's max_sequence_length {longest}: "
            "lower --seq-len"
        )
    # The rotary tables grow with the run: no parameter depends on their length.
    sections["model"]["max_sequence_length"] = length
    return Config.model_validate(sections)


def described(error: ValidationError) -> str:
    return "; ".join(map(_describe, error.errors()))


def _describe(item: Any) -> str:
    where = ".".join(map(str, item["loc"]))
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "extra_forbidden":
        sections: dict[str, type[BaseModel]] = {"model": ModelConfig, "training": TrainingConfig}
        known = sections.get(item["loc"][0], Config)
        return f"unknown key {where} (known: {', '.join(known.model_fields)})"
    if item["type"] == "value_error":
        return message
    return f"{where} = {item['input']!r}: {message[0].lower()}{message[1:]}"
